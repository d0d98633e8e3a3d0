"""A process that cannot be mistaken for another: the machine it runs on, its number, and when it started."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """A process that cannot be mistaken: its machine, its number, and when it started."""

    host: str
    pid: int
    started: str

    @classmethod
    def of(cls, pid: int) -> ProcessId:
        """That of a process which runs here now."""
        return cls(socket.gethostname(), pid, _start_time(pid) or "")

    def is_here(self) -> bool:
        """Whether this is the machine that it runs on."""
        return self.host == socket.gethostname()

    def is_alive(self) -> bool:
        """Whether it runs still. Only meaningful where `is_here`."""
        return bool(self.started) and _start_time(self.pid) == self.started

    def signal(self, number: int) -> None:
        """Signal it, unless it has ended."""
        if self.is_here() and self.is_alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)


def _start_time(pid: int) -> str | None:
    """When a process started, as text that only it has; None if it does not run (a zombie does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return _start_time_elsewhere(pid) if not Path("/proc/self/stat").exists() else None
    except OSError:
        return None
    fields = stat.rpartition(")")[2].split()  # the name before it may hold anything
    return None if fields[0] in ("Z", "X") else fields[19]


def _start_time_elsewhere(pid: int) -> str | None:
    import psutil

    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else str(process.create_time())
    except psutil.Error:
        return None
