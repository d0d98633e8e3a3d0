"""Ranks that one machine starts by itself: they start together, are looked after, and end together.

One supervisor for every run without a scheduler: a local job, and a node of `jobs.launch`. It passes on signals, keeps
the time limit, watches progress, and says how the ranks ended. Every signal goes to a process by its id, never to a
stranger that got the id of one that is gone.
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
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import IO, Any

from trainkit.diagnosis.evidence import is_lost_connection, last_error
from trainkit.fileio import append, readable
from trainkit.ranks.signals import STARTING_SECONDS, Heartbeats, hang, is_hang, pulses
from trainkit.run.events import Attempt, history_of
from trainkit.run.lease import is_stopped

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


SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
OWN_WATCHDOG_SECONDS = 15.0
"""Ranks that hang name the one that is behind themselves, if they can; only when so long has passed they cannot."""
_LOOK_SECONDS = 1.0
_LATE_SECONDS = 10.0
"""Who has not looked for so long was stopped itself, so that it knows nothing of the time in between."""


@dataclass(frozen=True)
class Limits:
    """What is kept for the ranks; all in seconds."""

    time: float
    lead: float
    """Before the time limit the ranks are told to save."""
    hang: float
    """No rank has made progress for so long: they hang."""
    cancel: float
    """After a cancel the ranks may save for so long."""


@dataclass
class Requests:
    """What signals asked for; set by handlers, read by the supervisor."""

    cancel: bool = False
    cancel_all: bool = False
    preempt: bool = False
    kill: bool = False

    def note(self, number: int) -> None:
        """A signal handler's whole work: USR2 preempts, INT and TERM cancel, and again kill."""
        if number == signal.SIGUSR2:
            self.preempt = True
            return
        self.kill = self.cancel
        self.cancel = True
        self.cancel_all |= number == signal.SIGTERM


@dataclass(frozen=True)
class Ending:
    """How the ranks of an attempt ended on this node."""

    codes: tuple[int, ...]
    handed_back: bool
    """They saved, because they were told to stop."""
    timed_out: bool
    cancelled: bool
    culprit: int | None
    """Of failed ranks the first, counted from this node's first."""
    why: str

    @property
    def state(self) -> str:
        """In SLURM's words."""
        if self.timed_out:
            return "TIMEOUT"
        if any(self.codes) or self.culprit is not None:
            return "CANCELLED" if self.cancelled else "FAILED"
        return "PREEMPTED" if self.handed_back else "CANCELLED" if self.cancelled else "COMPLETED"


def supervise(
    attempt: Attempt,
    ranks: Sequence[Rank],
    limits: Limits,
    requests: Requests,
    *,
    cwd: Path | None = None,
    first_rank: int = 0,
    tick: Callable[[], None] = lambda: None,
) -> Ending:
    """Start the ranks, look after them, and say how they ended; a failure is written down, with the rank that began it.

    Args:
        first_rank: the number, among all ranks, of the first one here.
        tick: called often.
    """
    with pulses(len(ranks)) as counts:
        told = [replace(rank, env={**rank.env, **counts.variable(index)}) for index, rank in enumerate(ranks)]
        group = RankGroup(told, cwd)
        watch = _Watch(group, counts, limits, requests)

        def look() -> None:
            watch.look()
            tick()

        codes = group.wait(look)
    if watch.hanging is not None:
        culprit: int | None
        culprit, why = watch.hanging
        attempt.failed(why, rank=first_rank + culprit)
    elif watch.timed_out or watch.cancelled_at is not None:
        culprit, why = None, ""
    else:
        culprit, why = _cause(attempt, group, first_rank)
    return Ending(
        codes=tuple(codes),
        handed_back=attempt.number in history_of(attempt.run).handed_back,
        timed_out=watch.timed_out,
        cancelled=watch.cancelled_at is not None,
        culprit=culprit,
        why=why,
    )


class _Watch:
    """What goes on between the start of the ranks and their end."""

    def __init__(self, group: RankGroup, counts: Heartbeats, limits: Limits, requests: Requests) -> None:
        self._group, self._counts, self._limits, self._requests = group, counts, limits, requests
        self._began = self._moved = self._looked = time.monotonic()
        self._seen = counts.read()
        self._told = False
        self.cancelled_at: float | None = None
        self.timed_out = False
        self.hanging: tuple[int, str] | None = None

    def look(self) -> None:
        """Pass on what was asked for, keep the time limit, and see whether the ranks make progress."""
        now, limits, requests = time.monotonic(), self._limits, self._requests
        if requests.preempt or (not self._told and now - self._began >= limits.time - limits.lead):
            requests.preempt, self._told = False, True
            self._group.signal(signal.SIGUSR2)
        if requests.cancel and self.cancelled_at is None:
            self.cancelled_at = now
            self._group.signal(signal.SIGTERM)
        if requests.kill or (self.cancelled_at is not None and now - self.cancelled_at > limits.cancel):
            self._group.end(grace_seconds=0)
        elif now - self._began >= limits.time:
            self.timed_out = True
            self._group.end()
        elif now - self._looked >= _LOOK_SECONDS:
            if now - self._looked > _LATE_SECONDS:
                self._moved = now
            self._looked = now
            self._look_for_a_hang(now)

    def _look_for_a_hang(self, now: float) -> None:
        counts = self._counts.read()
        if counts != self._seen:
            self._seen, self._moved = counts, now
        patience = self._limits.hang if all(counts) else max(self._limits.hang, STARTING_SECONDS)
        if now - self._moved > patience + OWN_WATCHDOG_SECONDS:
            running = [index for index, code in enumerate(self._group.exit_codes()) if code is None]
            stopped = [index for index in running if is_stopped(self._group.pid(index))]
            # The others wait for the one that is behind, so it is the one to look at.
            index = (stopped or sorted(running, key=lambda index: counts[index]) or [0])[0]
            how = ", and it is stopped by a signal" if stopped else ""
            self.hanging = index, hang(patience, how)
            self._group.end(grace_seconds=0)


def _cause(attempt: Attempt, group: RankGroup, first_rank: int) -> tuple[int | None, str]:
    """The rank that failed first, counted from this node's first, and why; written down unless it has said so itself.

    When one dies, the others fail for want of it, often before it has been missed: a lost connection is no cause as
    long as there is another.
    """
    if not group.deaths:
        return None, ""
    failures = [item for item in history_of(attempt.run).failures if item.attempt == attempt.number]
    for item in failures:
        if is_hang(item.error):  # by their own watchdogs, all ranks have ended at once
            return (item.rank or first_rank) - first_rank, item.error
    said = {item.rank: item.error for item in failures}

    def why(death: Death) -> str:
        rank = first_rank + death.index
        if death.code < 0:
            return str(death)
        return said.get(rank) or last_error(attempt.logs / f"rank-{rank}.err") or str(death)

    death = next((death for death in group.deaths if not is_lost_connection(why(death))), group.deaths[0])
    rank = first_rank + death.index
    if said.get(rank) != why(death):
        attempt.failed(why(death), rank=rank)
    return death.index, why(death)
