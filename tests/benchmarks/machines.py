"""Machines with a network of their own, which counts their bytes: a small internet, and processes on its machines.

Whoever is started here is killed by the kernel when this process ends, however it ends.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from tests.benchmarks.processes import PROJECT, end_with
from tests.swarm.internet import Internet, internet


def absent() -> str:
    """Why there can be no machines here; empty if there can."""
    try:
        with internet(public=1, homes=0):
            return ""
    except pytest.skip.Exception as error:
        return str(error)


@dataclass
class Started:
    """A command on one of the machines."""

    process: subprocess.Popen[bytes]
    file: Path

    @property
    def output(self) -> str:
        """What it has said so far."""
        return self.file.read_text(encoding="utf-8", errors="replace")

    def says(self, pattern: str, seconds: float = 120.0) -> re.Match[str]:
        """Wait for a line of its output. Raises AssertionError when it does not come."""
        deadline = time.monotonic() + seconds
        while (found := re.search(pattern, self.output, re.MULTILINE)) is None:
            assert self.process.poll() is None, f"ended with {self.process.returncode}: {self.output[-2000:]}"
            assert time.monotonic() < deadline, f"not within {seconds:g} s: {pattern!r} in {self.output[-2000:]}"
            time.sleep(0.1)
        return found

    def ends(self, seconds: float) -> None:
        """Wait for its end. Raises AssertionError unless it ends well."""
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGABRT)  # it says where it hangs
            self.process.wait(10)
            raise AssertionError(f"not over within {seconds:g} s: {self.output[-3000:]}") from None
        assert code == 0, f"ended with {code}: {self.output[-2000:]}"


@dataclass
class Machines:
    """Numbered from 0. Files of what runs on them are in ``folder``."""

    folder: Path
    net: Internet
    started: list[Started] = field(default_factory=list)

    def address(self, machine: int) -> str:
        """Its IP address; libp2p takes it for a public one."""
        return self.net.address(f"pub{1 + machine}")

    def inside(self, machine: int) -> tuple[str, ...]:
        """What starts a command there."""
        return self.net.on(f"pub{1 + machine}")

    def start(self, machine: int, *words: str, env: Mapping[str, str] | None = None) -> Started:
        """``python -m <words>``, with one thread for torch."""
        file = self.folder / f"{len(self.started)}.txt"
        own = {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **(env or {})}
        own |= {"TRAINKIT_RUNS": str(self.folder / "runs"), "XDG_STATE_HOME": str(self.folder / "state")}
        with file.open("wb") as out:
            process = subprocess.Popen(
                [*self.inside(machine), sys.executable, "-m", *words],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, **own, "PYTHONFAULTHANDLER": "1"},
                start_new_session=True,
                preexec_fn=partial(end_with, os.getpid()),
            )
        self.started.append(Started(process, file))
        return self.started[-1]

    def sent(self, machine: int) -> int:
        """Bytes that it has put on the wire, with all that Ethernet, IP and TCP add."""
        lines = subprocess.check_output([*self.inside(machine), "cat", "/proc/net/dev"], text=True).splitlines()
        (counted,) = [line.split() for line in lines if line.strip().startswith("eth0:")]
        return int(counted[9])


@contextmanager
def machines(count: int, folder: Path) -> Iterator[Machines]:
    """So many, at one switch. What still runs on them in the end is killed."""
    with internet(public=count, homes=0) as net:
        found = Machines(folder, net)
        try:
            yield found
        finally:
            # By their network: what a process has started may have outlived it.
            for machine in range(count):
                words = ["ip", "netns", "pids", f"{net.tag}-pub{1 + machine}"]
                while left := subprocess.check_output(words, text=True).split():
                    for pid in left:
                        with suppress(ProcessLookupError):
                            os.kill(int(pid), signal.SIGKILL)
                    time.sleep(0.01)
            for each in found.started:
                each.process.wait(10)
