"""Idleness of a script: a hang is a time without output, without records, and without use of CPU or GPU."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.cluster.ranks import RankEnv
from trainkit.cluster.signals import hang
from trainkit.common.process import device_masks
from trainkit.config.schema import LaunchConfig
from trainkit.run.events import Attempt

if TYPE_CHECKING:
    from trainkit.monitor.hardware import Gpus

_SHARE = 0.01
"""Share of a core that is work; a thread that waits and looks now and then takes less."""


class Idle:
    """Watch over a script's signs of life, at a look in ten of its patience."""

    def __init__(self, seconds: float, attempt: Attempt, env: RankEnv, pid: int, *, only_with_records: bool) -> None:
        self._seconds = seconds
        self._logs = [attempt.logs / f"rank-{env.rank}.{ending}" for ending in ("out", "err")]
        self._metrics = attempt.run.metrics
        self._records_before = _size(self._metrics)
        self._env = env
        self._pid = pid
        self._gpus: Gpus | None = None
        self._only_with_records = only_with_records
        self._looked = self._moved = time.monotonic()
        self._seen: tuple[int, ...] = ()
        self._worked = 0.0

    @classmethod
    def of(cls, launch: LaunchConfig, attempt: Attempt | None, env: RankEnv, pid: int) -> Idle | None:
        """Watch as ``launch.hang_seconds`` says; by its default only a script that writes records."""
        if attempt is None:
            return None
        by_default = launch.hang_seconds == LaunchConfig.model_fields["hang_seconds"].default
        return cls(launch.hang_seconds, attempt, env, pid, only_with_records=by_default)

    def look(self) -> str:
        """Look for signs of life, unless that was a moment ago. Returns the words of a hang, else nothing."""
        now = time.monotonic()
        passed = now - self._looked
        if passed < min(self._seconds / 10, 10.0):
            return ""
        if passed > self._seconds:  # this process itself was stopped
            self._moved = now
        self._looked = now
        sizes = tuple(_size(file) for file in (*self._logs, self._metrics))
        worked = _cpu_seconds(self._pid)
        if sizes != self._seen or abs(worked - self._worked) > _SHARE * passed or self._uses_gpu():
            self._moved = now
        self._seen = sizes
        self._worked = worked
        has_records = sizes[-1] > self._records_before
        if self._only_with_records and not has_records:
            return ""
        return hang(self._seconds) if now - self._moved > self._seconds else ""

    def _uses_gpu(self) -> bool:
        """True if a GPU of this rank computes: its own, where the ranks of the node see one for each, else any."""
        if self._gpus is None:
            from trainkit.monitor.hardware import open_gpus  # most scripts show another sign of life at every look

            self._gpus = open_gpus(device_masks())
        used: list[float] = [sample.get("util_percent", 0) for sample in self._gpus.samples()]
        if len(used) == self._env.local_world_size:
            return used[self._env.local_rank] > 0
        return any(percent > 0 for percent in used)


def _size(file: Path) -> int:
    with suppress(OSError):
        return os.stat(file).st_size
    return 0


def _cpu_seconds(pid: int) -> float:
    """CPU time of a process and of all that it has started and that lives, in seconds."""
    import psutil

    total = 0.0
    with suppress(psutil.Error):
        own = psutil.Process(pid)
        for process in (own, *own.children(recursive=True)):
            with suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
    return total
