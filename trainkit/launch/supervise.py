"""Looking after an attempt's ranks on this machine until they end: signals, time limit, progress, and the ending.

One supervisor for every run without a scheduler: a local job, and a node of `jobs.launch`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from trainkit.diagnosis.evidence import is_lost_connection, last_error
from trainkit.launch.processes import Death, Rank, RankGroup
from trainkit.ranks.signals import STARTING_SECONDS, Pulses, hang, is_hang, pulses
from trainkit.run.events import Attempt, life_of
from trainkit.run.lease import is_stopped

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
        handed_back=attempt.number in life_of(attempt.run).handed_back,
        timed_out=watch.timed_out,
        cancelled=watch.cancelled_at is not None,
        culprit=culprit,
        why=why,
    )


class _Watch:
    """What goes on between the start of the ranks and their end."""

    def __init__(self, group: RankGroup, counts: Pulses, limits: Limits, requests: Requests) -> None:
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
    failures = [item for item in life_of(attempt.run).failures if item.attempt == attempt.number]
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
