"""``--dependency afterok:RUN``: what a job waits for, by the names of runs instead of job ids."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import replace

from trainkit import terminal
from trainkit.errors import RefusedError, UserError
from trainkit.launch.plan import Plan
from trainkit.launch.resources import FIXED, Decision
from trainkit.run.events import life_of
from trainkit.run.folder import RunDir

Find = Callable[[str], Sequence[RunDir]]
_JOB_ID = re.compile(r"\d+(_(\d+|\*))?(\+\d+)?")  # 4711, 4711_3, and sbatch's +MINUTES


def with_job_ids(plan: Plan, find: Find) -> Plan:
    """The plan with the names of runs in its dependency replaced by their job ids.

    What a run by its own record has already met falls away: SLURM forgets the ids of ended jobs.

    Args:
        find: the run of a name, or all runs of a sweep; raises UserError for a name that there is none of.

    Raises:
        UserError: a name of no run, or of one that SLURM does not know.
        RefusedError: it will never come true.
    """
    directives = []
    for item in plan.directives:
        if item.name == "dependency" and item.value is not None:
            text = translated(str(item.value), find)
            if text == item.value:
                directives.append(item)
            elif text:
                directives.append(replace(item, value=text, reason=f"the jobs of {item.value}"))
            continue
        directives.append(item)
    return replace(plan, directives=tuple(directives))


def waiting_for(plan: Plan, job_id: str, reason: str) -> Plan:
    """The plan, to start after another job has ended as well, however that ends."""
    before = [str(item.value) for item in plan.directives if item.name == "dependency"]
    wait = Decision("dependency", ",".join([*before, f"afterany:{job_id}"]), FIXED, reason)
    return replace(plan, directives=(*(item for item in plan.directives if item.name != "dependency"), wait))


def translated(text: str, find: Find) -> str:
    """A dependency with job ids for the names in it; empty if nothing is left to wait for."""
    any_of = "?" in text  # sbatch takes commas (all of them) or question marks (any of them), and not both
    kept = []
    for term in re.split(r"[,?]", text):
        kind, colon, rest = term.partition(":")
        ids = [_ids(kind, word, find) for word in rest.split(":")] if colon else []
        if any_of and [] in ids:
            return ""
        left = [job_id for found in ids for job_id in found]
        if left or not colon:
            kept.append(":".join([kind, *left]))
    return ("?" if any_of else ",").join(kept)


def _ids(kind: str, word: str, find: Find) -> list[str]:
    """Job ids of one word; none if what is awaited has come true."""
    if _JOB_ID.fullmatch(word):
        _require_no_run(word, find)
        return [word]
    runs = find(word)
    waited = [run for run in runs if not _is_met(kind, run)]
    ids = [_job_id(run) for run in waited]
    arrays = {job_id.partition("_")[0] for job_id in ids}
    return list(arrays) if len(arrays) == 1 and len(ids) == len(runs) else ids


def _require_no_run(job_id: str, find: Find) -> None:
    """Raise UserError where a run is called like the job."""
    try:
        (run, *_) = find(job_id)
    except UserError:
        return
    raise UserError(
        f"--dependency {job_id} is a job and a run.",
        why=f"sbatch takes the number for a job's, and there is {run.path}.",
        fix=f"Give the job of the run by its path, ./{os.path.relpath(run.path)}, or rename the run.",
        key="launch.dependency",
    )


def _is_met(kind: str, run: RunDir) -> bool:
    life = life_of(run)
    ended = "COMPLETED" if life.finished else life.submission.ended if life.submission is not None else None
    if ended is None:
        return False
    wanted = {"afterok": ended == "COMPLETED", "afternotok": ended != "COMPLETED"}.get(kind, True)
    if not wanted:
        raise RefusedError(
            f"{kind}:{run.name} will never come true.",
            why=f"{run.name} is {ended}.",
            fix=f"`{terminal.command('resume', run.path)}` first, or use afterany:{run.name}."
            if kind == "afterok"
            else "Leave the dependency out.",
            key="launch.dependency",
        )
    return True


def _job_id(run: RunDir) -> str:
    submission = life_of(run).submission
    if submission is None or submission.executor != "slurm" or not submission.job_id:
        where = "It was never submitted." if submission is None else f"It runs by the executor {submission.executor}."
        raise UserError(
            f"No job can wait for {run.name}: it has no job in SLURM.",
            why=where,
            fix="Name a run that was submitted to SLURM, or leave the dependency out.",
            key="launch.dependency",
        )
    return submission.job_id
