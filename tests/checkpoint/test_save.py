"""What becomes of a run whose best weights are lost on the way."""

import contextlib
import io
import os
import re
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.checkpoint.reading import DIST, flip, tensors, write
from tests.rank_functions import QUICK, StopAfter, run_ranks, train_run
from tests.training.parts import keeper_of, parts_of
from trainkit.checkpoint import format, safetensors_files
from trainkit.checkpoint.format import file_name
from trainkit.checkpoint.save import Checkpoints
from trainkit.cluster.ranks import RankEnv
from trainkit.common.errors import RefusedError, RunFailedError
from trainkit.config.loading import load
from trainkit.distributed.process_group import distributed
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.training.loop import train
from trainkit.training.progress import Progress


def _save_on_a_full_disk(env: RankEnv, folder: Path) -> tuple[str, list[str]]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    with distributed(env, use_gpu=False) as dist:
        checkpoints, model = Checkpoints(folder, keep=3, dist=dist), nn.Linear(200, 200)
        optimizer = torch.optim.AdamW(model.parameters())
        checkpoints.save(model, optimizer, step=1, state={})
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))  # no file may hold the 160 kB of the weights
        try:
            checkpoints.save(model, optimizer, step=2, state={})
        except RunFailedError as error:
            return str(error), sorted(entry.name for entry in folder.iterdir())
    return "saved", []


def test_a_full_disk_is_said_so_and_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    ((said, left),) = run_ranks(1, _save_on_a_full_disk, tmp_path)
    assert "The checkpoint of step 2 could not be written." in said
    assert f"Free some space, then `python -m jobs.resume {tmp_path.parent}`" in said
    assert "/model" in said.split("why: ")[1].split("\n")[0], "the file is named"
    assert left == ["latest", "step-00000001"]
    format.verified(tmp_path, 1)


# Nothing is learned, so the first validation (19 updates, one epoch) stays the best.
SETTINGS = ("optim.lr=1e-30", "train.max_steps=24")
BEST = 19


def _go_on_and_evaluate(env: RankEnv, folder: Path) -> tuple[str, int, str, str]:
    from trainkit.inference.evaluate import evaluate_checkpoint

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        ending = train_run(env, folder, "single", SETTINGS)
        config = load(str(RunDir(folder).config), QUICK).config
        result = evaluate_checkpoint(config, RunDir(folder), "best", "test")
    return ending, result.step, result.which, said.getvalue()


def test_a_run_whose_best_weights_are_lost_ends_and_says_so(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    run_ranks(1, train_run, folder, "single", SETTINGS, 22 + 5)
    assert format.pointed(folder / "checkpoints", "best") == BEST
    flip(format.path_of(folder / "checkpoints", BEST) / "model.safetensors")
    ((ending, step, which, said),) = run_ranks(1, _go_on_and_evaluate, folder)
    assert ending == "finished"
    assert (step, which) == (24, "newest"), "nobody takes it for the best"
    assert f"step-{BEST:08d} is broken: the content of model.safetensors has changed" in said


# Training goes on while a checkpoint is written; what it says, and who waits for it.


class Gate:
    """Writing stands still until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.reached = threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.reached.set()
        assert self.opened.wait(60)
        return _write(*args, **kwargs)


_write = safetensors_files.write


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate()
    monkeypatch.setattr(safetensors_files, "write", gate)
    yield gate
    gate.opened.set()


def begun(folder: Path, **more: Any) -> tuple[Checkpoints, nn.Linear]:
    """Checkpoints whose first one has begun to be written."""
    checkpoints, model = Checkpoints(folder, keep=1, dist=DIST, asynchronous=True, **more), nn.Linear(3, 2)
    with torch.no_grad():
        model.weight.fill_(1.0)
    checkpoints.best = 1
    checkpoints.save(model, None, step=1, state={})
    return checkpoints, model


def test_nothing_names_it_and_nobody_hears_of_it_before_it_is_on_the_disk(tmp_path: Path, gate: Gate) -> None:
    heard: list[int] = []
    checkpoints, model = begun(tmp_path)
    gate.opened.set()
    checkpoints.settle()
    gate.opened.clear()
    gate.reached.clear()
    checkpoints.best = 2
    checkpoints.save(model, None, step=2, state={}, done=lambda: heard.append(2))
    assert gate.reached.wait(60)
    with torch.no_grad():
        model.weight.fill_(2.0)  # training goes on
    for _ in range(3):
        checkpoints.go_on(checkpoints.over())
    assert (heard, format.steps(tmp_path)) == ([], [1]), "said, or the one before it pruned, too early"
    assert [format.pointed(tmp_path, name) for name in ("latest", "best")] == [1, 1]
    gate.opened.set()
    deadline = time.monotonic() + 60
    while not heard and time.monotonic() < deadline:
        checkpoints.go_on(checkpoints.over())
    assert (heard, format.steps(tmp_path)) == ([2], [2])
    assert [format.pointed(tmp_path, name) for name in ("latest", "best")] == [2, 2]
    assert torch.equal(tensors(tmp_path)["weight"], torch.ones(2, 3)), "it is the model as the save began"


def buffers(checkpoints: Checkpoints) -> set[int]:
    return {value.data_ptr() for named in checkpoints._copies.values() for value in named.values()}


def test_a_second_save_waits_for_the_first_and_uses_its_memory(tmp_path: Path, gate: Gate) -> None:
    checkpoints, model = begun(tmp_path)
    memory = buffers(checkpoints)
    assert checkpoints.seconds_since_save() == 0.0, "its age while it is written"
    threading.Timer(0.2, gate.opened.set).start()
    checkpoints.save(model, None, step=2, state={})
    assert gate.opened.is_set()
    checkpoints.settle()
    assert format.steps(tmp_path) == [1, 2], "the first is the best"
    assert buffers(checkpoints) == memory != set()
    time.sleep(0.02)
    assert checkpoints.seconds_since_save() >= 0.02, "the age of the copy"


# In the loop


def test_who_is_told_to_stop_waits_for_the_disk(tmp_path: Path, gate: Gate) -> None:
    parts = parts_of("train.max_steps=50", "checkpoint.every_epochs=null", "train.eval_every_epochs=99")
    keeper = keeper_of(parts, tmp_path / "run", Progress(), asynchronous=True)
    threading.Timer(0.3, gate.opened.set).start()
    stop = StopAfter(3)
    assert train(parts, keeper, lambda: stop.requested) is False
    assert gate.opened.is_set()
    assert format.steps(keeper.writer.run.checkpoints) == [keeper.progress.step]
    assert [event["step"] for event in read_events(keeper.writer.run, "saved")] == [keeper.progress.step]


def test_training_ends_at_the_next_update_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device", "model.safetensors")

    monkeypatch.setattr(safetensors_files, "write", full)
    parts = parts_of("train.max_steps=5000", "checkpoint.every_steps=2", "train.eval_every_epochs=9999")
    keeper = keeper_of(parts, tmp_path / "run", Progress(), asynchronous=True)
    with pytest.raises(RunFailedError, match="step 2 could not be written"):
        train(parts, keeper, lambda: False)
    assert keeper.progress.step < 5000
    assert [*keeper.writer.run.checkpoints.glob("*")] == []


# Each rank its own


class Wide(nn.Module):
    """Weights that are cut in two, and a buffer that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(100, 64, bias=False)
        self.register_buffer("same", torch.arange(5.0))


def _save_own(env: RankEnv, folder: Path, sees: list[bool], full: bool) -> str:
    with distributed(env, use_gpu=False) as dist:
        torch.manual_seed(0)
        model = Wide()
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.world_size,)))
        gathered: list[object] = []
        setattr(type(model.wide.weight), "full_tensor", lambda self, **_: gathered.append(self))  # noqa: B010
        there = folder if sees[dist.rank] else folder / "elsewhere"
        checkpoints = Checkpoints(there, keep=2, dist=dist, asynchronous=True)
        if full and dist.rank == 1:

            def write(*args: Any) -> None:
                raise OSError(28, "No space left on device", "a shard")

            safetensors_files.write = write  # type: ignore[assignment]
        try:
            for step in (1, 2):
                checkpoints.save(model, None, step=step, state={})
            checkpoints.settle()
        except RunFailedError as error:
            return f"{error.what} {error.why}"
        assert not gathered
        return "saved"


@pytest.mark.parametrize("sees", [[True, True], [True, False, True], [True, False, False]], ids=str)
def test_each_rank_writes_its_part_or_rank_0_for_those_that_see_no_folder(tmp_path: Path, sees: list[bool]) -> None:
    count = len(sees)
    assert run_ranks(count, _save_own, tmp_path, sees, False) == ["saved"] * count
    record = format.verified(tmp_path, 2)
    sizes = [record.files[file_name("model", rank, count)].bytes for rank in range(count)]
    assert all(part == pytest.approx(100 * 64 * 4 / count, rel=0.07) for part in sizes)
    torch.manual_seed(0)
    assert torch.equal(tensors(tmp_path)["wide.weight"], Wide().wide.weight)
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("is_file", "why"), [(True, r"File exists|Not a directory"), (False, r"No space left on device: a shard\.")]
)
def test_a_rank_that_cannot_write_is_heard_by_all_and_nothing_is_left(tmp_path: Path, is_file: bool, why: str) -> None:
    folder = tmp_path / "checkpoints"
    if is_file:
        folder.write_text("a file where the folder should be")
    one, other = run_ranks(2, _save_own, folder, [True, True], not is_file)
    assert one == other
    assert re.match(rf"The checkpoint of step 1 could not be written\. ({why})", one)
    assert is_file or [*folder.iterdir()] == []


# A checkpoint is on the disk before its name is, and nobody writes who has lost the run.

TENSORS = {"model": {"w": torch.ones(10)}, "optimizer": {"m": torch.ones(10)}}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is flushed (by the inode that lies behind the descriptor) and renamed, in order."""
    done: list[str] = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor: int) -> None:
        fsync(descriptor)
        done.append(f"fsync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    def recorded_replace(source: Any, target: Any, **folders: int) -> None:
        replace(source, target, **folders)
        done.append(f"rename to {Path(target).name}")

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    return done


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="tells descriptors by /proc")
def test_all_is_flushed_before_the_checkpoint_has_its_name_and_after(tmp_path: Path, calls: list[str]) -> None:
    write(tmp_path / "checkpoints", 1, TENSORS, {})
    assert calls == [
        "fsync model.safetensors",
        "fsync optimizer.safetensors",
        "fsync state.json",
        "fsync .step-00000001.partial",
        "rename to step-00000001",
        "fsync checkpoints",  # before `latest` names it
        f"fsync {tmp_path.name}",
        "rename to latest",
        "fsync checkpoints",
    ]
    calls.clear()
    write(tmp_path / "checkpoints", 1, TENSORS, {"note": "a new state"})
    renamed = calls.index("rename to state.json")
    assert calls[:renamed][-2:] == ["fsync state.json", "fsync .step-00000001.partial"]
    assert calls[renamed + 1] == "fsync step-00000001"


def held_for(questions: int) -> Any:
    """A lease that is lost after so many questions."""
    asked = iter(range(questions))

    def may_write() -> None:
        if next(asked, None) is None:
            raise RefusedError("Another process writes this run now.", why="It has taken it over.", fix="See it.")

    return may_write


def contents(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# Before it begins, while it writes, behind training.
@pytest.mark.parametrize(("questions", "asynchronous"), [(0, False), (1, False), (1, True)])
def test_who_has_lost_the_run_leaves_everything_as_it_was(tmp_path: Path, questions: int, asynchronous: bool) -> None:
    model = nn.Linear(2, 1)
    checkpoints = Checkpoints(tmp_path, keep=1, dist=DIST)
    checkpoints.best = 1
    checkpoints.save(model, None, step=1, state={})
    before = contents(tmp_path)
    may_write = held_for(questions)
    checkpoints = Checkpoints(tmp_path, keep=1, dist=DIST, may_write=may_write, asynchronous=asynchronous)
    with pytest.raises(RefusedError, match="Another process"):  # noqa: PT012 - of either
        checkpoints.best = 2
        checkpoints.save(model, None, step=2, state={})
        checkpoints.settle()
    assert contents(tmp_path) == before
    assert (format.pointed(tmp_path, "latest"), format.pointed(tmp_path, "best")) == (1, 1)


@pytest.mark.parametrize(("keep", "during", "after"), [(None, [2, 4, 5, 6], [2, 6]), (2, [2, 5, 6], [2, 5, 6])])
def test_unless_a_number_is_asked_for_the_end_leaves_the_best_and_the_newest(
    tmp_path: Path, keep: int | None, during: list[int], after: list[int]
) -> None:
    checkpoints, model = Checkpoints(tmp_path, keep=keep, dist=DIST), nn.Linear(2, 1)
    for step in range(1, 7):
        checkpoints.best = min(step, 2)
        checkpoints.save(model, None, step=step, state={})
    assert format.steps(tmp_path) == during
    checkpoints.finish()
    assert format.steps(tmp_path) == after


def test_at_the_end_who_has_lost_the_run_removes_nothing(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    for step in (1, 2):
        checkpoints = Checkpoints(tmp_path, keep=3, dist=DIST)
        checkpoints.best = 2
        checkpoints.save(model, None, step=step, state={})
    with pytest.raises(RefusedError, match="Another process"):
        Checkpoints(tmp_path, keep=None, dist=DIST, may_write=held_for(0)).finish()
    assert format.steps(tmp_path) == [1, 2]
