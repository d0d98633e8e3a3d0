"""What launchers and ranks tell each other while they run: heartbeats, and requests to stop."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from trainkit.ranks import RankEnv
from trainkit.run.events import Attempt
from trainkit.run.folder import HEARTBEAT

# Ranks say that they make progress, for whoever looks after them: a number each, in memory that they share.
#
# Counting costs a rank a tenth of a microsecond, because nobody is called. The file lies on this machine, and only
# processes of this machine look at it.

VARIABLE = "TRAINKIT_HEARTBEAT"
"""``FILE:INDEX``, in a rank's environment."""
STARTING_SECONDS = 600.0
"""Code and data may take so long to load before the first update, if that is more than `launch.hang_seconds`."""
_SIZE = 8
_PREFIX = HEARTBEAT.name.format("")
_HANG = "no progress for "


def hang(seconds: float, more: str = "") -> str:
    """The error of ranks that have made no progress for so long."""
    return f"{_HANG}{seconds:.0f} s (launch.hang_seconds){more}"


def is_hang(error: str) -> bool:
    """Whether an error is what `hang` says."""
    return error.startswith(_HANG)


class Heartbeats:
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
def pulses(count: int) -> Iterator[Heartbeats]:
    """Room for the counts of ``count`` ranks, gone afterwards."""
    _clear()
    descriptor, name = tempfile.mkstemp(prefix=_PREFIX)
    file = Path(name)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        os.ftruncate(descriptor, count * _SIZE)
        with mmap.mmap(descriptor, count * _SIZE) as memory:
            yield Heartbeats(file, memory, count)
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


# Stop requests: a signal sets a flag, the ranks agree, and the loop leaves at the same step everywhere.
#
# The handlers must be in place before torch is imported: until then the signal of a time limit kills the process. So
# this module imports nothing heavy. Nothing is done in the handler itself: a collective there would deadlock, because
# the ranks are at different lines when the signal arrives.

# USR2: the time limit is near (`--signal=USR2@90`). TERM: preemption, `scontrol requeue`, a machine that shuts down.
SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


@dataclass
class StopFlag:
    """Set once, by a signal; read by the loop."""

    requested: bool = False
    signals: list[str] = field(default_factory=list)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.requested = True
        self.signals.append(signal.Signals(number).name)


@contextmanager
def stop_on_signal(*, leaves_process: bool = True) -> Iterator[StopFlag]:
    """Turn USR2 and TERM into a flag while the body runs.

    Args:
        leaves_process: the process ends after the body. The signals are then ignored instead of restored: a task that
            has saved and is on its way out must not be killed by the second signal of a preemption.
    """
    flag = StopFlag()
    if threading.current_thread() is not threading.main_thread():  # only the main thread may install handlers
        yield flag
        return
    before: dict[signal.Signals, Any] = {number: signal.signal(number, flag._handle) for number in SIGNALS}
    # A launcher may have blocked them until now; what is pending is delivered here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield flag
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN if leaves_process else before[number])


def hand_back(attempt: Attempt | None, env: RankEnv, signals: Sequence[str], *, step: int | None) -> None:
    """Say that this attempt ended on request and is saved: the first rank of each node, to whoever looks after it.

    ``attempt``: as this node knows it; None where nobody has begun one here.
    """
    if env.local_rank == 0 and attempt is not None:
        attempt.handed_back(node_rank=env.node_rank, step=step, signals=sorted(set(signals)))
