"""Watchdog: end a rank that makes no progress, and record which ranks are behind.

Nobody watches the ranks that srun has started, so a thread of each watches its own progress. All ranks of a hanging
run stop within one update, whichever of them is to blame. So each writes how far it is, and whether it waits for
others, into a small file beside its log; the first rank reads what all have written. The ranks of a run without a
scheduler do the same; their controller sees those that cannot, because they are stopped or gone.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import statistics
import sys
import sysconfig
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import FrameType

import torch

from trainkit.cluster.signals import STARTING_SECONDS, KeeperLink, hang
from trainkit.common import fileio, terminal
from trainkit.run.events import Attempt
from trainkit.run.folder import HANG, HANG_LIMIT

GATHER_SECONDS = 10.0
"""Seconds that the ranks wait for one another to write down where they stand."""
FACTOR = 5
"""Times as long as usual that an update may take."""
PACE = 20
"""Times as long as the slowest recent one that it may take while all ranks are in theirs."""
FLOOR_SECONDS = 60.0
"""But not less: a machine may be overloaded."""
FIRST = 3
"""Updates until the pace of a run is known."""
_STEPS = 64
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parent) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_DATA = str(Path(__file__).parents[1] / "data") + os.sep
_SAVING = str(Path(__file__).parents[1] / "checkpoint" / "save.py")
_COMPILER = ("_dynamo/convert_frame.py", "_inductor/compile_fx.py")
_STDERR = 2
"""The descriptor: what stands for sys.stderr where output is captured has none, and ended the thread that looks."""
LATE_SECONDS = 5.0
"""A thread that wakes up this much too late belongs to a process that was stopped, or starved."""


@dataclass(frozen=True)
class Stand:
    """Position of a rank; the more beats the further it is."""

    beats: int
    waits: bool
    """It is inside a collective, or in a backward pass, which has them: for others, as far as can be seen."""
    where: str

    @classmethod
    def of(cls, beats: int, frame: FrameType | None) -> Stand:
        """Make the stand from the main thread's innermost frame."""
        inside = []
        while frame is not None and _is_library(frame.f_code.co_filename):
            inside.append(frame.f_code.co_filename)
            frame = frame.f_back
        waits = any(name.startswith((_TORCH + "distributed", _TORCH + "autograd", _OURS)) for name in inside)
        if frame is None:
            return cls(beats, waits, "")
        file = frame.f_code.co_filename
        what = ""
        if file.startswith(_DATA):
            what = ", for its data loader"
        elif file == _SAVING:
            what = ", for its checkpoint to be written"
        return cls(beats, waits, f"{file}:{frame.f_lineno} in {frame.f_code.co_name}{what}")


def compiles(frame: FrameType | None) -> bool:
    """Return whether a thread is in torch's compiler, which may take minutes for an update."""
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILER):
            return True
        frame = frame.f_back
    return False


def _is_library(file: str) -> bool:
    """Return True for code that waits for others in the name of its caller: torch's, Python's own, this package's."""
    own = file.startswith(_PYTHON) and "-packages" + os.sep not in file
    return own or file.startswith((_TORCH, _OURS, "<frozen "))


@contextmanager
def watchdog(
    attempt: Attempt,
    rank: int,
    hosts: Sequence[str],
    *,
    hang_seconds: float,
    beats_per_step: int,
    keeper: KeeperLink | None = None,
    last: Callable[[], None] = lambda: None,
) -> Iterator[Callable[[], None]]:
    """Give what the main thread calls whenever it has made progress, while the body runs.

    If it is not called for `hang_seconds`, and for five times as long as an update usually takes, the process writes
    every thread's Python stack to stderr, records which ranks are behind, and ends with exit code 1.

    Args:
        attempt: ranks that do not share the folder of its logs know nothing of one another.
        hosts: by rank.
        beats_per_step: calls in an update.
        keeper: link to this rank's keeper, which knows sooner that all ranks hang.
        last: called, from another thread, before the process ends.
    """
    pulse = Pulse(hang_seconds, beats_per_step)
    over = threading.Event()
    main = threading.get_ident()

    def look() -> None:
        pause = min(1.0, hang_seconds / 10)
        armed = 0.0
        before = time.monotonic()
        told = 0.0
        while not over.wait(pause):
            now = time.monotonic()
            pulse.excuse(now - before - pause)
            before = now
            if now - armed > 10 * pause:
                # For a main thread that holds Python's lock, so that this one cannot look: a timer in C. It cannot be
                # excused: so it has more patience, for jobs that SLURM suspends and lets go on.
                armed = now
                faulthandler.dump_traceback_later(2 * (pulse.patience() + GATHER_SECONDS), exit=True, file=_STDERR)
            if rank == 0 and keeper is not None and abs(keeper.limit - told) > told / 10:
                told = keeper.limit
                with suppress(OSError):
                    HANG_LIMIT.send(attempt.logs, {"seconds": told, "otherwise": hang_seconds})
            frame = sys._current_frames().get(main)
            if keeper is not None and keeper.phase is not None and compiles(frame):
                keeper.leaves()
            by_pace = keeper is not None and keeper.hangs
            if by_pace or pulse.is_over():
                limit = keeper.limit if keeper is not None and by_pace else pulse.patience()
                if _ends(attempt, rank, hosts, Stand.of(pulse.beats, frame), limit, pulse, over):
                    last()
                    os._exit(1)
                if keeper is not None:
                    keeper.hangs = False

    thread = threading.Thread(target=look, name="watchdog", daemon=True)
    thread.start()
    try:
        yield pulse.beat
    finally:
        over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


class Pace:
    """The pace of this rank's computations, for its keeper: a limit for the case that all ranks are in theirs.

    Only what waits for nothing but other ranks is a computation: forward, backward, the update.

    Args:
        hang_seconds: the limit for all else, and the highest of this one.
    """

    def __init__(self, link: KeeperLink | None, hang_seconds: float) -> None:
        self._link = link
        self._hang = hang_seconds
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._since = 0.0

    def enter(self) -> None:
        """A computation begins."""
        self._since = time.monotonic()
        if self._link is not None and len(self._seconds) >= FIRST:
            self._link.enters()

    def leave(self) -> None:
        """It is over."""
        self._seconds.append(time.monotonic() - self._since)
        if self._link is not None:
            self._link.leaves()
            self._link.limit = self.limit

    @property
    def limit(self) -> float:
        """Seconds that one may take."""
        slowest = max(self._seconds, default=self._hang)
        return max(FACTOR * slowest, min(self._hang, max(FLOOR_SECONDS, PACE * slowest)))


class Pulse:
    """The progress of this rank."""

    def __init__(self, hang_seconds: float, beats_per_step: int) -> None:
        self._hang = hang_seconds
        self._per_step = beats_per_step
        self._times: deque[float] = deque(maxlen=_STEPS * beats_per_step)
        self._last = time.monotonic()
        self.beats = 0

    def beat(self) -> None:
        self._last = time.monotonic()
        self._times.append(self._last)
        self.beats += 1

    def patience(self) -> float:
        """Seconds without a beat after which the rank hangs."""
        if self.beats < self._per_step:  # the first update may compile the model
            return max(self._hang, STARTING_SECONDS)
        starts = list(self._times)[:: self._per_step]
        steps = [after - before for before, after in pairwise(starts)]
        return max(self._hang, FACTOR * statistics.median(steps) if steps else 0.0)

    def excuse(self, seconds: float) -> None:
        """Not count what the process has not had: SLURM suspends jobs by SIGSTOP, and a machine may be overloaded."""
        if seconds > LATE_SECONDS:
            self._last += seconds

    def is_over(self) -> bool:
        return time.monotonic() - self._last > self.patience()


def _ends(
    attempt: Attempt,
    rank: int,
    hosts: Sequence[str],
    stand: Stand,
    limit: float,
    pulse: Pulse,
    over: threading.Event,
) -> bool:
    """Say that this rank hangs, with the others, after ``limit`` seconds; False if it goes on after all."""
    logs = attempt.logs
    words = f"Rank {rank} on {hosts[rank]} has made no progress for {limit:.0f} s"
    terminal.warn(f"{words}. Its Python stacks:")
    faulthandler.dump_traceback(file=_STDERR, all_threads=True)
    with suppress(OSError):  # a full disk must not keep it from ending
        HANG.send(logs, vars(stand), rank)
    deadline = time.monotonic() + GATHER_SECONDS
    expected = [other for other in range(len(hosts)) if (logs / f"rank-{other}.err").exists()]
    while time.monotonic() < deadline and not all(HANG.at(logs, other).exists() for other in expected):
        if over.wait(0.2) or pulse.beats != stand.beats:
            with suppress(OSError):
                HANG.at(logs, rank).unlink()
            return False
    stands = {}
    for other in expected:
        with suppress(ValueError, TypeError):
            stands[other] = Stand(**fileio.parse(HANG.read(logs, other)))
    if min(stands, default=rank) == rank:
        behind, words = verdict(stands, expected, hosts)
        if limit < pulse.patience():
            pace = f"{PACE} times their slowest, at least {FLOOR_SECONDS:.0f} s"
            words = f", while all ranks compute an update: {pace}{words}"
        with suppress(OSError):
            attempt.failed(hang(limit, words), rank=behind, host="" if behind is None else hosts[behind])
    else:
        time.sleep(1)  # or the end of this one would end the first before it has written it down
    for worker in multiprocessing.active_children():  # of the data loader: their stacks too
        with suppress(OSError):
            os.kill(worker.pid or 0, signal.SIGUSR1)
    time.sleep(0.2)
    return True


def verdict(stands: dict[int, Stand], expected: Sequence[int], hosts: Sequence[str]) -> tuple[int | None, str]:
    """The first of the ranks that are behind, and words on all of them; None where none is behind another.

    Args:
        stands: of the ranks that have reported theirs.
        expected: ranks that should have.
        hosts: by rank.
    """
    stacks = "the stacks of all are in their .err"
    silent = [rank for rank in expected if rank not in stands]
    least = min((stand.beats for stand in stands.values()), default=0)
    last = [rank for rank, stand in stands.items() if stand.beats == least]
    behind = silent or [rank for rank in last if not stands[rank].waits] or last
    if not behind or (len(behind) == len(hosts) > 1):
        return None, f"; no rank is behind another; {stacks}"
    how = "says nothing: it is stopped, gone, or does not let its own watchdog run"
    if not silent:
        how = f"stands at {stands[behind[0]].where}"
    named = ", ".join(f"{rank} on {hosts[rank]}" for rank in behind[:8])
    return behind[0], f"; behind the others: rank {named}, which {how}; {stacks}"
