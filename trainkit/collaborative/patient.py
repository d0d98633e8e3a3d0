"""What a swarm's run folder is told although its disk is full: kept in memory, and written when there is room again.

Training on one machine may as well end there; a creator that ends takes the others' work with it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from trainkit.errors import DiskError
from trainkit.monitor.base import Logger
from trainkit.records.attempts import Attempt, Remark

# Lines that wait for room; of more than these the oldest are given up, and that is said.
_MOST_WAITING = 100_000


class PatientRecord:
    """Events and metrics, in the order in which they came. Takes the place of a run's `Logger`."""

    def __init__(self, attempt: Attempt, metrics: Logger, say: Callable[[str], None]) -> None:
        self._attempt, self._metrics, self._say = attempt, metrics, say
        self._waiting: deque[Callable[[], None]] = deque(maxlen=_MOST_WAITING)
        self.is_full = False
        """Something could not be written, and no checkpoint has been since."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take one metrics record."""
        self._add(partial(self._metrics.log, {"time": round(time.time(), 3), **record}))

    def remark(self, kind: Remark, **facts: Any) -> None:
        """Take one event."""
        self._add(partial(self._attempt.remark, kind, time=round(time.time(), 3), **facts))

    def close(self) -> None:
        """Whoever opened the metrics closes them."""

    def attempt(self, action: Callable[[], None], *, proves: bool = False) -> bool:
        """Do something that writes; False if the disk is full. What else waits for room comes first.

        ``proves``: once it is done, there is room for everything.
        """
        if not self._flush():
            return False
        try:
            action()
        except (DiskError, OSError) as error:
            self._full(error)
            return False
        if proves and self.is_full:
            self.is_full = False
            self._say("  there is room on the disk again: everything is written")
            self.remark("save_recovered")
        return True

    def _add(self, action: Callable[[], None]) -> None:
        self._waiting.append(action)
        self._flush()

    def _flush(self) -> bool:
        while self._waiting:
            try:
                self._waiting[0]()
            except (DiskError, OSError) as error:
                self._full(error)
                return False
            self._waiting.popleft()
        return True

    def _full(self, error: Exception) -> None:
        if self.is_full:
            return
        self.is_full = True
        why = error.why.partition(". ")[0].rstrip(".") if isinstance(error, DiskError) else str(error)
        self._say(f"  cannot write into the run folder: {why}. Training goes on; it is tried again after each round")
        self.remark("save_failed", error=why)
