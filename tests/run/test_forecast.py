"""When a run will have ended, from the attempts that it has had."""

from __future__ import annotations

import math
from typing import Any

import pytest

from trainkit.run.metrics import Forecast, forecast


def attempts(*times: tuple[float, float | None, str]) -> list[dict[str, Any]]:
    """(started, told to stop, by which signal)."""
    events = []
    for begun, ended, signal in times:
        events.append({"time": begun, "event": "started"})
        if ended is not None:
            events.append({"time": ended, "event": "handed_back", "signals": [signal]})
    return events


USR2, TERM = "SIGUSR2", "SIGTERM"


@pytest.mark.parametrize(
    ("events", "training", "now", "limit", "runs", "expected"),
    [
        (attempts((0, None, "")), 50, 10, 100, True, Forecast(50, 0, None)),
        (attempts((0, None, "")), 90, 10, 100, True, Forecast(90, 0, None)),
        (attempts((0, None, "")), 91, 10, 100, True, Forecast(91, 1, None)),
        (attempts((0, None, "")), 500, 10, math.inf, True, Forecast(500, 0, None)),
        # SLURM has told it after 80 s and not after 100, and its restart has cost 20 s.
        (attempts((0, 80, USR2), (100, None, "")), 160, 110, 100, True, Forecast(200, 2, 20)),
        (attempts((0, 80, USR2), (100, None, "")), 70, 110, 100, True, Forecast(70, 0, 20)),
        # Of a template nobody knows the limit but by what has been.
        (attempts((0, 80, USR2), (100, 180, USR2), (200, None, "")), 160, 210, math.inf, True, Forecast(200, 2, 20)),
        (attempts((0, 80, USR2), (100, None, "")), 160, 110, math.inf, True, Forecast(160, 0, 20)),
        # A preemption says nothing of the time limit, whichever its signal.
        (attempts((0, 5, TERM), (15, None, "")), 150, 15, 100, True, Forecast(160, 1, 10)),
        (attempts((0, 5, USR2), (15, None, "")), 150, 15, 100, True, Forecast(160, 1, 10)),
        # In the queue: 15 s of the usual 20 are still to wait.
        (attempts((0, 80, USR2), (100, 180, USR2)), 70, 185, 100, False, Forecast(85, 1, 20)),
        (attempts((0, 80, USR2), (100, 180, USR2)), 150, 999, 100, False, Forecast(170, 2, 20)),
    ],
)  # fmt: skip
def test_each_further_attempt_is_taken_to_cost_what_those_before_have_cost(
    events: list[dict[str, Any]], training: float, now: float, limit: float, runs: bool, expected: Forecast
) -> None:
    assert forecast(events, training, now=now, attempt_seconds=limit, runs=runs) == expected
