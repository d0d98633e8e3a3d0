"""Wait for runs, follow them to their end, report how they ended, or cancel them."""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from trainkit.cluster import job_states
from trainkit.cluster.job_states import Poller
from trainkit.cluster.scheduler import JobState, Scheduler, built_in, named
from trainkit.common import terminal
from trainkit.common.errors import RefusedError, RunFailedError, TrainkitError, UserError
from trainkit.run.events import cancelled
from trainkit.run.folder import OVER, RunDir
from trainkit.run.history import history_of

if TYPE_CHECKING:
    from trainkit.diagnosis.causes import Cause


LOOK_SECONDS = 0.25
"""Between two looks at a run's own record, which need no scheduler."""


class RunWatch:
    """Waits for the start and the end of a run."""

    def __init__(self, run: RunDir) -> None:
        self.run = run
        self.poller = Poller(run)
        self._doubt = ""

    def is_alive(self) -> bool:
        """Return True while the run may still write. Warns once if the scheduler cannot tell."""
        attempts = self.run.attempts()
        ends = bool(attempts) and OVER.at(self.run.attempt_logs(attempts[-1])).is_file()
        state = self.poller.state(soon=history_of(self.run).outcome is not None, ends=ends)
        doubt = ""
        if state.alive == "unknown":
            job = state.living()[0]
            doubt = f"Nobody can tell what job {job.job_id or '?'} does ({job.reason}); asking on."
            if doubt != self._doubt:
                terminal.warn(doubt)
        self._doubt = doubt
        return state.alive != "no"

    def wait_for_start(self) -> None:
        """Wait while the job is queued; say its state and reason whenever they change."""
        said = ""
        state = self.poller.state()
        while state.state in ("PENDING", "CONFIGURING") and not self.run.attempts():
            words = f"Job {state.job_id}: {state.state}"
            if state.reason:
                words += f" ({state.reason})"
            if words != said and named(state.executor).batch:
                terminal.say(words)
                said = words
            time.sleep(LOOK_SECONDS)
            state = self.poller.state()

    def wait_for_end(self) -> int:
        """Wait for the end. Returns the exit code, raises an error if the run failed."""
        while self.is_alive():
            time.sleep(LOOK_SECONDS)
        return end_of(self.run, self.poller.state())


def follow_to_end(run: RunDir) -> int:
    """Show progress until the run ends; Ctrl-C leaves it running. Returns the exit code, raises if it failed."""
    from trainkit.config.loading import load  # `launch --help` does without
    from trainkit.monitor.log_tail import OutputTail, follow

    try:
        watched = RunWatch(run)
        watched.wait_for_start()
        output = None
        if load(str(run.config)).config.script is not None:
            submission = history_of(run).submission
            output = OutputTail(run, first=0 if submission is None else submission.attempts_before)
        follow(run, watched.is_alive, output)
        return watched.wait_for_end()
    except KeyboardInterrupt:
        _say_detached(run)
        return 130


def show_to_end(run: RunDir, show: Callable[[], None]) -> bool:
    """Call ``show`` again and again until the run ends; False if Ctrl-C ended the watching."""
    try:
        watched = RunWatch(run)
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
    return RunWatch(run).wait_for_end()


def _say_detached(run: RunDir) -> None:
    terminal.say("\nDetached; the run goes on.")
    terminal.say(f"  watch   {terminal.command('logs', run.path, '-f')}")
    terminal.say(f"  cancel  {terminal.command('cancel', run.path)}")


def ended(run: RunDir) -> None:
    """Raise an error with the cause if a run has failed."""
    state = job_states.job_state(run)
    if state.state != "COMPLETED":
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
    """Say a finished run's results and paths. Raises an error with the cause if it failed."""
    if state.state == "COMPLETED":
        from trainkit.report.end_lines import summary_lines

        terminal.say("\n".join(summary_lines(run)))
        return 0
    heading = f"{full_name(run)}: {state.state}."
    if state.state not in ("CANCELLED", "PREEMPTED"):
        from trainkit.diagnosis.causes import cause_of
        from trainkit.diagnosis.evidence import last_words

        cause = cause_of(run, state)
        if cause is not None and cause.why:
            raise refusal(run, cause, heading)
        words: Sequence[str] = last_words(run)
        if cause is not None and cause.failure is not None:
            words = cause.failure.traceback[-60:]
        if words:
            terminal.warn("\n".join(words))
        if cause is not None:
            raise RunFailedError(f"{heading} {cause.what}", why=cause.shown, fix=cause.advice)
    fix = f"`{terminal.command('logs', run.path)}` shows more; "
    fix += f"`{terminal.command('resume', run.path)}` goes on where it saved."
    raise RunFailedError(heading, why=state.reason or f"Its log is in {run.logs}.", fix=fix)


# Cancel


def cancel(runs: Sequence[RunDir]) -> None:
    """Cancel all jobs of these runs. Raises RefusedError for jobs that may be another user's or another run's."""
    for run in runs:
        require_own(run, "Ask them. A job of your own you can still end by its number: scancel NUMBER, or kill.")
    jobs = []
    for run, state in zip(runs, job_states.job_states(runs), strict=True):
        if state.alive == "no":
            why = f" ({state.reason})" if state.reason else ""
            terminal.say(f"{terminal.long_line(run.path)}: nothing to cancel, it is {state.state}{why}.")
        for job in state.living():
            jobs.append((run, job))
    strange = job_states.not_known_as_its_own([(run, job) for run, job in jobs if job.job_id])
    groups: dict[Scheduler, list[tuple[RunDir, JobState]]] = {}
    waiting = []
    for run, job in jobs:
        if job.job_id and (run, job) not in strange:
            if job.waits:
                waiting.append((run, job))
            else:
                groups.setdefault(named(job.executor), []).append((run, job))
    for run, job in _call_off(waiting):
        groups.setdefault(named(job.executor), []).append((run, job))
    for scheduler in sorted(groups, key=lambda scheduler: not scheduler.batch):
        scheduler.cancel(groups[scheduler], _say_cancelled)
    for run, job in jobs:
        if not job.job_id:
            cancelled(run, "")
            place = terminal.long_line(run.path)
            terminal.say(f"{place}: no job is known, and one that comes is cancelled ({job.reason}).")
    if strange:
        run, job = strange[0]
        names = ", ".join(f"{each.job_id} of {folder.name}" for folder, each in strange)
        why = "Only the record in the run's folder names it, and whoever wrote that could name any job of yours."
        fix = f"If it is that run's and yours: {built_in(job.executor).by_hand(run, job)}"
        raise RefusedError(f"Not ended: {names}.", why=why, fix=fix)


def _call_off(waiting: Sequence[tuple[RunDir, JobState]]) -> list[tuple[RunDir, JobState]]:
    """Cancel runs that another job, the feeder, was to queue. Returns the jobs to end: those of runs that were queued
    meanwhile, and feeders that no run waits for any more."""
    for run, job in waiting:
        cancelled(run, job.job_id)
    left = []
    feeders: dict[str, tuple[RunDir, JobState]] = {}
    for run, job in waiting:
        newest = history_of(run).submission
        if newest is not None and not newest.waits and not newest.cancelled:
            left.append((run, JobState("PENDING", newest.job_id, newest.executor)))
        else:
            feeders[job.job_id] = (run, job)
    if waiting:
        terminal.say(f"{terminal.plural(len(waiting) - len(left), 'run')} will not be queued.")
    for run, job in feeders.values():
        others = [history_of(RunDir(path)).submission for path in run.path.parent.iterdir() if path.name.isdecimal()]
        if not any(item and item.waits and item.job_id == job.job_id and not item.cancelled for item in others):
            left.append((run, replace(job, waits=False)))
    return left


def require_own(run: RunDir, fix: str) -> None:
    """Refuse another user's run: its record names the job, and could name any job of this user."""
    try:
        owner = run.events.stat().st_uid
    except OSError:
        return  # without a record there is nothing to trust
    if owner != os.geteuid():
        raise RefusedError(f"{run.name} is not yours.", why=f"User {owner} wrote its record.", fix=fix)


def _say_cancelled(run: RunDir, job: JobState) -> None:
    """Say the run's whole path, as its name alone may be ambiguous."""
    place = terminal.long_line(run.path)  # others may have written what is in it
    if not named(job.executor).batch:
        terminal.say(f"{place}: cancelled local job {job.job_id}.")
    elif job.alive == "unknown":
        terminal.say(f"{place}: cancelled job {job.job_id}; it is unknown whether it was still running ({job.reason}).")
    else:
        terminal.say(f"{place}: cancelled job {job.job_id}.")
