"""How a process of ours waits and ends."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user says how OpenMP's threads wait; read when torch is loaded."""
_EXIT_CODE: list[int] = []
"""The exit code of a process that `leave` ends."""


def sleep_while_waiting() -> None:
    """Have OpenMP's threads sleep when they wait, unless the user says otherwise. Call it before torch is loaded."""
    if not user_says_how_threads_wait():
        os.environ["GOMP_SPINCOUNT"] = "0"


def user_says_how_threads_wait() -> bool:
    """Whether a variable of OpenMP is set."""
    return any(name in os.environ for name in _WAITING)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """While torch is imported: what it makes is no garbage, and looking through it is a sixth of a short command."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def end_with_parent() -> None:
    """From now on the kernel kills this process (Linux) when the thread that started it ends, however it ends."""
    import ctypes  # most commands do without

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(exit_code: int) -> NoReturn:
    """End this process by `SystemExit`, without taking apart what torch has made, half a second of a short command.

    What others have registered by ``atexit`` after this module was imported is called, and files are flushed.
    """
    _EXIT_CODE.append(exit_code)
    raise SystemExit(exit_code)


@atexit.register
def _end() -> None:
    if not _EXIT_CODE:
        gc.unfreeze()  # a process that fails is taken apart, and libraries complain of what is left
        return
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(_EXIT_CODE[-1])
