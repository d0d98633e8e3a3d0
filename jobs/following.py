"""Following a run to its end, for the commands that have started it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from trainkit.errors import RunFailedError
from trainkit.records.history import life_of
from trainkit.records.rundir import RunDir


def follow_to_end(run: RunDir) -> int:
    """Show progress until the run ends; Ctrl-C leaves it running. Returns the exit code, raises if it failed."""
    from trainkit.monitor.follow import follow

    try:
        _wait_for_start(run)
        follow(run, _alive_asker(run))
    except KeyboardInterrupt:
        print("\nDetached; the run goes on.")
        print(f"  watch   python -m jobs.logs {run.path} -f\n  cancel  python -m jobs.cancel {run.path}")
        return 130
    return wait_for(run)


def _wait_for_start(run: RunDir) -> None:
    """While the job waits in the queue, say so, and why, whenever that changes."""
    from trainkit.cluster.queue import job_state

    said, pause = "", 0.1
    while (state := job_state(run)).state in ("PENDING", "CONFIGURING") and not life_of(run).started:
        words = f"Job {state.job_id}: {state.state}" + (f" ({state.reason})" if state.reason else "")
        if words != said and state.executor == "slurm":
            print(words, flush=True)
            said = words
        time.sleep(pause)
        pause = min(pause * 1.5, 10.0 if state.executor == "slurm" else 0.5)


def _alive_asker(run: RunDir) -> Callable[[], bool]:
    """Whether the run's job may still write; SLURM is asked every ten seconds at most, for sites warn who asks more."""
    from trainkit.cluster.queue import job_state

    state, asked, said = job_state(run), time.monotonic(), False

    def is_alive() -> bool:
        nonlocal state, asked, said
        if state.executor != "slurm" or time.monotonic() - asked > 10:
            state, asked = job_state(run), time.monotonic()
        if state.alive == "unknown" and not said:
            print(f"Job {state.job_id}: nobody can tell what it does ({state.reason}); asking on.", file=sys.stderr)
        said = state.alive == "unknown"
        return state.alive != "no"

    return is_alive


def wait_for(run: RunDir) -> int:
    """Wait until the run's job has ended, without a word. Returns the exit code, raises if it failed."""
    pause, is_alive = 0.1, _alive_asker(run)
    while is_alive():
        time.sleep(pause)
        pause = min(pause * 1.5, 5.0)  # a scheduler is not asked more often than that
    return end_of(run)


def end_of(run: RunDir) -> int:
    """Say how a run ended: its numbers and paths, or why it failed."""
    from trainkit.cluster.queue import job_state
    from trainkit.diagnosis.evidence import failure_of, last_words
    from trainkit.monitor.follow import summary_lines

    state = job_state(run)
    if state.state == "COMPLETED":
        print("\n".join(summary_lines(run)))
        return 0
    failure = failure_of(run) if state.state not in ("CANCELLED", "PREEMPTED") else None
    if failure is not None and failure.traceback:
        print("\n".join(failure.traceback[-60:]), file=sys.stderr)
    elif failure is None and state.state not in ("CANCELLED", "PREEMPTED"):
        print("\n".join(last_words(run)), file=sys.stderr)
    raise RunFailedError(
        f"{run.name}: {state.state}" + (f", rank {failure.rank} first." if failure else "."),
        why=(failure.error if failure else state.reason) or f"Its log is in {run.logs}.",
        fix=f"`python -m jobs.logs {run.path}` shows more; `python -m jobs.resume {run.path}` goes on where it saved.",
    )
