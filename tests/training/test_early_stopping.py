"""Training ends when validations no longer improve, at the same step however often it was interrupted."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from tests.rank_functions import run_ranks, train_run
from tests.training.parts import keeper_of, parts_of
from tests.training.test_resume import final_weights
from trainkit.config.loading import load
from trainkit.errors import UserError
from trainkit.monitor.follow import summary_lines
from trainkit.report.facts import collect
from trainkit.report.write_markdown import write_logbook
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.training.recorder import Progress


@pytest.mark.parametrize(
    ("by", "values", "min_delta", "stalled"),
    [
        ("val/acc1", [50, 60, 60, 70], 0.0, [0, 0, 1, 0]),
        ("val/loss", [0.5, 0.6, 0.4, 0.4], 0.0, [0, 1, 0, 1]),
        # Small steps add up to one that counts: they are measured against the last that did.
        ("val/acc1", [50, 50.6, 51.2, 51.3], 1.0, [0, 1, 0, 1]),
        ("val/acc1", [50, math.nan, math.inf, 60], 0.0, [0, 1, 2, 0]),
        ("val/loss", [math.nan, 0.5], 0.0, [1, 0]),
    ],
)
def test_validations_that_are_no_better_are_counted(
    by: str, values: list[float], min_delta: float, stalled: list[int]
) -> None:
    progress, found = Progress(), []
    for value in values:
        progress.step += 1
        progress.judge({by.removeprefix("val/"): value}, by, higher_is_better=by != "val/loss", min_delta=min_delta)
        found.append(progress.stalled)
    assert found == stalled


def test_what_counts_as_better_for_stopping_does_not_change_which_model_is_best() -> None:
    progress = Progress()
    for step, value in enumerate((50.0, 50.6, 50.9), start=1):
        progress.step = step
        progress.judge({"acc1": value}, "val/acc1", higher_is_better=True, min_delta=1.0)
    assert (progress.best, progress.best_step, progress.reference) == (50.9, 3, 50.0)


@pytest.mark.long
def test_two_ranks_that_were_interrupted_anywhere_stop_at_the_same_step_as_two_that_were_not(tmp_path: Path) -> None:
    """No validation after the first is 100 percent better, so that the third is the second that is not."""
    small = ("data.name=synthetic", "data.train_size=160", "data.val_size=40", "data.test_size=20", "train.epochs=9")
    patient = ("train.early_stopping_patience=2", "train.early_stopping_min_delta=100", "train.global_batch_size=32")
    whole, broken = tmp_path / "whole", tmp_path / "broken"

    def train(folder: Path, stop_after: int | None = None) -> set[str]:
        return set(run_ranks(2, train_run, folder, "ddp", (*small, *patient), stop_after))

    assert train(whole) == {"finished"}
    # In the second epoch, and in the validation after step 15, which is owed then.
    for stop_after in (8, 9):
        assert train(broken, stop_after) == {"preempted"}
    assert train(broken) == {"finished"}
    assert [event["step"] for event in read_events(RunDir(broken), "started")] == [0, 7, 15]
    told = []
    for folder in (whole, broken):
        run = RunDir(folder)
        (event,) = read_events(run, "stopped_early")
        assert (event["step"], event["total_steps"]) == (15, 45)
        assert [record["step"] for record in read_metrics(run, "val")] == [5, 10, 15]
        assert [record["step"] for record in read_metrics(run, "test")] == [15]
        assert read_events(run, "ended")[-1]["state"] == "COMPLETED"
        summary = json.loads(run.summary.read_text())
        assert (summary["outcome"], summary["steps"], summary["stopped_early"]) == ("finished", 15, event["why"])
        told.append(event["why"])
    assert told[0] == told[1]
    assert told[0].startswith("val/acc1 has not improved in 2 validations in a row; the schedule 'onecycle' was not ")
    assert final_weights(broken) == final_weights(whole)
    assert f"stopped early    {told[0]}" in summary_lines(RunDir(whole))
    logbook = write_logbook(collect([RunDir(whole)]), tmp_path / "report")[0].read_text()
    assert f"Finished after 15 steps. Stopped early: {told[0]}." in logbook


def test_a_run_that_was_cut_off_after_its_last_validation_trains_no_further(tmp_path: Path) -> None:
    parts = parts_of("train.early_stopping_patience=2")
    keeper = keeper_of(parts, tmp_path / "run", Progress(step=6, stalled=1))
    assert not keeper.is_over()
    keeper.progress.stalled = 2
    assert keeper.is_over()
    assert not keeper_of(parts_of(), tmp_path / "other", Progress(step=6, stalled=20)).is_over()


def test_a_schedule_that_needs_no_end_is_not_called_unfinished(tmp_path: Path) -> None:
    parts = parts_of("train.early_stopping_patience=2", "schedule.name=constant")
    keeper = keeper_of(parts, tmp_path / "run", Progress(step=6, stalled=2))
    assert keeper.tell_early_stop() == "val/acc1 has not improved in 2 validations in a row"
    keeper.progress.step = parts.total_steps
    assert keeper.tell_early_stop() == ""


@pytest.mark.parametrize(
    ("preset", "overrides", "words"),
    [
        ("single", ["train.early_stopping_min_delta=0.1"], "train.early_stopping_patience=5"),
        ("single", ["train.early_stopping_patience=0"], "train.early_stopping_patience"),
        (
            "single",
            ["train.early_stopping_patience=2", "train.early_stopping_min_delta=-1"],
            "early_stopping_min_delta",
        ),
        ("hivemind", ["train.early_stopping_patience=2"], "jobs.swarm stop"),
    ],
)
def test_what_stops_nothing_or_cannot_be_stopped_is_refused(preset: str, overrides: list[str], words: str) -> None:
    with pytest.raises(UserError) as caught:
        load(preset, overrides)
    assert words in str(caught.value)
