"""This process: what it was granted, the variables that libraries read, how it waits, and how it ends."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

_PR_SET_PDEATHSIG = 1
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables by which a user says how OpenMP's threads wait; read when torch is loaded."""
_EXIT_CODE: list[int] = []
"""The exit code of a process that `leave` ends."""


def run_program(main: Callable[[Sequence[str], Mapping[str, str]], int]) -> NoReturn:
    """Run a ``python -m`` program: it gets its words and its environment, and its result is the exit code."""
    leave(main(sys.argv[1:], dict(os.environ)))


def is_set(*names: str, to: str = "") -> bool:
    """Whether one of these variables is set, for a library or for this whole process; ``to``: to this value."""
    return any(value and to in ("", value) for value in map(os.environ.get, names))


def set_variables(variables: Mapping[str, str | None], *, unless_set: bool = False) -> None:
    """Set variables that libraries or the children of this process read; None removes one."""
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        elif not (unless_set and is_set(name)):
            os.environ[name] = value


def visible_cpus() -> int:
    """CPUs in the mask of this process; all of the machine's on macOS, which has no masks."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def granted_cpus() -> int:
    """`visible_cpus`, or SLURM_CPUS_PER_TASK where that is less: a job may have four cores of a machine's 128."""
    granted = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return min(visible_cpus(), int(granted)) if granted.isdigit() and int(granted) > 0 else visible_cpus()


def visible_gpus() -> str | None:
    """CUDA_VISIBLE_DEVICES of this process."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def node_disk() -> Path | None:
    """This node's own disk, if the job's environment names it."""
    found = os.environ.get("SLURM_TMPDIR") or os.environ.get("TMPDIR")
    return Path(found) if found and Path(found).is_dir() else None


def sleep_while_waiting() -> None:
    """Have OpenMP's threads sleep when they wait, unless the user says otherwise. Call it before torch is loaded."""
    if not user_says_how_threads_wait():
        set_variables({"GOMP_SPINCOUNT": "0"})


def user_says_how_threads_wait() -> bool:
    """Whether a variable of OpenMP is set."""
    return is_set(*_WAITING)


@contextlib.contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Import torch in this block: what it makes is no garbage, and looking through it is a sixth of a short command."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def end_with_parent() -> None:
    """Have the kernel kill this process (Linux) when the thread that started it ends, however it ends."""
    import ctypes  # most commands do without

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def leave(exit_code: int) -> NoReturn:
    """End this process by `SystemExit`, without taking apart what torch has made: half a second of a short command.

    Functions registered by ``atexit`` after this module was imported are called, and files are flushed.
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
