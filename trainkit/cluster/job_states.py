"""States of runs, as their schedulers report them.

States are never stored. A run may have had many jobs: its state is that of the newest, and it is alive as long as any
of them may be. Sites warn users whose programs query SLURM often. So one query covers all runs, a `Poller` bounds its
commands per minute, and `jobs.status`, which prints the age of its answer, reuses one that is younger than
`KEPT_SECONDS` while the run's record is unchanged. No decision is based on a reused answer.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from trainkit.cluster.scheduler import Job, JobState, QueueAnswer, Scheduler, named
from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError
from trainkit.run.folder import RunDir
from trainkit.run.history import RunHistory, Submission, history_of
from trainkit.run.run_lease import ProcessId
from trainkit.run.user_lists import has_started, make_state_folder, state_file

ENDING_SECONDS = 60.0
"""Longest wait for a job that is being ended; SLURM gives its tasks 30 s by default."""
KEPT_SECONDS = 20.0
"""Age up to which an answer is repeated: with two commands each, that is six a minute."""
CALLS_A_MINUTE = 6
"""Most commands of one `Poller`, whatever happens."""
EVERY_SECONDS = 20.0
SOON_SECONDS = 1.5
_AT_ONCE_SECONDS = 0.2
_CALLS_FOR_ONE = 2
"""squeue and sacct; where a submission was cut short, both are also asked for its job."""


def job_states(
    runs: Sequence[RunDir],
    lives: Sequence[RunHistory] | None = None,
    *,
    aged: Callable[[float], None] | None = None,
    spent: Callable[[int], None] = lambda commands: None,
) -> list[JobState]:
    """Return the state of each run. SLURM gets two commands at most, and two more where a submission was cut short.

    Args:
        lives: the histories of the runs, if they have been read already.
        aged: allows an answer that this user got a moment ago; called with its age in seconds. None: ask anew.
        spent: called with the number of commands that each scheduler was asked by.
    """
    if lives is None:
        lives = [history_of(run) for run in runs]
    known = {run.path: life for run, life in zip(runs, lives, strict=True)}
    cut_short: dict[str, list[tuple[RunDir, RunHistory]]] = defaultdict(list)
    for run in runs:
        cut = known[run.path].cut_short
        if cut and ":" not in cut.executor:
            cut_short[cut.executor].append((run, known[run.path]))
    lost: dict[Path, JobState] = {}
    for name, group in cut_short.items():
        lost |= named(name).adopt(group)
        spent(_CALLS_FOR_ONE)
        for run, _ in group:
            known[run.path] = history_of(run)
    jobs: list[Job] = []
    for run in runs:
        jobs += _jobs_of(run, known[run.path])
    states: dict[Path, list[JobState]] = defaultdict(list)
    for job, state in zip(jobs, _states_of(jobs, aged, spent), strict=True):
        states[job.run.path].append(state)
    return [_state(known[run.path], states[run.path], lost.get(run.path)) for run in runs]


def _states_of(
    jobs: Sequence[Job], aged: Callable[[float], None] | None, spent: Callable[[int], None]
) -> list[JobState]:
    """Ask each scheduler once about all of its jobs. Returns their states in order."""
    asked: dict[Scheduler, list[Job]] = defaultdict(list)
    states: dict[Job, JobState] = {}
    for job in jobs:
        try:
            asked[_scheduler_of(job)].append(job)
        except UserError as error:
            why = f"its scheduler cannot be asked: {error.what} {error.why}".rstrip(".")
            states[job] = JobState("UNKNOWN", job.job_id, job.submission.executor, why)
    for scheduler, of_it in asked.items():
        answer = _ask(scheduler, of_it, aged)
        spent(answer.commands)
        for job, state in zip(of_it, answer.states, strict=True):
            states[job] = state or _by_record(job.submission, scheduler, answer)
            if job.submission.waits:
                states[job] = _while_waiting(job.submission, states[job])
    return [states[job] for job in jobs]


def job_state(run: RunDir) -> JobState:
    """Return the state of one run."""
    return job_states([run])[0]


def _scheduler_of(job: Job) -> Scheduler:
    """Return the scheduler to ask about a job.

    Raises UserError if none may be asked: code that a run names is loaded only for this user's own jobs.
    """
    name = job.submission.executor
    if ":" in name and not _has_started(job.run, name, job.job_id):
        what = f"It is {name}, code that a command of yours has not used for it."
        raise UserError(
            what, why="The author of the run's record could name any code.", fix="Ask the person who started the run."
        )
    return named(name)


def _jobs_of(run: RunDir, life: RunHistory) -> list[Job]:
    counts = [len(life.failures), len(life.handed_back), len(life.requeued)]
    mark = repr((life.submissions, life.started.get("time"), life.outcome, counts))
    return [Job(run, item, item is life.submissions[-1], "" if item.waits else mark) for item in life.submissions]


@dataclass(frozen=True)
class _Kept:
    """A scheduler's answer about a job."""

    asked: float
    mark: str
    complaint: str
    state: JobState | None


def _ask(scheduler: Scheduler, jobs: Sequence[Job], aged: Callable[[float], None] | None) -> QueueAnswer:
    """Ask a scheduler about jobs, or repeat its answer if it covers all of them and is younger than `KEPT_SECONDS`."""
    if aged is None or not scheduler.batch:
        return scheduler.states(jobs)
    from pydantic import TypeAdapter, ValidationError  # `cancel --help` does without

    now = time.time()
    file = state_file("queue.json")
    kept = TypeAdapter(dict[str, _Kept])
    known: dict[str, _Kept] = {}
    with suppress(ValidationError):
        known = kept.validate_python(fileio.read_object(file))
    known = {key: item for key, item in known.items() if 0 <= now - item.asked < KEPT_SECONDS}
    mine = []
    for job in jobs:
        item = known.get(_key(scheduler, job))
        if item is not None and item.mark == job.mark:
            mine.append(item)
    if len(mine) == len(jobs):
        aged(now - min(item.asked for item in mine))
        return QueueAnswer([item.state for item in mine], complaint=max(item.complaint for item in mine), commands=0)
    answer = scheduler.states(jobs)
    if answer.has_answered:
        for job, state in zip(jobs, answer.states, strict=True):
            known[_key(scheduler, job)] = _Kept(now, job.mark, answer.complaint, state)
        with suppress(OSError):  # a home that cannot be written costs only a question more
            make_state_folder(file.parent)
            fileio.write(file, kept.dump_json(known).decode(), file.parent)
    return answer


def _key(scheduler: Scheduler, job: Job) -> str:
    return f"{scheduler.name} {job.job_id}"


def _by_record(job: Submission, scheduler: Scheduler, answer: QueueAnswer) -> JobState:
    """Read in the run's record the state of a job that its scheduler has forgotten, or does not answer about."""
    is_gone = answer.has_answered
    state = job.ended
    if state is None and job.cancelled and is_gone:
        state = "CANCELLED"
    if state is None:
        state = "UNKNOWN"
        why = answer.complaint or f"{scheduler.title} does not know the job"
    elif is_gone:
        why = f"by its own record; {scheduler.title} has forgotten the job"
    else:
        why = f"by its own record; {answer.complaint}"
    return JobState(state, job.job_id, scheduler.name, why, is_gone=is_gone)


def _while_waiting(submission: Submission, feeder: JobState) -> JobState:
    """Return the state of a run that a job, the feeder, is to queue when there is room."""
    job_id = submission.job_id
    if submission.cancelled:
        return JobState("CANCELLED", job_id, reason="before it was queued")
    if feeder.alive == "yes":
        reason = f"{submission.waits}; job {job_id} is to queue it"
        return JobState("PENDING", job_id, feeder.executor, reason, waits=True)
    if feeder.alive == "no":
        return JobState("NOT SUBMITTED", reason=f"job {job_id}, which was to queue it, is {feeder.state}")
    return feeder


def _state(life: RunHistory, jobs: Sequence[JobState], lost: JobState | None) -> JobState:
    """Combine the states of a run's jobs, oldest first; ``lost`` is that of a submission that was cut short."""
    newest_first = list(jobs[::-1]) or [_without_job(life)]
    if lost is not None and lost.alive == "no":  # the command that was to submit it came to nothing
        reason = f"{newest_first[0].reason}; {lost.reason}".removeprefix("; ").removesuffix("; ")
        newest_first[0] = replace(newest_first[0], reason=reason)
    elif lost is not None:
        newest_first.insert(0, lost)
    state, *earlier = newest_first
    return replace(state, also=tuple(job for job in earlier if job.alive != "no"))


def _without_job(life: RunHistory) -> JobState:
    """Return the state of a run that nobody submitted, of torchrun or `jobs.train`, by its own record alone."""
    if life.finished:
        return JobState("COMPLETED", reason="by its own record")
    if life.outcome is not None:
        return JobState(life.outcome, reason="by its own record")
    if life.started:
        return JobState("UNKNOWN", reason="started without jobs.submit, so no scheduler knows it")
    return JobState("NOT SUBMITTED")


def process_of(run: RunDir, job_id: str) -> ProcessId | None:
    """Return the process that looks after the ranks of a job that no scheduler knows, by the run's record."""
    for submission in history_of(run).submissions:
        if submission.job_id == job_id:
            return submission.process
    return None


def _has_started(run: RunDir, executor: str, job_id: str) -> bool:
    own = process_of(run, job_id)
    return has_started(run.path, executor, job_id, own.word() if own is not None else "")


def not_known_as_its_own(jobs: Sequence[tuple[RunDir, JobState]]) -> list[tuple[RunDir, JobState]]:
    """Return the jobs that only the record in the run's folder names: whoever wrote it may have named any job.

    A job is known as the run's own by this user's list of started jobs, or by the scheduler.
    """
    unknown = [(run, job) for run, job in jobs if not _has_started(run, job.executor, job.job_id)]
    asked: dict[str, list[tuple[RunDir, JobState]]] = defaultdict(list)
    for run, job in unknown:
        if ":" not in job.executor:  # code of a run whose job is not in this user's list is never loaded
            asked[job.executor].append((run, job))
    for name, of_it in asked.items():
        own = named(name).own(of_it)
        unknown = [item for item in unknown if item not in own]
    return unknown


def require_no_job(run: RunDir, *, force: bool) -> None:
    """Refuse to start on a run whose job lives, or, unless ``force``, may live for all that anybody can tell.

    Waits for one that is just being ended.
    """
    state = job_state(run)
    deadline = time.monotonic() + ENDING_SECONDS
    pause = 2.0
    while state.state == "COMPLETING" and time.monotonic() < deadline:  # cancelled a moment ago
        time.sleep(pause)
        pause *= 1.7
        state = job_state(run)
    living = state.living()
    why = "Two jobs of one run would overwrite each other's files."
    which = f"job {', '.join(job.job_id or '?' for job in living)}"
    if len(living) > 1:
        which = which.replace("job", "jobs", 1)
    if state.alive == "yes":
        one = next(job for job in living if job.alive == "yes")
        fix = f"Wait for it, or `{terminal.command('cancel', run.path)}` first."
        raise UserError(f"{run.name} is {one.state} ({which}).", why=why, fix=fix)
    if state.alive == "unknown" and not force:
        lives = f"{which} of {run.name} may run" if living[0].job_id else f"{run.name} has a job"
        fix = "Ask again later or elsewhere; if you know that it has ended, add --force."
        raise UserError(f"It is unknown whether {lives}.", why=f"{living[0].reason}. {why}", fix=fix)


class Poller:
    """Watcher of a run's state for a command that waits for its end; a run on this machine is asked every time.

    Args:
        clock: seconds that only go forward.
    """

    def __init__(self, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._run = run
        self._clock = clock
        self._soon = SOON_SECONDS
        self._ends = False
        self._calls: list[float] = []
        self._ask()

    def state(self, *, soon: bool = False, ends: bool = False) -> JobState:
        """Return the newest state that is known.

        Args:
            soon: something has happened that makes it worth asking again early.
            ends: the job's script is about to end.
        """
        pause = EVERY_SECONDS
        if ends and not self._ends:
            self._soon = _AT_ONCE_SECONDS
        self._ends = ends
        soon |= ends
        if soon:
            pause = min(self._soon, EVERY_SECONDS)
        now = self._clock()
        self._calls = [call for call in self._calls if now - call < 60]
        is_local = ":" not in self._state.executor and not named(self._state.executor).batch
        if is_local or (now - self._asked >= pause and len(self._calls) + _CALLS_FOR_ONE <= CALLS_A_MINUTE):
            self._soon = 2 * self._soon if soon else SOON_SECONDS
            self._ask()
        return self._state

    def _ask(self) -> None:
        self._asked = self._clock()
        spent = list[int]()
        self._state = job_states([self._run], spent=spent.append)[0]
        self._calls += [self._asked] * sum(spent)
