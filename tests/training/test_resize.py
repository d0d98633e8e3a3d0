"""A run that is continued on another number of ranks: what stays as it was, and what is said where it does not."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rank_functions import run_ranks, train_run
from trainkit.config.loading import load
from trainkit.data import build_data
from trainkit.data.order import global_batch
from trainkit.ranks.env import RankEnv
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.training.build import TrainState

BATCH, UPDATES = 48, 24
SETTINGS = (
    *(f"train.global_batch_size={BATCH}", f"train.max_steps={UPDATES}", "train.eval_every_epochs=9"),
    "checkpoint.every_epochs=null",
)
RANKS = (1, 2, 4, 3)
MICRO = 4


def who(env: RankEnv, folder: Path, overrides: tuple[str, ...], stop_after: int | None) -> tuple[str, int]:
    """How it ended, and the process that was this rank."""
    return train_run(env, folder, "ddp", overrides, stop_after), os.getpid()


def equal_micro_batches(folder: Path) -> tuple[str, ...]:
    """Settings, with dropout, augmentation, and notes in ``folder`` of who has taken which samples."""
    data = ("data.name=tests.training.witnessed:build", f"data.folder={folder}")
    return *data, f"train.micro_batch_size={MICRO}", "model.dropout=0.3"


@dataclass(frozen=True)
class Resized:
    """A training on one rank, two, four and three, one after the other."""

    run: RunDir
    taken: list[list[list[int]]]
    """By attempt and rank, the samples in the order in which it took them."""


@pytest.fixture(scope="module")
def resized(tmp_path_factory: pytest.TempPathFactory) -> Resized:
    folder, taken = tmp_path_factory.mktemp("resized"), []
    for number, world_size in enumerate(RANKS):
        stop = 5 if number + 1 < len(RANKS) else None
        settings = (*SETTINGS, *equal_micro_batches(folder))
        ended = run_ranks(world_size, who, folder / "run", settings, stop)
        assert {how for how, _ in ended} == {"preempted" if stop else "finished"}
        taken.append([[int(word) for word in (folder / str(process)).read_text().split()] for _, process in ended])
    return Resized(RunDir(folder / "run"), taken)


def test_the_data_come_in_the_same_order_on_one_rank_two_four_and_three(resized: Resized) -> None:
    order: list[int] = []
    for ranks in resized.taken:
        for start in range(0, len(ranks[0]), MICRO):
            order += [sample for samples in ranks for sample in samples[start : start + MICRO]]
    size = len(build_data(load("ddp").config.data).train)
    assert order == [sample for step in range(UPDATES) for sample in global_batch(size, 0, step, BATCH)]


@pytest.mark.long
def test_with_equal_micro_batches_the_losses_are_those_of_one_rank_dropout_included(
    resized: Resized, tmp_path: Path
) -> None:
    # The same data set: one whose samples are read one by one draws other shifts than one that is cut out in batches.
    run_ranks(1, train_run, tmp_path / "run", "single", (*SETTINGS, *equal_micro_batches(tmp_path)))
    expected = [record["loss"] for record in read_metrics(RunDir(tmp_path / "run"), "train")]
    assert [record["loss"] for record in read_metrics(resized.run, "train")] == pytest.approx(expected, rel=1e-5)


def test_each_start_on_another_number_of_ranks_says_what_stays_as_it_was(resized: Resized) -> None:
    told = [event.get("resized") for event in read_events(resized.run, "started")]
    assert told[0] is None
    assert told[3] == (
        "3 ranks go on where 4 have saved, with the same data in the same order and micro batch; sums may differ in "
        "their last bits"
    )


@pytest.mark.parametrize(
    ("ranks", "saved", "told"),
    [
        (2, {"world_size": 2, "micro_batch_size": 24}, ""),
        (
            1,
            {"world_size": 2, "micro_batch_size": 24},
            "1 rank goes on where 2 have saved, with the same data in the same order; micro batches are of 48 instead "
            "of 24, by which dropout and BatchNorm go: these differ",
        ),
        (1, {}, ""),  # of a checkpoint that does not say
    ],
)
def test_where_the_micro_batches_become_others_it_says_what_does_not_stay(
    ranks: int, saved: dict[str, Any], told: str
) -> None:
    parts: Any = SimpleNamespace(
        config=load("ddp").config, dist=SimpleNamespace(world_size=ranks), micro_batch_size=BATCH // ranks
    )
    assert TrainState.differs_from(parts, saved) == told
