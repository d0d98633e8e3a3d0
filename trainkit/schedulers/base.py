"""The protocol of a scheduler, and what it says of jobs.

A scheduler is a file of this package, or ``launch.executor=package.module:build`` of the user's own. Nobody compares
names: whoever must know something of a scheduler asks it, as `named(plan.executor).batch`.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from trainkit import fileio, plugins, programs
from trainkit.errors import RefusedError
from trainkit.programs import NoAnswer
from trainkit.run.events import RunHistory, Submission, history_of
from trainkit.run.folder import RunDir, as_open_as

if TYPE_CHECKING:
    from trainkit.launch.plan import Plan
    from trainkit.site.profile import Partition, Site

PACKAGE = "trainkit.schedulers"

Function = Callable[[str], str]
"""What each rank of a run calls, with the run's folder."""
Alive = Literal["yes", "no", "unknown"]
"""Whether a job may still write, now or after waiting in the queue. Unknown is never taken for no."""
ENDED = frozenset(
    (
        *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
        *("REVOKED", "TIMEOUT"),
    )
)
_ALIVE: Sequence[Alive] = ("no", "unknown", "yes")

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


class NoCluster(NoAnswer):
    """The scheduler's programs are here, and belong to no cluster."""


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
    """When the scheduler means to start a job that waits, by its clock: 2026-11-21T22:04:10. Empty if not known."""
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
class Job:
    """A job of a run, as the run's record has it."""

    run: RunDir
    submission: Submission
    newest: bool = True
    """Of an earlier one it only matters whether it is over."""


@dataclass(frozen=True)
class Answer:
    """What a scheduler says of some jobs."""

    states: Sequence[JobState | None] = ()
    """In the order of the jobs; None for one that the scheduler does not know."""
    has_answered: bool = True
    """The queue has: what it does not have is over."""
    complaint: str = ""
    """Why somebody has not answered."""


@dataclass(frozen=True)
class Search:
    """What became of submissions that were cut short."""

    adopted: frozenset[Path] = frozenset()
    """Runs whose jobs have been found and written down."""
    lost: Mapping[Path, JobState] = field(default_factory=dict)
    """What is to be said of the others."""
    complaint: str = ""
    """Why the queue has not answered."""


@dataclass(frozen=True)
class Start:
    """The scheduler's guess; ``when`` is None, and ``refusal`` says why, where it would not take the job."""

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
    """How often the scheduler has started the job again."""


class OwnJob(NamedTuple):
    """What the queue says of a job."""

    state: str = ""
    """Empty if the scheduler does not answer, which is no reason to lose a run."""
    excluded: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    """Nodes asked for by --nodelist."""
    reason: str = ""
    """Of the state: ``TimeLimit``, ..."""

    @property
    def is_to_be_queued(self) -> bool:
        """Whether it is for its script to put it back into the queue: it is neither cancelled nor on its way back.

        One that is over its time limit is ended like a cancelled one, and SLURM takes its requeue all the same.
        """
        return self.state in ("RUNNING", "") or (self.reason == "TimeLimit" and self.state in ("COMPLETING", "TIMEOUT"))


class NodeState(NamedTuple):
    """What a scheduler says of a node."""

    state: str
    """``idle``, ``down*``, ..."""
    kind: str = ""
    """GPUs and features: a job that runs on one node can run on another of its kind."""


class Scheduler(ABC):
    """What starts jobs. Abstract methods are all that a scheduler needs; the others are for what it can besides."""

    name: str
    """As `launch.executor` and the records of runs have it; of a user's own `package.module:build`."""
    title: str
    """In sentences."""
    batch = False
    """Jobs wait in a queue and run on other machines. False: they are processes of this one."""
    witness = "status"
    """Where it is shown what a job does."""
    tools: tuple[str, ...] = ()
    """Programs that a user asks it by."""

    # Before there is a job

    def is_here(self, env: Mapping[str, str]) -> bool:
        """Whether jobs can be submitted from this machine."""
        return True

    def refusal(self, site: Site) -> RefusedError | None:
        """Why jobs cannot be submitted from this machine, if so."""
        return None

    def partitions(self, env: Mapping[str, str]) -> tuple[Partition, ...]:
        """Its partitions and their nodes; none where it has nothing of that kind. Raises NoAnswer."""
        return ()

    def questions(self, user: str, account_fields: str, summary_format: str) -> dict[str, tuple[str, ...]]:
        """Commands that tell what the site is, by what they tell."""
        return {}

    def ask(self, command: Sequence[str], env: Mapping[str, str]) -> programs.Answer:
        """What a command of `questions` says. Raises NoAnswer."""
        return programs.ask(command, env=env).shown()

    def has_pyxis(self, env: Mapping[str, str] | None = None) -> bool | None:
        """Whether it starts ranks in containers by itself; None if it does not say."""
        return False

    def largest_array(self) -> int:
        """How many runs of a sweep one submission takes."""
        return 10_000

    def script(self, plan: Plan, folder: Path, cwd: Path, points: int = 1) -> str | None:
        """The batch script of a run, or of a sweep of ``points`` runs; None for a scheduler that takes none."""
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
        """A command that starts another one as each rank of a plan, for minutes; None: on this machine, one by one."""
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
    def states(self, jobs: Sequence[Job], *, heard: Callable[[str], None] = lambda command: None) -> Answer:
        """What the jobs do; of one that waits, why. ``heard`` is told of each command that is given."""

    @abstractmethod
    def cancel(self, jobs: Sequence[tuple[RunDir, JobState]], ended: Callable[[RunDir, JobState], None]) -> None:
        """End jobs. Writes a ``cancelled`` event for each that it ends, and calls ``ended``.

        Raises:
            SchedulerError: some of them go on.
        """

    def by_hand(self, run: RunDir, job: JobState) -> str:
        """What a user types to end a job."""
        return f"cancel job {job.job_id} by the means of {self.title}"

    def own(self, jobs: Sequence[tuple[RunDir, JobState]]) -> list[tuple[RunDir, JobState]]:
        """Those of the jobs that the scheduler, and not only the run's record, knows to be these runs'."""
        return []

    def adopt(
        self, cut_short: Sequence[tuple[RunDir, RunHistory]], *, heard: Callable[[str], None] = lambda command: None
    ) -> Search:
        """Look for jobs whose id nobody could write down, and write down those that are there."""
        return Search()

    # Of its own job, for the script that looks after the ranks

    def place(self, env: Mapping[str, str]) -> Place:
        """Which job the process with this environment belongs to, and where that runs."""
        return Place()

    def claim(self, run: RunDir, env: Mapping[str, str]) -> None:
        """Do for a job what the command that queued it could not, for it was killed before."""
        return

    def own_job(self, job_id: str) -> OwnJob:
        """What the queue says of a job that runs."""
        return OwnJob()

    def nodes(self, partition: str) -> dict[str, NodeState]:
        """The nodes of a partition by name; empty if the scheduler does not answer."""
        return {}

    def restarted(self, nodes: Sequence[str], since: float) -> dict[str, str]:
        """Which nodes were booted, or began to take jobs, after a time in seconds since 1970, and when."""
        return {}

    def requeue(self, job_id: str) -> None:
        """Put a job that runs back into the queue, and end its script with SIGTERM. Raises NoAnswer where that is not
        done."""
        raise self._cannot("queue a job again")

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        """Let a job that waits do without nodes. Raises NoAnswer where that is not done."""
        raise self._cannot("exclude nodes")

    def next_link(self, run: RunDir, excluded: Sequence[str], env: Mapping[str, str]) -> str:
        """Queue a job that goes on where this one has stopped, once it has ended; its id. Raises NoAnswer."""
        raise self._cannot("queue a job behind another")

    def _cannot(self, what: str) -> NoAnswer:
        return NoAnswer(f"{self.title} cannot {what}.", why=f"{self.title} cannot {what}.", fix="Do without.")

    # For advice

    def at_node(self, host: str) -> str:
        """What stands before a command that is given on a node; empty: nothing."""
        return ""

    def shows_memory(self, job_id: str) -> str:
        """The command that shows how much memory a job took."""
        return "dmesg"


@cache
def _load(name: str) -> Scheduler:
    found: Scheduler = plugins.load(PACKAGE, name)()
    if ":" in name:
        found.name = name
    return found


def named(executor: str) -> Scheduler:
    """The scheduler of a plan or a record. What no scheduler has started runs as processes of a machine.

    Raises:
        UserError: it is the user's own code, and cannot be loaded.
    """
    known = executor if ":" in executor or executor in plugins.available(PACKAGE) else "local"
    return _load(known)


def built_in(executor: str) -> Scheduler:
    """The same for a record that somebody else may have written: code that it names is not loaded, and counts as this
    machine's processes."""
    return named("local" if ":" in executor else executor)


def batch_schedulers() -> list[Scheduler]:
    """Those of this package whose jobs wait in a queue."""
    return [found for found in map(_load, plugins.available(PACKAGE)) if found.batch]


def batch_here(env: Mapping[str, str]) -> Scheduler | None:
    """The one that is here."""
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
    if submission is not None and ":" in submission.executor:
        host = socket.gethostname()
        scheduler = named(submission.executor)
        place = scheduler.place(env)
        return scheduler, place if place.job_id else Place(submission.job_id, (host,), host)
    scheduler = batch_schedulers()[0]
    return scheduler, scheduler.place(env)


def unclaimed(index: int) -> str:
    """Name of the pickle of a run that has no job id yet; ``index``: its number in a sweep."""
    return f"{index}.pkl"


def pickled(folder: Path, runs: Sequence[RunDir], function: Function, start: Callable[[], str]) -> list[str]:
    """The job id of each run, once ``start`` has started a job for one run, or an array for several, and said its id.

    submitit's pickles, which `TASK` runs: one for each run, with one path and no code in it.
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
