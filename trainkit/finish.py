"""Wait for runs, follow them to their end, report how they ended, and cancel them."""

import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from trainkit import terminal
from trainkit.errors import RefusedError, RunFailedError, TrainkitError, UserError
from trainkit.run.events import cancelled, history_of
from trainkit.run.folder import RunDir
from trainkit.schedulers import base
from trainkit.schedulers.base import JobState, Poller, Scheduler, job_state, named

if TYPE_CHECKING:
    from trainkit.diagnosis.causes import Cause

LOOK_SECONDS = 0.25
"""Between two looks at a run's own record, which need no scheduler."""


class Watch:
    """Waits for the start and the end of a run."""

    def __init__(self, run: RunDir) -> None:
        self.run, self.poller, self.said = run, Poller(run), ""

    def is_alive(self) -> bool:
        """Whether the run may still write. Prints once if the scheduler cannot tell."""
        state, words = self.poller.state(soon=history_of(self.run).outcome is not None), ""
        if state.alive == "unknown":
            job = state.living()[0]
            words = f"Nobody can tell what job {job.job_id or '?'} does ({job.reason}); asking on."
            if words != self.said:
                print(words, file=sys.stderr, flush=True)
        self.said = words
        return state.alive != "no"

    def wait_for_start(self) -> None:
        """Wait while the job is queued; print its state and reason whenever they change."""
        said = ""
        while (state := self.poller.state()).state in ("PENDING", "CONFIGURING") and not self.run.attempts():
            words = f"Job {state.job_id}: {state.state}" + (f" ({state.reason})" if state.reason else "")
            if words != said and named(state.executor).batch:
                print(words, flush=True)
                said = words
            time.sleep(LOOK_SECONDS)

    def wait_for_end(self) -> int:
        """Wait for the end. Returns the exit code, raises an error if the run failed."""
        while self.is_alive():
            time.sleep(LOOK_SECONDS)
        return end_of(self.run, self.poller.state())


def follow_to_end(run: RunDir) -> int:
    """Show progress until the run ends; Ctrl-C leaves it running. Returns the exit code, raises if it failed."""
    from trainkit.monitor.follow import follow

    try:
        watched = Watch(run)
        watched.wait_for_start()
        follow(run, watched.is_alive)
        return watched.wait_for_end()
    except KeyboardInterrupt:
        _say_detached(run)
        return 130


def show_to_end(run: RunDir, show: Callable[[], None]) -> bool:
    """Call ``show`` again and again until the run ends; False if Ctrl-C ended the watching."""
    try:
        watched = Watch(run)
        watched.wait_for_start()
        while watched.is_alive():
            time.sleep(LOOK_SECONDS)
            show()
        show()
        return True
    except KeyboardInterrupt:
        _say_detached(run)
        return False


def wait_for(run: RunDir) -> int:
    """Wait silently for the end of a run. Returns the exit code, raises an error if it failed."""
    return Watch(run).wait_for_end()


def _say_detached(run: RunDir) -> None:
    print("\nDetached; the run goes on.")
    print(f"  watch   {terminal.command('logs', run.path, '-f')}\n  cancel  {terminal.command('cancel', run.path)}")


def ended(run: RunDir) -> None:
    """Raise an error with the cause if a run has failed."""
    if (state := job_state(run)).state != "COMPLETED":
        end_of(run, state)


def full_name(run: RunDir) -> str:
    """A run's name as commands take it; a run of a sweep is SWEEP/NUMBER."""
    return f"{run.path.parent.name}/{run.name}" if run.name.isdecimal() else run.name


def refusal(run: RunDir, cause: "Cause", heading: str) -> TrainkitError:
    """The error of a rank that refused its settings, in its own words and with its exit code."""
    kinds: dict[int, type[TrainkitError]] = {2: UserError, 3: RefusedError}
    kind = kinds.get(history_of(run).refused_with, RunFailedError)
    return kind(f"{heading} {cause.what}", why=cause.shown, fix=cause.advice)


def end_of(run: RunDir, state: JobState) -> int:
    """Print a finished run's results and paths. Raises an error with the cause if it failed."""
    if state.state == "COMPLETED":
        from trainkit.report.facts import summary_lines

        print("\n".join(summary_lines(run)))
        return 0
    heading = f"{full_name(run)}: {state.state}."
    if state.state not in ("CANCELLED", "PREEMPTED"):
        from trainkit.diagnosis.causes import cause_of
        from trainkit.diagnosis.evidence import last_words

        cause = cause_of(run, state)
        if cause is not None and cause.why:
            raise refusal(run, cause, heading)
        failure = cause.failure if cause is not None else None
        if words := failure.traceback[-60:] if failure is not None else last_words(run):
            print("\n".join(words), file=sys.stderr)
        if cause is not None:
            raise RunFailedError(f"{heading} {cause.what}", why=cause.shown, fix=cause.advice)
    logs, resume = terminal.command("logs", run.path), terminal.command("resume", run.path)
    why, fix = state.reason or f"Its log is in {run.logs}.", f"`{logs}` shows more; `{resume}` goes on where it saved."
    raise RunFailedError(heading, why=why, fix=fix)


def cancel(runs: Sequence[RunDir]) -> None:
    """Cancel all jobs of these runs. Raises RefusedError for jobs that may be another user's or another run's."""
    for run in runs:
        _require_own(run)
    states = dict(zip(runs, base.job_states(runs), strict=True))
    for run, state in states.items():
        if state.alive == "no":
            why = f" ({state.reason})" if state.reason else ""
            print(f"{terminal.long_line(run.path)}: nothing to cancel, it is {state.state}{why}.")
    jobs = [(run, job) for run, state in states.items() for job in state.living()]
    strange = base.not_known_as_its_own([(run, job) for run, job in jobs if job.job_id])
    groups: dict[Scheduler, list[tuple[RunDir, JobState]]] = {}
    for run, job in jobs:
        if job.job_id and (run, job) not in strange:
            groups.setdefault(named(job.executor), []).append((run, job))
    for scheduler in sorted(groups, key=lambda scheduler: not scheduler.batch):
        scheduler.cancel(groups[scheduler], _say_cancelled)
    for run, job in jobs:
        if not job.job_id:
            cancelled(run, "")
            place = terminal.long_line(run.path)
            print(f"{place}: no job is known, and one that comes is cancelled ({job.reason}).", flush=True)
    if strange:
        run, job = strange[0]
        raise RefusedError(
            f"Not ended: {', '.join(f'{each.job_id} of {folder.name}' for folder, each in strange)}.",
            why="Only the record in the run's folder names it, and whoever wrote that could name any of yours: neither "
            "your own list of jobs nor the scheduler knows it as that run's.",
            fix=f"If it is that run's and yours: {base.built_in(job.executor).by_hand(run, job)}",
        )


def _require_own(run: RunDir) -> None:
    """The record names the job to cancel: another user's record could name any job of this user."""
    try:
        owner = run.events.stat().st_uid
    except OSError:
        return  # without a record there is nothing to trust
    if owner != os.geteuid():
        why = f"User {owner} wrote what is known of its job."
        fix = "Ask them. A job of your own you can still end by its number: scancel NUMBER, or kill."
        raise RefusedError(f"{run.name} is not yours.", why=why, fix=fix)


def _say_cancelled(run: RunDir, job: JobState) -> None:
    """Print the run's whole path, as its name alone may be ambiguous."""
    batch, place = named(job.executor).batch, terminal.long_line(run.path)
    doubt = f"; whether it still ran, nobody could tell ({job.reason})" if batch and job.alive == "unknown" else ""
    print(f"{place}: cancelled {'' if batch else 'local '}job {job.job_id}{doubt}.", flush=True)
