"""Archives that strangers made, or that came to harm on the way."""

import hashlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.runs import local_run  # noqa: F401
from trainkit.checkpoint import archive, format
from trainkit.cluster.job_states import job_state
from trainkit.cluster.plan import Plan
from trainkit.common.errors import UserError
from trainkit.run.events import append_event, submitted
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.run.labels import labels_of, say
from trainkit.run.snapshot import STORE, share

SECRET = "hunter2secret9hunter2"


@pytest.fixture
def run(local_run: Callable[..., tuple[RunDir, Plan]]) -> RunDir:  # noqa: F811
    """A run with one checkpoint, of step 7, and a job of SLURM."""
    run, _ = local_run()
    submitted(run, "slurm", "4711")
    append_event(run, "started", attempt=0, total_steps=7)
    say(run, tags=["paper"])
    write(run, {"model.safetensors": os.urandom(3000), "optimizer.safetensors": os.urandom(3000)})
    return run


def write(run: RunDir, files: dict[str, bytes]) -> None:
    """Write a checkpoint of step 7, the best."""
    folder = format.begin(run.checkpoints, 7)
    facts = {}
    for name, content in files.items():
        facts[name] = format.FileFacts(len(content), hashlib.sha256(content).hexdigest())
        with format.new_file(folder, name) as out:
            out.write(content)
    format.commit(run.checkpoints, format.CheckpointManifest(7, {}, facts))
    format.point(run.checkpoints, "best", 7)


def names(file: Path) -> list[str]:
    with tarfile.open(file) as content:
        return content.getnames()


def test_a_run_comes_out_as_it_went_in(run: RunDir, tmp_path: Path) -> None:
    archive.pack(run, file := tmp_path / "run.tar", [7])
    assert archive.name_in(file) == "run-0001"
    there = archive.unpack(file, tmp_path / "there" / "x")
    assert there.config.read_bytes() == run.config.read_bytes()
    assert there.code_archive.stat().st_size > 100_000
    assert labels_of(there).tags == ("paper",)
    assert (format.pointed(there.checkpoints, "best"), format.pointed(there.checkpoints, "latest")) == (7, 7)
    assert (format.path_of(there.checkpoints, 7) / "model.safetensors").stat().st_size == 3000
    assert not (format.path_of(there.checkpoints, 7) / "optimizer.safetensors").exists()
    assert (there.path.stat().st_mode & 0o077, file.stat().st_mode & 0o077) == (0, 0)


def test_the_optimizer_goes_along_where_it_is_asked_for(run: RunDir, tmp_path: Path) -> None:
    archive.pack(run, tmp_path / "run.tar", [7], optimizer=True)
    assert format.verified(archive.unpack(tmp_path / "run.tar", tmp_path / "x").checkpoints, 7)
    archive.pack(run, tmp_path / "none.tar", [])
    assert not archive.unpack(tmp_path / "none.tar", tmp_path / "y").checkpoints.exists()


def test_no_scheduler_is_asked_about_jobs_of_another_machine(run: RunDir, tmp_path: Path) -> None:
    archive.pack(run, tmp_path / "run.tar", [])
    there = archive.unpack(tmp_path / "run.tar", tmp_path / "x")
    assert history_of(run).submissions[0].job_id == "4711"
    assert history_of(there).submissions == []
    assert (job_state(there).job_id, there.attempts()) == ("", [0])


def test_secrets_keys_and_logs_stay_at_home(run: RunDir, tmp_path: Path) -> None:
    """Of a run that was made by an older version, or edited by hand."""
    run.attempt_logs(0).mkdir()
    (run.attempt_logs(0) / "rank-0.out").write_text(f"password: {SECRET}\n")
    (run.path / "swarm_identity").write_text("key")
    run.manifest.write_text(json.dumps({"command": ["x", f"--password={SECRET}"], "password": SECRET}))
    append_event(run, "failed", attempt=0, rank=0, error=f'password="{SECRET}"')
    hidden = archive.pack(run, tmp_path / "run.tar", [7])
    assert hidden == ["manifest.json", "events.jsonl"]
    assert not [name for name in names(tmp_path / "run.tar") if "swarm" in name or "logs" in name or "lease" in name]
    assert "rank-0.out" in archive.pack(run, tmp_path / "logs.tar", [7], logs=True)[-1]
    for file in tmp_path.glob("*.tar"):
        assert SECRET.encode() not in file.read_bytes()
    there = archive.unpack(tmp_path / "run.tar", tmp_path / "x")
    assert json.loads(there.manifest.read_text())["password"] == "***"


def test_nothing_is_written_over(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "run.tar").write_text("mine")
    with pytest.raises(UserError, match="exists already"):
        archive.pack(run, tmp_path / "run.tar", [7])
    archive.pack(run, tmp_path / "good.tar", [7])
    with pytest.raises(UserError, match="exists already"):
        archive.unpack(tmp_path / "good.tar", run.path)
    assert (tmp_path / "run.tar").read_text() == "mine"


def test_a_run_that_cannot_be_read_leaves_no_half_archive(run: RunDir, tmp_path: Path) -> None:
    (format.path_of(run.checkpoints, 7) / "model.safetensors").write_bytes(b"short")
    with pytest.raises(UserError, match="Cannot pack"):
        archive.pack(run, tmp_path / "run.tar", [7])
    run.summary.symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="Cannot pack"):
        archive.pack(run, tmp_path / "run.tar", [])
    assert [file.name for file in tmp_path.iterdir() if "run.tar" in file.name] == []


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The archive of a run with one checkpoint, of step 7, which tests may change."""
    folder = tmp_path_factory.mktemp("packed")
    run = RunDir.create(folder / "run-0001", "seed: 0\n")
    content = {f"trainkit/{name}.py": os.urandom(50) for name in ("a", "b")}
    share(run, content, folder / STORE)
    write(run, {"model.safetensors": os.urandom(3000)})
    archive.pack(run, folder / "run.tar", [7])
    return (folder / "run.tar").read_bytes()


Change = Callable[[list[tuple[tarfile.TarInfo, bytes]]], object]


def member(name: str, content: bytes = b"x", **facts: object) -> tuple[tarfile.TarInfo, bytes]:
    item = tarfile.TarInfo(name)
    item.size = len(content)
    for key, value in facts.items():
        setattr(item, key, value)
    return item, content


def put(name: str, content: bytes = b"x", **facts: object) -> Change:
    return lambda items: items.insert(0, member(name, content, **facts))


def changed(name: str) -> Change:
    def change(items: list[tuple[tarfile.TarInfo, bytes]]) -> None:
        at = next(n for n, (item, _) in enumerate(items) if item.name.endswith(name))
        items[at] = (items[at][0], items[at][1][:-1] + bytes([items[at][1][-1] ^ 1]))

    return change


def without(name: str) -> Change:
    return lambda items: items.remove(next(pair for pair in items if pair[0].name.endswith(name)))


WRONG: dict[str, Change] = {
    "a path outwards": put("../evil"),
    "an absolute path": put("/tmp/evil"),
    "a path outwards of a checkpoint": put("checkpoints/step-00000007/../../evil.safetensors"),
    "a link": put("submit.sbatch", b"", type=tarfile.SYMTYPE, linkname="/etc/passwd"),
    "a hard link": put("submit.sbatch", b"", type=tarfile.LNKTYPE, linkname="config.yaml"),
    "a device": put("submit.sbatch", b"", type=tarfile.CHRTYPE),
    "a folder in the place of a file": put("submit.sbatch", b"", type=tarfile.DIRTYPE),
    "a FIFO": put("submit.sbatch", b"", type=tarfile.FIFOTYPE),
    "a sparse file": put("submit.sbatch", pax_headers={"GNU.sparse.size": str(1 << 40), "GNU.sparse.map": "0,1"}),
    "an old sparse file": put("submit.sbatch", b"", type=tarfile.GNUTYPE_SPARSE),
    "a name twice": put("config.yaml"),
    "what no run has": put("code/trainkit/evil.py"),
    "a key": put("swarm_identity"),
    "a step that is none": put("checkpoints/step-000000007/state.json"),
    "other settings": changed("config.yaml"),
    "other code": changed("code.zip"),
    "other weights": changed("model.safetensors"),
    "another state": changed("state.json"),
    "no weights": without("model.safetensors"),
    "no settings": without("config.yaml"),
    "no end": without("pack.json"),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_archive_that_pack_would_not_write_is_refused(packed: bytes, tmp_path: Path, what: str) -> None:
    (file := tmp_path / "run.tar").write_bytes(packed)
    with tarfile.open(file) as content:
        items = [(item, content.extractfile(item).read()) for item in content]  # type: ignore[union-attr]
    WRONG[what](items)
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as out:
        for item, data in items:
            out.addfile(item, io.BytesIO(data))
    with pytest.raises(UserError, match="is not a file of"):
        archive.unpack(file, tmp_path / "there" / "x")
    assert list((tmp_path / "there").iterdir()) == []
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.9, 1.0])
def test_an_archive_that_was_cut_short_is_refused(packed: bytes, tmp_path: Path, share: float) -> None:
    (file := tmp_path / "run.tar").write_bytes(packed)
    with tarfile.open(file) as content:
        last = content.getmembers()[-1]
    os.truncate(file, int((last.offset_data + last.size - 1) * share))  # what follows is filling
    with pytest.raises(UserError, match="is not a file of"):
        archive.unpack(file, tmp_path / "x")
    with pytest.raises(UserError, match="is not a file of"):
        archive.name_in(file)
    assert not (tmp_path / "x").exists()


def test_a_compressed_archive_and_one_of_terabytes_are_refused(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "bomb.tar.gz", "w:gz") as out:
        item, content = member("config.yaml", bytes(10_000_000))
        out.addfile(item, io.BytesIO(content))
    with pytest.raises(UserError, match="is not a file of"):
        archive.unpack(tmp_path / "bomb.tar.gz", tmp_path / "x")
    (tmp_path / "hole.tar").touch()
    os.truncate(tmp_path / "hole.tar", 1 << 43)
    with pytest.raises(UserError, match="does not fit"):
        archive.unpack(tmp_path / "hole.tar", tmp_path / "x")


def test_what_a_killed_unpack_has_left_is_no_run_and_goes(run: RunDir, tmp_path: Path) -> None:
    archive.pack(run, tmp_path / "run.tar", [7])
    (left := tmp_path / "runs" / ".x.unpacked").mkdir()
    (left / "config.yaml").write_text("half")
    archive.unpack(tmp_path / "run.tar", tmp_path / "runs" / "x")
    assert not left.exists()
