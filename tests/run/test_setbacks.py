from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainkit import fileio
from trainkit.run.folder import RunDir
from trainkit.run.metrics import Setbacks, divergence_of, setbacks_of


def event(kind: str, step: int, **more: Any) -> dict[str, Any]:
    return {"event": kind, "step": step, **more}


def train(*losses: float | None) -> list[dict[str, Any]]:
    return [{"step": 10 * number, "loss": loss} for number, loss in enumerate(losses, 1)]


def test_a_run_without_any_says_nothing() -> None:
    setbacks = setbacks_of([event("started", 0), event("saved", 20)], train(2.3, 1.1), 20)
    assert (setbacks.in_words(), setbacks.diverged) == ("", False)


def test_a_loss_that_is_no_number_any_more_is_told_from_where_on() -> None:
    lost = [event("nonfinite", step) for step in range(3, 41)]
    setbacks = setbacks_of([event("started", 0), *lost], train(2.3, None, None, None), 40)
    assert setbacks.in_words() == "loss nan from step 20, 38 of 40 updates skipped"
    assert setbacks.diverged


def test_a_loss_that_has_come_back_is_no_divergence() -> None:
    setbacks = setbacks_of([event("nonfinite", 12)], train(2.3, None, 1.2), 30)
    assert (setbacks.in_words(), setbacks.diverged) == ("1 of 30 updates skipped", False)


def test_what_fp16_skips_is_no_step_and_was_tried_all_the_same() -> None:
    setbacks = setbacks_of([event("skipped", 0), event("skipped", 0), event("skipped", 7)], train(2.3), 10)
    assert setbacks == Setbacks(None, skipped=3, nonfinite=0, updates=13)


def test_the_last_of_too_many_skips_is_told_twice_and_counts_once() -> None:
    setbacks = setbacks_of([*[event("skipped", 1)] * 50, event("nonfinite", 1)], [], 1)
    assert (setbacks.in_words(), setbacks.diverged) == ("50 of 51 updates skipped", True)


def test_what_is_done_again_after_a_restart_counts_once() -> None:
    events = [event("nonfinite", 4), event("nonfinite", 9), event("started", 5), event("nonfinite", 9)]
    assert setbacks_of(events, train(2.3), 10).lost == 2


def test_updates_that_a_rollback_has_undone_were_tried() -> None:
    events = [event("nonfinite", step) for step in (8, 9, 10)] + [event("rolled_back", 5, from_step=10)]
    assert setbacks_of(events, train(2.3, 1.0), 20).in_words() == "3 of 25 updates skipped, rolled back 1 time"


@pytest.mark.parametrize(
    "odd", [{"event": "skipped"}, {"event": "nonfinite", "step": "3"}, {"event": "else", "step": 1}]
)
def test_odd_events_are_passed_over(odd: dict[str, Any]) -> None:
    assert setbacks_of([odd], [], 5).lost == 0


def test_updates_that_were_saved_and_not_recorded_count(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for step, loss in enumerate((2.3, None, None), start=1):
        fileio.append_jsonl(run.metrics, {"step": step, "split": "train", "loss": loss})
    for step in (2, 3, 4):
        fileio.append_jsonl(run.events, {"event": "nonfinite", "step": step})
    fileio.append_jsonl(run.events, {"event": "saved", "step": 4})
    fileio.append_jsonl(run.events, {"event": "saved", "step": None})  # as a stranger may have written it
    assert divergence_of(run) == "loss nan from step 2, 3 of 4 updates skipped"
