"""Asking SLURM for many jobs at once: sites warn users who ask for each."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from trainkit import programs, terminal
from trainkit.programs import NoAnswer

Alive = Literal["yes", "no", "unknown"]
"""Whether a job may still write, now or after waiting in the queue. Unknown is never taken for no."""

ENDED = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "TIMEOUT"),
    )
)
_SQUEUE_FORMAT = "%i|%T|%r|%M|%N|%S"
_LONGEST = 5000
"""Characters of a list of nodes."""
_ALIVE: Sequence[Alive] = ("no", "unknown", "yes")


@dataclass(frozen=True)
class JobState:
    """State of a run's newest job, in SLURM's words: PENDING, RUNNING, COMPLETED, FAILED, CANCELLED, TIMEOUT, ...

    NOT SUBMITTED for a run without a job; UNKNOWN, with the reason, where nobody can tell.
    """

    state: str
    job_id: str = ""
    executor: str = ""
    reason: str = ""
    nodes: str = ""
    start: str = ""
    """When SLURM means to start a job that waits, by its clock: 2026-11-21T22:04:10. Empty while it has no idea."""
    is_gone: bool = False
    """The queue has answered and does not have it: it is over, however it ended."""
    also: tuple[JobState, ...] = ()
    """Earlier jobs of the run that live, or may."""

    @property
    def alive(self) -> Alive:
        """Whether this or an earlier job of the run may still write."""
        return max((self._alone, *(other.alive for other in self.also)), key=_ALIVE.index)

    def living(self) -> list[JobState]:
        """Every job of the run that lives, or may, newest first; each alone."""
        own = [] if self._alone == "no" else [replace(self, also=())]
        return own + [job for other in self.also for job in other.living()]

    @property
    def _alone(self) -> Alive:
        if self.is_gone or self.state in ENDED:
            return "no"
        if self.state == "UNKNOWN":  # of a run that nobody has submitted, nothing is alive that one could ask for
            return "unknown" if self.executor else "no"
        return "yes" if self.executor else "no"


@dataclass(frozen=True)
class Answer:
    """What SLURM says of some jobs."""

    jobs: Mapping[str, JobState] = field(default_factory=dict)
    has_answered: bool = True
    """The queue has: what it does not have is over."""
    complaint: str = ""
    """Why somebody has not answered."""


def ask(
    job_ids: Iterable[str], *, only_if_queued: Iterable[str] = (), heard: Callable[[str], None] = lambda command: None
) -> Answer:
    """What the jobs do, with at most two commands.

    Args:
        only_if_queued: further jobs, of which it only matters whether they are over.
        heard: told of each command that is given.
    """
    wanted, others = set(job_ids), set(only_if_queued)
    if not wanted | others:
        return Answer()
    complaint, has_answered = "", True
    found: dict[str, JobState] = {}
    ids = ",".join(sorted(wanted | others))
    # `-t all` also shows jobs that have just ended, with or without accounting.
    heard("squeue")
    try:
        found = read_squeue(run("squeue", "-h", "-r", "-t", "all", "-j", ids, "-o", _SQUEUE_FORMAT))
    except NoAnswer as error:
        if "invalid job id" not in error.words.lower():  # which only means that the queue has forgotten it
            complaint, has_answered = error.words, False
    # An ended job's own word is in the accounts: squeue shows COMPLETING and forgets.
    missing = {job for job in (wanted if has_answered else wanted | others) if job not in found}
    if missing:
        heard("sacct")
        fields = "JobID,State,ExitCode,NodeList"
        try:
            accounts = read_sacct(run("sacct", "-X", "-n", "-P", "-D", "-j", ",".join(sorted(missing)), "-o", fields))
            told = {job: state for job, state in accounts.items() if job in missing}
            found |= told if has_answered else {job: _doubted(state) for job, state in told.items()}
        except NoAnswer as error:
            complaint = complaint or f"the queue has forgotten it, and there is no accounting here ({error.words})"
    return Answer(found, has_answered, complaint)


def _doubted(state: JobState) -> JobState:
    """By the accounts alone: SLURM may have put it back into the queue since."""
    if state.state not in ("BOOT_FAIL", "NODE_FAIL", "PREEMPTED", "REQUEUED"):
        return state
    reason = f"the accounts say {state.state}, and the queue, to which it may have returned, does not answer"
    return replace(state, state="UNKNOWN", reason=reason)


def read_squeue(text: str) -> dict[str, JobState]:
    """Jobs by id from ``squeue -h -r -o "%i|%T|%r|%M|%N|%S"``."""
    found = {}
    for line in text.splitlines():
        fields = [terminal.one_line(field, _LONGEST) for field in line.strip().split("|")]
        if len(fields) in (5, 6):
            job_id, state, reason, _, nodes, start = [*fields, ""][:6]
            start = start if state == "PENDING" and re.fullmatch(r"[\dT:-]{16,}", start) else ""
            found[job_id] = JobState(state, job_id, "slurm", "" if reason == "None" else reason, nodes, start)
    return found


def read_sacct(text: str) -> dict[str, JobState]:
    """Jobs by id from ``sacct -X -n -P -D -o JobID,State,ExitCode,NodeList``; of a requeued job the newest run."""
    found = {}
    for line in text.splitlines():
        fields = [terminal.one_line(field, _LONGEST) for field in line.strip().split("|")]
        if len(fields) == 4 and "[" not in fields[0]:
            job_id, state, exit_code, nodes = fields
            reason = f"exit code {exit_code}" if exit_code not in ("", "0:0") else ""
            nodes = "" if nodes == "None assigned" else nodes
            # "CANCELLED by 0"
            found[job_id] = JobState(state.split()[0] if state else "UNKNOWN", job_id, "slurm", reason, nodes)
    return found


def run(*command: str) -> str:
    """What a command of SLURM's prints. Raises `NoAnswer`."""
    return programs.ask(command).require()
