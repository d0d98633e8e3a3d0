"""When a run will have ended that needs more attempts than it has had: time limits end some, and each start costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("started", "handed_back")


@dataclass(frozen=True)
class Forecast:
    """Until the training's end."""

    seconds: float
    """From now."""
    restarts: int
    """Among them; each is taken to cost what those before have cost."""
    restart_seconds: float | None
    """From the end of one attempt to the first update of the next, waits in the queue included; None: not known yet."""


def forecast(
    events: Sequence[Mapping[str, Any]], training_seconds: float, *, now: float, attempt_seconds: float, runs: bool
) -> Forecast:
    """What is to be expected of a run by what has been.

    Args:
        events: of `KINDS`, oldest first.
        training_seconds: as long as it still has to train, at its present pace.
        now: seconds since 1970.
        attempt_seconds: as long as its time limit allows an attempt, from its first update on; infinite without one.
        runs: an attempt does now; else it waits for the next.
    """
    lasted, gaps, limited = [], [], attempt_seconds
    begun: float | None = None
    ended: float | None = None
    for event in events:
        when = event.get("time")
        if not isinstance(when, float | int):
            continue
        if event["event"] == "started":
            if ended is not None:
                gaps.append(when - ended)
            begun, ended = when, None
        elif begun is not None and ended is None:
            ended = when
            if "SIGUSR2" in event.get("signals", ()):  # told so by the time limit, and by few preemptions
                lasted.append(ended - begun)
    # SLURM tells it early, up to a minute; what ended in half of the time was something else.
    whole = [seconds for seconds in lasted if seconds >= max(lasted) / 2]
    if len(whole) > 1 if math.isinf(limited) else whole and max(whole) >= limited / 2:
        limited = sum(whole) / len(whole)
    gap = sum(gaps) / len(gaps) if gaps else None
    used = now - begun if runs and begun is not None else 0.0
    left = max(limited - used, 0.0) if runs else 0.0
    restarts = 0 if training_seconds <= left and runs else max(math.ceil((training_seconds - left) / limited), 1)
    waited = max((gap or 0.0) - (now - ended), 0.0) if not runs and ended is not None else gap or 0.0
    more = waited + (restarts - 1) * (gap or 0.0) if restarts else 0.0
    return Forecast(training_seconds + more, restarts, gap)
