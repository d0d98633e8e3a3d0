"""What a rank saves of a loop of the user's own that has lost another rank."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.reading import DIST, tensors
from tests.rank_functions import run_ranks
from tests.training.test_survivor import KilledError, records
from trainkit.checkpoint import format
from trainkit.checkpoint.objects import SavedObjects
from trainkit.cluster.ranks import NO_SECRET, RankEnv
from trainkit.cluster.signals import KeeperLink, StopFlag
from trainkit.config.loading import settled_by, to_yaml
from trainkit.config.schema import Config, ScriptConfig
from trainkit.diagnosis.rank_log import is_lost_connection
from trainkit.run.events import Attempt, read_events, writing
from trainkit.run.folder import RunDir
from trainkit.training.loop_notes import LoopNotes
from trainkit.training.startup import Reports
from trainkit.training.survivor import Survivor
from trainkit.training.user_rank import Rank, rank_of

QUICK = ("monitor.loggers=[jsonl]", "launch.gpus_per_node=0", "train.precision=fp32", "checkpoint.every_epochs=null")
STEPS = 10


class Data(torch.utils.data.Dataset[Tensor]):
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(4, generator=torch.Generator().manual_seed(index))


def loop(rank: Rank, dies_at: int = -1) -> None:
    """Train what has all that differs between ranks, or changes without the optimizer."""
    torch.manual_seed(0)
    model = rank.wrap(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 2)))
    teacher = nn.Linear(8, 2).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    own = torch.Generator().manual_seed(rank.rank)
    batches = rank.batches(Data(), global_batch_size=8, epochs=2)
    with rank.saved(
        model=model, teacher=teacher, optimizer=optimizer, schedule=schedule, own=own, batches=batches, best=0.0
    ) as state:
        for batch in batches:
            if state.steps == dies_at:
                raise KilledError
            loss = model(batch).square().mean() + teacher(torch.ones(8)).sum() * 0
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            last = rank.unwrap(model)[3]  # type: ignore[index]
            teacher.weight.data.mul_(0.9).add_(last.weight.data, alpha=0.1)
            if rank.is_main:
                state.best += torch.rand((), generator=own).item()
            rank.log(loss=loss)
            state.step()


def _train(env: RankEnv, folder: Path, memory: Path, settings: tuple[str, ...], victim: int = -1) -> None:
    """Train as one rank, on a node of its own; the victim dies before its 7th update, and the other fails for it."""
    config = settled_by(Config(script=ScriptConfig(path="train.py")), (*QUICK, *settings))
    with ExitStack() as held, suppress(KilledError):

        def open_run() -> Attempt:
            run = RunDir.open(folder) if folder.exists() else RunDir.create(folder, to_yaml(config))
            return held.enter_context(writing(Attempt.begin(run)))

        reports = Reports(keeper=KeeperLink.make(memory / str(env.rank)))
        try:
            with rank_of(config, env, StopFlag(), open_run=open_run, secret=NO_SECRET, reports=reports) as rank:
                loop(rank, 6 if victim == env.rank else -1)
        except RuntimeError as error:
            if victim < 0 or not is_lost_connection(str(error)):
                raise


def plain(run: RunDir) -> Any:
    return format.manifest_of(run.checkpoints, STEPS).state["objects"]


@pytest.mark.nightly
@pytest.mark.parametrize("victim", [0, 1])
def test_a_loop_goes_on_from_the_last_update_that_a_survivor_has_finished(tmp_path: Path, victim: int) -> None:
    """To the same weights and values, bit for bit, though those of rank 0 are others than the survivor's."""
    settings = ("monitor.log_every=1",)
    whole, run, memory = RunDir(tmp_path / "whole"), RunDir(tmp_path / "run"), tmp_path / "memory"
    run_ranks(2, _train, whole.path, memory, settings)
    run_ranks(2, _train, run.path, memory, settings, victim)
    assert format.steps(memory / str(1 - victim) / "checkpoints") == [6]
    run_ranks(2, _train, run.path, memory, settings)
    assert [event["step"] for event in read_events(run, "started")] == [0, 6]
    for stem in ("model", "teacher", "optimizer", "own"):
        mine, other = tensors(run.checkpoints, stem), tensors(whole.checkpoints, stem)
        assert mine.keys() == other.keys()
        assert [name for name in other if not torch.equal(mine[name], other[name])] == []
    assert plain(run) == plain(whole)
    assert records(run) == records(whole)
    assert list(memory.iterdir()) == [], "the memory is free again"


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings", [("strategy.name=zero",), ("strategy.comm_hook=powersgd", "strategy.powersgd_start_step=2")]
)
def test_nothing_is_saved_where_a_rank_has_only_a_part(tmp_path: Path, settings: tuple[str, ...]) -> None:
    run_ranks(2, _train, tmp_path / "run", tmp_path / "memory", settings, 1)
    assert not (tmp_path / "memory").exists()


# What is noted, by one rank


class Noted:
    """Notes of one rank on a model, its optimizer and a value, and where a survivor saves."""

    def __init__(self, folder: Path, *more: torch.optim.Optimizer) -> None:
        self.model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1.0)
        self.values: dict[str, Any] = {"best": 1}
        dist = DIST
        objects = SavedObjects({"model": self.model, "optimizer": self.optimizer}, self.values, dist)
        self.survivor = Survivor()
        self.survivor.arm(KeeperLink.make(folder))
        self.notes = LoopNotes(self.survivor, objects, [self.optimizer, *more], dist)
        self.checkpoints = folder / "checkpoints"
        self.end(4)

    def update(self) -> None:
        self.model(torch.ones(2, 2)).sum().backward()
        self.optimizer.step()

    def end(self, step: int) -> None:
        self.notes.take(step, {})

    def saved(self) -> list[int]:
        self.survivor.save()
        return format.steps(self.checkpoints)


@pytest.fixture
def noted(tmp_path: Path) -> Noted:
    return Noted(tmp_path / "memory")


def test_what_changes_without_the_optimizer_is_saved_as_it_was(noted: Noted) -> None:
    noted.model(torch.ones(2, 2))
    noted.values["best"] = 2
    noted.optimizer.param_groups[0]["lr"] = 0.5
    assert noted.saved() == [4]
    assert tensors(noted.checkpoints, "model")["1.num_batches_tracked"] == 0
    found = format.manifest_of(noted.checkpoints, 4).state["objects"]
    assert (found["best"], found["optimizer"][0]["lr"]) == (1, 1.0)


def test_between_the_optimizer_and_the_end_of_an_update_nothing_is_saved(noted: Noted) -> None:
    noted.update()
    assert noted.saved() == []
    noted.end(5)
    assert noted.saved() == [5]


def test_between_two_optimizers_the_update_before_is_saved(tmp_path: Path) -> None:
    noted = Noted(tmp_path / "memory", torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0))
    before = {name: tensor.clone() for name, tensor in noted.model.state_dict().items()}
    noted.update()
    assert noted.saved() == [4]
    saved = tensors(noted.checkpoints, "model")
    assert [name for name in before if not torch.equal(saved[name], before[name])] == []


def test_weights_that_something_else_has_changed_are_not_saved(noted: Noted) -> None:
    with torch.no_grad():
        next(noted.model.parameters()).add_(1)
    assert noted.saved() == []
