"""Ranks say that they make progress, for whoever looks after them: a number each, in memory that they share.

Counting costs a rank a tenth of a microsecond, because nobody is called. The file lies on this machine, and only
processes of this machine look at it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "TRAINKIT_HEARTBEAT"
"""``FILE:INDEX``, in a rank's environment."""
STARTING_SECONDS = 600.0
"""Code and data may take so long to load before the first update, if that is more than `launch.hang_seconds`."""
_SIZE = 8
_PREFIX = "trainkit-heartbeat-"
_HANG = "no progress for "


def hang(seconds: float, more: str = "") -> str:
    """The error of ranks that have made no progress for so long."""
    return f"{_HANG}{seconds:.0f} s (launch.hang_seconds){more}"


def is_hang(error: str) -> bool:
    """Whether an error is what `hang` says."""
    return error.startswith(_HANG)


class Pulses:
    """The counts of all ranks of this machine, as their supervisor sees them."""

    def __init__(self, file: Path, memory: mmap.mmap, count: int) -> None:
        self._file, self._memory, self._count = file, memory, count

    def variable(self, index: int) -> dict[str, str]:
        """What tells a rank where to count."""
        return {VARIABLE: f"{self._file}:{index}"}

    def read(self) -> list[int]:
        """How often each rank has said that it makes progress; 0 for one that still starts."""
        parts = (self._memory[index * _SIZE : (index + 1) * _SIZE] for index in range(self._count))
        return [int.from_bytes(part, "little") for part in parts]


@contextmanager
def pulses(count: int) -> Iterator[Pulses]:
    """Room for the counts of ``count`` ranks, gone afterwards."""
    _clear()
    descriptor, name = tempfile.mkstemp(prefix=_PREFIX)
    file = Path(name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, count * _SIZE)
        with mmap.mmap(descriptor, count * _SIZE) as memory:
            yield Pulses(file, memory, count)
    finally:
        os.close(descriptor)
        file.unlink(missing_ok=True)


def _clear() -> None:
    """Remove what supervisors that were killed have left: nobody holds the lock on it."""
    for file in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with suppress(OSError):  # somebody else's, or gone
            descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(descriptor).st_size:  # one without is just being made
                    file.unlink()
            finally:
                os.close(descriptor)


def heartbeat(env: Mapping[str, str]) -> Callable[[], None]:
    """What a rank calls whenever it has made progress; does nothing where nobody looks."""
    name, _, index = env.get(VARIABLE, "").rpartition(":")
    try:
        start = int(index) * _SIZE
        with open(name, "r+b") as file:
            memory = mmap.mmap(file.fileno(), 0)
    except (OSError, ValueError):
        return lambda: None
    if not 0 <= start <= len(memory) - _SIZE:
        return lambda: None
    end, beats = start + _SIZE, 0

    def beat() -> None:
        nonlocal beats
        beats += 1
        memory[start:end] = beats.to_bytes(_SIZE, "little")

    return beat
