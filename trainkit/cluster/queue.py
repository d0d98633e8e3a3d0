"""What jobs are doing now: asked from SLURM, or from this machine's processes for local runs. Never stored.

One question for many jobs: sites warn users who ask for each.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from trainkit.errors import UserError
from trainkit.records.history import Life, Submission, life_of
from trainkit.records.rundir import RunDir

Alive = Literal["yes", "no", "unknown"]
"""Whether a job may still write, now or after waiting in the queue. Unknown is never taken for no."""

ENDED = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "TIMEOUT"),
    )
)
ENDING_SECONDS = 60.0
"""How long to wait for a job that is being ended; SLURM gives its tasks 30 s by default."""
_SQUEUE_FORMAT = "%i|%T|%r|%M|%N"


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
    is_gone: bool = False
    """The queue has answered and does not have it: it is over, however it ended."""

    @property
    def alive(self) -> Alive:
        """Of a run without a job, nothing is alive that one could ask for."""
        if not self.job_id or self.is_gone or self.state in ENDED:
            return "no"
        return "unknown" if self.state == "UNKNOWN" else "yes"


def job_states(runs: Sequence[RunDir]) -> list[JobState]:
    """State of each run's newest job, with at most two calls to SLURM."""
    lives = [life_of(run) for run in runs]
    asked = [life.submission.job_id for life in lives if life.submission and life.submission.executor == "slurm"]
    told, is_gone, complaint = _ask_slurm(asked) if asked else ({}, False, "")
    states = []
    for run, life in zip(runs, lives, strict=True):
        if life.submission is None:
            states.append(_without_job(life))
        elif life.submission.executor == "slurm":
            states.append(told.get(life.submission.job_id) or _by_record(life.submission, complaint, is_gone))
        else:
            states.append(_local(run, life.submission))
    return states


def job_state(run: RunDir) -> JobState:
    """State of one run's newest job."""
    return job_states([run])[0]


def require_no_job(run: RunDir, *, force: bool) -> None:
    """Refuse to start on a run whose job lives, or, unless ``force``, may live for all that anybody can tell.

    Waits for one that is just being ended.
    """
    state = job_state(run)
    deadline = time.monotonic() + ENDING_SECONDS
    while state.state == "COMPLETING" and time.monotonic() < deadline:  # cancelled a moment ago
        time.sleep(1)
        state = job_state(run)
    if state.alive == "yes":
        raise UserError(
            f"{run.name} is {state.state} (job {state.job_id}).",
            why="Two jobs on one run would write over each other.",
            fix=f"Wait for it, or `python -m jobs.cancel {run.path}` first.",
        )
    if state.alive == "unknown" and not force:
        raise UserError(
            f"Nobody can tell whether job {state.job_id} of {run.name} still runs.",
            why=f"{state.reason}. Two jobs on one run would write over each other.",
            fix="Ask again later or elsewhere; if you know that it has ended, add --force.",
        )


def read_squeue(text: str) -> dict[str, JobState]:
    """Jobs by id from ``squeue -h -r -o "%i|%T|%r|%M|%N"``."""
    found = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 5:
            job_id, state, reason, _, nodes = fields
            found[job_id] = JobState(state, job_id, "slurm", "" if reason == "None" else reason, nodes)
    return found


def read_sacct(text: str) -> dict[str, JobState]:
    """Jobs by id from ``sacct -X -n -P -D -o JobID,State,ExitCode,NodeList``; of a requeued job the newest run."""
    found = {}
    for line in text.splitlines():
        fields = line.strip().split("|")
        if len(fields) == 4 and "[" not in fields[0]:
            job_id, state, exit_code, nodes = fields
            reason = f"exit code {exit_code}" if exit_code not in ("", "0:0") else ""
            nodes = "" if nodes == "None assigned" else nodes
            # "CANCELLED by 0"
            found[job_id] = JobState(state.split()[0] if state else "UNKNOWN", job_id, "slurm", reason, nodes)
    return found


def _ask_slurm(job_ids: Iterable[str]) -> tuple[dict[str, JobState], bool, str]:
    """Jobs by id; whether the queue has answered: what it does not have is over; a complaint if somebody has not."""
    wanted = set(job_ids)
    ids = ",".join(sorted(wanted))
    complaint, has_answered = "", True
    found: dict[str, JobState] = {}
    # `-t all` also shows jobs that have just ended, with or without accounting.
    try:
        found = read_squeue(_run("squeue", "-h", "-r", "-t", "all", "-j", ids, "-o", _SQUEUE_FORMAT))
    except _NoAnswer as error:
        if "invalid job id" not in str(error).lower():  # which only means that the queue has forgotten it
            complaint, has_answered = str(error), False
    # An ended job's own word is in the accounts: squeue shows COMPLETING and forgets.
    missing = [job for job in wanted if job not in found]
    if missing:
        try:
            accounts = read_sacct(
                _run(
                    "sacct",
                    "-X",
                    "-n",
                    "-P",
                    "-D",
                    "-j",
                    ",".join(sorted(missing)),
                    "-o",
                    "JobID,State,ExitCode,NodeList",
                )
            )
            found |= {job: state for job, state in accounts.items() if job in missing}
        except _NoAnswer as error:
            complaint = complaint or f"the queue has forgotten it, and there is no accounting here ({error})"
    return found, has_answered, complaint


def _without_job(life: Life) -> JobState:
    """A run that nobody submitted: of torchrun, of `jobs.train`. Only its own record speaks of it."""
    if life.finished or life.outcome is not None:
        return JobState("COMPLETED" if life.finished else str(life.outcome), reason="by its own record")
    if life.started:
        return JobState("UNKNOWN", reason="started without jobs.submit, so nobody can be asked")
    return JobState("NOT SUBMITTED")


def _by_record(submission: Submission, complaint: str, is_gone: bool) -> JobState:
    """SLURM does not know the job: long after its end where there is no accounting, or it does not answer."""
    if submission.finished or submission.ended is not None:
        reason = "by its own record; SLURM has forgotten the job"
        state = "COMPLETED" if submission.finished else str(submission.ended)
        return JobState(state, submission.job_id, "slurm", reason, is_gone=is_gone)
    why = complaint or "SLURM does not know the job"
    return JobState("UNKNOWN", submission.job_id, "slurm", why, is_gone=is_gone)


def _local(run: RunDir, submission: Submission) -> JobState:
    job_id, executor, process = submission.job_id, submission.executor, submission.process
    if submission.ended is not None:
        return JobState(submission.ended, job_id, executor)
    if process is None or not process.is_here():
        where = f"it runs on {process.host}; ask there" if process else "its process is not recorded"
        return JobState("UNKNOWN", job_id, executor, where)
    if not process.is_alive():
        again = life_of(run).submission  # it may have ended between the two looks
        if again is not None and again.ended is not None:
            return JobState(again.ended, job_id, executor)
        return JobState("FAILED", job_id, executor, "the process that ran it is gone without a word")
    if len(run.attempts()) > submission.attempts_before:
        return JobState("RUNNING", job_id, executor, nodes=process.host)
    return JobState("PENDING", job_id, executor, "waits for its turn")


class _NoAnswer(Exception):
    """SLURM did not answer; with its words."""


def _run(*command: str) -> str:
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=30, check=False, stdin=subprocess.DEVNULL
        )
    except FileNotFoundError:
        raise _NoAnswer(f"there is no {command[0]} on this machine") from None
    except subprocess.TimeoutExpired:
        raise _NoAnswer(f"{command[0]} did not answer within 30 s") from None
    if done.returncode:
        raise _NoAnswer(
            re.sub(r"\s+", " ", done.stderr).strip() or f"{command[0]} failed with exit code {done.returncode}"
        )
    return done.stdout
