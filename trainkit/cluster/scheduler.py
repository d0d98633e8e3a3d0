"""The scheduler protocol, its values, and the schedulers by name.

They are modules of this package, and ``launch.executor=package.module:build`` of the user's own. No code compares
names: it asks the scheduler, as in `named(plan.executor).batch`.
"""

from __future__ import annotations

import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from trainkit.common import process
from trainkit.common.errors import SchedulerError
from trainkit.common.process import NoAnswer
from trainkit.config import plugins
from trainkit.run.folder import RunDir
from trainkit.run.history import RunHistory, Submission, history_of

if TYPE_CHECKING:  # the configuration's classes take a tenth of a second, and `why --help` does without
    from trainkit.cluster.plan import Plan
    from trainkit.cluster.site import Partition
    from trainkit.cluster.waits import PastJob

PACKAGE = "trainkit.cluster"
Function = Callable[[str], str]
"""The function that each rank of a run calls with the run's folder."""
Alive = Literal["yes", "no", "unknown"]
"""Answer to: may a job still write, now or after waiting in the queue? Unknown is never taken for no."""
ENDED = frozenset((
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED",
    "TIMEOUT",
))  # fmt: skip
_ALIVE: Sequence[Alive] = ("no", "unknown", "yes")


# What schedulers are asked about jobs, and what they answer


class NoCluster(NoAnswer):
    """The scheduler's programs are installed, but configured for no cluster."""


class QueueFullError(SchedulerError):
    """The queue takes no more jobs now, or not so many: of this user, of an account, or of all."""


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
    waits: bool = False
    """The job is not the run's: it queues one for it when the queue takes more."""
    also: tuple[JobState, ...] = ()
    """Earlier jobs of the run that are alive, or may be; each without others."""

    @property
    def alive(self) -> Alive:
        """Answer for this and the earlier jobs of the run together."""
        return max((job._alone for job in (self, *self.also)), key=_ALIVE.index)

    def living(self) -> list[JobState]:
        """List every job of the run that is alive, or may be, newest first; each without the others."""
        return [replace(job, also=()) for job in (self, *self.also) if job._alone != "no"]

    @property
    def _alone(self) -> Alive:
        if self.is_gone or self.state in ENDED:
            return "no"
        if not self.executor:  # nobody has submitted the run, so there is no job to ask for
            return "no"
        if self.state == "UNKNOWN":
            return "unknown"
        return "yes"


class Job(NamedTuple):
    """A job of a run, as the run's record has it."""

    run: RunDir
    submission: Submission
    newest: bool = True
    """False for an older job, where it only matters that it has ended."""
    mark: str = ""
    """Digest of the run's record of its jobs: while it stays the same, nothing is known to have happened."""

    @property
    def job_id(self) -> str:
        return self.submission.job_id


class QueueAnswer(NamedTuple):
    """A scheduler's answer about some jobs."""

    states: Sequence[JobState | None] = ()
    """States in the order of the jobs; None for one that the scheduler does not know."""
    has_answered: bool = True
    """The queue answered: a job that it does not list has ended."""
    complaint: str = ""
    """Reason why a program did not answer."""
    commands: int = 1
    """Number of commands that it took."""


class ExpectedStart(NamedTuple):
    """The time at which the scheduler expects to start a job; None, with the reason, where it would refuse it."""

    when: datetime | None = None
    nodes: str = ""
    refusal: str = ""
    answered: bool = True
    """False: it has neither taken nor refused it."""


class JobPlace(NamedTuple):
    """The place of a process in its job, by its environment."""

    job_id: str = ""
    """Empty for a process of no job."""
    nodes: tuple[str, ...] = ()
    nodelist: str = ""
    """The same in the scheduler's own words."""
    partition: str = ""
    needed: int = 1
    """Number of nodes that the job has."""
    restarts: int = 0
    """Number of times that the scheduler has restarted the job."""


class OwnJob(NamedTuple):
    """The queue's entry of the job that this process belongs to."""

    state: str = ""
    """Empty if the scheduler does not answer: a run must survive that."""
    excluded: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    """Nodes asked for by --nodelist."""
    reason: str = ""
    """Reason of the state: ``TimeLimit``, ..."""
    nodes: tuple[str, ...] = ()
    """Nodes that it still has: of a job with spare nodes those that are lost are taken away."""
    ends_at: float | None = None
    """When it must end, by its time limit or a preemption, in seconds since 1970; None if that is not known."""

    @property
    def is_to_be_queued(self) -> bool:
        """True if its script may requeue it: it is neither cancelled nor already on its way back.

        SLURM ends a job at its time limit as it ends a cancelled one, but still accepts its requeue.
        """
        if self.reason == "TimeLimit":
            return self.state in ("RUNNING", "", "COMPLETING", "TIMEOUT")
        return self.state in ("RUNNING", "")


class NodeState(NamedTuple):
    """A scheduler's entry of a node."""

    state: str
    """``idle``, ``down*``, ..."""
    kind: str = ""
    """GPUs and features: a job that runs on one node can run on another of its kind."""


# The protocol


class Scheduler(ABC):
    """Program that starts jobs. It must have the abstract methods; the others are optional abilities."""

    name: str
    """Name in `launch.executor` and in run records; ``package.module:build`` of a user's own."""
    title: str
    """Name in sentences."""
    batch = False
    """True if jobs wait in a queue and run on other machines; otherwise they are processes of this machine."""
    replaces_nodes = False
    """True if a job can have spare nodes, and start its ranks again on one of them."""
    witness = "status"
    """Programs that show the state of a job."""
    tools: tuple[str, ...] = ()
    """Programs for users."""

    # Before there is a job

    def is_here(self, env: Mapping[str, str]) -> bool:
        """Return True if jobs can be submitted from this machine."""
        return True

    def expected(self, env: Mapping[str, str]) -> str:
        """Return the variable that says that jobs are meant for it, where its programs are not found; else nothing."""
        return ""

    def partitions(self, env: Mapping[str, str]) -> tuple[Partition, ...]:
        """List partitions with their nodes; none where it has no partitions. Raises NoAnswer."""
        return ()

    def questions(self, user: str, account_fields: str) -> dict[str, tuple[str, ...]]:
        """Map each topic to the command that shows it."""
        return {}

    def ask(self, command: Sequence[str], env: Mapping[str, str]) -> process.ProgramOutput:
        """Answer a command of `questions`. Raises NoAnswer."""
        return process.ask(command, env=env).shown()

    def has_pyxis(self, env: Mapping[str, str] | None = None) -> bool | None:
        """Return True if it can start ranks in containers by pyxis; None if unknown."""
        return False

    def largest_array(self) -> int:
        """Return how many runs of a sweep fit into one submission."""
        return 10_000

    def script(self, plan: Plan, folder: Path, cwd: Path, points: int = 1) -> str | None:
        """Write the batch script of a run, or of a sweep of ``points`` runs; None for a scheduler without scripts."""
        return None

    def preview(self, plan: Plan, folder: Path) -> str:
        """Return the line that a dry run prints where there is no script."""
        where = "" if self.batch else " on this machine"
        return f"# {plan.executor}: {plan.nodes} x {plan.ntasks_per_node} ranks{where}, run folder {folder}\n"

    def earliest_start(self, script: str, partition: str, env: Mapping[str, str]) -> ExpectedStart:
        """Ask when the script would start in a partition."""
        return ExpectedStart(refusal=f"{self.title} does not say", answered=False)

    def past_jobs(self, partition: str, now: float) -> list[PastJob]:
        """List the jobs that have waited for a partition in the last weeks; none where nobody keeps accounts.

        Raises NoAnswer.
        """
        return []

    def with_job_ids(self, plan: Plan, find: Callable[[str], Sequence[RunDir]]) -> Plan:
        """Replace the names of runs in the plan's dependency by their job ids."""
        return plan

    def on_its_nodes(self, plan: Plan, command: Sequence[str], minutes: int) -> list[str] | None:
        """Return the command that runs ``command`` as every rank of a plan, for ``minutes`` at most.

        None: the caller starts the ranks on this machine.
        """
        return None

    def beside(
        self, job_id: str, nodes: Sequence[str], cpus: int | None, options: Sequence[tuple[str, str]], *,
        on_terminal: bool,
    ) -> list[str]:  # fmt: skip
        """Return the prefix that runs a command once on each of these nodes of a running job, beside its ranks.

        Nothing where they are processes of this machine.

        Args:
            cpus: those of one rank, if it has a number of them.
            options: further ones of the launcher, such as a container's.
            on_terminal: the command has this terminal.
        """
        return []

    # Jobs

    @abstractmethod
    def submit(
        self, folder: Path, runs: Sequence[RunDir], plan: Plan, function: Function, *, cwd: Path, env: Mapping[str, str]
    ) -> list[str]:
        """Start or queue a job for each run in ``folder``, and write a ``submitted`` event into each; their ids.

        Raises:
            QueueFullError: it takes fewer jobs at the same time.
            SchedulerError: it takes none of them.
        """

    def submit_later(
        self, arrays: Sequence[tuple[Path, Sequence[RunDir]]], plan: Plan, function: Function, *, cwd: Path,
        env: Mapping[str, str], why: str = "",
    ) -> str:  # fmt: skip
        """Submit as many runs of these arrays as the queue takes, and a job, the feeder, that does so with the rest.

        Args:
            arrays: folder and runs of each.
            plan: of the first.
            why: its refusal of all of them, if they were tried.

        Returns:
            The feeder's id; empty where none is needed.

        Raises:
            SchedulerError: it takes not even that.
        """
        raise self._cannot("queue a job that queues others")

    def feed(self, folders: Sequence[Path], env: Mapping[str, str]) -> bool:
        """Do the work of the feeder with this environment. Returns True if it is queued again, for runs that are left.

        Raises NoAnswer if it is to be, and is not.
        """
        raise self._cannot("queue a job that queues others")

    @abstractmethod
    def states(self, jobs: Sequence[Job]) -> QueueAnswer:
        """Ask for the states of jobs, with the reason why one is pending."""

    @abstractmethod
    def cancel(self, jobs: Sequence[tuple[RunDir, JobState]], ended: Callable[[RunDir, JobState], None]) -> None:
        """End jobs. Writes a ``cancelled`` event for each that it ends, and calls ``ended``.

        Raises:
            SchedulerError: some of them go on.
        """

    def by_hand(self, run: RunDir, job: JobState) -> str:
        """Tell a user, in a sentence, how to end a job."""
        return f"cancel job {job.job_id} by the means of {self.title}."

    def own(self, jobs: Sequence[tuple[RunDir, JobState]]) -> list[tuple[RunDir, JobState]]:
        """Select the jobs that belong to these runs by the scheduler's own knowledge, not only by the run's record."""
        return []

    def adopt(self, cut_short: Sequence[tuple[RunDir, RunHistory]]) -> Mapping[Path, JobState]:
        """Find and record the jobs of submissions that were cut short before their id was recorded.

        Returns the states of the runs without such a job.
        """
        return {}

    # Its own job, for the script that looks after the ranks

    def place(self, env: Mapping[str, str]) -> JobPlace:
        """Tell which job the process with this environment belongs to, and where that runs."""
        return JobPlace()

    def claim(self, run: RunDir, env: Mapping[str, str]) -> None:
        """Finish, inside a job, the submission of a command that was killed."""
        return

    def own_job(self, job_id: str) -> OwnJob:
        """Return the queue's entry of this running job."""
        return OwnJob()

    def nodes(self, partition: str) -> dict[str, NodeState]:
        """Map the names of a partition's nodes to their states; empty if the scheduler does not answer."""
        return {}

    def restarted(self, nodes: Sequence[str], since: float) -> dict[str, str]:
        """Find nodes that were booted, or began to take jobs, after ``since`` (seconds since 1970), and say when."""
        return {}

    def requeue(self, job_id: str) -> None:
        """Requeue a running job, and end its script with SIGTERM. Raises NoAnswer where that is not possible."""
        raise self._cannot("queue a job again")

    def exclude(self, job_id: str, nodes: Sequence[str]) -> None:
        """Exclude nodes from a pending job. Raises NoAnswer where that is not possible."""
        raise self._cannot("exclude nodes")

    def end_steps(self, job_id: str) -> None:
        """Kill all ranks of a running job; its script goes on."""
        raise self._cannot("end the ranks alone")

    def resize(self, job_id: str, nodes: str, tasks: int) -> None:
        """Have a pending job wait for so many nodes, ``2-3`` for two and one more if there is one, and so many tasks on
        the fewest. Raises NoAnswer."""
        raise self._cannot("give a job other nodes")

    def can_expedite(self) -> str:
        """Say why a lost node's job cannot be started before all others; empty if it can."""
        return f"{self.title} cannot expedite a job"

    def next_link(self, run: RunDir, excluded: Sequence[str], env: Mapping[str, str]) -> str:
        """Queue a job that continues the run after this job has ended. Returns its id; raises NoAnswer."""
        raise self._cannot("queue a job behind another")

    def _cannot(self, what: str) -> NoAnswer:
        return NoAnswer(f"{self.title} cannot {what}.", why=f"{self.title} cannot {what}.", fix="Do without.")

    # For advice

    def at_node(self, host: str) -> str:
        """Return the prefix that runs a command on a node."""
        return ""

    def peak_memory_mb(self, job_id: str) -> float | None:
        """Return the most memory that a rank of a job had, in MB; None where nobody has accounted for it."""
        return None

    def shows_memory(self, job_id: str) -> str:
        """Return the command that shows how much memory a job took."""
        return "dmesg"


# The schedulers by name


@cache
def _load(name: str) -> Scheduler:
    found: Scheduler = plugins.load(PACKAGE, name)()
    if ":" in name:
        found.name = name
    return found


def named(executor: str) -> Scheduler:
    """Return the scheduler of a plan or a record; local for a run that no scheduler started.

    Raises:
        UserError: it is the user's own code, and cannot be loaded.
    """
    if ":" not in executor and executor not in plugins.available(PACKAGE):
        return _load("local")
    return _load(executor)


def built_in(executor: str) -> Scheduler:
    """Do as `named` for a record of somebody else: code that it names is never loaded, and counts as local."""
    if ":" in executor:
        return named("local")
    return named(executor)


def batch_schedulers() -> list[Scheduler]:
    """List the schedulers of this package whose jobs wait in a queue."""
    return [found for found in map(_load, plugins.available(PACKAGE)) if found.batch]


def batch_here(env: Mapping[str, str]) -> Scheduler | None:
    """Return the batch scheduler of this machine, if it has one."""
    for found in batch_schedulers():
        if found.is_here(env):
            return found
    return None


def around(env: Mapping[str, str], run: RunDir | None = None) -> tuple[Scheduler, JobPlace]:
    """Return the scheduler whose job the process with this environment belongs to, and its place there.

    Args:
        run: whose job this is, if a scheduler of the user's own may have started it.
    """
    for found in batch_schedulers():
        place = found.place(env)
        if place.job_id:
            return found, place
    submission = None if run is None else history_of(run).submission
    if submission is None or ":" not in submission.executor:
        usual = batch_schedulers()[0]
        return usual, usual.place(env)
    scheduler = named(submission.executor)
    place = scheduler.place(env)
    if not place.job_id:
        host = socket.gethostname()
        place = JobPlace(submission.job_id, (host,), host)
    return scheduler, place
