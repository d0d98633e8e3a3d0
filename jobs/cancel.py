"""``python -m jobs.cancel RUN...``: end the job of a run, or all of a sweep's, on SLURM or on this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence

from jobs import cli
from trainkit.cluster.queue import JobState, job_state, job_states
from trainkit.errors import RefusedError, SchedulerError
from trainkit.records.attempts import cancelled
from trainkit.records.history import life_of
from trainkit.records.rundir import RunDir, find_runs

PATIENCE_SECONDS = 20.0
"""A local run has less than this to save and end; then it is killed."""


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    parser = cli.Parser("cancel", "End the jobs of runs. What they have saved stays, and `resume` goes on from it.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's or a sweep's name or folder")
    args = parser.parse_args(list(argv))
    runs = [run for reference in args.runs for run in find_runs(reference, env)]
    for run in runs:
        _require_own(run)
    states = job_states(runs)
    living = [(run, state) for run, state in zip(runs, states, strict=True) if state.alive != "no"]
    on_slurm = [(run, state) for run, state in living if state.executor == "slurm"]
    local = [(run, state) for run, state in living if state.executor != "slurm"]
    for run, state in zip(runs, states, strict=True):
        if state.alive == "no":
            why = f" ({state.reason})" if state.reason else ""
            print(f"{run.name}: nothing to cancel, it is {state.state}{why}.")
    if on_slurm:
        _scancel(on_slurm)
    if local:
        _end_locally(local)
    return 0


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


def _scancel(jobs: Sequence[tuple[RunDir, JobState]]) -> None:
    command = ["scancel", *dict.fromkeys(state.job_id for _, state in jobs)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired) as error:
        raise SchedulerError(
            "Cannot cancel: scancel did not answer.", why=str(error), fix="Try again on a login node."
        ) from None
    if done.returncode:
        raise SchedulerError(
            "scancel refused.", why=" ".join(done.stderr.split()), fix="Only a job's owner may cancel it."
        )
    for run, state in jobs:
        cancelled(run, state.job_id)
        print(f"{run.name}: cancelled job {state.job_id}.")


def _end_locally(jobs: Sequence[tuple[RunDir, JobState]]) -> None:
    # Of a sweep, the runs that still wait come first: otherwise the next would start as soon as one has ended.
    for run, state in sorted(jobs, key=lambda job: job[1].state == "RUNNING"):
        submission = life_of(run).submission
        process = submission.process if submission is not None else None
        if process is None or not process.is_here():
            where = process.host if process else "another machine"
            raise RefusedError(
                f"{run.name} runs on {where}.", why="A local run can only be ended there.", fix=f"Log in to {where}."
            )
        cancelled(run, state.job_id)
        in_sweep = (run.path.parent / "sweep.json").is_file()
        if not in_sweep or job_state(run).state == "RUNNING":
            # INT ends one run of a sweep, TERM all that its process has to do.
            process.signal(signal.SIGINT if in_sweep else signal.SIGTERM)
            deadline = time.monotonic() + PATIENCE_SECONDS
            while (job_state(run).alive != "no" if in_sweep else process.is_alive()) and time.monotonic() < deadline:
                time.sleep(0.05)
        if not in_sweep:
            # Its ranks die with it: each has asked the kernel for that.
            process.signal(signal.SIGKILL)
        print(f"{run.name}: cancelled local job {state.job_id}.")


if __name__ == "__main__":
    cli.run(main)
