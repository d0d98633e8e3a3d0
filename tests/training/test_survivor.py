"""What a rank saves that has lost another one: the state of its last finished update, and never half of the next."""

import os
import threading
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.reading import tensors
from tests.rank_functions import QUICK, run_ranks
from tests.training.parts import Linear, parts_of
from trainkit.checkpoint import format
from trainkit.checkpoint.save import Checkpoints
from trainkit.cluster.ranks import RankEnv
from trainkit.cluster.signals import KeeperLink, StopFlag
from trainkit.config.loading import load, to_yaml
from trainkit.diagnosis.rank_log import is_lost_connection
from trainkit.run.events import Attempt, read_events, writing
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.training import experiment, recorder, survivor
from trainkit.training.precision import Precision
from trainkit.training.progress import Progress
from trainkit.training.recorder import as_finished
from trainkit.training.startup import Reports
from trainkit.training.survivor import copies_of
from trainkit.training.train_state import TrainState
from trainkit.training.update import Updater

# BatchNorm, whose statistics change in each forward pass; an average of the weights; two micro batches; 5 updates an
# epoch, and no checkpoint before the end.
SETTINGS = (
    *("data.name=synthetic", "data.train_size=40", "data.val_size=16", "data.test_size=8", "model.width=8"),
    *("data.image_size=12", "data.in_chans=1", "data.num_classes=7", "model.norm=batch", "train.epochs=2"),
    *("train.global_batch_size=8", "train.micro_batch_size=2", "train.ema_decay=0.9", "train.grad_clip_norm=1"),
    *("checkpoint.every_epochs=null", "checkpoint.best=val/loss", "optim.lr=1e-3"),
)
STEPS = 10


class KilledError(BaseException):
    """Ends a rank whose connections are closed with it."""


def _dies(where: str) -> None:
    """Have this rank die before its 7th update, before the weights of that change, or in the first validation."""
    made = 0

    def before(self: Updater, *args: Any, **named: Any) -> Any:
        nonlocal made
        made += 1
        if made == 7:
            raise KilledError
        return update(self, *args, **named)

    def stepping(self: Precision, optimizer: Any, parameters: Any, norm: Any, changes: Any) -> Any:
        nonlocal made
        made += 1
        if made < 7:
            return step(self, optimizer, parameters, norm, changes)

        def changing() -> None:
            raise KilledError

        return step(self, optimizer, parameters, norm, changing)

    def measuring(*_: Any) -> Any:
        raise KilledError

    update, step = Updater.__call__, Precision.step
    if where == "before":
        Updater.__call__ = before  # type: ignore[method-assign]
    elif where == "step":
        Precision.step = stepping  # type: ignore[method-assign, assignment]
    else:
        vars(recorder)["measure"] = measuring


def _train(env: RankEnv, folder: Path, memory: Path, victim: int | None = None, where: str = "") -> None:
    """Train as one rank, on a node of its own; the victim dies, and the others fail for it."""
    config = load("ddp", (*QUICK, *SETTINGS)).config
    keeper = KeeperLink.make(memory / str(env.rank))
    if victim == env.rank:
        _dies(where)
    with ExitStack() as held, suppress(KilledError) if victim is not None else held:

        def open_run() -> Attempt:
            run = RunDir.open(folder) if folder.exists() else RunDir.create(folder, to_yaml(config))
            return held.enter_context(writing(Attempt.begin(run)))

        try:
            experiment.run(config, env, StopFlag(), open_run=open_run, reports=Reports(keeper=keeper))
        except RuntimeError as error:
            if victim is None or not is_lost_connection(str(error)):
                raise


def records(run: RunDir) -> list[dict[str, Any]]:
    found = []
    for split in ("train", "val", "test"):
        for record in read_metrics(run, split):
            found.append({key: value for key, value in record.items() if not key.startswith(("seconds_", "images_"))})
    return [{**record, "time": 0} for record in found]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """The run that nothing has happened to."""
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(2, _train, folder / "run", folder / "memory")
    return RunDir(folder / "run")


@pytest.mark.nightly
@pytest.mark.parametrize(("where", "step"), [("before", 6), ("step", 7), ("validation", 5)])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_run_goes_on_from_the_last_update_that_a_survivor_has_finished(
    tmp_path: Path, whole: RunDir, victim: int, where: str, step: int
) -> None:
    """To the same weights, averages and records, bit for bit, though the dead rank's node has nothing of it."""
    run, memory = RunDir(tmp_path / "run"), tmp_path / "memory"
    run_ranks(2, _train, run.path, memory, victim, where)
    assert max(format.steps(run.checkpoints), default=0) < step, "of the best model"
    assert format.steps(memory / str(1 - victim) / "checkpoints") == [step]
    assert not (memory / str(victim)).exists()
    run_ranks(2, _train, run.path, memory)
    assert [event["step"] for event in read_events(run, "started")] == [0, step]
    for stem in ("model", "optimizer", "ema"):
        mine, other = tensors(run.checkpoints, stem), tensors(whole.checkpoints, stem)
        assert mine.keys() == other.keys()
        assert [name for name in other if not torch.equal(mine[name], other[name])] == []
    assert records(run) == records(whole)
    assert list(memory.iterdir()) == [], "the memory is free again"


# What is saved when, by one rank here


@pytest.fixture
def link(tmp_path: Path) -> KeeperLink:
    return KeeperLink.make(tmp_path / "memory")


@pytest.fixture
def parts(link: KeeperLink) -> TrainState:
    parts = parts_of("optim.name=sgd", model=Linear())
    parts.survivor.arm(link)
    return parts


def finish(parts: TrainState, step: int) -> None:
    progress = vars(Progress(step=step, position=step))
    parts.survivor.finished(step, partial(as_finished, parts, progress, copies_of(parts.model)))


def saved_by_a_thread(parts: TrainState, link: KeeperLink) -> list[int]:
    """Steps that are saved while the main thread does something else."""
    thread = threading.Thread(target=parts.survivor.save)
    thread.start()
    thread.join()
    return format.steps(link.folder / "checkpoints")


def test_nothing_is_saved_between_two_updates(
    parts: TrainState, link: KeeperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(survivor, "STEP_SECONDS", 0.05)
    assert saved_by_a_thread(parts, link) == [], "there is no finished update"
    finish(parts, 4)
    parts.survivor.changes()
    assert saved_by_a_thread(parts, link) == []
    finish(parts, 5)
    assert saved_by_a_thread(parts, link) == [5]


def test_the_main_thread_does_not_change_what_is_being_saved(parts: TrainState, link: KeeperLink) -> None:
    finish(parts, 4)
    assert saved_by_a_thread(parts, link) == [4]
    changing = threading.Thread(target=parts.survivor.changes, daemon=True)
    changing.start()
    changing.join(0.1)
    assert changing.is_alive()


def test_only_the_end_of_another_rank_is_a_reason(parts: TrainState, link: KeeperLink) -> None:
    finish(parts, 4)
    parts.survivor.outlives(ValueError("a mistake"))
    assert not link.folder.exists()
    parts.survivor.outlives(RuntimeError("Connection closed by peer [127.0.0.1]:4711"))
    assert format.steps(link.folder / "checkpoints") == [4]


def test_what_does_not_fit_into_memory_is_not_saved(
    parts: TrainState, link: KeeperLink, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(survivor, "cgroup_free", lambda: 1000)
    finish(parts, 4)
    assert saved_by_a_thread(parts, link) == []
    assert "do not fit" in capsys.readouterr().err


def test_a_folder_that_others_can_write_to_is_not_used(parts: TrainState, link: KeeperLink) -> None:
    link.folder.mkdir(mode=0o777)
    link.folder.chmod(0o777)
    finish(parts, 4)
    assert saved_by_a_thread(parts, link) == []


def test_what_others_could_have_left_there_is_not_taken(parts: TrainState, link: KeeperLink, tmp_path: Path) -> None:
    finish(parts, 4)
    assert saved_by_a_thread(parts, link) == [4]
    checkpoints = Checkpoints(tmp_path / "run", keep=1, dist=parts.dist, memory=link.folder / "checkpoints")
    link.folder.chmod(0o777)
    assert checkpoints.newest() is None
    link.folder.chmod(0o700)
    found = checkpoints.newest()
    assert found is not None
    assert found[0].step == 4


def _ordered(env: RankEnv, memory: Path) -> tuple[int, list[int]]:
    """Be the keeper of a rank that waits, and order it to save. Returns its exit code, and the steps that it saved."""
    link = KeeperLink.make(memory)
    process = os.fork()
    if process == 0:
        parts = parts_of("optim.name=sgd", model=Linear())
        parts.survivor.arm(link)
        finish(parts, 4)
        threading.Event().wait(60)
        os._exit(7)
    while not link.can_save:
        pass
    link.order()
    _, status = os.waitpid(process, 0)
    assert link.saves
    return os.waitstatus_to_exitcode(status), format.steps(memory / "checkpoints")


def test_a_rank_that_waits_for_ever_saves_by_order_and_ends(tmp_path: Path) -> None:
    assert run_ranks(1, _ordered, tmp_path / "memory") == [(1, [4])]
