"""Whole commands, with all processes that come of them: wall and CPU seconds, and memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_LOOK_SECONDS = 0.2
_PATIENCE_SECONDS = 300.0
_PR_SET_CHILD_SUBREAPER = 36


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
    sum: float
    """Of all of them; pages that several share count in each."""


def ran(command: Sequence[str], env: Mapping[str, str], cwd: Path) -> Ran:
    """Run a command to the end of its last process.

    Raises AssertionError, with what it has printed, if it fails or takes longer than five minutes.
    """
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what it leaves behind becomes a child of this process
    most: dict[int, int] = {}
    spent = _spent()
    with (cwd / "output").open("w+b") as output:
        began, started = time.time(), time.perf_counter()
        process = subprocess.Popen(command, env=env, cwd=cwd, stdout=output, stderr=output)
        end, deadline = os.pidfd_open(process.pid), started + _PATIENCE_SECONDS
        try:
            while not select.select([end], [], [], _LOOK_SECONDS)[0] and time.perf_counter() < deadline:
                for pid in _descendants(process.pid):
                    most[pid] = _high_water(pid) or most.get(pid, 0)
        finally:
            seconds = time.perf_counter() - started
            os.close(end)
            left = _left_behind(process, deadline)
        output.seek(0)
        words = output.read().decode(errors="replace")[-3000:]
    assert process.returncode == 0, f"exit code {process.returncode}: {' '.join(command)}\n{words}"
    assert not left, f"still runs: {left}\n{words}"
    largest = max(most.values(), default=0)
    return Ran(began, seconds, _spent() - spent, largest / 1024, sum(most.values()) / 1024)


def _left_behind(process: subprocess.Popen[bytes], deadline: float) -> list[str]:
    """Wait for all processes to end, but not after ``deadline``; the command lines of those that had to be killed."""
    while time.perf_counter() < deadline:
        process.poll()
        with contextlib.suppress(ChildProcessError):
            while process.returncode is not None and os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if process.returncode is not None and len(_descendants(os.getpid())) == 1:
            return []
        time.sleep(0.02)
    alive = [psutil.Process(pid) for pid in _descendants(os.getpid())[1:] if psutil.pid_exists(pid)]
    lines = []
    for one in alive:
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(one.cmdline()))
            one.kill()
    process.wait()
    return lines


def _descendants(pid: int) -> list[int]:
    """``pid`` and whatever it has started, and so on."""
    found, look = [], [pid]
    while look:
        found.append(look.pop())
        for task in Path(f"/proc/{found[-1]}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                look += map(int, task.read_text().split())
    return found


def _high_water(pid: int) -> int:
    """The most KiB that a process had in memory; 0 if it is gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def _spent() -> float:
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return children.ru_utime + children.ru_stime
