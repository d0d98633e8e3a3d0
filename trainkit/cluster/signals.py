"""Messages between launchers, keepers and running ranks: heartbeats, requests to stop, and orders to save.

A rank counts its progress in memory that it shares with the process that supervises it. A count takes a tenth of a
microsecond, because no system call is made. The memory has no name: a rank inherits its descriptor.

A request to stop is a signal that sets a flag; the ranks then agree, and all leave the loop at the same step. The
handlers must be in place before torch is imported, because until then the signal of a time limit kills the process: so
this module imports nothing heavy. A handler does nothing but set the flag: a collective in it would deadlock, because
the signal reaches the ranks at different lines.
"""

import mmap
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from trainkit.cluster.ranks import RankEnv
from trainkit.run.events import Attempt

# Heartbeats

VARIABLE = "TRAINKIT_HEARTBEAT"
"""``FILE:INDEX``, in a rank's environment."""
STARTING_SECONDS = 600.0
"""Seconds that a rank may be silent before the first update, while it loads code and data, unless
`launch.hang_seconds` is longer."""
_SIZE = 8
_HANG = "no progress for "


def hang(seconds: float, more: str = "") -> str:
    """Word the error of ranks that have made no progress for that time."""
    return f"{_HANG}{seconds:.0f} s (launch.hang_seconds){more}"


def is_hang(error: str) -> bool:
    """Return True for an error of `hang`."""
    return error.startswith(_HANG)


KILLED = "killed by "
"""Begins the error of a rank that a signal has ended."""


def ending_in_words(code: int) -> str:
    """Put the end of a rank into words, of which there is nothing but the exit code; negative: the signal."""
    if code >= 0:
        return f"exit code {code}"
    words = f"{KILLED}{signal.Signals(-code).name}"
    if code == -signal.SIGKILL:
        words += " (which the kernel does when memory runs out)"
    return words


@dataclass(frozen=True)
class Heartbeats:
    """Counts of all ranks of this machine, for their supervisor."""

    descriptor: int
    """Descriptor of the memory; a rank that inherits it finds it by its number."""
    counts: memoryview

    def variable(self, index: int) -> dict[str, str]:
        """Return the variable that tells a rank where to count."""
        return {VARIABLE: f"/dev/fd/{self.descriptor}:{index}"}

    def read(self) -> list[int]:
        """Return how often each rank has beaten; 0 for one that is still starting."""
        return self.counts.tolist()


@contextmanager
def pulses(count: int) -> Iterator[Heartbeats]:
    """Memory for the counts of ``count`` ranks, which must inherit its descriptor; it is gone when nobody holds it."""
    with tempfile.TemporaryFile() as file:
        file.truncate(count * _SIZE)
        with mmap.mmap(file.fileno(), count * _SIZE) as memory, memoryview(memory).cast("Q") as counts:
            yield Heartbeats(file.fileno(), counts)


def heartbeat(env: Mapping[str, str]) -> Callable[[], None]:
    """Return the function that a rank calls whenever it has made progress; without a supervisor it does nothing."""
    count = _count(env)
    if count is None:
        return lambda: None

    def beat() -> None:
        count[0] += 1

    return beat


def forget_heartbeat(env: Mapping[str, str]) -> None:
    """Begin to count anew: the rank starts again."""
    count = _count(env)
    if count is not None:
        count[0] = 0


def _count(env: Mapping[str, str]) -> memoryview | None:
    """The count of a rank, in the memory that it shares with its supervisor; None where it has none."""
    name, _, text = env.get(VARIABLE, "").rpartition(":")
    try:
        index = int(text)
        with open(name, "r+b") as file:
            counts = memoryview(mmap.mmap(file.fileno(), 0)).cast("Q")
    except (OSError, ValueError, TypeError):  # TypeError: its size is no multiple of a count's
        return None
    if not 0 <= index < len(counts):
        return None
    return counts[index : index + 1]


# Between a rank and its keeper

KEEPER = "TRAINKIT_KEEPER"
"""``PARENT:MEMORY:READER:WRITER:FOLDER`` in the environment of a rank that has a keeper: the process that has started
it, for only to its children they mean anything; descriptors; a path."""
_CAN_SAVE = 1
_SAVES = 2
_SAVING, _CHANGES, _INSIDE, _LIMIT, _HANGS = range(5)
_LINK_BYTES = 5 * _SIZE


class KeeperLink:
    """Memory and a pipe that a rank shares with its keeper, which it is a fork of.

    Args:
        memory: descriptor of the memory.
        reader, writer: descriptors of the pipe.
        folder: in this node's memory, the same for all ranks of a run here: there a rank leaves the state of a training
            that has lost another one. It is made when it is needed.
    """

    def __init__(self, memory: int, reader: int, writer: int, folder: Path) -> None:
        self._words = memoryview(mmap.mmap(memory, _LINK_BYTES)).cast("Q")
        self.descriptors = (memory, reader, writer)
        self.folder = folder

    @classmethod
    def make(cls, folder: Path) -> "KeeperLink":
        """Make the link of a rank that is to be forked next."""
        with tempfile.TemporaryFile() as file:
            file.truncate(_LINK_BYTES)
            return cls(os.dup(file.fileno()), *os.pipe(), folder)

    @classmethod
    def named_in(cls, env: Mapping[str, str]) -> "KeeperLink | None":
        """Return that of a rank's environment; None for a rank without a keeper."""
        try:
            parent, memory, reader, writer, folder = env.get(KEEPER, "").split(":", 4)
            if int(parent) != os.getppid():
                return None
            return cls(int(memory), int(reader), int(writer), Path(folder))
        except (OSError, ValueError):
            return None

    def variable(self) -> dict[str, str]:
        """Return the variable that `named_in` reads, in a child of this process that has `descriptors` as well."""
        return {KEEPER: ":".join([*map(str, [os.getpid(), *self.descriptors]), str(self.folder)])}

    def close(self) -> None:
        """Forget a rank that has ended."""
        for descriptor in self.descriptors:
            os.close(descriptor)

    @property
    def can_save(self) -> bool:
        """True if the rank listens for an order to save."""
        return self._words[_SAVING] >= _CAN_SAVE

    @can_save.setter
    def can_save(self, can: bool) -> None:
        self._words[_SAVING] = _CAN_SAVE * can

    @property
    def saves(self) -> bool:
        """True once the rank has taken note of the order."""
        return self._words[_SAVING] == _SAVES

    def order(self) -> None:
        """Order the rank to save what it can, and to end."""
        os.write(self.descriptors[2], b"\n")

    def wait_for_order(self) -> None:
        """Wait for the order, in the rank, and take note of it."""
        os.read(self.descriptors[1], 1)
        self._words[_SAVING] = _SAVES

    def enters(self) -> None:
        """Say that the rank begins the computation of an update, or a part of it, which waits for nothing but ranks."""
        self._words[_CHANGES] += 1
        self._words[_INSIDE] = 1

    def leaves(self) -> None:
        """Say that the rank does something else: it waits for data, validates, saves, compiles, or starts."""
        self._words[_CHANGES] += 1
        self._words[_INSIDE] = 0

    @property
    def phase(self) -> int | None:
        """Number of the computation that the rank is in; None while it does something else."""
        return self._words[_CHANGES] if self._words[_INSIDE] else None

    @property
    def limit(self) -> float:
        """Seconds in such a computation after which the rank hangs, should all others be in theirs as well."""
        return self._words[_LIMIT] / 1000

    @limit.setter
    def limit(self, seconds: float) -> None:
        self._words[_LIMIT] = round(1000 * seconds)

    @property
    def hangs(self) -> bool:
        """All ranks have been in a computation for longer than their limits: the rank is to say where it stands."""
        return bool(self._words[_HANGS])

    @hangs.setter
    def hangs(self, hangs: bool) -> None:
        self._words[_HANGS] = hangs


# Requests to stop

# USR2: the time limit is near (`--signal=USR2@90`). TERM: preemption, `scontrol requeue`, a machine that shuts down.
SIGNALS = (signal.SIGUSR2, signal.SIGTERM)


@dataclass
class StopFlag:
    """Set once, by a signal; read by the loop."""

    requested: bool = False
    signals: list[str] = field(default_factory=list)
    leaves_process: bool = True
    """The process ends soon: from then on it is not to be told again."""

    def request(self, name: str) -> None:
        """Ask for a stop; `name` is that of the signal, or of another reason."""
        self.requested = True
        self.signals.append(name)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.request(signal.Signals(number).name)


@contextmanager
def stop_on_signal(*, leaves_process: bool = True) -> Iterator[StopFlag]:
    """Turn USR2 and TERM into a flag while the body runs.

    Args:
        leaves_process: the process ends after the body, so the signals are ignored from then on: the second signal of
            a preemption must not kill a rank that has saved and is about to exit. Otherwise the handlers are restored.
    """
    flag = StopFlag(leaves_process=leaves_process)
    if threading.current_thread() is not threading.main_thread():  # only the main thread may install handlers
        yield flag
        return
    before: dict[signal.Signals, Any] = {number: signal.signal(number, flag._handle) for number in SIGNALS}
    # The launcher may have blocked the signals until now; those that are pending arrive here.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    try:
        yield flag
    finally:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN if flag.leaves_process else before[number])


def hand_back(
    attempt: Attempt | None, env: RankEnv, signals: Sequence[str], *, step: int | None, was_ended: bool = False
) -> None:
    """Record that this attempt has saved and ended on request; the first rank of each node does so for its supervisor.

    Args:
        attempt: None where this node has begun none.
        was_ended: it is a script that did not say so, and goes on all the same.
    """
    if env.local_rank == 0 and attempt is not None:
        facts = {"was_ended": True} if was_ended else {}
        attempt.handed_back(node_rank=env.node_rank, step=step, signals=sorted(set(signals)), **facts)
