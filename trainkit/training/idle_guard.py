"""Idle guard: end a run whose GPU does nothing, for sites that count such hours or cancel such jobs."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainkit.cluster.signals import StopFlag
from trainkit.common import terminal
from trainkit.run.events import Attempt

REASON = "IDLE"
"""Stands among the signals of an attempt that the guard has told to stop."""
_HERE = Path(__file__).parents[1]
_DOINGS = {
    str(_HERE / "data"): "waited for data",
    str(_HERE / "training" / "evaluation.py"): "validated",
    str(_HERE / "checkpoint"): "saved",
    str(_HERE / "distributed"): "waited for other ranks",
}
"""Files whose functions the main thread is in, the innermost first, and what it does there."""
_LONGEST_SECONDS = 60.0
"""Time that one look adds at most: the process may have been stopped since the last one."""


class IdleGuard:
    """Watch the GPUs of a host from its first update on, and tell the run to save and end if one does nothing.

    Args:
        minutes: patience; None: for ever.
        attempt: gets the event ``gpu_idle``, which keeps it from being requeued.
        doing: tells what the rank does now, for that event.
    """

    def __init__(
        self, minutes: float | None, attempt: Attempt, host: str, stop: StopFlag, doing: Callable[[], str]
    ) -> None:  # fmt: skip
        self._minutes = minutes
        self._attempt = attempt
        self._host = host
        self._stop = stop
        self._doing = doing
        self._looked = time.monotonic()
        self._idle: dict[int, float] = {}
        self._doings = Counter[str]()
        self.has_started = False
        """Set at the first update: before that a rank reads, compiles and restores."""

    def look(self, gpus: Sequence[Mapping[str, Any]]) -> None:
        """Count the time of the GPUs that do nothing, by a sample of all."""
        now = time.monotonic()
        passed = min(now - self._looked, _LONGEST_SECONDS)
        self._looked = now
        if self._minutes is None or not self.has_started or self._stop.requested:
            return
        before = self._idle
        self._idle = {}
        for gpu in gpus:
            if gpu.get("util_percent") == 0:
                self._idle[gpu["index"]] = before.get(gpu["index"], 0.0) + passed
        if not self._idle:
            self._doings.clear()
            return
        self._doings[self._doing()] += 1
        over = [index for index, seconds in self._idle.items() if seconds >= 60 * self._minutes]
        if over:
            self._end(over)

    def _end(self, gpus: list[int]) -> None:
        doing = self._doings.most_common(1)[0][0]
        which = f"{'GPU' if len(gpus) == 1 else 'GPUs'} {', '.join(map(str, gpus))} of {self._host}"
        why = f"{which} did nothing for {self._minutes:g} minutes (launch.idle_minutes), while the rank {doing}"
        terminal.warn(f"{why}: the run saves and ends.")
        self._attempt.remark("gpu_idle", host=self._host, gpus=gpus, minutes=self._minutes, doing=doing, why=why)
        self._stop.request(REASON)


def doing_of(thread: int) -> str:
    """Put into words what a thread does now, by the innermost of our functions that it is in."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        for place, doing in _DOINGS.items():
            if frame.f_code.co_filename.startswith(place):
                return doing
        frame = frame.f_back
    return "computed on the CPU"
