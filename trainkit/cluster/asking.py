"""Waiting for a run without troubling its scheduler: sites warn users whose programs ask too often."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from trainkit.cluster.queue import job_state
from trainkit.cluster.slurm_jobs import JobState
from trainkit.run.folder import RunDir

CALLS_A_MINUTE = 6
"""Of one follower, whatever happens."""
EVERY_SECONDS = 20.0
SOON_SECONDS = 1.5
_CALLS_FOR_ONE = 2  # squeue and sacct


class Asker:
    """What a run does, for one who waits for its end; a run on this machine is asked every time.

    Args:
        clock: seconds that only go forward.
    """

    def __init__(self, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._calls: deque[float] = deque()
        self._asked, self._soon = clock(), SOON_SECONDS
        self._state = job_state(run, heard=self._heard)

    def state(self, *, soon: bool = False) -> JobState:
        """The newest that is known.

        Args:
            soon: something has happened that makes it worth asking again early.
        """
        pause = min(self._soon, EVERY_SECONDS) if soon else EVERY_SECONDS
        if self._state.executor != "slurm" or self._may_ask(pause):
            self._asked, self._soon = self._clock(), 2 * self._soon if soon else SOON_SECONDS
            self._state = job_state(self._run, heard=self._heard)
        return self._state

    def _may_ask(self, pause: float) -> bool:
        now = self._clock()
        while self._calls and now - self._calls[0] > 60:
            self._calls.popleft()
        return now - self._asked >= pause and len(self._calls) + _CALLS_FOR_ONE <= CALLS_A_MINUTE

    def _heard(self, command: str) -> None:
        self._calls.append(self._clock())
