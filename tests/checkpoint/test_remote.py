"""A run's copy in a bucket: complete or absent, behind the training, and enough to go on from."""

import asyncio
import gzip
import io
import json
import shutil
import tarfile
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from fsspec.asyn import get_loop
from fsspec.implementations.local import LocalFileSystem

from tests.checkpoint.conftest import Trouble
from tests.checkpoint.reading import DIST, flip, write
from tests.rank_functions import QUICK, run_command, run_ranks, train_run
from tests.runs import wait_until
from trainkit.checkpoint import format, remote
from trainkit.checkpoint.remote import fetch_checkpoints, fetch_run, pointers
from trainkit.checkpoint.uploads import Uploads, open_remote, send_rest
from trainkit.common import object_store
from trainkit.common.errors import RunFailedError, UserError
from trainkit.common.object_store import Store, StoreError
from trainkit.config.loading import load, to_yaml
from trainkit.run.events import Attempt, read_events
from trainkit.run.folder import RunDir

Bucket = tuple[str, Trouble]
SOON = 60.0


class Sender:
    """A run whose copy is kept, with short tries."""

    def __init__(self, folder: Path, url: str) -> None:
        self.run = RunDir.create(folder, to_yaml(load("single").config))
        (self.run.code / "jobs").mkdir(parents=True)
        (self.run.code / "jobs" / "own.py").write_text("print('hello')\n")
        self.writer = Attempt.begin(self.run)
        self.store = Store(remote.claim(url, self.run).url, seconds=0.5, patience=2.0)
        self.uploads = Uploads(self.store, self.writer, pause=0.05)

    def save(self, step: int, *, best: int | None = None, size: int = 1000) -> None:
        weights = {"weight": torch.full((size,), float(step))}
        write(self.run.checkpoints, step, {"model": weights, "optimizer": weights}, {"progress": {"step": step}})
        if best is not None:
            format.point(self.run.checkpoints, "best", best)
        self.uploads.look()

    def send(self, *steps: int, best: int | None = None) -> None:
        for step in steps:
            self.save(step, best=best)
        assert self.uploads.wait(SOON)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return read_events(self.run, kind)

    @contextmanager
    def away(self) -> Iterator[None]:
        """The place does not answer until the block ends."""

        def refused(*request: Any, **options: Any) -> None:
            raise StoreError("it is away")

        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(self.store, "_call", refused)
            yield

    def end(self) -> None:
        self.uploads.finish(0.0, lambda: True)


@pytest.fixture
def sender(tmp_path: Path) -> Iterator[Sender]:
    """To a folder, which is no different from a bucket here."""
    sender = Sender(tmp_path / "first", f"file://{tmp_path}/far")
    yield sender
    sender.end()


@pytest.fixture
def to_bucket(bucket: Bucket, tmp_path: Path) -> Iterator[Sender]:
    sender = Sender(tmp_path / "first", bucket[0])
    yield sender
    bucket[1].over()
    sender.end()


def test_latest_and_best_go_up_and_what_nothing_names_goes_away(sender: Sender) -> None:
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3)):
        sender.send(step, best=best)
    assert sender.store.read_object("pointers.json") == {"latest": 4, "best": 3}
    assert sorted(sender.store.names("checkpoints")) == ["step-00000003", "step-00000004"]
    assert [event["step"] for event in sender.events("uploaded")] == [1, 2, 3, 4]


def test_the_newest_wins_while_one_is_on_its_way(sender: Sender) -> None:
    with sender.away():
        sender.save(1)
        wait_until(lambda: sender.events("upload_failed"))
        for step in (2, 3):
            sender.save(step)
    assert sender.uploads.wait(SOON)
    assert [event["step"] for event in sender.events("uploaded")] == [3]
    assert sender.store.names("checkpoints") == ["step-00000003"]


@pytest.mark.parametrize("trouble", [{"refuse": True}, {"stall": True}, {"cut_after": 300_000}], ids=str)
def test_a_bucket_is_tried_again_until_it_is_back(bucket: Bucket, to_bucket: Sender, trouble: dict[str, Any]) -> None:
    for name, value in trouble.items():
        setattr(bucket[1], name, value)
    to_bucket.save(5, size=500_000)
    wait_until(lambda: to_bucket.events("upload_failed"))
    assert not to_bucket.uploads.wait(0.2)
    bucket[1].over()
    assert to_bucket.uploads.wait(SOON)
    assert pointers(to_bucket.store) == {"latest": 5}
    assert remote.record_of(to_bucket.store, 5) == format.verified(to_bucket.run.checkpoints, 5)
    assert len(to_bucket.events("upload_failed")) == len(to_bucket.events("upload_recovered")) == 1


def test_a_place_that_comes_back_empty_gets_all_that_makes_a_run(sender: Sender, tmp_path: Path) -> None:
    sender.send(1, best=1)
    with sender.away():
        sender.save(2)
        wait_until(lambda: sender.events("upload_failed"))
        shutil.rmtree(tmp_path / "far")
    assert sender.uploads.wait(SOON)
    back = fetch_run(sender.store.url, tmp_path / "elsewhere")
    assert (format.resolve(back.checkpoints, "latest"), format.resolve(back.checkpoints, "best")) == (2, 1)
    assert (back.path / "config.yaml").is_file()


def test_if_saves_come_faster_than_they_go_up_the_copy_follows(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    put, steps = sender.store.put, iter(range(2, 40))

    def another_is_saved(file: Path, name: str) -> None:
        if (step := next(steps, None)) is not None:
            sender.save(step)
        put(file, name)

    monkeypatch.setattr(sender.store, "put", another_is_saved)
    sender.save(1)
    wait_until(lambda: pointers(sender.store))
    assert next(steps, None) is not None, "it was pointed at before the saves had ended"


def test_one_that_is_deleted_while_it_goes_up_arrives_whole(sender: Sender, monkeypatch: pytest.MonkeyPatch) -> None:
    put = sender.store.put

    def delete_first(file: Path, name: str) -> None:
        shutil.rmtree(format.path_of(sender.run.checkpoints, 1), ignore_errors=True)
        put(file, name)

    monkeypatch.setattr(sender.store, "put", delete_first)
    sender.send(1)
    files = {"model.safetensors", "optimizer.safetensors", "state.json"}
    assert set(sender.store.names("checkpoints/step-00000001")) == files


def test_other_weights_of_the_same_step_replace_the_first(sender: Sender, tmp_path: Path) -> None:
    for content in (1, 2):
        write(sender.run.checkpoints, 7, {"model": {"weight": torch.full((10,), float(content))}}, {})
        sender.uploads.look()
        assert sender.uploads.wait(SOON)
    run = fetch_run(sender.store.url, tmp_path / "elsewhere")
    assert format.verified(run.checkpoints, 7) == format.verified(sender.run.checkpoints, 7)


def test_what_one_attempt_had_no_time_for_the_next_sends(sender: Sender, capsys: pytest.CaptureFixture[str]) -> None:
    sender.send(1)
    with sender.away():
        sender.save(2, best=1)
        sender.uploads.finish(0.2)
        sender.uploads._thread.join(SOON)  # it ends with its process
        assert not sender.uploads._thread.is_alive()
    assert len(sender.events("not_uploaded")) == 1
    assert f"It goes there by: python -m jobs.resume {sender.run.path}" in capsys.readouterr().err
    again = Uploads(sender.store, sender.writer)
    assert again.finish(SOON)
    assert pointers(sender.store) == {"latest": 2, "best": 1}
    assert [event["step"] for event in sender.events("uploaded")] == [1, 2]


def test_nobody_waits_for_uploads_that_have_ended(sender: Sender) -> None:
    sender.end()
    sender.uploads._thread.join(SOON)
    sender.save(1)
    began = time.monotonic()
    assert not sender.uploads.wait(SOON)
    assert time.monotonic() - began < SOON / 2


def test_where_no_folder_can_be_made_a_checkpoint_is_sent_from_where_it_is(sender: Sender) -> None:
    sender.run.checkpoints.mkdir(exist_ok=True)
    (sender.run.checkpoints / ".sending").touch()  # what a full disk refuses, this refuses too
    sender.send(1)
    assert remote.record_of(sender.store, 1) == format.verified(sender.run.checkpoints, 1)


@pytest.mark.nightly
def test_a_whole_run_folder_comes_back_from_a_bucket(to_bucket: Sender, tmp_path: Path) -> None:
    to_bucket.writer.started(step=0)
    to_bucket.send(1, best=1)
    to_bucket.send(2)
    patient = Store(to_bucket.store.url)  # on a busy machine the server may need longer than the upload's short tries
    run = fetch_run(patient.url, tmp_path / "elsewhere")
    assert run.path == tmp_path / "elsewhere" / "first"
    assert run.config.read_text() == to_bucket.run.config.read_text()
    assert (run.code / "jobs" / "own.py").read_text() == "print('hello')\n"
    assert (format.pointed(run.checkpoints, "latest"), format.pointed(run.checkpoints, "best")) == (2, 1)
    for step in (1, 2):
        assert format.verified(run.checkpoints, step) == format.verified(to_bucket.run.checkpoints, step)
    assert Attempt.begin(run).number == 1, "the number of the attempt that is known there is taken"
    assert remote.claim(patient.url.rpartition("/")[0], run).url == patient.url
    # Again: what is here already is not fetched, and what is newer is.
    to_bucket.send(3)
    assert fetch_run(patient.url, tmp_path / "elsewhere").path == run.path
    assert format.pointed(run.checkpoints, "latest") == 3
    assert fetch_checkpoints(patient, run) == []


def test_a_change_on_the_way_is_seen_and_the_other_checkpoint_taken(
    sender: Sender, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sender.send(1, best=1)
    sender.send(2)
    weights = tmp_path / "far/first/checkpoints/step-00000002/model.safetensors"
    flip(weights)
    run = fetch_run(sender.store.url, tmp_path / "elsewhere")
    assert format.pointed(run.checkpoints, "latest") == 1
    assert "the content of model.safetensors has changed" in capsys.readouterr().err
    sender.store.remove("checkpoints/step-00000001/state.json")
    with pytest.raises(UserError, match=r"No checkpoint in \S+ is complete"):
        fetch_run(sender.store.url, tmp_path / "nowhere")
    sender.store.write(packed("../outside"), remote.CODE)
    with pytest.raises(UserError, match="cannot be used"):
        fetch_run(sender.store.url, tmp_path / "nowhere")
    assert list((tmp_path / "nowhere").iterdir()) == []


def packed(name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        item = tarfile.TarInfo(name)
        item.pax_headers = {"path": name}  # which takes any name
        item.size, item.type, item.linkname = len(content), kind, "/etc"
        archive.addfile(item, io.BytesIO(content))
    return out.getvalue()


def with_header(size: int, times: int = 1) -> bytes:
    """An archive whose first member's name is so long, and said so often."""
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, size
    return gzip.compress(name.tobuf(tarfile.GNU_FORMAT) * times + b"a" * size + tarfile.TarInfo("code/a.py").tobuf())


NO_CODE: dict[str, Callable[[], bytes]] = {
    "root": lambda: packed("/outside"),
    "winding": lambda: packed("code/../../outside"),
    "deep": lambda: packed(f"code/{'a/' * 60}b"),
    "compiled": lambda: packed("code/__pycache__/a.pyc"),
    "no name": lambda: packed("code/a\0b"),
    "large": lambda: packed("code/a", b"x" * (1 << 21)),
    "a long header": lambda: with_header(1 << 25),
    "names of names": lambda: with_header(0, times=1500),
    "a hard link": lambda: packed("code/a", b"", tarfile.LNKTYPE),
    "a link": lambda: packed("code/a", b"", tarfile.SYMTYPE),
    "a device": lambda: packed("code/a", b"", tarfile.CHRTYPE),
    "a folder": lambda: packed("code/a", b"", tarfile.DIRTYPE),
}


@pytest.mark.parametrize("what", NO_CODE)
def test_code_that_is_more_than_code_is_refused(what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of any depth take minutes to make; of a header's own length nothing but memory is a bound."""
    monkeypatch.setattr(remote, "LONGEST_CODE", 1 << 20)
    archive = NO_CODE[what]()
    tracemalloc.start()
    try:
        with pytest.raises(StoreError, match=r"code\.tar\.gz was not written by a run"):
            remote.unpack_code(archive, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
    assert list(tmp_path.iterdir()) == []


def test_a_record_that_names_a_place_outside_is_not_followed(tmp_path: Path) -> None:
    """A run's folder may be a stranger's: what is below the place that the user gave was ``..`` of it."""
    run = RunDir.create(tmp_path / "runs" / "first", "")
    told = {"id": "0" * 32, "url": f"file://{tmp_path}/far/../mine"}
    (run.path / remote.PLACE).write_text(json.dumps(told))
    assert remote.claim(f"file://{tmp_path}/far", run).url == f"file://{tmp_path}/far/first"
    assert not (tmp_path / "mine").exists()


def test_another_run_of_that_name_is_never_written_over(sender: Sender, tmp_path: Path) -> None:
    second = RunDir.create(tmp_path / "there" / "first", "")
    with pytest.raises(UserError, match="another run") as caught:
        remote.claim(f"file://{tmp_path}/far", second)
    assert f"jobs.resume file://{tmp_path}/far/first" in caught.value.fix
    with pytest.raises(UserError, match="is another run"):
        fetch_run(sender.store.url, tmp_path / "there")


@pytest.mark.parametrize("absent", ["bucket", "credentials"])
def test_a_place_that_cannot_be_used_is_refused_before_anything_else(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    if absent == "credentials":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    url = "s3://no-such-one/x" if absent == "bucket" else bucket[0]
    with pytest.raises(UserError, match=rf"{url}/run cannot be used") as caught:
        remote.claim(url, RunDir.create(tmp_path / "run", ""))
    assert absent in caught.value.why
    assert "AWS_ACCESS_KEY_ID" in caught.value.fix


def test_a_place_whose_package_is_missing_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="gs:// needs the package gcsfs") as caught:
        Store("gs://bucket/prefix")
    assert caught.value.fix == 'pip install "trainkit-vision[gcs]"'


@pytest.mark.parametrize("what", ["a new folder", "the run's own folder"])
def test_a_place_that_refuses_for_a_moment_is_asked_again_at_a_resume(
    sender: Sender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    sender.send(1)
    sender.end()
    read, asked = LocalFileSystem.cat_file, iter(range(1, 1000))

    def refuses(system: LocalFileSystem, *place: Any, **part: Any) -> Any:
        if next(asked) % 3:
            raise ConnectionRefusedError("Connection refused")
        return read(system, *place, **part)

    monkeypatch.setattr(object_store, "_FETCH_PAUSE", 0.001)
    monkeypatch.setattr(LocalFileSystem, "cat_file", refuses)
    if what == "a new folder":
        run = fetch_run(sender.store.url, tmp_path / "elsewhere")
    else:
        run = sender.run
        shutil.rmtree(run.checkpoints)
        uploads = open_remote(f"file://{tmp_path}/far", Attempt.begin(run), DIST)
        assert uploads is not None
        uploads.finish(0.0, lambda: True)
    assert format.pointed(run.checkpoints, "latest") == 1
    asked = iter([1, 3])  # a new run's place may be wrong: the first refusal is the answer
    with pytest.raises(UserError, match="cannot be used"):
        remote.claim(f"file://{tmp_path}/other", RunDir.create(tmp_path / "second", "seed: 0\n"))


def test_a_request_ends_when_nothing_goes_through_however_large_its_file_is(tmp_path: Path) -> None:
    class Hanging:
        async_impl, loop = True, get_loop()

        async def _put_file(self, *place: Any, **options: Any) -> None:
            await asyncio.sleep(60)

    with (tmp_path / "large").open("wb") as large:
        large.truncate(1 << 32)
    store = Store(f"file://{tmp_path}/far", patience=0.2)
    store._fs = Hanging()
    began = time.monotonic()
    with pytest.raises(StoreError, match="no data has gone through"):
        store.put(tmp_path / "large", "large")
    assert time.monotonic() - began < 30


def test_what_is_too_long_is_not_read(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    store.write(b"x" * 100, "long.json")
    assert store.read("long.json", limit=100) == b"x" * 100
    with pytest.raises(StoreError, match="longer than 99"):
        store.read("long.json", limit=99)


@pytest.mark.parametrize(
    ("place", "says"),
    [(place, "more than an address") for place in ("s3://key:secret@bucket/x", "s3://bucket/x?key=secret")]
    + [(place, "s3://bucket/prefix")
       for place in ("ftp://host/x", "bucket/x", "s3://", "s3://bucket/../x", "file://relative")],
)  # fmt: skip
def test_what_is_no_place_or_holds_a_key_is_refused_and_no_key_repeated(place: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        load("single", (f"checkpoint.remote={place}",))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["checkpoints/step-00000001/model.safetensors", "evaluations.jsonl", "config.yaml"])
def test_what_a_run_only_links_to_is_not_sent(tmp_path: Path, name: str) -> None:
    run = RunDir.create(tmp_path / "run", "")
    write(run.checkpoints, 1, {"model": {"weight": torch.ones(3)}}, {})
    key, file = tmp_path / "key", run.path / name
    key.write_text("private")
    file.unlink(missing_ok=True)
    file.symlink_to(key)
    with pytest.raises(RunFailedError, match="Not all of run") as caught:
        send_rest(run, f"file://{tmp_path}/copies", seconds=5)
    assert caught.value.why == f"It is a link, and links are not followed: {file}."
    assert b"private" not in b"".join(path.read_bytes() for path in (tmp_path / "copies").rglob("*") if path.is_file())


def test_what_has_become_a_link_just_before_it_is_sent_is_not_sent(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("private")
    (tmp_path / "weights").symlink_to("key")
    with pytest.raises(OSError, match="It is a link"):
        Store(f"file://{tmp_path}/copies").put(tmp_path / "weights", "weights")
    assert not (tmp_path / "copies").exists()


def test_what_a_finished_run_could_not_send_goes_later(bucket: Bucket, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "single-0001", to_yaml(load("single").config))
    write(run.checkpoints, 7, {"model": {"weight": torch.ones(3)}}, {})
    bucket[1].refuse = True
    with pytest.raises(UserError, match="cannot be used"):
        send_rest(run, bucket[0])
    bucket[1].over()
    assert send_rest(run, bucket[0]) == f"{bucket[0]}/single-0001"
    shutil.rmtree(run.path)
    back = fetch_run(f"{bucket[0]}/single-0001", tmp_path)
    assert format.resolve(back.checkpoints, "latest") == 7
    assert not back.lease.exists()


# Whole runs whose disk is lost

SETTINGS = ("train.max_steps=24", "model.dropout=0.2", "checkpoint.every_steps=5")


def weights(folder: Path) -> bytes:
    step = format.resolve(folder / "checkpoints", "latest")
    return (format.path_of(folder / "checkpoints", step) / "model.safetensors").read_bytes()


@pytest.mark.nightly
def test_a_run_whose_disk_is_lost_ends_as_an_uninterrupted_one(tmp_path: Path) -> None:
    settings = (*SETTINGS, f"checkpoint.remote=file://{tmp_path}/far")
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run_ranks(2, train_run, broken, "ddp", settings, 12) == ["preempted"] * 2
    shutil.rmtree(broken)
    assert fetch_run(f"file://{tmp_path}/far/broken", tmp_path).path == broken
    shutil.rmtree(broken / "checkpoints")  # these alone are found where they are, without anybody's asking
    assert run_ranks(2, train_run, broken, "ddp", settings) == ["finished"] * 2
    first, second = read_events(RunDir(broken), "started")
    assert (first["step"], first["attempt"], second["attempt"]) == (0, 0, 1)
    assert second["step"] > 0
    assert run_ranks(2, train_run, whole, "ddp", SETTINGS) == ["finished"] * 2
    there = fetch_run(f"file://{tmp_path}/far/broken", tmp_path / "elsewhere")
    assert weights(there.path) == weights(broken) == weights(whole)


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINKIT_RUNS", str(tmp_path / "runs"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "runs"


def submit(*settings: str, cwd: Path) -> None:
    done = run_command("submit", "single", "--executor", "debug", *QUICK, *settings, cwd=cwd)
    assert done.returncode == 0, done.stderr


@pytest.mark.nightly
def test_a_run_is_evaluated_straight_from_its_bucket(bucket: Bucket, runs: Path, tmp_path: Path) -> None:
    submit("train.max_steps=20", f"checkpoint.remote={bucket[0]}", cwd=tmp_path)
    summary = json.loads((runs / "single-0001" / "summary.json").read_text())
    shutil.rmtree(runs)
    done = run_command("evaluate", f"{bucket[0]}/single-0001", "--json", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["step"], result["acc1"]) == (summary["best_step"], pytest.approx(summary["test"]["acc1"]))


@pytest.mark.long
def test_a_run_is_resumed_from_its_bucket_once_its_code_is_allowed(bucket: Bucket, runs: Path, tmp_path: Path) -> None:
    submit("train.max_steps=4", f"checkpoint.remote={bucket[0]}", cwd=tmp_path)
    shutil.rmtree(runs)
    url = f"{bucket[0]}/single-0001"
    refused = run_command("resume", url, cwd=tmp_path)
    assert refused.returncode == 3
    assert "--allow-code" in refused.stderr
    assert not (runs / "single-0001").exists()
    finished = run_command("resume", url, "--allow-code", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    assert "has finished" in finished.stdout
    assert (runs / "single-0001" / "code" / "jobs" / "train.py").is_file()
