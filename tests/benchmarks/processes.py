"""Each measurement in a process of its own, and none that outlives the command."""

from __future__ import annotations

import ctypes
import importlib
import inspect
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.benchmarks.measuring import Figure, Table

PR_SET_PDEATHSIG = 1


def measured(name: str, peers: str | None, rounds: int | None) -> Sequence[Figure | Table]:
    """The figures, or the one that says that it failed."""
    try:
        with ProcessPoolExecutor(1, get_context("spawn"), initializer=end_with, initargs=(os.getpid(),)) as pool:
            return pool.submit(measure, name, peers, rounds).result()
    except Exception as error:
        traceback.print_exc()
        return [Figure("", "", note=f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}")]


def measure(name: str, peers: str | None, rounds: int | None) -> Sequence[Figure | Table]:
    """In the process of its own."""
    module = importlib.import_module(f"tests.benchmarks.{name}")
    options = {} if rounds is None else {"rounds": rounds}
    if "peers" in inspect.signature(module.measure).parameters:
        return module.measure(peers=peers, **options)  # type: ignore[no-any-return]
    return module.measure(**options)  # type: ignore[no-any-return]


def end_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends, however it does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before it could be said
        os._exit(1)
