"""End the jobs of runs: what `cancel` does, in notebooks too."""

from __future__ import annotations

import os
from collections.abc import Sequence

from trainkit import terminal
from trainkit.errors import RefusedError
from trainkit.run.events import cancelled
from trainkit.run.folder import RunDir
from trainkit.schedulers.base import JobState, Scheduler, built_in, named
from trainkit.schedulers.states import job_states, not_known_as_its_own


def cancel(runs: Sequence[RunDir]) -> None:
    """End every job that these runs have, and say so. Raises RefusedError for what may be somebody else's."""
    for run in runs:
        _require_own(run)
    states = job_states(runs)
    jobs = [(run, job) for run, state in zip(runs, states, strict=True) for job in state.living()]
    for run, state in zip(runs, states, strict=True):
        if state.alive == "no":
            why = f" ({state.reason})" if state.reason else ""
            print(f"{_shown(run)}: nothing to cancel, it is {state.state}{why}.")
    strange = not_known_as_its_own([(run, job) for run, job in jobs if job.job_id])
    jobs = [(run, job) for run, job in jobs if (run, job) not in strange]
    nameless = [(run, job) for run, job in jobs if not job.job_id]
    groups: dict[Scheduler, list[tuple[RunDir, JobState]]] = {}
    for run, job in jobs:
        if job.job_id:
            groups.setdefault(named(job.executor), []).append((run, job))
    for scheduler, group in sorted(groups.items(), key=lambda item: not item[0].batch):
        scheduler.cancel(group, _say_ended)
    for run, job in nameless:
        cancelled(run, "")
        print(f"{_shown(run)}: no job is known, and one that comes is cancelled ({job.reason}).", flush=True)
    if strange:
        raise _not_its_own(strange)


def _not_its_own(jobs: Sequence[tuple[RunDir, JobState]]) -> RefusedError:
    run, job = jobs[0]
    them = ", ".join(f"{state.job_id} of {folder.name}" for folder, state in jobs)
    return RefusedError(
        f"Not ended: {them}.",
        why="Only the record in the run's folder names it, and whoever wrote that could name any of yours: neither "
        "your own list of jobs nor the scheduler knows it as that run's.",
        fix=f"If it is that run's and yours: {built_in(job.executor).by_hand(run, job)}",
    )


def _shown(run: RunDir) -> str:
    """Its whole path: by a name alone nobody sees whether it was the one that was meant."""
    return terminal.one_line(run.path, 5000)


def _require_own(run: RunDir) -> None:
    """Its record says which job or process is ended: a stranger's could name any of the user's."""
    try:
        owner = run.events.stat().st_uid
    except OSError:
        return  # no record that could be believed
    if owner != os.geteuid():
        raise RefusedError(
            f"{run.name} is not yours.",
            why=f"User {owner} wrote what is known of its job.",
            fix="Ask them. A job of your own you can still end by its number: scancel NUMBER, or kill.",
        )


def _say_ended(run: RunDir, job: JobState) -> None:
    if not named(job.executor).batch:
        print(f"{_shown(run)}: cancelled local job {job.job_id}.")
        return
    doubt = f"; whether it still ran, nobody could tell ({job.reason})" if job.alive == "unknown" else ""
    print(f"{_shown(run)}: cancelled job {job.job_id}{doubt}.", flush=True)
