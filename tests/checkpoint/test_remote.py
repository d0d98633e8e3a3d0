"""A run's copy in a bucket: complete or absent, behind the training, and enough to go on from."""

from __future__ import annotations

import gzip
import io
import json
import shutil
import tarfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.bucket import Trouble
from tests.checkpoint.reading import write
from trainkit.checkpoint import format, remote, transfer
from trainkit.checkpoint.remote import Pointers, Store, StoreError
from trainkit.checkpoint.transfer import Uploads, bring_back, fetch_run, send_rest
from trainkit.config.loading import load, to_yaml
from trainkit.errors import RunFailedError, UserError
from trainkit.run.events import Attempt, Writer, read_events
from trainkit.run.folder import RunDir

Bucket = tuple[str, Trouble]
SOON = 60.0


def run_in(folder: Path, *, code: str = "print('hello')\n") -> Writer:
    run = RunDir.create(folder, to_yaml(load("single").config))
    (run.code / "jobs").mkdir(parents=True)
    (run.code / "jobs" / "own.py").write_text(code)
    return Writer(Attempt.begin(run), check=lambda: None)


def save(writer: Writer, step: int, *, best: int | None = None, size: int = 1000) -> None:
    weights = {"weight": torch.full((size,), float(step))}
    write(writer.run.checkpoints, step, {"model": weights, "optimizer": weights}, {"progress": {"step": step}})
    if best is not None:
        format.point(writer.run.checkpoints, "best", best)


def until(true: Callable[[], Any]) -> None:
    deadline = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def events(writer: Writer, kind: str) -> list[dict[str, Any]]:
    return read_events(writer.run, kind)


def sent(uploads: Any, *steps: int, best: int | None = None) -> None:
    """Save checkpoints, and wait until they are in the bucket."""
    thread, writer, _ = uploads
    for step in steps:
        save(writer, step, best=best)
    thread.look()
    assert thread.wait(SOON)


@pytest.fixture
def uploads(bucket: Bucket, tmp_path: Path) -> Any:
    """A run whose copy is kept in the bucket, with short tries."""
    writer = run_in(tmp_path / "first")
    store = remote.claim(bucket[0], writer.run)
    quick = Store(store.url, seconds=0.5, slowest_part=2.0)
    uploads = Uploads(quick, writer, pause=0.05)
    yield uploads, writer, quick
    bucket[1].over()
    uploads.finish(0.0, lambda: True)


def test_latest_and_best_go_up_and_what_nothing_names_goes_away(uploads: Any) -> None:
    _, writer, store = uploads
    for step, best in ((1, 1), (2, 1), (3, 3), (4, 3)):
        sent(uploads, step, best=best)
    assert Pointers.read(store) == Pointers(4, 3)
    assert sorted(store.names("checkpoints")) == ["step-00000003", "step-00000004"]
    assert [event["step"] for event in events(writer, "uploaded")] == [1, 2, 3, 4]


def test_the_newest_wins_while_one_is_on_its_way(bucket: Bucket, uploads: Any) -> None:
    thread, writer, store = uploads
    bucket[1].refuse = True
    save(writer, 1)
    thread.look()
    until(lambda: events(writer, "upload_failed"))
    for step in (2, 3):
        save(writer, step)
        thread.look()
    bucket[1].over()
    assert thread.wait(SOON)
    assert [event["step"] for event in events(writer, "uploaded")] == [3]
    assert store.names("checkpoints") == ["step-00000003"]


@pytest.mark.parametrize("trouble", [{"refuse": True}, {"stall": True}, {"cut_after": 300_000}], ids=str)
def test_a_bucket_that_is_away_is_tried_again_until_it_is_back(
    bucket: Bucket, uploads: Any, trouble: dict[str, Any]
) -> None:
    thread, writer, store = uploads
    for name, value in trouble.items():
        setattr(bucket[1], name, value)
    save(writer, 5, size=500_000)
    thread.look()
    until(lambda: events(writer, "upload_failed"))
    assert not thread.wait(0.2)
    assert format.verified(writer.run.checkpoints, 5).step == 5
    bucket[1].over()
    assert thread.wait(SOON)
    assert Pointers.read(store) == Pointers(5, None)
    assert remote.record_of(store, 5) == format.verified(writer.run.checkpoints, 5)
    assert len(events(writer, "upload_failed")) == len(events(writer, "upload_recovered")) == 1


def test_of_a_checkpoint_that_is_removed_no_folder_is_left(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}/far")
    for step in (1, 2):
        store.write(b"{}", f"{remote.folder_of(step)}/state.json")
    remote.remove_step(store, 1)
    assert store.names("checkpoints") == ["step-00000002"]


def test_a_place_that_comes_back_empty_gets_all_that_makes_a_run(
    uploads: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, writer, store = uploads
    sent(uploads, 1, best=1)

    def is_away(*request: Any, **options: Any) -> None:
        raise StoreError("it is away")

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(store, "_call", is_away)
        save(writer, 2)
        thread.look()
        until(lambda: events(writer, "upload_failed"))
        Store(store.url)._fs.rm(store.url, recursive=True)
    assert thread.wait(SOON)
    back = fetch_run(store.url, tmp_path / "elsewhere")
    assert (format.resolve(back.checkpoints, "latest"), format.resolve(back.checkpoints, "best")) == (2, 1)
    assert (back.path / "config.yaml").is_file()


def test_where_saves_come_faster_than_they_go_up_the_copy_follows(
    uploads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    thread, writer, store = uploads
    put, steps = store.put, iter(range(2, 40))

    def another_is_saved(file: Path, name: str) -> None:
        if (step := next(steps, None)) is not None:
            save(writer, step)
            thread.look()
        put(file, name)

    monkeypatch.setattr(store, "put", another_is_saved)
    save(writer, 1)
    thread.look()
    patient = Store(store.url)  # for who looks; uploads are tried again
    until(lambda: Pointers.read(patient).latest is not None)
    assert next(steps, None) is not None, "it was pointed at before the saves had ended"


def test_a_checkpoint_without_its_last_file_is_none(uploads: Any, tmp_path: Path) -> None:
    _, _, store = uploads
    sent(uploads, 1)
    store.remove("checkpoints/step-00000001/state.json")
    with pytest.raises(UserError, match="is whole"):
        fetch_run(store.url, tmp_path / "elsewhere")
    assert not (tmp_path / "elsewhere" / "first").exists()


def test_one_that_is_deleted_here_while_it_goes_up_arrives_whole(
    bucket: Bucket, uploads: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, writer, store = uploads
    put = store.put

    def delete_first(file: Path, name: str) -> None:
        shutil.rmtree(format.path_of(writer.run.checkpoints, 1), ignore_errors=True)
        put(file, name)

    monkeypatch.setattr(store, "put", delete_first)
    sent(uploads, 1)
    assert remote.record_of(store, 1).step == 1
    assert sorted(store.names("checkpoints/step-00000001")) == [
        "model.safetensors", "optimizer.safetensors", "state.json",
    ]  # fmt: skip


def test_other_weights_of_the_same_step_replace_the_first(uploads: Any, tmp_path: Path) -> None:
    thread, writer, store = uploads
    for content in (1, 2):
        weights = {"weight": torch.full((10,), float(content))}
        write(writer.run.checkpoints, 7, {"model": weights}, {})
        thread.look()
        assert thread.wait(SOON)
    run = fetch_run(store.url, tmp_path / "elsewhere")
    assert format.verified(run.checkpoints, 7) == format.verified(writer.run.checkpoints, 7)


def test_what_an_attempt_had_no_time_for_goes_up_at_the_next_start(
    bucket: Bucket, uploads: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    thread, writer, store = uploads
    sent(uploads, 1)
    bucket[1].refuse = True
    save(writer, 2, best=1)
    thread.look()
    thread.finish(0.2)
    assert len(events(writer, "not_uploaded")) == 1
    assert f"It goes there by: python -m jobs.resume {writer.run.path}" in capsys.readouterr().err
    thread._thread.join(SOON)  # it ends with its process
    assert not thread._thread.is_alive()
    bucket[1].over()
    again = Uploads(Store(store.url), writer)
    again.look()
    assert again.wait(SOON)
    again.finish(1.0)
    assert Pointers.read(store) == Pointers(2, 1)
    assert [event["step"] for event in events(writer, "uploaded")] == [1, 2]


def test_a_whole_run_folder_comes_back(uploads: Any, tmp_path: Path) -> None:
    _, writer, store = uploads
    writer.attempt.started(step=0)
    sent(uploads, 1, best=1)
    sent(uploads, 2)
    run = fetch_run(store.url, tmp_path / "elsewhere")
    assert run.path == tmp_path / "elsewhere" / "first"
    assert run.config.read_text() == writer.run.config.read_text()
    assert (run.code / "jobs" / "own.py").read_text() == "print('hello')\n"
    assert (format.pointed(run.checkpoints, "latest"), format.pointed(run.checkpoints, "best")) == (2, 1)
    for step in (1, 2):
        assert format.verified(run.checkpoints, step) == format.verified(writer.run.checkpoints, step)
    assert Attempt.begin(run).number == 1, "the number of the attempt that is known there is taken"
    assert remote.claim(store.url.rpartition("/")[0], run).url == store.url
    # Again: what is here already is not fetched, and what is newer is.
    sent(uploads, 3)
    assert fetch_run(store.url, tmp_path / "elsewhere").path == run.path
    assert format.pointed(run.checkpoints, "latest") == 3
    assert bring_back(store, run) == []


def test_a_change_on_the_way_is_seen_and_the_other_checkpoint_taken(
    uploads: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, _, store = uploads
    sent(uploads, 1, best=1)
    sent(uploads, 2)
    name = "checkpoints/step-00000002/model.safetensors"
    patient = Store(store.url)  # on a busy machine the server may need longer than the upload's short tries
    content = bytearray(patient.read(name, limit=10**6))
    content[-1] ^= 1
    patient.write(bytes(content), name)
    run = fetch_run(store.url, tmp_path / "elsewhere")
    assert format.pointed(run.checkpoints, "latest") == 1
    assert "the content of model.safetensors has changed" in capsys.readouterr().err


def packed(name: str, content: bytes = b"x", kind: bytes = tarfile.REGTYPE) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        item = tarfile.TarInfo(name)
        item.pax_headers = {"path": name}  # which takes any name
        item.size, item.type, item.linkname = len(content), kind, "/etc"
        archive.addfile(item, io.BytesIO(content))
    return out.getvalue()


@pytest.mark.parametrize("name", ["../outside", "/outside", "code/../../outside", "outside"])
def test_code_that_would_lie_elsewhere_is_refused(uploads: Any, tmp_path: Path, name: str) -> None:
    _, _, store = uploads
    sent(uploads, 1)
    store.write(packed(name), remote.CODE)
    with pytest.raises(UserError, match="cannot be used"):
        fetch_run(store.url, tmp_path / "elsewhere")
    assert not list(tmp_path.rglob("outside"))


def with_header(size: int, times: int = 1) -> bytes:
    """An archive whose first member's name is so long, and said so often."""
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = tarfile.GNUTYPE_LONGNAME, size
    return gzip.compress(name.tobuf(tarfile.GNU_FORMAT) * times + b"a" * size + tarfile.TarInfo("code/a.py").tobuf())


@pytest.mark.parametrize(
    "content",
    [
        packed(f"code/{'a/' * 60}b"),
        packed("code/__pycache__/a.pyc"),
        packed("code/a\0b"),
        packed("code/a", b"x" * (1 << 21)),
        with_header(1 << 25),
        with_header(0, times=1500),
    ],
    ids=["deep", "compiled", "no name", "large", "long header", "names of names"],
)
def test_code_that_is_more_than_code_is_refused(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders of any depth take minutes to make; of a header's own length nothing but memory is a bound."""
    monkeypatch.setattr(transfer, "_LONGEST_CODE", 1 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(StoreError, match="is not what a run has written"):
            transfer._unpack(content, tmp_path)
        assert tracemalloc.get_traced_memory()[1] < 1 << 24
    finally:
        tracemalloc.stop()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", [tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE, tarfile.DIRTYPE])
def test_of_code_only_files_are_taken(kind: bytes, tmp_path: Path) -> None:
    transfer._unpack(packed("code/a", b"", kind), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_another_run_of_that_name_is_never_written_over(bucket: Bucket, tmp_path: Path) -> None:
    first = run_in(tmp_path / "here" / "ddp-0001")
    remote.claim(bucket[0], first.run)
    second = run_in(tmp_path / "there" / "ddp-0001")
    with pytest.raises(UserError, match="another run") as caught:
        remote.claim(bucket[0], second.run)
    assert f"jobs.resume {bucket[0]}/ddp-0001" in caught.value.fix
    with pytest.raises(UserError, match="is another run"):
        fetch_run(f"{bucket[0]}/ddp-0001", tmp_path / "there")


@pytest.mark.parametrize("absent", ["bucket", "credentials"])
def test_a_place_that_cannot_be_used_is_refused_before_anything_else(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, absent: str
) -> None:
    if absent == "credentials":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    url = "s3://no-such-bucket/x" if absent == "bucket" else bucket[0]
    with pytest.raises(UserError, match=rf"{url}/run cannot be used") as caught:
        remote.claim(url, run_in(tmp_path / "run").run)
    assert absent in (caught.value.why if absent == "bucket" else caught.value.fix)
    assert "AWS_ACCESS_KEY_ID" in caught.value.fix


def test_a_folder_does_as_well(tmp_path: Path) -> None:
    writer = run_in(tmp_path / "run")
    store = remote.claim(f"file://{tmp_path}/copies", writer.run)
    thread = Uploads(store, writer)
    save(writer, 1)
    thread.look()
    thread.finish(SOON)
    assert json.loads((tmp_path / "copies" / "run" / "pointers.json").read_text()) == {"latest": 1, "best": None}
    assert fetch_run(store.url, tmp_path / "elsewhere").name == "run"


def test_a_place_whose_package_is_missing_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="gs:// needs the package gcsfs") as caught:
        Store("gs://bucket/prefix")
    assert caught.value.fix == "pip install gcsfs"


def test_what_is_too_long_is_not_read(bucket: Bucket) -> None:
    store = Store(bucket[0])
    store.write(b"x" * 100, "long.json")
    assert store.read("long.json", limit=100) == b"x" * 100
    with pytest.raises(StoreError, match="longer than 99"):
        store.read("long.json", limit=99)


@pytest.mark.parametrize(
    ("place", "says"),
    [(place, "more than a place") for place in ("s3://key:secret@bucket/x", "s3://bucket/x?key=secret")]
    + [(place, "s3://bucket/prefix")
       for place in ("ftp://host/x", "bucket/x", "s3://", "s3://bucket/../x", "file://relative")],
)  # fmt: skip
def test_what_is_no_place_or_holds_a_key_is_refused_and_no_key_repeated(place: str, says: str) -> None:
    with pytest.raises(UserError, match=says) as caught:
        load("single", (f"checkpoint.remote={place}",))
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("name", ["checkpoints/step-00000001/model.safetensors", "evaluations.jsonl", "config.yaml"])
def test_what_a_run_only_links_to_is_not_sent(tmp_path: Path, name: str) -> None:
    writer = run_in(tmp_path / "run")
    save(writer, 1)
    key, file = tmp_path / "key", writer.run.path / name
    key.write_text("private")
    file.unlink(missing_ok=True)
    file.symlink_to(key)
    with pytest.raises(RunFailedError, match="Not all of run") as caught:
        send_rest(writer.run, f"file://{tmp_path}/copies", seconds=5)
    assert caught.value.why == f"It is a link, and what it leads to is not read: {file}."
    assert b"private" not in b"".join(path.read_bytes() for path in (tmp_path / "copies").rglob("*") if path.is_file())


def test_what_has_become_a_link_just_before_it_is_sent_is_not_sent(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("private")
    (tmp_path / "weights").symlink_to("key")
    with pytest.raises(OSError, match="It is a link"):
        Store(f"file://{tmp_path}/copies").put(tmp_path / "weights", "weights")
    assert not (tmp_path / "copies").exists()
