"""Ranks that hang say so themselves: where each of them stands and which are behind; and end, to be started again.

Nobody looks after the ranks that srun has started, so a thread of each looks at its own pulse. All of a hanging run
stop within one update, whichever of them is to blame. So each writes down how far it is and whether it waits for
others, a small file beside its log; the first of them reads what all have written. The ranks of a run without a
scheduler do the same; their supervisor sees those that cannot, because they are stopped or gone.
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

from trainkit import fileio
from trainkit.ranks.signals import STARTING_SECONDS, hang
from trainkit.run.events import Attempt
from trainkit.run.folder import HANG

GATHER_SECONDS = 10.0
"""How long the ranks wait for one another to write down where they stand."""
FACTOR = 5
"""An update may take so many times as long as usual."""
_STEPS = 64
_TORCH = str(Path(torch.__file__).parent) + os.sep
_OURS = str(Path(__file__).parent) + os.sep
_PYTHON = sysconfig.get_path("stdlib") + os.sep
_DATA = str(Path(__file__).parents[1] / "data") + os.sep
_SAVING = str(Path(__file__).parents[1] / "checkpoint" / "save.py")
LATE_SECONDS = 5.0
"""A thread that is waked so much later than it asked for belongs to a process that was stopped, or starved."""


@dataclass(frozen=True)
class Stand:
    """Where a rank stands; the more beats the further it is."""

    beats: int
    waits: bool
    """It is inside a collective, or in a backward pass, which has them: for others, as far as can be seen."""
    where: str

    @classmethod
    def of(cls, beats: int, frame: FrameType | None) -> Stand:
        """Of the main thread's innermost frame."""
        inside = []
        while frame is not None and _is_library(frame.f_code.co_filename):
            inside.append(frame.f_code.co_filename)
            frame = frame.f_back
        waits = any(name.startswith((_TORCH + "distributed", _TORCH + "autograd", _OURS)) for name in inside)
        if frame is None:
            return cls(beats, waits, "")
        file = frame.f_code.co_filename
        what = ", for its data loader" if file.startswith(_DATA) else ""
        what = ", for its checkpoint to be written" if file == _SAVING else what
        return cls(beats, waits, f"{file}:{frame.f_lineno} in {frame.f_code.co_name}{what}")


def _is_library(file: str) -> bool:
    """Code that waits for others in the name of whoever has called it: torch's, Python's own, and this package's."""
    own = file.startswith(_PYTHON) and "-packages" + os.sep not in file
    return own or file.startswith((_TORCH, _OURS, "<frozen "))


@dataclass(frozen=True)
class Place:
    """Of a rank among all."""

    rank: int
    hosts: Sequence[str]
    """By rank."""
    logs: Path
    """Of the attempt; ranks that do not share this folder know nothing of one another."""


@contextmanager
def watchdog(
    attempt: Attempt, place: Place, *, hang_seconds: float, beats_per_step: int
) -> Iterator[Callable[[], None]]:
    """Give what the main thread calls whenever it has made progress, while the body runs.

    If it is not called for `hang_seconds`, and for five times as long as an update usually takes, the process writes
    every thread's Python stack to stderr, records which ranks are behind, and ends with exit code 1.

    Args:
        beats_per_step: calls in an update.
    """
    pulse = _Pulse(hang_seconds, beats_per_step)
    over = threading.Event()
    main = threading.get_ident()

    def look() -> None:
        pause = min(1.0, hang_seconds / 10)
        armed, before = 0.0, time.monotonic()
        while not over.wait(pause):
            now = time.monotonic()
            pulse.excuse(now - before - pause)
            before = now
            if now - armed > 10 * pause:
                # For a main thread that holds Python's lock, so that this one cannot look: a timer in C. It cannot be
                # excused: so it has more patience, for jobs that SLURM suspends and lets go on.
                armed = now
                faulthandler.dump_traceback_later(2 * (pulse.patience() + GATHER_SECONDS), exit=True)
            if pulse.is_over():
                stand = Stand.of(pulse.beats, sys._current_frames().get(main))
                if _ends(attempt, place, stand, pulse, over):
                    os._exit(1)

    thread = threading.Thread(target=look, name="watchdog", daemon=True)
    thread.start()
    try:
        yield pulse.beat
    finally:
        over.set()
        thread.join()
        faulthandler.cancel_dump_traceback_later()


class _Pulse:
    """The progress of this rank."""

    def __init__(self, hang_seconds: float, beats_per_step: int) -> None:
        self._hang, self._per_step = hang_seconds, beats_per_step
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


def _ends(attempt: Attempt, place: Place, stand: Stand, pulse: _Pulse, over: threading.Event) -> bool:
    """Say that this rank hangs, with the others; False if it goes on after all."""
    mine = HANG.at(place.logs, place.rank)
    words = f"Rank {place.rank} on {place.hosts[place.rank]} has made no progress for {pulse.patience():.0f} s"
    print(f"{words}. Its Python stacks:", file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    with suppress(OSError):  # a full disk must not keep it from ending
        HANG.send(place.logs, vars(stand), place.rank)
    deadline = time.monotonic() + GATHER_SECONDS
    expected = [rank for rank in range(len(place.hosts)) if (place.logs / f"rank-{rank}.err").exists()]
    while time.monotonic() < deadline and not all(HANG.at(place.logs, rank).exists() for rank in expected):
        if over.wait(0.2) or pulse.beats != stand.beats:
            with suppress(OSError):
                mine.unlink()
            return False
    stands = {}
    for other in expected:
        with suppress(ValueError, TypeError):
            stands[other] = Stand(**fileio.parse(HANG.read(place.logs, other)))
    if min(stands, default=place.rank) == place.rank:
        rank, words = verdict(stands, expected, place.hosts)
        with suppress(OSError):
            attempt.failed(hang(pulse.patience(), words), rank=rank, host="" if rank is None else place.hosts[rank])
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
        stands: of the ranks that have said theirs.
        expected: ranks that should have.
        hosts: by rank.
    """
    silent = [rank for rank in expected if rank not in stands]
    if silent:
        behind, how = silent, "says nothing: it is stopped, gone, or does not let its own watchdog run"
    else:
        least = min((stand.beats for stand in stands.values()), default=0)
        behind = [rank for rank, stand in stands.items() if stand.beats == least]
        at_work = [rank for rank in behind if not stands[rank].waits]
        behind = at_work or behind
        how = f"stands at {stands[behind[0]].where}" if behind else ""
    if not behind or (len(behind) == len(hosts) > 1):
        return None, "; no rank is behind another; the stacks of all are in their .err"
    named = ", ".join(f"{rank} on {hosts[rank]}" for rank in behind[:8])
    return behind[0], f"; behind the others: rank {named}, which {how}; the stacks of all are in their .err"
