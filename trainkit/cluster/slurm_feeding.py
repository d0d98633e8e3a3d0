"""Feed a sweep to a queue that does not take all of its runs at once: MaxSubmitJobs of a user, a QOS or an account,
MaxJobCount of the site.

What the limits are nobody is asked: sbatch says whether so many tasks fit, and half as many are tried. For the rest a
small job, the feeder, waits in the queue. It begins when a task of the sweep has ended, queues more, and requeues
itself, so that its own place is never lost, and no process stays on the login node. A run is the feeder's as long as
its newest event is `waits`, with the feeder's id; whoever feeds holds the lease on the sweep's folder.
"""

import signal
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from trainkit.cluster import slurm_commands
from trainkit.cluster.job_states import job_states
from trainkit.cluster.pickles import write_pickles
from trainkit.cluster.plan import Decision, Plan, whole
from trainkit.cluster.ranks import restarts
from trainkit.cluster.scheduler import Function, QueueFullError
from trainkit.cluster.slurm_commands import NAME, persist, told
from trainkit.cluster.slurm_submission import batch_script, sbatch, submit_tasks
from trainkit.common import fileio, terminal
from trainkit.common.errors import SchedulerError, TrainkitError
from trainkit.common.process import NoAnswer
from trainkit.config.source import Source
from trainkit.run import events
from trainkit.run.events import job_of
from trainkit.run.folder import RunDir, as_open_as
from trainkit.run.history import Submission, history_of
from trainkit.run.run_lease import Holder, Lease, lease_on

_MINUTES = 15
"""Time limit of a feeder: it works for seconds, and waits while the controller does not answer."""
_SAME = ("account", "partition", "qos", "reservation")
"""Options of sbatch that a feeder takes over from the runs: by them its jobs are counted."""
_PAUSE = "now+10minutes"
"""Until a feeder tries again that has no task of its sweep to wait for: jobs of others fill the queue."""
_MOST_AWAITED = 30
"""Tasks that a feeder waits for; the end of any one is enough."""
_LITTLE = 8
"""Room is left in the queue for other jobs: it gets no smaller parts than this of what it has taken."""


class _Task(NamedTuple):
    """A run of an array, by its number there."""

    folder: Path
    number: int
    run: RunDir

    @property
    def submission(self) -> Submission | None:
        return history_of(self.run).submission


def submit_later(
    arrays: Sequence[tuple[Path, Sequence[RunDir]]],
    plan: Plan,
    function: Function,
    *,
    cwd: Path,
    env: Mapping[str, str],
    why: str = "",
) -> str:
    """See `Scheduler.submit_later`."""
    for folder, runs in arrays:
        with as_open_as(folder):
            write_pickles(folder, runs, function)
    folders = [folder for folder, _ in arrays]
    sweep = whole(folders[0])
    first = arrays[0][1][0]
    code = first.code
    if not (code / "trainkit" / "cluster" / "slurm_feeding.py").is_file():  # of an older version
        code = Path(__file__).parents[2]
    script = folders[0] / ".submitit" / "feed.sbatch"
    with as_open_as(sweep):
        text = batch_script(_feeder(plan, script.with_suffix(".out")), first.path, cwd, feeds=[code, *folders])
        fileio.write(script, text, folders[0])
        feeder = sbatch(script, env, "--begin=now+1hour")  # should this command die; else it is told below
    for task in _tasks(folders):
        events.waits(task.run, NAME, feeder, why or "others of its sweep come first")
    with lease_on(RunDir(sweep), Holder.me()) as lease:
        try:
            _feed(folders, feeder, lease, env, is_full=bool(why))
        except SchedulerError as error:  # the feeder tries again
            terminal.warn(str(error))
    with suppress(NoAnswer):
        if not _waiting(folders, feeder):
            persist("scancel", feeder)
            return ""
        persist("scontrol", "update", f"job={feeder}", "StartTime=now", *_awaited(whole(folders[0])))
    return feeder


def _feeder(plan: Plan, log: Path) -> Plan:
    """Return the plan of a job of one CPU that queues others."""
    ours = Source("default", "trainkit")
    given = {"job-name": f"{plan.name}-feed", "nodes": 1, "ntasks": 1, "cpus-per-task": 1, "mem": "1G"}
    given |= {"time": _MINUTES, "requeue": None, "open-mode": "append", "output": str(log).replace("%", "%%")}
    own = [Decision(name, value, ours) for name, value in given.items()]
    own += [item for item in plan.directives if item.name in _SAME]
    return replace(plan, directives=tuple(own))


def feed(folders: Sequence[Path], env: Mapping[str, str]) -> bool:
    """See `Scheduler.feed`."""
    feeder = job_of(env)
    holder = Holder.me(job_id=feeder, attempt=restarts(env))
    try:
        with lease_on(RunDir(whole(folders[0])), holder) as lease:
            _feed(folders, feeder, lease, env, is_full=True)
    except TrainkitError as error:  # what is not queued now is queued when it is this job's turn again
        terminal.warn(str(error))
    left = len(_waiting(folders, feeder))
    terminal.say(f"{time.strftime('%F %T')}  {left} runs are left to be queued.")
    if not left or signal.SIGTERM in signal.sigpending():  # somebody ends this job
        return False
    persist("scontrol", "requeue", feeder, patiently=True)
    persist("scontrol", "update", f"job={feeder}", *_awaited(whole(folders[0])))
    return True


def _tasks(folders: Sequence[Path]) -> list[_Task]:
    """List the runs of arrays; the folder of a run alone is that of an array of one."""
    found = []
    for folder in folders:
        if (folder / "config.yaml").is_file():
            found.append(_Task(folder, 0, RunDir(folder)))
            continue
        last = int(_array(folder)[0].rpartition("-")[2])  # a sweep has more runs than its first array
        for number in range(last + 1):
            found.append(_Task(folder, number, RunDir((folder / str(number)).resolve())))
    return found


def _array(folder: Path) -> tuple[str, str]:
    """Return the tasks of an array, ``0-8``, and how many of them run at the same time, ``%2`` or nothing."""
    tasks, percent, parallel = RunDir(folder).directive("array").partition("%")
    return tasks, percent + parallel


def _waiting(folders: Sequence[Path], feeder: str) -> list[_Task]:
    """List the runs that wait for this feeder."""
    found = []
    for task in _tasks(folders):
        submission = task.submission
        if submission is not None and submission.waits and submission.job_id == feeder and not submission.cancelled:
            found.append(task)
    return found


def _feed(folders: Sequence[Path], feeder: str, lease: Lease, env: Mapping[str, str], *, is_full: bool) -> None:
    """Queue as many of the runs that wait as the queue takes. ``is_full``: it has refused some before."""
    cut_short = [task.run for task in _waiting(folders, feeder) if history_of(task.run).cut_short]
    if cut_short:  # a feeder was killed, or had no answer: the job may be there
        job_states(cut_short)
    waiting = [task for task in _waiting(folders, feeder) if not history_of(task.run).cut_short]
    room = _room()
    is_chained = bool(_array(folders[0])[1])
    size = 1 if is_full and not is_chained else len(waiting)  # each try is a line in the records of so many runs
    is_growing = not is_chained
    taken = 0
    while waiting and min(size, room) * _LITTLE > taken:
        folder = waiting[0].folder
        part = [task for task in waiting[: min(size, room)] if task.folder == folder]
        lease.check()
        try:
            tasks = {task.number: task.run for task in part}
            submit_tasks(folder, tasks, _words(folder, part, folders), env, feeder=feeder)
        except QueueFullError:
            is_full = True
            is_growing = False
            size = len(part) // 2
            continue
        if is_chained and is_full:  # what follows a part of an array waits for all of that part
            return
        taken += len(part)
        room -= len(part)
        waiting = waiting[len(part) :]
        if is_growing:
            size *= 2


def _room() -> int:
    """Return how many jobs MaxJobCount leaves; sbatch would try for two minutes what goes beyond it."""
    with suppress(NoAnswer, ValueError):
        most = int(slurm_commands.configuration().get("MaxJobCount", ""))
        return max(most - len(told("squeue", "-h", "-r", "-t", "all", "-o", "%i").splitlines()) - 1, 0)
    return 10_000


def _words(folder: Path, part: Sequence[_Task], folders: Sequence[Path]) -> list[str]:
    """Return options of sbatch for some tasks of an array; with --max-parallel they wait for those before them."""
    parallel = _array(folders[0])[1]
    words: list[str] = []
    if not (folder / "config.yaml").is_file():
        words.append(f"--array={','.join(str(task.number) for task in part)}{parallel}")
    queued = [job for job in (_own_job(task.run) for task in _tasks(folders)) if job is not None]
    if parallel and queued:  # it is for all tasks together
        before = max(queued, key=lambda job: job.time).job_id.partition("_")[0]
        terms = [RunDir(folder).directive("dependency"), f"afterany:{before}"]
        words.append(f"--dependency={','.join(filter(None, terms))}")
    return words


def _own_job(run: RunDir) -> Submission | None:
    """Return the newest job of a run that has been queued."""
    submission = history_of(run).submission
    return None if submission is None or submission.waits else submission


def _awaited(sweep: Path) -> list[str]:
    """Return the words of scontrol by which a feeder begins when one of the oldest living tasks has ended."""
    runs = [RunDir(path) for path in sweep.iterdir() if path.name.isdecimal()]
    jobs = [job for job in map(_own_job, runs) if job is not None and job.ended is None]
    ids = [job.job_id for job in sorted(jobs, key=lambda item: item.time)]
    living = slurm_commands.queued(set(ids)).those_of(ids) if ids else {}
    oldest = [job_id for job_id in ids if job_id in living and living[job_id].alive != "no"][:_MOST_AWAITED]
    if not oldest:
        return [f"StartTime={_PAUSE}", "Dependency="]
    return [f"Dependency={'?'.join(f'afterany:{job_id}' for job_id in oldest)}"]
