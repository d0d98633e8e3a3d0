"""The states of runs, asked of the schedulers that started their jobs. Never stored.

A run may have had many jobs. Its state is that of the newest, and it is alive as long as any of them may be.

Sites warn users whose programs ask often. So each scheduler is asked for all runs at once, a `Poller` bounds its
questions, and `jobs.status`, which says how old its answer is, takes one that was given to this user a moment ago. That
holds for a job as long as the run's own record has not changed: what was started, cancelled, requeued or has ended
since is asked anew. Nothing is decided by it.
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainkit import fileio, terminal
from trainkit.errors import UserError
from trainkit.run import folder
from trainkit.run.events import RunHistory, Submission, history_of
from trainkit.run.folder import RunDir
from trainkit.run.lease import ProcessId
from trainkit.schedulers.base import Answer, Job, JobState, Scheduler, Search, named

ENDING_SECONDS = 60.0
"""How long to wait for a job that is being ended; SLURM gives its tasks 30 s by default."""
KEPT_SECONDS = 20.0
"""With two commands each, that is six a minute."""
CALLS_A_MINUTE = 6
"""Of one `Poller`, whatever happens."""
EVERY_SECONDS = 20.0
SOON_SECONDS = 1.5
_CALLS_FOR_ONE = 2  # squeue and sacct
_FIELDS = ("state", "job_id", "executor", "reason", "nodes", "start")

Heard = Callable[[str], None]


def _unheard(command: str) -> None:
    pass


def job_states(
    runs: Sequence[RunDir],
    lives: Sequence[RunHistory] | None = None,
    *,
    heard: Heard = _unheard,
    aged: Callable[[float], None] | None = None,
) -> list[JobState]:
    """What each run does. SLURM is asked twice at most; twice more where a submission was cut short.

    Args:
        lives: those of the runs, where they have been read already.
        heard: told of each command that a scheduler is asked by.
        aged: what was said to this user a moment ago will do, and this is told how many seconds ago that was.
            None: ask anew.
    """
    known = [history_of(run) for run in runs] if lives is None else list(lives)
    search = _adopted([(run, life) for run, life in zip(runs, known, strict=True) if life.cut_short], heard)
    known = [history_of(run) if run.path in search.adopted else life for run, life in zip(runs, known, strict=True)]
    jobs: dict[Scheduler | str, list[Job]] = {}
    marks: dict[Job, str] = {}
    for run, life in zip(runs, known, strict=True):
        for item in life.submissions:
            job = Job(run, item, newest=item is life.submissions[-1])
            jobs.setdefault(_scheduler_of(job), []).append(job)
            marks[job] = mark(life)
    states: dict[tuple[Path, Submission], JobState] = {}
    for scheduler, group in jobs.items():
        if isinstance(scheduler, str):
            found = [JobState("UNKNOWN", job.submission.job_id, job.submission.executor, scheduler) for job in group]
        else:
            answer = _ask(scheduler, group, marks, heard, aged)
            found = [state or _by_record(scheduler, job.submission, answer)
                     for job, state in zip(group, answer.states, strict=True)]  # fmt: skip
        states |= {(job.run.path, job.submission): state for job, state in zip(group, found, strict=True)}
    return [_state(run, life, states, search) for run, life in zip(runs, known, strict=True)]


def job_state(run: RunDir, *, heard: Heard = _unheard) -> JobState:
    """What one run does."""
    return job_states([run], heard=heard)[0]


def not_known_as_its_own(jobs: Sequence[tuple[RunDir, JobState]]) -> list[tuple[RunDir, JobState]]:
    """Those of the jobs that only the record in the run's folder names: who has written that, may have named any.

    Known are those that this user's own list has, and those that the scheduler itself knows to be the run's.
    """
    unknown: dict[str, list[tuple[RunDir, JobState]]] = {}
    for run, job in jobs:
        if not _has_started(run, job.executor, job.job_id):
            unknown.setdefault(job.executor, []).append((run, job))
    # Code of a run whose job is not in this user's list is never loaded.
    own = [item for name, group in unknown.items() if ":" not in name for item in named(name).own(group)]
    return [item for group in unknown.values() for item in group if item not in own]


def process_of(run: RunDir, job: JobState) -> ProcessId | None:
    """What looks after the ranks of a job that no scheduler knows, by the run's record."""
    return next((item.process for item in history_of(run).submissions if item.job_id == job.job_id), None)


def _has_started(run: RunDir, executor: str, job_id: str) -> bool:
    process = process_of(run, JobState("", job_id))
    return folder.has_started(run.path, executor, job_id, process.word() if process is not None else "")


def _scheduler_of(job: Job) -> Scheduler | str:
    """Whom to ask for a job, or why nobody: code that a run names is loaded for jobs that this user has started."""
    name = job.submission.executor
    if ":" in name and not _has_started(job.run, name, job.submission.job_id):
        return f"its scheduler is {name}, code that a command of yours has not used for it"
    try:
        return named(name)
    except UserError as error:
        return f"its scheduler cannot be asked: {error.what} {error.why}".rstrip(".")


def require_no_job(run: RunDir, *, force: bool) -> None:
    """Refuse to start on a run whose job lives, or, unless ``force``, may live for all that anybody can tell.

    Waits for one that is just being ended.
    """
    state = job_state(run)
    deadline, pause = time.monotonic() + ENDING_SECONDS, 2.0
    while state.state == "COMPLETING" and time.monotonic() < deadline:  # cancelled a moment ago
        time.sleep(pause)
        pause *= 1.7
        state = job_state(run)
    living = state.living()
    which = ", ".join(job.job_id or "?" for job in living)
    jobs = "job" if len(living) == 1 else "jobs"
    if state.alive == "yes":
        one = next(job for job in living if job.alive == "yes")
        raise UserError(
            f"{run.name} is {one.state} ({jobs} {which}).",
            why="Two jobs on one run would write over each other.",
            fix=f"Wait for it, or `{terminal.command('cancel', run.path)}` first.",
        )
    if state.alive == "unknown" and not force:
        reason = next(job.reason for job in living)
        known = f"{jobs} {which} of {run.name} still {'runs' if len(living) == 1 else 'run'}"
        raise UserError(
            f"Nobody can tell whether {known if living[0].job_id else f'{run.name} has a job'}.",
            why=f"{reason}. Two jobs on one run would write over each other.",
            fix="Ask again later or elsewhere; if you know that it has ended, add --force.",
        )


def _adopted(cut_short: Sequence[tuple[RunDir, RunHistory]], heard: Heard) -> Search:
    """What became of submissions that were cut short, by their schedulers."""
    groups: dict[str, list[tuple[RunDir, RunHistory]]] = {}
    for run, life in cut_short:
        assert life.cut_short is not None
        if ":" not in life.cut_short.executor:
            groups.setdefault(life.cut_short.executor, []).append((run, life))
    found = [named(name).adopt(group, heard=heard) for name, group in groups.items()]
    lost = {path: state for search in found for path, state in search.lost.items()}
    return Search(frozenset().union(*(search.adopted for search in found)), lost)


def _state(
    run: RunDir, life: RunHistory, known: Mapping[tuple[Path, Submission], JobState], search: Search
) -> JobState:  # fmt: skip
    states = [known[run.path, item] for item in reversed(life.submissions)]
    state, *earlier = states or [_without_job(life)]
    lost = search.lost.get(run.path)
    if lost is not None:
        if lost.alive == "no":  # the command that was to submit it came to nothing
            state = replace(state, reason="; ".join(word for word in (state.reason, lost.reason) if word))
        else:
            state, earlier = lost, [state, *earlier]
    also = tuple(job for job in earlier if job.alive != "no")
    return replace(state, also=also) if also else state


def _without_job(life: RunHistory) -> JobState:
    """A run that nobody submitted: of torchrun, of `jobs.train`. Only its own record speaks of it."""
    if life.finished or life.outcome is not None:
        return JobState("COMPLETED" if life.finished else str(life.outcome), reason="by its own record")
    if life.started:
        return JobState("UNKNOWN", reason="started without jobs.submit, so nobody can be asked")
    return JobState("NOT SUBMITTED")


def _by_record(scheduler: Scheduler, job: Submission, answer: Answer) -> JobState:
    """Its scheduler does not know the job: long after its end where there is no accounting, or it does not answer."""
    is_gone, name = answer.has_answered, scheduler.name
    if job.finished or job.ended is not None:
        reason = "by its own record; " + (f"{scheduler.title} has forgotten the job" if is_gone else answer.complaint)
        return JobState("COMPLETED" if job.finished else str(job.ended), job.job_id, name, reason, is_gone=is_gone)
    why = answer.complaint or f"{scheduler.title} does not know the job"
    return JobState("UNKNOWN", job.job_id, name, why, is_gone=is_gone)


class Poller:
    """What a run does, for one who waits for its end; a run on this machine is asked every time.

    Args:
        clock: seconds that only go forward.
    """

    def __init__(self, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock = run, clock
        self._calls: deque[float] = deque()
        self._asked, self._soon = clock(), SOON_SECONDS
        self._state = job_state(run, heard=self._heard)

    def state(self, *, soon: bool = False) -> JobState:
        """The newest that is known.

        Args:
            soon: something has happened that makes it worth asking again early.
        """
        pause = min(self._soon, EVERY_SECONDS) if soon else EVERY_SECONDS
        local = ":" not in self._state.executor and not named(self._state.executor).batch
        if local or self._may_ask(pause):
            self._asked, self._soon = self._clock(), 2 * self._soon if soon else SOON_SECONDS
            self._state = job_state(self._run, heard=self._heard)
        return self._state

    def _may_ask(self, pause: float) -> bool:
        now = self._clock()
        while self._calls and now - self._calls[0] > 60:
            self._calls.popleft()
        return now - self._asked >= pause and len(self._calls) + _CALLS_FOR_ONE <= CALLS_A_MINUTE

    def _heard(self, command: str) -> None:
        self._calls.append(self._clock())


def mark(life: RunHistory) -> str:
    """What a run's record says of its jobs: as long as it is the same, nothing is known to have happened."""
    jobs = [(job.job_id, job.time, job.cancelled, job.ended, job.finished) for job in life.submissions]
    attempts = (life.started.get("time"), life.outcome, len(life.failures), len(life.handed_back), len(life.requeued))
    return json.dumps([jobs, attempts])


def _ask(
    scheduler: Scheduler, jobs: Sequence[Job], marks: Mapping[Job, str], heard: Heard,
    aged: Callable[[float], None] | None,
) -> Answer:  # fmt: skip
    """What a scheduler says of jobs, or has said of all of them within `KEPT_SECONDS`.

    Args:
        marks: of their runs' records, see `mark`.
    """
    if aged is None or not scheduler.batch:
        return scheduler.states(jobs, heard=heard)
    now, file = time.time(), folder.state_file("queue.json")
    keys = [f"{scheduler.name} {job.submission.job_id}" for job in jobs]
    known = {
        key: item
        for key, item in fileio.read_object(file).items()
        if _is_whole(item) and 0 <= now - item["asked"] < KEPT_SECONDS
    }
    if all(key in known and known[key]["mark"] == marks[job] for key, job in zip(keys, jobs, strict=True)):
        mine = [known[key] for key in keys]
        aged(max(now - item["asked"] for item in mine))
        states = [JobState(*item["state"]) if item["state"] else None for item in mine]
        return Answer(states, complaint=next((item["complaint"] for item in mine if item["complaint"]), ""))
    answer = scheduler.states(jobs, heard=heard)
    if answer.has_answered:
        for key, job, state in zip(keys, jobs, answer.states, strict=True):
            fields = [getattr(state, name) for name in _FIELDS] if state is not None else None
            known[key] = {"asked": now, "mark": marks[job], "complaint": answer.complaint, "state": fields}
        try:
            folder.make_state_folder(file.parent)
            fileio.write(file, json.dumps(known), file.parent)
        except OSError:  # a home that cannot be written costs only a question more
            pass
    return answer


def _is_whole(item: Any) -> bool:
    if not isinstance(item, dict) or not fileio.is_time(item.get("asked")):
        return False
    state = item.get("state")
    texts = [item.get("mark"), item.get("complaint"), *(state if isinstance(state, list) else ())]
    fits = state is None or (isinstance(state, list) and len(state) == len(_FIELDS))
    return fits and all(isinstance(text, str) for text in texts)
