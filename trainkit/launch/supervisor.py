"""Supervision of the ranks of one node: start, signals, time limit, hangs, and how they ended."""

import contextlib
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from trainkit.cluster.pickles import PYTHON_FLAGS
from trainkit.cluster.signals import STARTING_SECONDS, Heartbeats, ending_in_words, hang, is_hang, pulses
from trainkit.common.fileio import append
from trainkit.diagnosis.rank_log import RankLog, is_lost_connection
from trainkit.recovery.keeper import CAN_FORK
from trainkit.recovery.nursery import FILE, ForkedRank, Nursery, be_child
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of
from trainkit.run.run_lease import is_stopped
from trainkit.script.script_rank import family

TICK_SECONDS = 0.05
"""Seconds between two looks at the ranks, at requests and at output."""
NOTICE_SECONDS = 2.0
"""Time for other ranks to notice a failed one by themselves: their words help to find the cause."""
GRACE_SECONDS = 3.0
"""Between SIGTERM and SIGKILL."""
OWN_WATCHDOG_SECONDS = 15.0
"""Extra wait of the supervisor: ranks that hang name the one that is behind themselves."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
_LOOK_SECONDS = 1.0
_LATE_SECONDS = 10.0
"""A supervisor that has not looked for this long was stopped, and does not know what its ranks did meanwhile."""


class Rank(NamedTuple):
    """One process to start. It writes to ``log`` with the endings .out and .err."""

    command: Sequence[str]
    env: Mapping[str, str]
    log: Path


class RankGroup:
    """The processes of the ranks, from start to end."""

    def __init__(
        self, ranks: Sequence[Rank], cwd: Path | None = None, inherited: Sequence[int] = (), run: RunDir | None = None
    ) -> None:
        """Start them.

        Args:
            cwd: their current folder.
            inherited: descriptors that they inherit.
            run: whose ranks they are; several then share their imports, where the run's code knows how.
        """
        self._children: list[subprocess.Popen[bytes] | ForkedRank] = []
        self._running: set[int] = set()
        self._ending = False
        self.deaths: dict[int, int] = {}
        """Rank -> exit code of those that ended badly before anybody told them to, in the order in which they were
        noticed; of several at once a killed one first, for it was the cause."""
        try:
            if run is not None and (Nursery.stands_by(run) or _share_imports(run, ranks)):
                self._children += _start_together(run, ranks, cwd, inherited)
                self._running.update(range(len(ranks)))
            else:
                for index, rank in enumerate(ranks):
                    self._children.append(_start(rank, cwd, inherited))
                    self._running.add(index)
        except BaseException:
            self.end(grace_seconds=0)
            raise

    def pid(self, index: int) -> int:
        """Process id of a rank."""
        return self._children[index].pid

    def exit_codes(self) -> list[int | None]:
        """Exit code by rank, None while it runs; negative for the signal that killed it."""
        codes = [child.poll() for child in self._children]
        bad: dict[int, int] = {}
        for index, code in enumerate(codes):
            if index not in self._running or code is None:
                continue
            self._running.discard(index)
            self._kill(index)  # what a rank leaves behind: data loaders of one that was killed
            if code:
                bad[index] = code
        if not self._ending:
            self.deaths |= sorted(bad.items(), key=lambda item: item[1] >= 0)
        return codes

    def signal(self, number: int) -> None:
        """Send a signal to the ranks that run, not to their data loaders, which they need until they have saved."""
        for child in self._children:
            child.send_signal(number)

    def wait(self, tick: Callable[[], None] = lambda: None) -> list[int]:
        """Wait until all have ended, and call ``tick`` often. If one fails, end the others within seconds."""
        failed_at = math.inf
        codes = self.exit_codes()
        while None in codes:
            now = time.monotonic()
            if any(codes):
                failed_at = min(failed_at, now)
            if now - failed_at > NOTICE_SECONDS:
                return self.end()
            tick()
            time.sleep(TICK_SECONDS)
            codes = self.exit_codes()
        return [child.wait() for child in self._children]

    def end(self, grace_seconds: float = GRACE_SECONDS) -> list[int]:
        """End all that still run: SIGTERM, and SIGKILL after ``grace_seconds``."""
        self.exit_codes()
        self._ending = True
        if grace_seconds > 0:
            self.signal(signal.SIGTERM)
        deadline = time.monotonic() + grace_seconds
        while None in self.exit_codes() and time.monotonic() < deadline:
            time.sleep(TICK_SECONDS)
        for index in self._running:
            self._kill(index)
        return [child.wait() for child in self._children]

    def _kill(self, index: int) -> None:
        # A rank leads a session and group of its own, so this reaches its children and nobody else's.
        child = self._children[index]
        if isinstance(child, ForkedRank):
            child.kill_group()
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)


def _share_imports(run: RunDir, ranks: Sequence[Rank]) -> bool:
    return len(ranks) > 1 and CAN_FORK and (run.code / FILE).is_file()


def _start_together(run: RunDir, ranks: Sequence[Rank], cwd: Path | None, inherited: Sequence[int]) -> list[ForkedRank]:
    first = ranks[0]
    nursery = Nursery.of(run, PYTHON_FLAGS, first.env, first.log, cwd=cwd, inherited=inherited)
    started = []
    for rank in ranks:
        started.append(nursery.start(rank.command, rank.env, rank.log, is_alone=len(ranks) == 1))
    nursery.complete()
    return started


def _start(rank: Rank, cwd: Path | None, inherited: Sequence[int]) -> subprocess.Popen[bytes]:
    folder = rank.log.parent
    with append(rank.log.with_suffix(".out"), folder) as out, append(rank.log.with_suffix(".err"), folder) as err:
        return subprocess.Popen(
            list(rank.command), env=dict(rank.env), cwd=cwd, stdin=subprocess.DEVNULL, stdout=out, stderr=err,
            start_new_session=True, preexec_fn=be_child, pass_fds=inherited,
        )  # fmt: skip


@dataclass(frozen=True)
class TimeLimits:
    """Limits that the supervisor enforces; all in seconds."""

    time: float
    lead: float
    """Before the time limit the ranks are told to save."""
    hang: float
    """Time without progress after which ranks hang."""
    cancel: float
    """Time that ranks have to save after a cancel."""


@dataclass
class Requests:
    """Requests that came by signals: handlers set them, the supervisor reads them."""

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

    def forget_run(self) -> None:
        """Forget what was asked of a run that has ended: the next one was not meant."""
        self.cancel = False
        self.preempt = False
        self.kill = False


@contextlib.contextmanager
def signal_requests() -> Iterator[Requests]:
    """Collect the requests of this process's signals while the body runs."""
    requests = Requests()
    before = {}
    for number in SIGNALS:
        before[number] = signal.signal(number, requests.note)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)  # whoever started this process may have blocked them
    try:
        yield requests
    finally:
        for number, old in before.items():
            signal.signal(number, old)


class Ending(NamedTuple):
    """End of an attempt's ranks on this node."""

    state: str
    """State in SLURM's words."""
    codes: tuple[int, ...]
    culprit: int | None
    """First rank that failed, counted from this node's first."""
    why: str


def supervise(
    attempt: Attempt, ranks: Sequence[Rank], limits: TimeLimits, requests: Requests, *,
    cwd: Path | None = None, first_rank: int = 0, tick: Callable[[], None] = lambda: None,
) -> Ending:  # fmt: skip
    """Start the ranks, supervise them, and say how they ended. A failure is recorded with the rank that caused it.

    Args:
        first_rank: the number, among all ranks, of the first one here.
        tick: called often.
    """
    with pulses(len(ranks)) as counts:
        counted = []
        for index, rank in enumerate(ranks):
            counted.append(rank._replace(env={**rank.env, **counts.variable(index)}))
        group = RankGroup(counted, cwd, [counts.descriptor], attempt.run)
        watch = _Watch(group, counts, limits, requests, tick)
        codes = tuple(group.wait(watch.look))
    attempt = attempt.newest_in_place()
    is_cancelled = watch.cancelled_at is not None
    culprit = None
    why = ""
    if watch.hanging is not None:
        culprit, why = watch.hanging
        attempt.failed(why, rank=first_rank + culprit)
    elif not watch.timed_out and not is_cancelled:
        culprit, why = _cause(attempt, group, first_rank)
    is_bad = any(codes) or culprit is not None
    if watch.timed_out:
        state = "TIMEOUT"
    elif not is_bad and attempt.number in history_of(attempt.run).handed_back:
        state = "PREEMPTED"
    elif is_cancelled:
        state = "CANCELLED"
    else:
        state = "FAILED" if is_bad else "COMPLETED"
    return Ending(state, codes, culprit, why)


class _Watch:
    """Watch over the ranks between their start and their end."""

    def __init__(
        self, group: RankGroup, counts: Heartbeats, limits: TimeLimits, requests: Requests, tick: Callable[[], None]
    ) -> None:
        self._group = group
        self._counts = counts
        self._limits = limits
        self._requests = requests
        self._tick = tick
        self._began = self._moved = self._looked = time.monotonic()
        self._seen = counts.read()
        self._told = False
        self.cancelled_at: float | None = None
        self.timed_out = False
        self.hanging: tuple[int, str] | None = None

    def look(self) -> None:
        """Pass requests on, keep the time limit, and check that the ranks make progress."""
        self._tick()
        now = time.monotonic()
        limits = self._limits
        requests = self._requests
        if requests.preempt or (not self._told and now - self._began >= limits.time - limits.lead):
            requests.preempt = False
            self._told = True
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
            self._seen = counts
            self._moved = now
        patience = self._limits.hang
        if not all(counts):
            patience = max(patience, STARTING_SECONDS)
        if now - self._moved > patience + OWN_WATCHDOG_SECONDS:
            running = [index for index, code in enumerate(self._group.exit_codes()) if code is None]
            stopped = [index for index in running if any(map(is_stopped, family(self._group.pid(index))))]
            # The others wait for the one that is behind, so it is the one to look at.
            index = min(running, key=counts.__getitem__, default=0)
            why = ""
            if stopped:
                index = stopped[0]
                why = ", and it is stopped by a signal"
            self.hanging = (index, hang(patience, why))
            self._group.end(grace_seconds=0)


def _cause(attempt: Attempt, group: RankGroup, first_rank: int) -> tuple[int | None, str]:
    """Find the rank that failed first, counted from this node's first, and why; recorded unless it did so itself.

    When one dies, the others fail for want of it, often before it has been missed: a lost connection counts as the
    cause only where there is no other.
    """
    if not group.deaths:
        return None, ""
    recorded = {}
    for item in history_of(attempt.run).failures:
        if item.attempt == attempt.number:
            if is_hang(item.error):  # by their own watchdogs, all ranks have ended at once
                return (item.rank or first_rank) - first_rank, item.error
            recorded[item.rank] = item.error
    whys = {}
    for index, code in group.deaths.items():
        rank = first_rank + index
        own_words = ""
        if code > 0:
            own_words = recorded.get(rank) or RankLog(attempt.logs / f"rank-{rank}.err").error
        whys[index] = own_words or ending_in_words(code)
    index = min(whys, key=lambda index: is_lost_connection(whys[index]))  # the first of those that are not
    if recorded.get(first_rank + index) != whys[index]:
        attempt.failed(whys[index], rank=first_rank + index)
    return index, whys[index]
