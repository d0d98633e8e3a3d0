"""The beginning and the end of a process, which are most of the time of a short one.

What torch makes when it is imported lives as long as the process. Python's collector of garbage would look through it
again and again while there is more and more of it, and at the end all of it would be taken apart, piece by piece, right
before the kernel takes it back at once. A command that trains a small model for seconds spends a third of its CPU
time on that: `python -m tests.benchmarks.start_cost`.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

_WHILE_STARTING = 200_000
"""New objects before the collector looks for garbage; Python's own number is 700."""
_PR_SET_PDEATHSIG = 1
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""By which a user says how threads wait; read when torch is loaded."""


@dataclass
class _Process:
    """This one."""

    thresholds: tuple[int, int, int] | None = None
    """The collector's own ones, while they are not in force."""
    exit_code: int | None = None
    """All is done and said, and there is nothing to take apart."""


_PROCESS = _Process()


def begin() -> None:
    """To be called before anything large is imported."""
    _PROCESS.thresholds = gc.get_threshold()
    gc.set_threshold(_WHILE_STARTING)
    atexit.register(_end)  # the first to be registered is the last to be called


def sleep_while_waiting() -> None:
    """Threads of OpenMP sleep at once when they wait, unless a user says otherwise. Called before torch is loaded."""
    if not user_says_how_threads_wait():
        os.environ["GOMP_SPINCOUNT"] = "0"


def user_says_how_threads_wait() -> bool:
    """By a variable that OpenMP reads."""
    return any(name in os.environ for name in _WAITING)


def settled() -> None:
    """All that lives to the end has been made. From here on the collector works as always, and leaves that alone."""
    if _PROCESS.thresholds is not None:
        gc.set_threshold(*_PROCESS.thresholds)
        gc.freeze()
        _PROCESS.thresholds = None


@contextmanager
def collecting_by_hand() -> Iterator[Callable[[], None]]:
    """While the body runs the collector works only when it is called, by what this gives.

    Left alone it stops each process at another moment, and in a training whoever waits for that process as well. The
    first call lets it leave everything alone that has been made until then; so later ones take microseconds. What is
    part of no circle is freed at once, as always.
    """
    if not gc.isenabled():  # somebody knows better
        yield lambda: None
        return
    others_froze = gc.get_freeze_count() > 0
    frozen = False

    def collect() -> None:
        nonlocal frozen
        gc.collect()
        if not frozen:
            gc.freeze()
            frozen = True

    gc.disable()
    try:
        yield collect
    finally:
        gc.enable()
        if frozen and not others_froze:  # as in tests and notebooks, which go on to do other things
            gc.unfreeze()


def end_with_parent() -> None:
    """From now on the kernel kills this process (Linux) when the thread that has started it ends, however it ends."""
    import ctypes  # which most commands do without

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(exit_code: int) -> NoReturn:
    """End this process, by `SystemExit`. What others have registered by ``atexit`` is called, and files are flushed."""
    _PROCESS.exit_code = exit_code
    raise SystemExit(exit_code)


def _end() -> None:
    if _PROCESS.exit_code is None:
        gc.unfreeze()  # a process that fails is taken apart, and libraries complain of what is left
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(_PROCESS.exit_code)
