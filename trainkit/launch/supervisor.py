"""Ranks that this machine starts itself: they start together, are supervised, and end together.

A local job and a node of `jobs.launch` use the same supervisor. It passes signals on, keeps the time limit, watches
progress, and says how the ranks ended. It signals processes that it started, never one that reuses their id.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

from trainkit.diagnosis.evidence import RankLog, is_lost_connection
from trainkit.fileio import append, readable
from trainkit.launch.restarts import KILLED
from trainkit.ranks.signals import STARTING_SECONDS, Heartbeats, hang, is_hang, pulses
from trainkit.run.events import Attempt, history_of
from trainkit.run.lease import is_stopped

TICK_SECONDS = 0.2
"""Seconds between two looks at requests, time limits and output; the end of a rank wakes the supervisor at once."""
NOTICE_SECONDS = 2.0
"""After a rank has failed, the others have so long to notice by themselves: their own words help to find the cause."""
GRACE_SECONDS = 3.0
"""Between SIGTERM and SIGKILL."""
OWN_WATCHDOG_SECONDS = 15.0
"""Ranks that hang name the one that is behind themselves; the supervisor waits so much longer before it does."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
_LOOK_SECONDS = 1.0
_LATE_SECONDS = 10.0
"""A supervisor that has not looked for so long was stopped itself, and does not know what its ranks did meanwhile."""


@dataclass(frozen=True)
class Rank:
    """One process to start. It writes to ``log`` with the endings .out and .err."""

    command: Sequence[str]
    env: Mapping[str, str]
    log: Path


@dataclass(frozen=True)
class Death:
    """A rank that ended badly before anybody told it to."""

    index: int
    code: int

    def __str__(self) -> str:
        if self.code >= 0:
            return f"exit code {self.code}"
        out_of_memory = " (which the kernel does when memory runs out)" if self.code == -signal.SIGKILL else ""
        return f"{KILLED}{signal.Signals(-self.code).name}{out_of_memory}"


class RankGroup:
    """The processes of the ranks, from start to end."""

    def __init__(self, ranks: Sequence[Rank], cwd: Path | None = None) -> None:
        self._children: list[subprocess.Popen[bytes]] = []
        self._running: dict[int, int | None] = {}
        """Index -> a descriptor that becomes readable when the rank ends; None where the kernel has none."""
        self._ending = False
        self.deaths: list[Death] = []
        """In the order in which they were noticed; of several at once a killed one first, for it was the cause."""
        try:
            for index, rank in enumerate(ranks):
                child = _start(rank, cwd)
                self._children.append(child)
                self._running[index] = os.pidfd_open(child.pid) if hasattr(os, "pidfd_open") else None
        except BaseException:
            self.end(grace_seconds=0)
            raise

    def pid(self, index: int) -> int:
        """Process id of a rank."""
        return self._children[index].pid

    def exit_codes(self) -> list[int | None]:
        """Exit code by rank, None while it runs; negative for the signal that killed it."""
        codes = [child.poll() for child in self._children]
        ended = {index: code for index, code in enumerate(codes) if code is not None and index in self._running}
        for index in ended:
            if (descriptor := self._running.pop(index)) is not None:
                os.close(descriptor)
            self._kill(index)  # what a rank leaves behind: data loaders of one that was killed
        if not self._ending:
            deaths = [Death(index, code) for index, code in ended.items() if code]
            self.deaths += sorted(deaths, key=lambda death: death.code >= 0)
        return codes

    def signal(self, number: int) -> None:
        """Send a signal to the ranks that run, not to their data loaders, which they need until they have saved."""
        for child in self._children:
            if child.poll() is None:
                child.send_signal(number)

    def wait(self, tick: Callable[[], None] = lambda: None) -> list[int]:
        """Wait until all have ended, and call ``tick`` often. If one fails, end the others within seconds."""
        failed_at: float | None = None
        while None in (codes := self.exit_codes()):
            if failed_at is None and any(codes):
                failed_at = time.monotonic()
            if failed_at is not None and time.monotonic() - failed_at > NOTICE_SECONDS:
                return self.end()
            tick()
            self._rest()
        return [child.returncode for child in self._children]

    def end(self, grace_seconds: float = GRACE_SECONDS) -> list[int]:
        """End all that still run: SIGTERM, and SIGKILL after ``grace_seconds``."""
        self.exit_codes()
        self._ending = True
        if grace_seconds > 0:
            self.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while None in self.exit_codes() and time.monotonic() < deadline:
            self._rest()
        for index, child in enumerate(self._children):
            if child.poll() is None:
                self._kill(index)
        for child in self._children:
            child.wait()
        self.exit_codes()
        return [child.returncode for child in self._children]

    def _rest(self) -> None:
        readable([descriptor for descriptor in self._running.values() if descriptor is not None], TICK_SECONDS)

    def _kill(self, index: int) -> None:
        # A rank leads a session and group of its own, so this reaches its children and nobody else's.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._children[index].pid, signal.SIGKILL)


def _start(rank: Rank, cwd: Path | None) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None)  # loaded before the fork

    def before_exec() -> None:
        # A signal must not kill a rank before Python has its handlers: ignoring is inherited.
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if sys.platform == "linux":
            # If the supervisor is killed outright, its ranks must not go on as orphans.
            libc.prctl(1, signal.SIGKILL)  # 1: PR_SET_PDEATHSIG

    folder = rank.log.parent
    with append(rank.log.with_suffix(".out"), folder) as out, append(rank.log.with_suffix(".err"), folder) as err:
        return subprocess.Popen(
            list(rank.command), env=dict(rank.env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True, preexec_fn=before_exec,
        )  # fmt: skip


@dataclass(frozen=True)
class Limits:
    """What the supervisor enforces; all in seconds."""

    time: float
    lead: float
    """Before the time limit the ranks are told to save."""
    hang: float
    """Ranks that make no progress for so long hang."""
    cancel: float
    """After a cancel the ranks may save for so long."""


@dataclass
class Requests:
    """What signals asked for: handlers set it, the supervisor reads it."""

    cancel: bool = False
    cancel_all: bool = False
    preempt: bool = False
    kill: bool = False

    def note(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: USR2 preempts, INT and TERM cancel, and kill the second time."""
        if number == signal.SIGUSR2:
            self.preempt = True
            return
        self.kill = self.cancel
        self.cancel = True
        self.cancel_all |= number == signal.SIGTERM


@contextlib.contextmanager
def signal_requests() -> Iterator[Requests]:
    """What this process's signals ask for while the body runs."""
    requests = Requests()
    before = {number: signal.signal(number, requests.note) for number in SIGNALS}
    try:
        yield requests
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@dataclass(frozen=True)
class Ending:
    """How the ranks of an attempt ended on this node."""

    state: str
    """In SLURM's words."""
    codes: tuple[int, ...]
    culprit: int | None
    """Of failed ranks the first, counted from this node's first."""
    why: str


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
    """Start the ranks, supervise them, and say how they ended. A failure is recorded with the rank that caused it.

    Args:
        first_rank: the number, among all ranks, of the first one here.
        tick: called often.
    """
    with pulses(len(ranks)) as counts:
        counted = [replace(rank, env={**rank.env, **counts.variable(index)}) for index, rank in enumerate(ranks)]
        group = RankGroup(counted, cwd)
        watch = _Watch(group, counts, limits, requests)

        def look() -> None:
            watch.look()
            tick()

        codes = tuple(group.wait(look))
    cancelled = watch.cancelled_at is not None
    culprit, why = watch.hanging or (None, "")
    if culprit is not None:
        attempt.failed(why, rank=first_rank + culprit)
    elif not watch.timed_out and not cancelled:
        culprit, why = _cause(attempt, group, first_rank)
    if watch.timed_out:
        state = "TIMEOUT"
    elif any(codes) or culprit is not None:
        state = "CANCELLED" if cancelled else "FAILED"
    elif attempt.number in history_of(attempt.run).handed_back:
        state = "PREEMPTED"
    else:
        state = "CANCELLED" if cancelled else "COMPLETED"
    return Ending(state, codes, culprit, why)


class _Watch:
    """What happens between the start of the ranks and their end."""

    def __init__(self, group: RankGroup, counts: Heartbeats, limits: Limits, requests: Requests) -> None:
        self._group, self._counts, self._limits, self._requests = group, counts, limits, requests
        self._began = self._moved = self._looked = time.monotonic()
        self._seen = counts.read()
        self._told = False
        self.cancelled_at: float | None = None
        self.timed_out = False
        self.hanging: tuple[int, str] | None = None

    def look(self) -> None:
        """Pass requests on, keep the time limit, and check that the ranks make progress."""
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
            self.hanging = index, hang(patience, ", and it is stopped by a signal" * bool(stopped))
            self._group.end(grace_seconds=0)


def _cause(attempt: Attempt, group: RankGroup, first_rank: int) -> tuple[int | None, str]:
    """The rank that failed first, counted from this node's first, and why. Recorded unless the rank has done so itself.

    When one dies, the others fail for want of it, often before it has been missed: a lost connection counts as the
    cause only where there is no other.
    """
    if not group.deaths:
        return None, ""
    failures = [item for item in history_of(attempt.run).failures if item.attempt == attempt.number]
    for item in failures:
        if is_hang(item.error):  # by their own watchdogs, all ranks have ended at once
            return (item.rank or first_rank) - first_rank, item.error
    recorded = {item.rank: item.error for item in failures}
    whys = {}
    for death in group.deaths:
        rank = first_rank + death.index
        own_words = recorded.get(rank) or RankLog(attempt.logs / f"rank-{rank}.err").error if death.code > 0 else ""
        whys[death.index] = own_words or str(death)
    index = next((index for index, why in whys.items() if not is_lost_connection(why)), group.deaths[0].index)
    if recorded.get(first_rank + index) != whys[index]:
        attempt.failed(whys[index], rank=first_rank + index)
    return index, whys[index]
