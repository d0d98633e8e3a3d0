"""Following a run to its end, for the commands that have started it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit import terminal
from trainkit.errors import RefusedError, RunFailedError, TrainkitError, UserError
from trainkit.run.events import history_of
from trainkit.run.folder import RunDir
from trainkit.schedulers.base import named
from trainkit.watcher import FileWatcher

if TYPE_CHECKING:
    from trainkit.diagnosis.causes import Cause
    from trainkit.schedulers.base import JobState
    from trainkit.schedulers.states import Poller

LOOK_SECONDS = 0.5
SELDOM_SECONDS = 2.0
"""Where nobody tells of its end: how often the run's own record is looked at, which costs its scheduler nothing; at
first, and after a while."""


def follow_to_end(run: RunDir) -> int:
    """Show progress until the run ends; Ctrl-C leaves it running. Returns the exit code, raises if it failed."""
    from trainkit.monitor.follow import files_of, follow
    from trainkit.schedulers.states import Poller

    try:
        poller = Poller(run)
        with FileWatcher(files_of(run), process_of(poller.state())) as notice:
            _wait_for_start(run, poller, notice)
            follow(run, alive_poller(run, poller), notice)
            return _wait(run, poller, notice)
    except KeyboardInterrupt:
        _detached(run)
        return 130


def show_to_end(run: RunDir, files: Sequence[Path], show: Callable[[], None]) -> bool:
    """Call ``show`` whenever something was written to ``files``, until the run ends; False if Ctrl-C has left it."""
    from trainkit.schedulers.states import Poller

    try:
        poller = Poller(run)
        with FileWatcher([run.events, *files], process_of(poller.state())) as notice:
            _wait_for_start(run, poller, notice)
            is_alive = alive_poller(run, poller)
            while is_alive():
                notice.wait(LOOK_SECONDS)
                show()
            show()
        return True
    except KeyboardInterrupt:
        _detached(run)
        return False


def ended(run: RunDir) -> None:
    """Raise why a run has failed, if it has."""
    from trainkit.schedulers.states import job_state

    state = job_state(run)
    if state.state != "COMPLETED":
        end_of(run, state)


def _detached(run: RunDir) -> None:
    print("\nDetached; the run goes on.")
    print(f"  watch   {terminal.command('logs', run.path, '-f')}\n  cancel  {terminal.command('cancel', run.path)}")


def _wait_for_start(run: RunDir, poller: Poller, notice: FileWatcher) -> None:
    """While the job waits in the queue, say so, and why, whenever that changes."""
    said = ""
    while (state := poller.state()).state in ("PENDING", "CONFIGURING") and not run.attempts():
        words = f"Job {state.job_id}: {state.state}" + (f" ({state.reason})" if state.reason else "")
        if words != said and named(state.executor).batch:
            print(words, flush=True)
            said = words
        notice.wait(LOOK_SECONDS)


def alive_poller(run: RunDir, poller: Poller) -> Callable[[], bool]:
    """Whether the run may still write, as often as one likes. It says when nobody can tell, and that it asks on."""
    said = ""

    def is_alive() -> bool:
        nonlocal said
        state = poller.state(soon=history_of(run).outcome is not None)
        words = unknown(state)
        if words and words != said:
            print(words, file=sys.stderr, flush=True)
        said = words
        return state.alive != "no"

    return is_alive


def unknown(state: JobState) -> str:
    """What to say while nobody can tell whether a run's jobs are over; empty otherwise."""
    if state.alive != "unknown":
        return ""
    job = state.living()[0]
    return f"Nobody can tell what job {job.job_id or '?'} does ({job.reason}); asking on."


def wait_for(run: RunDir) -> int:
    """Wait until the run's job has ended, without a word. Returns the exit code, raises if it failed."""
    from trainkit.schedulers.states import Poller

    poller = Poller(run)
    with FileWatcher([run.events], process_of(poller.state())) as notice:
        return _wait(run, poller, notice)


def _wait(run: RunDir, poller: Poller, notice: FileWatcher) -> int:
    pause, is_alive = 0.1, alive_poller(run, poller)
    while is_alive():
        notice.wait(pause)
        pause = min(pause * 1.2, SELDOM_SECONDS)
    return end_of(run, poller.state())


def process_of(state: JobState) -> int | None:
    """The process whose end is that of a job on this machine; None for any other job."""
    process = state.job_id.partition("_")[0]
    return int(process) if state.executor == "local" and state.alive == "yes" and process.isdecimal() else None


def full_name(run: RunDir) -> str:
    """A run's name as other commands take it: of one of a sweep's with that of the sweep."""
    return f"{run.path.parent.name}/{run.name}" if run.name.isdecimal() else run.name


def refusal(run: RunDir, cause: Cause, heading: str) -> TrainkitError:
    """The error of a rank that refused what it was to train: in its own words, with its own exit code."""
    kinds: dict[int, type[TrainkitError]] = {2: UserError, 3: RefusedError}
    kind = kinds.get(history_of(run).refused_with, RunFailedError)
    return kind(f"{heading} {cause.what}", why=cause.shown, fix=cause.advice)


def end_of(run: RunDir, state: JobState) -> int:
    """Say how a run ended: its numbers and paths, or why it failed."""
    if state.state == "COMPLETED":
        from trainkit.monitor.follow import summary_lines

        print("\n".join(summary_lines(run)))
        return 0
    from trainkit.diagnosis.causes import cause_of
    from trainkit.diagnosis.evidence import last_words

    cause = cause_of(run, state) if state.state not in ("CANCELLED", "PREEMPTED") else None
    failure = cause.failure if cause is not None else None
    name = full_name(run)
    if cause is not None and cause.why:
        raise refusal(run, cause, f"{name}: {state.state}.")
    if failure is not None and failure.traceback:
        print("\n".join(failure.traceback[-60:]), file=sys.stderr)
    elif failure is None and state.state not in ("CANCELLED", "PREEMPTED"):
        print("\n".join(last_words(run)), file=sys.stderr)
    if cause is not None:
        raise RunFailedError(f"{name}: {state.state}. {cause.what}", why=cause.shown, fix=cause.advice)
    logs, resume = terminal.command("logs", run.path), terminal.command("resume", run.path)
    raise RunFailedError(
        f"{name}: {state.state}.",
        why=state.reason or f"Its log is in {run.logs}.",
        fix=f"`{logs}` shows more; `{resume}` goes on where it saved.",
    )
