"""Dependencies of a job: ``--dependency``, with names of runs in the place of job ids.

slurmctld forgets a job some minutes after its end (MinJobAge), and takes every dependency on a job that it does not
know for fulfilled. So the states of named runs are asked first: what has come true falls away, and what cannot come
true is refused. Job ids that users give themselves are passed on as they are.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from trainkit.cluster.job_states import job_states
from trainkit.cluster.plan import Plan
from trainkit.cluster.scheduler import JobState, built_in
from trainkit.common import terminal
from trainkit.common.errors import RefusedError, UserError
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of

Find = Callable[[str], Sequence[RunDir]]
_KEY = "launch.dependency"
_JOB_ID = re.compile(r"\d+(_\d+|_\*)?(\+\d+)?")  # 4711, 4711_3, 4711_*, and sbatch's +MINUTES
_LEFT_OUT = "Omit the dependency."
_NEEDS_SUCCESS = ("afterok", "aftercorr")


def with_job_ids(plan: Plan, find: Find) -> Plan:
    """Replace the names of runs in the plan's dependency by their job ids.

    Args:
        find: the run of a name, or all runs of a sweep; raises UserError for a name that there is none of.

    Raises:
        UserError: a name of no run, or of one that has no job in SLURM.
        RefusedError: it will never come true, or SLURM does not know the job and would not wait.
    """
    directives = []
    for item in plan.directives:
        if item.name == "dependency" and item.value is not None:
            text = translated(str(item.value), find)
            if not text:
                continue
            if text != item.value:
                item = replace(item, value=text, reason=f"what {item.value} still waits for")
        directives.append(item)
    return replace(plan, directives=tuple(directives))


def translated(text: str, find: Find) -> str:
    """Write a dependency with job ids for the names in it; empty if nothing is left to wait for."""
    terms = []
    for term in re.split(r"[,?]", text):
        kind, *words = term.split(":")
        left = []
        for word in words:
            if _JOB_ID.fullmatch(word):
                left.append(word)
                continue
            if "?" in text:
                why = "With a question mark, any one of its jobs is enough, and a run may have ended."
                fix = "Use commas, or the job ids that `status` shows."
                raise UserError(f"{text} cannot name runs.", why=why, fix=fix, key=_KEY)
            left += _jobs_to_wait_for(kind, find(word))
        if left or not words:
            terms.append(":".join([kind, *left]))
    return ("?" if "?" in text else ",").join(terms)


def _jobs_to_wait_for(kind: str, runs: Sequence[RunDir]) -> list[str]:
    """Return the job ids of a run, or of a sweep's runs, that have not ended; an array's id if none of it has."""
    for run in runs:
        _require_job(run)
    job_ids = []
    for run, state in zip(runs, job_states(runs), strict=True):
        if _waits(kind, run, state):
            job_ids.append(state.job_id)
    arrays = {job_id.partition("_")[0] for job_id in job_ids}
    by_task = kind.lower() == "aftercorr"  # task 3 waits for task 3: an array stays as it is
    if len(runs) > 1 and len(arrays) == 1 and (by_task or len(job_ids) == len(runs)):
        return list(arrays)
    if by_task and len(arrays) > 1:
        why = "Its runs are jobs of several arrays, but aftercorr works within one array."
        raise UserError(f"{kind} cannot wait for that sweep.", why=why, fix="Use afterok.", key=_KEY)
    return job_ids


def _require_job(run: RunDir) -> None:
    """Raise UserError for a run that has no job in SLURM, and has not finished."""
    life = history_of(run)
    if life.finished or (life.submission is not None and built_in(life.submission.executor).batch):
        return
    why = "It was never submitted."
    if life.submission is not None:
        why = f"It runs with the executor {life.submission.executor}."
    what = f"No job can wait for {run.name}: it has no job in SLURM."
    raise UserError(what, why=why, fix=f"Name a run that was submitted to SLURM. {_LEFT_OUT}", key=_KEY)


def _waits(kind: str, run: RunDir, state: JobState) -> bool:
    """Return True if a dependency may still come true, False if it has.

    Raises RefusedError if it cannot, or if SLURM would not wait because it has forgotten the job.
    """
    is_good = history_of(run).finished or state.state == "COMPLETED"
    if state.alive != "no" and not is_good:
        return True
    if state.state == "UNKNOWN" and not is_good:
        what = f"SLURM does not know job {state.job_id} of {run.name}."
        why = f"It is unknown how it ended ({state.reason}), and SLURM starts a job at once if it waits for that one."
        raise RefusedError(what, why=why, fix="Omit the dependency if that run has ended as you want.")
    ended = "COMPLETED" if is_good else state.state
    how = kind.lower()
    if (how in _NEEDS_SUCCESS and not is_good) or (how == "afternotok" and is_good):
        resume = f"`{terminal.command('resume', run.path)}` first, or use afterany:{run.name}."
        fix = _LEFT_OUT if is_good else resume
        raise RefusedError(f"{kind}:{run.name} can never be met.", why=f"{run.name} is {ended}.", fix=fix, key=_KEY)
    return False
