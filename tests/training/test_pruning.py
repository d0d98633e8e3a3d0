"""Runs of a sweep that stop where they are behind the others; one that is let go on is as if it had not stopped."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.rank_functions import run_ranks, train_run
from tests.training.test_resume import final_weights
from trainkit.config.loading import Loaded, load
from trainkit.launch.prolong import Change, prolongation
from trainkit.run.events import read_events
from trainkit.run.folder import PRUNING, RunDir
from trainkit.run.history import history_of
from trainkit.run.metrics import read_metrics
from trainkit.run.pruning import eta_of, is_behind, is_rung


@pytest.mark.parametrize(
    ("own", "others", "behind"),
    [
        (1.0, [], False),
        (90.0, [80.0], False),
        (70.0, [80.0], True),
        (80.0, [80.0, 80.0], False),
        (79.0, [80.0, 70.0, 60.0], False),
        (79.0, [80.0, 81.0, 60.0], True),
        (79.0, [80.0, None, math.nan], False),
        (math.nan, [10.0], True),
        (None, [None, math.nan], False),
    ],
)
def test_a_run_is_behind_unless_it_is_among_the_best_third(
    own: float | None, others: list[float | None], behind: bool
) -> None:
    assert is_behind(own, others, eta=3, higher_is_better=True) == behind


def test_of_a_loss_the_lower_is_the_better() -> None:
    assert is_behind(0.5, [0.4], eta=2, higher_is_better=False)
    assert not is_behind(0.4, [0.5], eta=2, higher_is_better=False)


def test_runs_are_compared_after_a_power_of_validations() -> None:
    assert [count for count in range(1, 30) if is_rung(count, 3)] == [1, 3, 9, 27]
    assert [is_rung(count, 2) for count in (0.5, 1.5, 4.0)] == [False, False, True]


SETTINGS = ("train.epochs=2", "schedule.name=constant", "model.dropout=0.2")


def trained(run: Path, world_size: int, preset: str, rate: str, *more: str) -> RunDir:
    run_ranks(world_size, train_run, run, preset, (*SETTINGS, f"optim.lr={rate}", *more))
    return RunDir(run)


@pytest.mark.parametrize(("preset", "world_size"), [("single", 1), pytest.param("ddp", 2, marks=pytest.mark.nightly)])
def test_a_pruned_run_keeps_its_checkpoint_and_goes_on_bit_for_bit(
    tmp_path: Path, preset: str, world_size: int
) -> None:
    sweep, whole = tmp_path / "sweep", trained(tmp_path / "whole", world_size, preset, "1e-4")
    sweep.mkdir()
    (sweep / PRUNING).write_text(json.dumps({"eta": 2}))
    best, worse = trained(sweep / "0", world_size, preset, "2e-3"), trained(sweep / "1", world_size, preset, "1e-4")
    assert [(history_of(run).finished, history_of(run).pruned) for run in (best, worse)] == [
        (True, False),
        (True, True),
    ]
    (event,) = read_events(worse, "pruned")
    assert (event["step"], event["total_steps"]) == (19, 38)
    assert event["why"] == "at epoch 1 it is not among the best of 2 runs, 1 in 2"
    assert (json.loads(worse.summary.read_text())["outcome"], read_metrics(worse, "test")) == ("pruned", [])

    def loaded(overrides: Sequence[str]) -> Loaded:
        return load(str(worse.config), overrides)

    with prolongation(worse, Change(), loaded).recorded():
        pass
    assert not history_of(worse).finished
    trained(worse.path, world_size, preset, "1e-4")
    assert (history_of(worse).finished, len(read_events(worse, "pruned"))) == (True, 1)
    assert final_weights(worse.path) == final_weights(whole.path)
    assert read_metrics(worse, "val")[-1]["loss"] == read_metrics(whole, "val")[-1]["loss"]


@pytest.mark.parametrize("content", ["", "[3]", '{"eta": 1}', '{"eta": "3"}', '{"eta": -2}'])
def test_a_file_that_says_no_such_number_prunes_nothing(tmp_path: Path, content: str) -> None:
    sweep = tmp_path / "sweep"
    sweep.mkdir()
    (sweep / PRUNING).write_text(content)
    assert eta_of(sweep) == 0
