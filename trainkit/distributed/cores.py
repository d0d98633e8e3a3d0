"""Threads of OpenMP sleep while they wait, as long as other programs want the same cores.

libgomp, which torch computes with on the CPU, lets a thread look on for about 10 ms before it sleeps. Where the cores
are free the others are done sooner than that, and nobody has to be woken. Where somebody else has a core, a thread that
looks on takes the time that the others need: with four busy programs a core a small model trained at 58 images/s
instead of 3,109. Fewer threads would serve as well there, but a sum's last bits go by their number, and a run that was
interrupted ends with those of one that was not.

libgomp looks on for a moment only while a process has more threads than CPUs (its manual, at GOMP_SPINCOUNT: 100 looks
instead of 300,000). So as long as this process waits for cores, more of its threads are there, and sleep.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from trainkit import reading
from trainkit.lifetime import user_says_how_threads_wait

_LOOK_SECONDS = 1.0
_CROWDED, _FREE = 0.5, 0.1
"""Time waited for a core, in parts of the time on one, from which on others want them; and below which nobody does."""
_MOST = 64
"""Threads that begin teams; each team has as many threads as torch computes with."""
_PARALLEL = 1 << 18
"""Numbers that torch adds to with all its threads."""


@contextmanager
def sharing_cores() -> Iterator[None]:
    """While the body runs in this thread, others get the cores that only wait.

    Does nothing where torch has one thread, where a user's variable says how threads wait, and where the kernel does
    not tell how long a thread was ready and had no core (Linux does).
    """
    path = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat")
    if torch.get_num_threads() == 1 or user_says_how_threads_wait() or _times(path) is None:
        yield
        return
    end = threading.Event()
    thread = threading.Thread(target=_watch, args=(path, end), name="cores", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _watch(path: Path, end: threading.Event) -> None:
    before, others = _times(path), _Teams()
    while not end.wait(_LOOK_SECONDS):
        now = _times(path)
        if before is None or now is None:
            break
        ran, waited = (new - old for new, old in zip(now, before, strict=True))
        before = now
        if waited > _CROWDED * ran:
            others.begin()
        elif waited < _FREE * ran:
            others.end()
    others.end()


def _times(path: Path) -> tuple[int, int] | None:
    """Nanoseconds in which a thread ran, and in which it was ready to; None where nobody knows."""
    try:
        ran, waited, *_ = reading.read_start(path, 100).split()
        return int(ran), int(waited)
    except (OSError, ValueError):
        return None


class _Teams:
    """Threads that sleep, each at the head of a team of torch's: so many that there are more threads than CPUs."""

    def __init__(self) -> None:
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []

    def begin(self) -> None:
        """If they have not begun."""
        if self._threads:
            return
        size, cpus = torch.get_num_threads(), len(os.sched_getaffinity(0))
        self._over.clear()
        for _ in range(min((cpus - size) // (size - 1) + 1, _MOST)):
            self._threads.append(threading.Thread(target=self._sleep, name="team", daemon=True))
            self._threads[-1].start()

    def end(self) -> None:
        """Their teams end with them."""
        self._over.set()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _sleep(self) -> None:
        torch.zeros(_PARALLEL).add_(1)
        self._over.wait()
