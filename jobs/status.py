"""``python -m jobs.status [RUN...]``: what runs are doing, asked from their scheduler; with names, in detail."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs import cli
from trainkit.cluster.queue import JobState, job_states
from trainkit.records import index
from trainkit.records.events import read_events
from trainkit.records.history import life_of
from trainkit.records.metrics import read_metrics
from trainkit.records.rundir import RunDir, find_runs, list_runs, runs_root

HEADER = ("run", "state", "job", "step", "epoch", "val acc1", "age", "")
LISTED = 20


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    parser = cli.Parser("status", "Runs in the runs folder, and those submitted from other folders.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run's name or folder: show it in detail")
    parser.add_argument("-a", "--all", action="store_true", help=f"all runs, not only the newest {LISTED}")
    args = parser.parse_args(list(argv))
    root = runs_root(env)
    if args.runs:
        runs = [run for reference in args.runs for run in find_runs(reference, env)]
        states = job_states(runs)
        _print_table(runs, states, root)
        if len(runs) == 1:
            _print_detail(runs[0], states[0])
        return 0
    runs = _all_runs(root)
    hidden = 0 if args.all else max(len(runs) - LISTED, 0)
    runs = runs[hidden:]
    if not runs:
        print(f"No runs in {root}, and none submitted from elsewhere. Start one: python -m jobs.submit ddp")
        return 0
    _print_table(runs, job_states(runs), root)
    if hidden:
        print(f"{hidden} older runs are not shown; --all shows them.")
    return 0


def _all_runs(root: Path) -> list[RunDir]:
    runs = {run.path: run for run in [*(RunDir(path) for path in index.known()), *list_runs(root)]}
    return sorted(runs.values(), key=lambda run: run.config.stat().st_mtime)


def _print_table(runs: Sequence[RunDir], states: Sequence[JobState], root: Path) -> None:
    rows = [_row(run, state, root) for run, state in zip(runs, states, strict=True)]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table

        table = Table(*HEADER, box=None)
        for row in rows:
            table.add_row(*row)
        Console().print(table)
        return
    widths = [max(len(row[column]) for row in [HEADER, *rows]) for column in range(len(HEADER) - 1)] + [0]
    for row in [HEADER, *rows]:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _row(run: RunDir, state: JobState, root: Path) -> tuple[str, ...]:
    metrics = read_metrics(run)
    started = life_of(run).started
    last: dict[str, Any] = metrics[-1] if metrics else {}
    scored = [record["acc1"] for record in metrics if record.get("split") == "val" and record.get("acc1") is not None]
    step = str(last.get("step", "-")) + (f"/{started['total_steps']}" if last and "total_steps" in started else "")
    epoch = last.get("epoch")
    name = str(run.path.relative_to(root)) if run.path.is_relative_to(root) else str(run.path)
    return (
        name,
        state.state,
        state.job_id or "-",
        step,
        f"{epoch:.1f}" if isinstance(epoch, int | float) else "-",
        f"{scored[-1]:.2f}" if scored else "-",
        age(time.time() - run.config.stat().st_mtime),
        state.reason,
    )


def _print_detail(run: RunDir, state: JobState) -> None:
    print(f"\nfolder  {run.path}")
    if state.nodes:
        print(f"nodes   {state.nodes}")
    for event in read_events(run):
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(event.get("time", 0))))
        facts = {key: value for key, value in event.items() if key not in ("time", "event", "process_started")}
        print(
            f"{when}  {event.get('event', '?'):10} "
            + " ".join(f"{key}={_plain(value)}" for key, value in facts.items())
        )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def age(seconds: float) -> str:
    """Seconds in the largest unit that fits: ``40 s``, ``12 min``, ``5 h``, ``3 d``."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{int(seconds // size)} {unit}"
    return f"{max(int(seconds), 0)} s"


if __name__ == "__main__":
    cli.run(main)
