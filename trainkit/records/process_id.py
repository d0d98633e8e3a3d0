"""A process that cannot be mistaken for another: the machine it runs on, its number, and when it started."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit import reading


@dataclass(frozen=True)
class ProcessId:
    """One process, on whatever machine."""

    host: str
    pid: int
    started: str
    space: str = ""
    """Where the number counts: a container, or a machine before and after a restart, may have the same host name."""

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """That of a process which runs here now."""
        return cls(socket.gethostname(), pid, _start_time(pid) or "", _space())

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ProcessId | None:
        """From what `fields` has put into a record; None if it is not there or was written by somebody else."""
        host, pid = fields.get("host"), fields.get("pid")
        started, space = fields.get("process_started"), fields.get("process_space", "")
        if isinstance(host, str) and isinstance(started, str) and isinstance(space, str) and type(pid) is int:
            return cls(host, pid, started, space)
        return None

    def fields(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {
            "host": self.host,
            "pid": self.pid,
            "process_started": self.started,
            "process_space": self.space,
        }

    @classmethod
    def seen_from_here(cls, word: str) -> ProcessId | None:
        """That of a `word`; None if no such process is seen here, as from within a container or on another machine."""
        number, _, started = word.partition(":")
        seen = cls(socket.gethostname(), int(number) if number.isdigit() else 0, started, _space())
        return seen if seen.is_alive() else None

    def word(self) -> str:
        """The process for others who share its numbers of processes, in one word."""
        return f"{self.pid}:{self.started}"

    def is_here(self) -> bool:
        """Whether it counts among the processes that this one can see."""
        return self.host == socket.gethostname() and self.space in ("", _space())

    def is_alive(self) -> bool:
        """Whether it runs still. Only meaningful where `is_here`."""
        return bool(self.started) and _start_time(self.pid) == self.started

    def signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.is_here() and self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def is_stopped(pid: int) -> bool:
    """Whether a process of this machine is held by SIGSTOP or a debugger."""
    return (_stat(pid) or [""])[0] in ("T", "t")


def _space() -> str:
    try:
        boot = reading.read_text(Path("/proc/sys/kernel/random/boot_id"))[:8]
        return f"{boot}-{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str | None:
    """When a process started, as text that only it has; None if it does not run (a zombie does not)."""
    fields = _stat(pid)
    if fields is None:
        return None if Path("/proc/self/stat").exists() else _start_time_elsewhere(pid)
    return None if fields[0] in ("Z", "X") else fields[19]


def _stat(pid: int) -> list[str] | None:
    try:
        stat = reading.read_text(Path(f"/proc/{pid}/stat"))
    except OSError:
        return None
    return stat.rpartition(")")[2].split()  # the name before it may hold anything


def _start_time_elsewhere(pid: int) -> str | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return None
