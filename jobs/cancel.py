"""``python -m jobs.cancel RUN...``: end the job of a run, or all of a sweep's, on SLURM or on this machine."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Mapping, Sequence

from jobs import cli, elsewhere
from trainkit import programs, terminal
from trainkit.cluster.queue import job_state, job_states, not_known_as_its_own, process_of
from trainkit.cluster.slurm_jobs import JobState
from trainkit.errors import RefusedError, SchedulerError
from trainkit.run.events import cancelled
from trainkit.run.folder import RunDir, find_runs

PATIENCE_SECONDS = 20.0
"""A local run has less than this to save and end; then it is killed."""
# What scancel, and the controller, say of a job.
_OVER = re.compile(r"invalid job id|already (completing|completed)", re.IGNORECASE)
_DENIED = re.compile(r"denied|not permitted|permission", re.IGNORECASE)


def parser() -> cli.Parser:
    parser = cli.Parser("cancel", "End the jobs of runs. What they have saved stays, and `resume` goes on from it.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's or a sweep's name or folder")
    elsewhere.add_host_flag(parser)
    return parser


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    args = parser().parse_args(list(argv))
    if args.host is not None:
        return elsewhere.forward("cancel", argv, args.host, env)
    runs = [run for reference in args.runs for run in find_runs(reference, env)]
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
    on_slurm = [(run, job) for run, job in jobs if job.job_id and job.executor == "slurm"]
    local = [(run, job) for run, job in jobs if job.executor != "slurm"]
    if on_slurm:
        _scancel(on_slurm)
    if local:
        _end_locally(local)
    for run, job in nameless:
        cancelled(run, "")
        print(f"{_shown(run)}: no job is known, and one that comes is cancelled ({job.reason}).", flush=True)
    if strange:
        raise _not_its_own(strange)
    return 0


def _not_its_own(jobs: Sequence[tuple[RunDir, JobState]]) -> RefusedError:
    run, job = jobs[0]
    named = ", ".join(f"{state.job_id} of {folder.name}" for folder, state in jobs)
    process = process_of(run, job) if job.executor != "slurm" else None
    by_hand = f"scancel {job.job_id}" if job.executor == "slurm" else f"kill {process.pid if process else 'NUMBER'}"
    return RefusedError(
        f"Not ended: {named}.",
        why="Only the record in the run's folder names it, and whoever wrote that could name any of yours: neither "
        "your own list of jobs nor the scheduler knows it as that run's.",
        fix=f"If it is that run's and yours: {by_hand}",
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


def _scancel(jobs: Sequence[tuple[RunDir, JobState]]) -> None:
    """Every job in one call; which it was is written down before anything is said against others of them."""
    command = ["scancel", *dict.fromkeys(state.job_id for _, state in jobs)]
    try:
        answer = programs.ask(command, seconds=60)
    except programs.NoProgram:
        raise SchedulerError(
            "Nothing was cancelled: there is no scancel on this machine.",
            why=f"The jobs are SLURM's: {', '.join(command[1:])}.",
            fix="Give the same command on a login node.",
        ) from None
    except programs.NoAnswer as error:
        raise _unanswered(command, error.words) from None
    # One line for each job that it could not end; one that has ended already needs none.
    lines = [line for line in answer.err.splitlines() if line.strip() and not _OVER.search(line)]
    asked = set(command[1:])
    refused = {found[0] for line in lines for found in re.finditer(r"\w+(\+\d+)?", line) if found[0] in asked}
    if answer.code and lines and not refused:
        refused = asked
    for run, state in jobs:
        if state.job_id not in refused:
            cancelled(run, state.job_id)
            doubt = f"; whether it still ran, nobody could tell ({state.reason})" if state.alive == "unknown" else ""
            print(f"{_shown(run)}: cancelled job {state.job_id}{doubt}.", flush=True)
    if refused:
        text = terminal.one_line(" ".join(lines), 2000)
        if _DENIED.search(text):
            raise SchedulerError("scancel refused.", why=text, fix="Only a job's owner may cancel it.")
        raise _unanswered([command[0], *sorted(refused)], text)


def _unanswered(command: Sequence[str], words: str) -> SchedulerError:
    return SchedulerError(
        f"Not cancelled: {', '.join(command[1:])}.",
        why=f"{words}.",
        fix="The jobs go on. Give the same command again when the scheduler answers: `squeue` shows whether it does.",
    )


def _end_locally(jobs: Sequence[tuple[RunDir, JobState]]) -> None:
    # Of a sweep, the runs that still wait come first: otherwise the next would start as soon as one has ended.
    for run, state in sorted(jobs, key=lambda job: job[1].state == "RUNNING"):
        process = process_of(run, state)
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
        print(f"{_shown(run)}: cancelled local job {state.job_id}.")


if __name__ == "__main__":
    cli.run(main)
