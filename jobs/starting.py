"""What `submit`, `resume` and `launch` share: launch flags, checking, handing over, and following a run to its end."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs import cli
from trainkit.config.loading import Loaded
from trainkit.errors import RunFailedError
from trainkit.records.events import last_event
from trainkit.records.rundir import RunDir


def add_launch_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of the commands that start a job: executor, cluster, following, resources."""
    parser.add_argument("--executor", metavar="NAME", help="auto, slurm, local, or debug (in this very process)")
    parser.add_argument(
        "--cluster", metavar="PROFILE", help="a site profile: a name in configs/clusters, or a YAML file"
    )
    parser.add_argument("--dry-run", action="store_true", help="print what would be submitted, and why; write nothing")
    group = parser.add_mutually_exclusive_group()
    group.add_argument("-f", "--follow", action="store_true", default=None, help="show progress until the run ends")
    group.add_argument("--no-follow", action="store_false", dest="follow", help="return at once, also for a local run")
    group.add_argument("--wait", action="store_true", help="wait silently until the run ends")
    cli.add_resource_flags(parser)


def launch_settings(args: argparse.Namespace) -> dict[str, tuple[Any, str]]:
    """Configuration keys set by the flags of `add_launch_flags`."""
    settings = cli.resource_settings(args)
    if args.executor is not None:
        settings["launch.executor"] = (args.executor, "--executor")
    if args.cluster is not None:
        settings["launch.cluster"] = (args.cluster, "--cluster")
    return settings


def start(
    folder: Path,
    runs: Sequence[RunDir],
    plan: Any,
    args: argparse.Namespace,
    cwd: Path,
    env: Mapping[str, str],
    *,
    new: bool,
) -> int:
    """Hand written runs over, say what was done, and follow them if asked (local runs: unless asked not to)."""
    from jobs.train import run_rank  # imports no torch
    from trainkit.launch import submission

    if plan.executor == "debug":
        print(f"{runs[0].name}: rank 0 of 1 in this process. {_reason(plan, 'nodes')}".rstrip(), flush=True)
        submission.run_here(runs[0], plan, run_rank, env)
        return end_of(runs[0])
    if new:
        with submission.undone_on_error(folder):
            job_ids = submission.hand_over(folder, runs, plan, run_rank, cwd=cwd, env=env)
    else:
        job_ids = submission.hand_over(folder, runs, plan, run_rank, cwd=cwd, env=env)
    _announce(folder, plan, job_ids)
    follow = args.follow if args.follow is not None else plan.executor == "local"
    if not args.wait and not follow:
        return 0
    codes = []
    for run in runs:
        try:
            codes.append(wait_for(run) if args.wait else follow_to_end(run))
        except RunFailedError as error:
            if len(runs) == 1:
                raise
            print(error, file=sys.stderr)  # the others of a sweep go on
            codes.append(error.exit_code)
    return max(codes)


def dry_run(plan: Any, loaded: Loaded, folder: Path, script: str | None) -> int:
    """On stdout what would be submitted, on stderr every value with its source and reason. Writes nothing."""
    from trainkit.launch import explain

    if script is None:
        script = (
            f"# {plan.executor}: {plan.nodes} x {plan.ntasks_per_node} ranks on this machine, run folder {folder}\n"
        )
        script += "".join(f"{line}\n" for line in explain.rank_commands(plan, folder))
    sys.stdout.write(script)
    sys.stdout.flush()
    rows = explain.plan_rows(plan) + explain.config_rows(loaded)
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table("setting", "value", "source", "reason", box=None)
        for row in rows:
            table.add_row(*row)
        Console(stderr=True).print(table)
        return 0
    widths = [max(len(row[column]) for row in rows) for column in range(3)] + [0]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip(), file=sys.stderr)
    return 0


def _announce(folder: Path, plan: Any, job_ids: Sequence[str]) -> None:
    ranks = f"{plan.nodes} node{'s' * (plan.nodes > 1)} x {plan.ntasks_per_node} rank{'s' * (plan.ntasks_per_node > 1)}"
    if plan.executor == "slurm":
        what = job_ids[0] if len(job_ids) == 1 else f"{job_ids[0].split('_')[0]} (array of {len(job_ids)})"
        print(f"Submitted job {what}: {ranks}.")
    else:
        why = _reason(plan, "executor")
        how = f"simulating {ranks}" if plan.nodes > 1 else ranks
        print(f"Running locally ({why or 'as asked'}): {how} on this machine through submitit's local execution.")
    run = folder if len(job_ids) == 1 else folder / "0"
    print(f"  run folder  {folder}")
    print(f"  watch       python -m jobs.logs {run} -f")
    print(f"  state       python -m jobs.status {folder}")
    print(f"  cancel      python -m jobs.cancel {folder}", flush=True)


def _reason(plan: Any, name: str) -> str:
    return next((str(item.reason) for item in plan.decisions if item.name == name), "")


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
    while (state := job_state(run)).state in ("PENDING", "CONFIGURING") and last_event(run, "started") is None:
        words = f"Job {state.job_id}: {state.state}" + (f" ({state.reason})" if state.reason else "")
        if words != said and state.executor == "slurm":
            print(words, flush=True)
            said = words
        time.sleep(pause)
        pause = min(pause * 1.5, 10.0 if state.executor == "slurm" else 0.5)


def _alive_asker(run: RunDir) -> Callable[[], bool]:
    """Whether the run's job may still write; SLURM is asked every ten seconds at most, for sites warn who asks more."""
    from trainkit.cluster.queue import job_state

    state, asked = job_state(run), time.monotonic()

    def is_alive() -> bool:
        nonlocal state, asked
        if state.executor != "slurm" or time.monotonic() - asked > 10:
            state, asked = job_state(run), time.monotonic()
        return state.alive

    return is_alive


def wait_for(run: RunDir) -> int:
    """Wait until the run's job has ended, without a word. Returns the exit code, raises if it failed."""
    from trainkit.cluster.queue import job_state

    pause = 0.1
    while job_state(run).alive:
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
