"""What jobs are doing now: asked from SLURM, or from this machine's processes for local runs. Never stored.

One question for many jobs: sites warn users who ask for each.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainkit.records.events import read_events
from trainkit.records.process_id import ProcessId
from trainkit.records.rundir import RunDir

ENDED = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "TIMEOUT", "UNKNOWN"),
    )
)
_BY_EVENT = {"finished": "COMPLETED", "failed": "FAILED"}
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

    @property
    def alive(self) -> bool:
        """Whether it may still write, now or after waiting in the queue."""
        return bool(self.job_id) and self.state not in ENDED


def job_states(runs: Sequence[RunDir]) -> list[JobState]:
    """State of each run's newest job, with at most two calls to SLURM."""
    submissions = [_submission(run) for run in runs]
    asked = [str(item["job_id"]) for item in submissions if item and item.get("executor") == "slurm"]
    told, complaint = _ask_slurm(asked) if asked else ({}, "")
    states = []
    for run, submitted in zip(runs, submissions, strict=True):
        if submitted is None:
            states.append(_without_job(run))
        elif submitted.get("executor") == "slurm":
            job_id = str(submitted["job_id"])
            states.append(told.get(job_id) or _by_record(run, submitted, complaint))
        else:
            states.append(_local(run, submitted))
    return states


def job_state(run: RunDir) -> JobState:
    """State of one run's newest job."""
    return job_states([run])[0]


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


def _submission(run: RunDir) -> dict[str, Any] | None:
    events = read_events(run, "submitted")
    return events[-1] if events and "job_id" in events[-1] else None


def _ask_slurm(job_ids: Iterable[str]) -> tuple[dict[str, JobState], str]:
    wanted = set(job_ids)
    ids = ",".join(sorted(wanted))
    complaint = ""
    found: dict[str, JobState] = {}
    # `-t all` also shows jobs that have just ended, with or without accounting.
    try:
        found = read_squeue(_run("squeue", "-h", "-r", "-t", "all", "-j", ids, "-o", _SQUEUE_FORMAT))
    except _NoAnswer as error:
        if "invalid job id" not in str(error).lower():  # which only means that the queue has forgotten it
            complaint = str(error)
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
    return found, complaint


def _without_job(run: RunDir) -> JobState:
    """A run that nobody submitted: of torchrun, of a template, of `jobs.launch`. Only its own record speaks of it."""
    for event in reversed(read_events(run)):
        if event.get("event") in _BY_EVENT:
            return JobState(_BY_EVENT[event["event"]], reason="by its own record")
        if event.get("event") == "started":
            return JobState("UNKNOWN", reason="started without jobs.submit, so nobody can be asked")
    return JobState("NOT SUBMITTED")


def _by_record(run: RunDir, submitted: Mapping[str, Any], complaint: str) -> JobState:
    """SLURM does not know the job: right after sbatch, or long after its end where there is no accounting."""
    job_id = str(submitted["job_id"])
    for event in reversed(_events_since(run, submitted)):
        if event.get("event") in _BY_EVENT:
            reason = "by its own record; SLURM has forgotten the job"
            return JobState(_BY_EVENT[event["event"]], job_id, "slurm", reason)
    return JobState("UNKNOWN", job_id, "slurm", complaint or "SLURM does not know the job")


def _local(run: RunDir, submitted: Mapping[str, Any]) -> JobState:
    job_id, executor = str(submitted["job_id"]), str(submitted.get("executor"))
    events = _events_since(run, submitted)
    ended = [event for event in events if event.get("event") == "ended"]
    if ended:
        return JobState(str(ended[-1].get("state", "UNKNOWN")), job_id, executor)
    process = controller_of(submitted)
    if process is None or not process.is_here():
        where = f"it runs on {process.host}; ask there" if process else "its process is not recorded"
        return JobState("UNKNOWN", job_id, executor, where)
    if not process.is_alive():
        # It may have ended between the two looks.
        ended = [event for event in _events_since(run, submitted) if event.get("event") == "ended"]
        if ended:
            return JobState(str(ended[-1].get("state", "UNKNOWN")), job_id, executor)
        return JobState("FAILED", job_id, executor, "the process that ran it is gone without a word")
    if len(run.attempts()) > int(submitted.get("attempts_before", 0)):
        return JobState("RUNNING", job_id, executor, nodes=process.host)
    return JobState("PENDING", job_id, executor, "waits for its turn")


def controller_of(submitted: Mapping[str, Any]) -> ProcessId | None:
    """The process of a local job, from its ``submitted`` event."""
    try:
        return ProcessId(str(submitted["host"]), int(submitted["pid"]), str(submitted["process_started"]))
    except (KeyError, ValueError):
        return None


def _events_since(run: RunDir, submitted: Mapping[str, Any]) -> list[dict[str, Any]]:
    events = read_events(run)
    last = max((index for index, event in enumerate(events) if event.get("event") == "submitted"), default=-1)
    return events[last + 1 :]


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
