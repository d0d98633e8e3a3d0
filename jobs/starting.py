"""What `submit` and `resume` share: dry runs, handing a run over and saying so."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jobs.expecting import expected_rows
from jobs.following import end_of, follow_to_end, wait_for
from jobs.train import run_rank
from trainkit import terminal
from trainkit.config.loading import Loaded
from trainkit.errors import TrainkitError
from trainkit.launch.plan import Plan, config_rows, plan_rows
from trainkit.run.folder import RunDir, find_runs
from trainkit.schedulers.base import named
from trainkit.schedulers.states import job_state


def by_names(plan: Plan, env: Mapping[str, str]) -> Plan:
    """The plan with job ids for the runs that its dependency names."""
    if not any(item.name == "dependency" for item in plan.directives):
        return plan
    return named(plan.executor).with_job_ids(plan, lambda name: find_runs(name, env))


def start(
    folder: Path, runs: Sequence[RunDir], plan: Plan, cwd: Path, env: Mapping[str, str],
    function: Callable[[str], str] = run_rank,
) -> list[str]:  # fmt: skip
    """Hand written runs over to whoever runs them, and say so. The job id of each; none for the debug executor.

    ``function``: what every rank of a run calls, with its folder.
    """
    if plan.executor == "debug":
        from trainkit.launch import submission

        print(f"{runs[0].name}: rank 0 of 1 in this process. {_reason(plan, 'nodes')}".rstrip(), flush=True)
        submission.run_here(runs[0], plan, function, env)
        return []
    job_ids = named(plan.executor).submit(folder, runs, plan, function, cwd=cwd, env=env)
    _announce(folder, plan, job_ids)
    return job_ids


def follow(runs: Sequence[RunDir], executor: str, args: argparse.Namespace) -> int:
    """Follow runs that were started, if asked; local ones unless asked not to. The exit code."""
    if executor == "debug":
        return end_of(runs[0], job_state(runs[0]))
    wanted = args.follow if args.follow is not None else not named(executor).batch
    if not args.wait and not wanted:
        return 0
    codes = []
    for run in runs:
        try:
            codes.append(wait_for(run) if args.wait else follow_to_end(run))
        except TrainkitError as error:
            if len(runs) == 1:
                raise
            print(error, file=sys.stderr)  # the others of a sweep go on
            codes.append(error.exit_code)
    return max(codes, default=0)


def dry_run(plan: Plan, loaded: Loaded, folder: Path, script: str | None) -> int:
    """On stdout what would be submitted, on stderr every value with its source and reason. Writes nothing."""
    sys.stdout.write(script if script is not None else named(plan.executor).preview(plan, folder))
    sys.stdout.flush()
    # What follows from it all comes last, where the prompt is.
    rows = plan_rows(plan) + config_rows(loaded) + expected_rows(plan, loaded.config)
    if sys.stderr.isatty():
        told = [
            (setting, value, f"{source}: {reason}" if reason else source) for setting, value, source, reason in rows
        ]
        print("\n".join(terminal.listing(told, shutil.get_terminal_size().columns)), file=sys.stderr)
        return 0
    widths = [max(len(row[column]) for row in rows) for column in range(3)] + [0]
    for row in rows:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip(), file=sys.stderr)
    return 0


def _announce(folder: Path, plan: Plan, job_ids: Sequence[str]) -> None:
    ranks = f"{plan.nodes} node{'s' * (plan.nodes > 1)} x {plan.ntasks_per_node} rank{'s' * (plan.ntasks_per_node > 1)}"
    if named(plan.executor).batch:
        what = job_ids[0] if len(job_ids) == 1 else f"{job_ids[0].split('_')[0]} (array of {len(job_ids)})"
        print(f"Submitted job {what}: {ranks}.")
    else:
        why = _reason(plan, "executor")
        how = f"simulating {ranks}" if plan.nodes > 1 else ranks
        print(f"Running locally ({why or 'as asked'}): {how} on this machine through submitit's local execution.")
    say_commands(folder, folder if len(job_ids) == 1 else folder / "0")


def say_commands(folder: Path, run: Path) -> None:
    """Where a run, or a sweep, and one run of it, is, and what to type to look after it."""
    print(f"  run folder  {folder}")
    print(f"  watch       {terminal.command('logs', run, '-f')}")
    print(f"  state       {terminal.command('status', folder)}")
    print(f"  cancel      {terminal.command('cancel', folder)}", flush=True)


def _reason(plan: Plan, name: str) -> str:
    return next((str(item.reason) for item in plan.decisions if item.name == name), "")
