"""Child processes that belong together: the ranks that one machine starts by itself, without a scheduler.

They start together and end together, and every signal goes to a process by its id, never to a stranger that got the id
of one that is gone.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Any

from trainkit.fileio import append, readable

TICK_SECONDS = 0.2
"""How often signals that have come, time limits and output are looked at; of a rank's end one is told."""
NOTICE_SECONDS = 2.0
"""After a rank has failed, how long the others have to notice by themselves: their own words help to see why."""
GRACE_SECONDS = 3.0
"""Between SIGTERM and SIGKILL."""


@dataclass(frozen=True)
class Rank:
    """One process to start. Its output goes to the two files; None is this process's own."""

    command: Sequence[str]
    env: Mapping[str, str]
    stdout: Path | None
    stderr: Path | None


@dataclass(frozen=True)
class Death:
    """A rank that ended badly, before anybody told it to."""

    index: int
    code: int

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        out_of_memory = " (which the kernel does when memory runs out)" if self.code == -signal.SIGKILL else ""
        return f"{_KILLED}{signal.Signals(-self.code).name}{out_of_memory}"


_KILLED = "killed by "


def is_killed(error: str) -> bool:
    """Whether an error is what a `Death` by a signal says."""
    return error.startswith(_KILLED)


class RankGroup:
    """Ranks on this machine, from start to end."""

    def __init__(self, ranks: Sequence[Rank], cwd: Path | None = None) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._ends: dict[int, int] = {}
        """Of ranks that run, by index: a descriptor that can be read from once it has ended."""
        self._over: set[int] = set()
        """Ranks whose end has been taken note of."""
        self._ending = False
        self.deaths: list[Death] = []
        """In the order in which they were noticed; of several at once a killed one first, for it was the cause."""
        try:
            for index, rank in enumerate(ranks):
                self._children.append(_start(rank, cwd))
                if hasattr(os, "pidfd_open"):  # Linux
                    self._ends[index] = os.pidfd_open(self._children[-1].pid)
        except BaseException:
            self.end(grace_seconds=0)
            raise

    def pid(self, index: int) -> int:
        """Process id of a rank."""
        return self._children[index].pid

    def exit_codes(self) -> list[int | None]:
        """Exit code by rank, None while it runs; negative for the signal that killed it."""
        codes, deaths = [], []
        for index, child in enumerate(self._children):
            codes.append(child.poll())
            if child.returncode is not None and index not in self._over:
                self._over.add(index)
                if index in self._ends:
                    os.close(self._ends.pop(index))
                _kill_group(child.pid)  # whatever a rank leaves behind: data loaders of one that was killed
                if child.returncode:
                    deaths.append(Death(index, child.returncode))
        if not self._ending:
            self.deaths += sorted(deaths, key=lambda death: death.code >= 0)
        return codes

    def signal(self, number: int) -> None:
        """Send a signal to every rank that runs, not to its data loaders: they must live until the ranks have saved."""
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)

    def wait(self, tick: Callable[[], None] = lambda: None) -> list[int]:
        """Wait until all have ended, calling ``tick`` often. If one fails, the others are ended within seconds."""
        failed_at: float | None = None
        while True:
            codes = self.exit_codes()
            if all(code is not None for code in codes):
                return [code for code in codes if code is not None]
            if failed_at is None and any(codes):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > NOTICE_SECONDS:
                return self.end()
            tick()
            self._rest()

    def end(self, grace_seconds: float = GRACE_SECONDS) -> list[int]:
        """End all that still run: SIGTERM, and SIGKILL after ``grace_seconds``."""
        self.exit_codes()
        self._ending = True
        if grace_seconds > 0:
            self.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while any(code is None for code in self.exit_codes()) and time.monotonic() < deadline:
            self._rest()
        for child in self._children:
            if child.poll() is None:
                _kill_group(child.pid)
        for child in self._children:
            child.wait()
        return [code for code in self.exit_codes() if code is not None]

    def _rest(self) -> None:
        """Until a rank ends, or for a moment."""
        readable(self._ends.values(), TICK_SECONDS)


def _start(rank: Rank, cwd: Path | None) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)  # loaded before the fork
    with contextlib.ExitStack() as files:
        out, err = (_open(files, path) for path in (rank.stdout, rank.stderr))
        return subprocess.Popen(
            list(rank.command), env=dict(rank.env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True, preexec_fn=lambda: _before_exec(libc),
        )  # fmt: skip


def _open(files: contextlib.ExitStack, path: Path | None) -> IO[Any] | None:
    return None if path is None else files.enter_context(append(path, path.parent))


def _before_exec(libc: ctypes.CDLL) -> None:
    # A signal must not kill a rank before Python has its handlers: ignoring is inherited.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.platform == "linux":
        # Should whoever started the ranks be killed outright, they must not go on as orphans.
        libc.prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG


def _kill_group(pid: int) -> None:
    # A rank leads a session and group of its own, so this reaches its children and nobody else's.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


@contextlib.contextmanager
def caught_signals(numbers: Sequence[int], handler: Callable[[int], None]) -> Any:
    """Handle these signals by ``handler``, which must only take note of them."""

    def note(number: int, frame: FrameType | None) -> None:
        handler(number)

    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)
