"""The scheduler protocol, and the states of runs as their schedulers report them.

A scheduler is a module of this package, or ``launch.executor=package.module:build`` of the user's own. No code compares
scheduler names: it asks the scheduler, as in `named(plan.executor).batch`.

States are never stored. A run may have had many jobs: its state is that of the newest, and it is alive as long as any
of them may be. Sites warn users whose programs query SLURM often. So one query covers all runs, a `Poller` bounds its
commands per minute, and `jobs.status`, which prints the age of its answer, reuses one that is younger than
`KEPT_SECONDS` while the run's record is unchanged. No decision is based on a reused answer.
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from trainkit import fileio, plugins, process, terminal
from trainkit.errors import UserError
from trainkit.process import NoAnswer
from trainkit.run.events import ProcessId, RunHistory, Submission, history_of
from trainkit.run.folder import RunDir, as_open_as, has_started, make_state_folder, state_file

if TYPE_CHECKING:
    from trainkit.launch.plan import Plan
    from trainkit.site.profile import Partition

PACKAGE = "trainkit.schedulers"
Function = Callable[[str], str]
"""What each rank of a run calls, with the run's folder."""
Alive = Literal["yes", "no", "unknown"]
"""Whether a job may still write, now or after waiting in the queue. Unknown is never taken for no."""
ENDED = frozenset((
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
))  # fmt: skip
_ALIVE: Sequence[Alive] = ("no", "unknown", "yes")
ENDING_SECONDS = 60.0
"""How long to wait for a job that is being ended; SLURM gives its tasks 30 s by default."""
KEPT_SECONDS = 20.0
"""With two commands each, that is six a minute."""
CALLS_A_MINUTE = 6
"""Of one `Poller`, whatever happens."""
EVERY_SECONDS = 20.0
SOON_SECONDS = 1.5
_CALLS_FOR_ONE = 2
"""squeue and sacct; where a submission was cut short, both are also asked for its job."""

# `python -c` puts the current folder ("") first on the path, before PYTHONPATH, so a job submitted from a checkout
# would run the checkout and not its snapshot: it goes to the end. (`python -P` is 3.11 and newer.)
BEGIN = "import os, sys; sys.path = [path for path in sys.path if path] + [os.getcwd()]; "
BEGIN += "from trainkit import importing; importing.installed_first(); "
# A run goes on with its own code, in which `process` may still be called `lifetime`.
TASK = BEGIN + (
    "from importlib import import_module, util; "
    "leave = import_module('trainkit.process' if util.find_spec('trainkit.process') else 'trainkit.lifetime').leave; "
    "from submitit.core.submission import submitit_main; submitit_main(); leave(0)"
)
"""What Python runs as a rank: the function in the pickle of the rank's job."""


# What schedulers are asked about jobs, and what they answer


class NoCluster(NoAnswer):
    """The scheduler's programs are installed, but configured for no cluster."""


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
    """When the scheduler expects to start a pending job, by its clock: 2026-11-21T22:04:10. Empty if unknown."""
    is_gone: bool = False
    """The queue answered and does not list the job: it has ended, somehow."""
    also: tuple[JobState, ...] = ()
    """Earlier jobs of the run that are alive, or may be; each without others."""

    @property
    def alive(self) -> Alive:
        """Whether this or an earlier job of the run may still write."""
        return max((job._alone for job in (self, *self.also)), key=_ALIVE.index)

    def living(self) -> list[JobState]:
        """Every job of the run that is alive, or may be, newest first; each without the others."""
        return [replace(job, also=()) for job in (self, *self.also) if job._alone != "no"]

    @property
    def _alone(self) -> Alive:
        # Of a run that nobody has submitted, nothing is alive that one could ask for.
        if self.is_gone or self.state in ENDED or not self.executor:
            return "no"
        return "unknown" if self.state == "UNKNOWN" else "yes"


class Job(NamedTuple):
    """A job of a run, as the run's record has it."""

    run: RunDir
    submission: Submission
    newest: bool = True
    """Of an earlier one it only matters whether it is over."""
    mark: str = ""
    """What the record says of the run's jobs: as long as it is the same, nothing is known to have happened."""


class Answer(NamedTuple):
    """What a scheduler says of some jobs."""

    states: Sequence[JobState | None] = ()
    """In the order of the jobs; None for one that the scheduler does not know."""
    has_answered: bool = True
    """Whether the queue answered: a job that it does not list has ended."""
    complaint: str = ""
    """Why a program did not answer."""
    commands: int = 1
    """How many commands that took."""


class Start(NamedTuple):
    """When the scheduler expects to start a job. Where it would refuse the job, ``when`` is None and ``refusal`` says
    why."""

    when: datetime | None = None
    nodes: str = ""
    refusal: str = ""


class Place(NamedTuple):
    """Where a process of a job is, by its environment."""

    job_id: str = ""
    """Empty for a process of no job."""
    nodes: tuple[str, ...] = ()
    nodelist: str = ""
    """The same in the scheduler's own words."""
    partition: str = ""
    needed: int = 1
    """How many nodes the job has."""
    restarts: int = 0
    """How often the scheduler has restarted the job."""


class OwnJob(NamedTuple):
    """What the queue says of the job that this process belongs to."""

    state: str = ""
    """Empty if the scheduler does not answer: a run must survive that."""
    excluded: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    """Nodes asked for by --nodelist."""
    reason: str = ""
    """Of the state: ``TimeLimit``, ..."""

    @property
    def is_to_be_queued(self) -> bool:
        """Whether its script may requeue it: it is neither cancelled nor already on its way back.

        SLURM ends a job at its time limit as it ends a cancelled one, but still accepts its requeue.
        """
        return self.state in ("RUNNING", "") or (self.reason == "TimeLimit" and self.state in ("COMPLETING", "TIMEOUT"))


class NodeState(NamedTuple):
    """What a scheduler says of a node."""

    state: str
    """``idle``, ``down*``, ..."""
    kind: str = ""
    """GPUs and features: a job that runs on one node can run on another of its kind."""


# The protocol


class Scheduler(ABC):
    """What starts jobs. A scheduler must have the abstract methods; the others are optional abilities."""

    name: str
    """As in `launch.executor` and in run records; ``package.module:build`` of a user's own."""
    title: str
    """Its name in sentences."""
    batch = False
    """Whether jobs wait in a queue and run on other machines; otherwise they are processes of this machine."""
    witness = "status"
    """What shows the state of a job."""
    tools: tuple[str, ...] = ()
    """Its programs for users."""

    # Before there is a job

    def is_here(self, env: Mapping[str, str]) -> bool:
        """Whether jobs can be submitted from this machine."""
        return True

    def partitions(self, env: Mapping[str, str]) -> tuple[Partition, ...]:
        """Its partitions and their nodes; none where it has no partitions. Raises NoAnswer."""
        return ()

    def questions(self, user: str, account_fields: str) -> dict[str, tuple[str, ...]]:
        """Topic -> the command that shows it."""
        return {}

    def ask(self, command: Sequence[str], env: Mapping[str, str]) -> process.Answer:
        """The answer to a command of `questions`. Raises NoAnswer."""
        return process.ask(command, env=env).shown()

    def has_pyxis(self, env: Mapping[str, str] | None = None) -> bool | None:
        """Whether it can start ranks in containers by pyxis; None if unknown."""
        return False

    def largest_array(self) -> int:
        """How many runs of a sweep fit into one submission."""
        return 10_000

    def script(self, plan: Plan, folder: Path, cwd: Path, points: int = 1) -> str | None:
        """The batch script of a run, or of a sweep of ``points`` runs; None for a scheduler without scripts."""
        return None

    def preview(self, plan: Plan, folder: Path) -> str:
        """What a dry run prints where there is no script."""
        ranks = f"{plan.nodes} x {plan.ntasks_per_node} ranks"
        return f"# {plan.executor}: {ranks}{'' if self.batch else ' on this machine'}, run folder {folder}\n"

    def earliest_start(self, script: str, partition: str, env: Mapping[str, str]) -> Start:
        """When the script would start in a partition."""
        return Start(refusal=f"{self.title} does not say")

    def with_job_ids(self, plan: Plan, find: Callable[[str], Sequence[RunDir]]) -> Plan:
        """The plan with the names of runs in its dependency replaced by their job ids."""
        return plan

    def on_its_nodes(self, plan: Plan, command: Sequence[str], minutes: int) -> list[str] | None:
        """The command that runs ``command`` as every rank of a plan, for ``minutes`` at most; None: the caller starts
        the ranks on this machine."""
        return None

    # Of jobs

    @abstractmethod
    def submit(
        self, folder: Path, runs: Sequence[RunDir], plan: Plan, function: Function, *, cwd: Path, env: Mapping[str, str]
    ) -> list[str]:
        """Start or queue a job for each run in ``folder``, and write a ``submitted`` event into each; their ids.

        Raises:
            SchedulerError: it takes none of them.
        """

    @abstractmethod
    def states(self, jobs: Sequence[Job]) -> Answer:
        """The states of jobs, with the reason why one is pending."""

    @abstractmethod
    def cancel(self, jobs: Sequence[tuple[RunDir, JobState]], ended: Callable[[RunDir, JobState], None]) -> None:
        """End jobs. Writes a ``cancelled`` event for each that it ends, and calls ``ended``.

        Raises:
            SchedulerError: some of them go on.
        """

    def by_hand(self, run: RunDir, job: JobState) -> str:
        """How a user ends a job, as a sentence."""
        return f"cancel job {job.job_id} by the means of {self.title}."

    def own(self, jobs: Sequence[tuple[RunDir, JobState]]) -> list[tuple[RunDir, JobState]]:
        """Those jobs that belong to these runs by the scheduler's own knowledge, and not only by the run's record."""
        return []

    def adopt(self, cut_short: Sequence[tuple[RunDir, RunHistory]]) -> Mapping[Path, JobState]:
        """Find the jobs of submissions that were cut short before their id was recorded, and record them; the states
        of the runs without such a job."""
        return {}

    # Of its own job, for the script that looks after the ranks

    def place(self, env: Mapping[str, str]) -> Place:
        """Which job the process with this environment belongs to, and where that runs."""
        return Place()

    def claim(self, run: RunDir, env: Mapping[str, str]) -> None:
        """Finish, inside a job, the submission of a command that was killed."""
        return

    def own_job(self, job_id: str) -> OwnJob:
        """What the queue says of this running job."""
        return OwnJob()

    def nodes(self, partition: str) -> dict[str, NodeState]:
        """The nodes of a partition by name; empty if the scheduler does not answer."""
        return {}

    def restarted(self, nodes: Sequence[str], since: float) -> dict[str, str]:
        """Which nodes were booted, or began to take jobs, after a time in seconds since 1970, and when."""
        return {}

    def requeue(self, job_id: str) -> None:
        """Requeue a running job, and end its script with SIGTERM. Raises NoAnswer where that is not possible."""
        raise self._cannot("queue a job again")

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        """Exclude nodes from a pending job. Raises NoAnswer where that is not possible."""
        raise self._cannot("exclude nodes")

    def next_link(self, run: RunDir, excluded: Sequence[str], env: Mapping[str, str]) -> str:
        """Queue a job that continues the run after this job has ended; its id. Raises NoAnswer."""
        raise self._cannot("queue a job behind another")

    def _cannot(self, what: str) -> NoAnswer:
        return NoAnswer(f"{self.title} cannot {what}.", why=f"{self.title} cannot {what}.", fix="Do without.")

    # For advice

    def at_node(self, host: str) -> str:
        """The prefix that runs a command on a node."""
        return ""

    def shows_memory(self, job_id: str) -> str:
        """The command that shows how much memory a job took."""
        return "dmesg"


# Which scheduler it is


@cache
def _load(name: str) -> Scheduler:
    found: Scheduler = plugins.load(PACKAGE, name)()
    if ":" in name:
        found.name = name
    return found


def named(executor: str) -> Scheduler:
    """The scheduler of a plan or a record. A run that no scheduler started consists of processes of a machine.

    Raises:
        UserError: it is the user's own code, and cannot be loaded.
    """
    return _load(executor if ":" in executor or executor in plugins.available(PACKAGE) else "local")


def built_in(executor: str) -> Scheduler:
    """`named` for a record that somebody else may have written: code that it names is never loaded, and counts as
    local."""
    return named("local" if ":" in executor else executor)


def batch_schedulers() -> list[Scheduler]:
    """The schedulers of this package whose jobs wait in a queue."""
    return [found for found in map(_load, plugins.available(PACKAGE)) if found.batch]


def batch_here(env: Mapping[str, str]) -> Scheduler | None:
    """The batch scheduler of this machine, if it has one."""
    return next((found for found in batch_schedulers() if found.is_here(env)), None)


def around(env: Mapping[str, str], run: RunDir | None = None) -> tuple[Scheduler, Place]:
    """The scheduler whose job the process with this environment belongs to, and where that is.

    Args:
        run: whose job this is, if a scheduler of the user's own may have started it.
    """
    for found in batch_schedulers():
        if (place := found.place(env)).job_id:
            return found, place
    submission = history_of(run).submission if run is not None else None
    if submission is None or ":" not in submission.executor:
        return (found := batch_schedulers()[0]), found.place(env)
    scheduler, host = named(submission.executor), socket.gethostname()
    place = scheduler.place(env)
    return scheduler, place if place.job_id else Place(submission.job_id, (host,), host)


# What a rank of a job runs


def unclaimed(index: int) -> str:
    """File name of a run's pickle until its job id is known; ``index``: the run's number in a sweep."""
    return f"{index}.pkl"


def pickled(folder: Path, runs: Sequence[RunDir], function: Function, start: Callable[[], str]) -> list[str]:
    """Write submitit's pickle for each run, which `TASK` runs, and start the job; the job id of each run.

    A pickle holds a path and no code. ``start`` starts a job for one run, an array for several, and returns its id.
    """
    from submitit.core.utils import DelayedSubmission  # a dry run and `--help` do without

    with as_open_as(folder):  # submitit's files, the scheduler's (it takes the umask over), the ranks'
        pickles = folder / ".submitit"
        fileio.make_folder(pickles, folder)
        for index, run in enumerate(runs):
            DelayedSubmission(function, str(run.path)).dump(pickles / unclaimed(index))
        first = start()  # should this fail, the job may be there all the same: it claims its own
        ids = [first] if len(runs) == 1 else [f"{first}_{index}" for index in range(len(runs))]
        for index, job_id in enumerate(ids):
            (pickles / unclaimed(index)).rename(pickles / f"{job_id}_submitted.pkl")
    return ids


# The states of runs


def job_states(
    runs: Sequence[RunDir],
    lives: Sequence[RunHistory] | None = None,
    *,
    aged: Callable[[float], None] | None = None,
    spent: Callable[[int], None] = lambda commands: None,
) -> list[JobState]:
    """The state of each run. SLURM gets two commands at most, and two more where a submission was cut short.

    Args:
        lives: the histories of the runs, if they have been read already.
        aged: allows an answer that this user got a moment ago; called with its age in seconds. None: ask anew.
        spent: called with the number of commands that each scheduler was asked by.
    """
    known = dict(zip((run.path for run in runs), lives or map(history_of, runs), strict=True))
    cut_short: dict[str, list[tuple[RunDir, RunHistory]]] = defaultdict(list)
    for run in runs:
        if (cut := known[run.path].cut_short) and ":" not in cut.executor:
            cut_short[cut.executor].append((run, known[run.path]))
    lost: dict[Path, JobState] = {}
    for name, group in cut_short.items():
        lost |= named(name).adopt(group)
        spent(_CALLS_FOR_ONE)
        known |= {run.path: history_of(run) for run, _ in group}
    jobs = {run.path: _jobs_of(run, known[run.path]) for run in runs}
    asked: dict[Scheduler, list[Job]] = defaultdict(list)
    states: dict[Job, JobState] = {}
    for job in (job for of_run in jobs.values() for job in of_run):
        try:
            asked[_scheduler_of(job)].append(job)
        except UserError as error:
            why = f"its scheduler cannot be asked: {error.what} {error.why}".rstrip(".")
            states[job] = JobState("UNKNOWN", job.submission.job_id, job.submission.executor, why)
    for scheduler, of_it in asked.items():
        answer = _ask(scheduler, of_it, aged)
        spent(answer.commands)
        told = zip(of_it, answer.states, strict=True)
        states |= {job: state or _by_record(job.submission, scheduler, answer) for job, state in told}
    return [_state(known[run.path], [states[job] for job in jobs[run.path]], lost.get(run.path)) for run in runs]


def job_state(run: RunDir) -> JobState:
    """The state of one run."""
    return job_states([run])[0]


def _scheduler_of(job: Job) -> Scheduler:
    """The scheduler to ask about a job. Raises UserError if none may be asked: code that a run names is loaded only for
    this user's own jobs."""
    name = job.submission.executor
    if ":" in name and not _has_started(job.run, name, job.submission.job_id):
        what = f"It is {name}, code that a command of yours has not used for it."
        raise UserError(what, why="Whoever wrote the run's record could name any.", fix="Ask who started the run.")
    return named(name)


def _jobs_of(run: RunDir, life: RunHistory) -> list[Job]:
    counts = [len(found) for found in (life.failures, life.handed_back, life.requeued)]
    mark = repr((life.submissions, life.started.get("time"), life.outcome, counts))
    return [Job(run, item, item is life.submissions[-1], mark) for item in life.submissions]


@dataclass(frozen=True)
class _Kept:
    """What a scheduler has said of a job."""

    asked: float
    mark: str
    complaint: str
    state: JobState | None


def _ask(scheduler: Scheduler, jobs: Sequence[Job], aged: Callable[[float], None] | None) -> Answer:
    """What a scheduler says of jobs, or has said of all of them within `KEPT_SECONDS`."""
    if aged is None or not scheduler.batch:
        return scheduler.states(jobs)
    from pydantic import TypeAdapter, ValidationError  # `cancel --help` does without

    now, file = time.time(), state_file("queue.json")
    kept = TypeAdapter(dict[str, _Kept])
    known: dict[str, _Kept] = {}
    with suppress(ValidationError):
        known = kept.validate_python(fileio.read_object(file))
    known = {key: item for key, item in known.items() if 0 <= now - item.asked < KEPT_SECONDS}
    keys = [f"{scheduler.name} {job.submission.job_id}" for job in jobs]
    if all(key in known and known[key].mark == job.mark for key, job in zip(keys, jobs, strict=True)):
        mine = [known[key] for key in keys]
        aged(max(now - item.asked for item in mine))
        complaint = next((item.complaint for item in mine if item.complaint), "")
        return Answer([item.state for item in mine], complaint=complaint, commands=0)
    if (answer := scheduler.states(jobs)).has_answered:
        for key, job, state in zip(keys, jobs, answer.states, strict=True):
            known[key] = _Kept(now, job.mark, answer.complaint, state)
        with suppress(OSError):  # a home that cannot be written costs only a question more
            make_state_folder(file.parent)
            fileio.write(file, kept.dump_json(known).decode(), file.parent)
    return answer


def _by_record(job: Submission, scheduler: Scheduler, answer: Answer) -> JobState:
    """What the run's record says of a job that its scheduler does not report: it has forgotten the job, or does not
    answer."""
    is_gone, title = answer.has_answered, scheduler.title
    state, why = "UNKNOWN", answer.complaint or f"{title} does not know the job"
    if job.ended is not None:
        state = job.ended
        why = "by its own record; " + (f"{title} has forgotten the job" if is_gone else answer.complaint)
    return JobState(state, job.job_id, scheduler.name, why, is_gone=is_gone)


def _state(life: RunHistory, jobs: Sequence[JobState], lost: JobState | None) -> JobState:
    """The state of a run whose jobs, oldest first, have these; ``lost``: of a submission that was cut short."""
    state, *earlier = jobs[::-1] or [_without_job(life)]
    if lost is not None and lost.alive == "no":  # the command that was to submit it came to nothing
        state = replace(state, reason="; ".join(word for word in (state.reason, lost.reason) if word))
    elif lost is not None:
        state, earlier = lost, [state, *earlier]
    return replace(state, also=tuple(job for job in earlier if job.alive != "no"))


def _without_job(life: RunHistory) -> JobState:
    """A run that nobody submitted: of torchrun, of `jobs.train`. Only its own record speaks of it."""
    if life.finished or life.outcome is not None:
        return JobState("COMPLETED" if life.finished else str(life.outcome), reason="by its own record")
    if life.started:
        return JobState("UNKNOWN", reason="started without jobs.submit, so nobody can be asked")
    return JobState("NOT SUBMITTED")


def process_of(run: RunDir, job_id: str) -> ProcessId | None:
    """What looks after the ranks of a job that no scheduler knows, by the run's record."""
    return next((item.process for item in history_of(run).submissions if item.job_id == job_id), None)


def _has_started(run: RunDir, executor: str, job_id: str) -> bool:
    own = process_of(run, job_id)
    return has_started(run.path, executor, job_id, own.word() if own is not None else "")


def not_known_as_its_own(jobs: Sequence[tuple[RunDir, JobState]]) -> list[tuple[RunDir, JobState]]:
    """The jobs that only the record in the run's folder names: whoever wrote it may have named any job.

    A job is known as the run's own by this user's list of started jobs, or by the scheduler.
    """
    unknown = [(run, job) for run, job in jobs if not _has_started(run, job.executor, job.job_id)]
    # Code of a run whose job is not in this user's list is never loaded.
    names = {job.executor for _, job in unknown if ":" not in job.executor}
    own = [item for name in names for item in named(name).own([item for item in unknown if item[1].executor == name])]
    return [item for item in unknown if item not in own]


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
    living, why = state.living(), "Two jobs on one run would write over each other."
    which = f"job{'s' * (len(living) > 1)} {', '.join(job.job_id or '?' for job in living)}"
    if state.alive == "yes":
        one = next(job for job in living if job.alive == "yes")
        fix = f"Wait for it, or `{terminal.command('cancel', run.path)}` first."
        raise UserError(f"{run.name} is {one.state} ({which}).", why=why, fix=fix)
    if state.alive == "unknown" and not force:
        lives = f"{which} of {run.name} may run" if living[0].job_id else f"{run.name} has a job"
        fix = "Ask again later or elsewhere; if you know that it has ended, add --force."
        raise UserError(f"Nobody can tell whether {lives}.", why=f"{living[0].reason}. {why}", fix=fix)


class Poller:
    """What a run does, for one who waits for its end; a run on this machine is asked every time.

    Args:
        clock: seconds that only go forward.
    """

    def __init__(self, run: RunDir, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._clock, self._soon = run, clock, SOON_SECONDS
        self._calls: list[float] = []
        self._ask()

    def state(self, *, soon: bool = False) -> JobState:
        """The newest that is known.

        Args:
            soon: something has happened that makes it worth asking again early.
        """
        pause = min(self._soon, EVERY_SECONDS) if soon else EVERY_SECONDS
        now = self._clock()
        self._calls = [call for call in self._calls if now - call < 60]
        is_local = ":" not in self._state.executor and not named(self._state.executor).batch
        if is_local or (now - self._asked >= pause and len(self._calls) + _CALLS_FOR_ONE <= CALLS_A_MINUTE):
            self._soon = 2 * self._soon if soon else SOON_SECONDS
            self._ask()
        return self._state

    def _ask(self) -> None:
        self._asked, spent = self._clock(), list[int]()
        (self._state,) = job_states([self._run], spent=spent.append)
        self._calls += [self._asked] * sum(spent)
