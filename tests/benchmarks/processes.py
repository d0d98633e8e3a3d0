"""Processes of the measurements: each measurement in its own, whole commands with what they leave behind, and none that
outlives this one."""

import contextlib
import ctypes
import importlib
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import psutil

from tests.benchmarks.measuring import Figure, Table

PROJECT = Path(__file__).resolve().parents[2]
_LOOK_SECONDS = 0.2
_SUM_SECONDS = 1.0
_PATIENCE_SECONDS = 300.0
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def measured(name: str, rounds: int | None) -> Sequence[Figure | Table]:
    """The figures of a measurement, or one that says that it failed."""
    try:
        with ProcessPoolExecutor(1, get_context("spawn"), initializer=end_with, initargs=(os.getpid(),)) as pool:
            return pool.submit(_measure, name, rounds).result()
    except Exception as error:
        traceback.print_exc()
        return [Figure("", "", note=f"failed: {str(error).splitlines()[0] if str(error) else type(error).__name__}")]


def _measure(name: str, rounds: int | None) -> Sequence[Figure | Table]:
    measure = importlib.import_module(f"tests.benchmarks.{name}").measure
    return measure() if rounds is None else measure(rounds)  # type: ignore[no-any-return]


def end_with(parent: int) -> None:
    """Have the kernel end this process when its parent ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the kernel was told
        os._exit(1)


def environment(folder: Path, device: str = "cpu") -> dict[str, str]:
    """The environment of a command that keeps its runs and its state in ``folder``."""
    kept = {name: value for name, value in os.environ.items() if name not in ("OMP_NUM_THREADS", "TRAINKIT_ATTEMPT")}
    own = {"TRAINKIT_RUNS": str(folder / "runs"), "XDG_STATE_HOME": str(folder / "state"), "WANDB_MODE": "offline"}
    own |= {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return kept | own | {"PYTHONPATH": str(PROJECT)}


@dataclass(frozen=True)
class Ran:
    """What a command took."""

    began: float
    """Seconds since 1970."""
    seconds: float
    """Until its own process had ended."""
    cpu: float
    """Seconds of all its processes, those that outlived it included."""
    largest: float
    """The most MiB that one process of it had (VmHWM, looked at 5 times a second)."""
    together: float
    """The most MiB that all of them had at one time, each page once (PSS, looked at every second)."""


def ran(command: Sequence[str], env: Mapping[str, str], cwd: Path) -> Ran:
    """Run a command to the end of its last process.

    Raises AssertionError, with what it has printed, if it fails or takes longer than five minutes.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what it leaves behind becomes a child of this process
    largest = together = 0
    next_sum = 0.0
    spent = _spent()
    with (cwd / "output").open("w+b") as output:
        began, started = time.time(), time.perf_counter()
        process = subprocess.Popen(command, env=env, cwd=cwd, stdout=output, stderr=output)
        end, deadline = os.pidfd_open(process.pid), started + _PATIENCE_SECONDS
        try:
            while not select.select([end], [], [], _LOOK_SECONDS)[0] and time.perf_counter() < deadline:
                pids = [one.pid for one in psutil.Process().children(recursive=True)]
                largest = max(largest, *(_told(pid, "status", "VmHWM") for pid in pids), 0)
                if time.perf_counter() >= next_sum:  # the kernel looks at each page
                    next_sum = time.perf_counter() + _SUM_SECONDS
                    together = max(together, sum(_told(pid, "smaps_rollup", "Pss") for pid in pids))
        finally:
            seconds = time.perf_counter() - started
            os.close(end)
            left = _left_behind(process, deadline)
        output.seek(0)
        words = output.read().decode(errors="replace")[-3000:]
    assert process.returncode == 0, f"exit code {process.returncode}: {' '.join(command)}\n{words}"
    assert not left, f"still runs: {left}\n{words}"
    return Ran(began, seconds, _spent() - spent, largest / 1024, together / 1024)


def _left_behind(process: subprocess.Popen[bytes], deadline: float) -> list[str]:
    """Wait for all processes to end, but not after ``deadline``; the command lines of those that had to be killed."""
    while time.perf_counter() < deadline:
        process.poll()
        with contextlib.suppress(ChildProcessError):
            while process.returncode is not None and os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if process.returncode is not None and not psutil.Process().children():
            return []
        time.sleep(0.02)
    lines = []
    for one in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(one.cmdline()))
            one.kill()
    process.wait()
    return lines


def _told(pid: int, file: str, name: str) -> int:
    """A number of KiB that the kernel tells of a process; 0 if it is gone."""
    with contextlib.suppress(OSError):
        if found := re.search(rf"^{name}:\s+(\d+)", Path(f"/proc/{pid}/{file}").read_text(), re.MULTILINE):
            return int(found[1])
    return 0


def _spent() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime
