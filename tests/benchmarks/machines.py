"""Machines with a network of their own, which counts their bytes: network namespaces, and processes in them.

Nothing of them has a name or outlives this process, however that ends: each namespace is held by a ``cat`` whose input
ends with it, and whoever is started here is killed by the kernel.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.benchmarks.processes import PROJECT, end_with

TOKEN = r"TRAINKIT_TOKEN=(trainkit1\.\S+) python -m jobs\.join$"
"""The line with which `swarm create` invites."""


def absent() -> str:
    """Why there can be no machines here; empty if there can."""
    missing = [tool for tool in ("ip", "nsenter", "unshare") if shutil.which(tool) is None]
    if os.geteuid() != 0:
        return "network namespaces need root"
    return f"needs {', '.join(missing)}" if missing else ""


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
    holders: list[subprocess.Popen[bytes]]
    started: list[Started] = field(default_factory=list)

    def address(self, machine: int) -> str:
        """Its IP address; libp2p takes it for a public one."""
        return f"45.10.10.{10 + machine}"

    def inside(self, machine: int) -> list[str]:
        """What starts a command there."""
        return _inside(self.holders[1 + machine])

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

    def sent(self) -> list[int]:
        """Bytes that each machine has put on the wire, with all that Ethernet, IP and TCP add."""
        found = []
        for holder in self.holders[1:]:
            lines = Path(f"/proc/{holder.pid}/net/dev").read_text(encoding="ascii").splitlines()
            found += [int(line.split()[9]) for line in lines if line.strip().startswith("eth0:")]
        return found


@contextmanager
def machines(count: int, folder: Path) -> Iterator[Machines]:
    """So many, at one switch. What still runs on them in the end is killed."""
    with ExitStack() as held:
        holders = [held.enter_context(_namespace()) for _ in range(1 + count)]
        switch = _inside(holders[0])
        _run(*switch, "ip", "link", "add", "br0", "type", "bridge")
        _run(*switch, "ip", "link", "set", "br0", "up")
        found = Machines(folder, holders)
        for machine in range(count):
            inside, port = found.inside(machine), f"port{machine}"
            # Made at the switch, one end moved into the machine: none is ever among the real machine's own.
            _run(*switch, "ip", "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", _pid(inside))
            _run(*switch, "ip", "link", "set", port, "master", "br0", "up")
            _run(*inside, "ip", "address", "add", f"{found.address(machine)}/24", "dev", "eth0")
            _run(*inside, "ip", "link", "set", "eth0", "up")
            _run(*inside, "ip", "link", "set", "lo", "up")
        try:
            yield found
        finally:
            # By their network: what a process has started may have outlived it.
            while left := [pid for holder in holders[1:] for pid in _living_in(holder)]:
                for pid in left:
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                time.sleep(0.01)
            for each in found.started:
                each.process.wait(10)


@contextmanager
def _namespace() -> Iterator[subprocess.Popen[bytes]]:
    holder = subprocess.Popen(["unshare", "--net", "cat"], bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert holder.stdin is not None
    assert holder.stdout is not None
    try:
        holder.stdin.write(b"there?\n")
        holder.stdout.readline()  # it is in its namespace
        yield holder
    finally:
        holder.communicate()  # closes its input


def _inside(holder: subprocess.Popen[bytes]) -> list[str]:
    return ["nsenter", "--target", str(holder.pid), "--net"]


def _pid(inside: Sequence[str]) -> str:
    return inside[2]


def _living_in(holder: subprocess.Popen[bytes]) -> list[int]:
    """The processes in its namespace, but for itself."""
    found, here = [], os.stat(f"/proc/{holder.pid}/ns/net").st_ino
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if os.stat(process / "ns/net").st_ino == here and int(process.name) != holder.pid:
                found.append(int(process.name))
    return found


def _run(*command: str) -> None:
    subprocess.run(command, check=True)
