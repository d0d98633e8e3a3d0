"""``python -m jobs.status [RUN...]``: what runs are doing, asked from their scheduler; with names, in detail."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jobs import cli
from trainkit import terminal
from trainkit.cluster.queue import JobState, job_states
from trainkit.errors import TrainkitError
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
        states = _print_table(runs, root)
        if len(runs) == 1:
            _print_detail(runs[0], states[0])
        return 0
    runs = _all_runs(root)
    hidden = 0 if args.all else max(len(runs) - LISTED, 0)
    runs = runs[hidden:]
    if not runs:
        print(f"No runs in {root}, and none submitted from elsewhere. Start one: python -m jobs.submit ddp")
        return 0
    _print_table(runs, root)
    if hidden:
        print(f"{hidden} older runs are not shown; --all shows them.")
    return 0


def _all_runs(root: Path) -> list[RunDir]:
    runs = {run.path: run for run in [*(RunDir(path) for path in index.known()), *list_runs(root)]}
    return sorted(runs.values(), key=RunDir.made)


def _print_table(runs: Sequence[RunDir], root: Path) -> list[JobState]:
    """One row a run. A run whose records cannot be read says so in its row, and hides no other."""
    states = _states(runs)
    rows = [_row(run, state, root) for run, state in zip(runs, states, strict=True)]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*HEADER, box=None)
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))  # and not Rich's own markup: [red] may be a name
        Console().print(table)
        return states
    widths = [max(len(row[column]) for row in [HEADER, *rows]) for column in range(len(HEADER) - 1)] + [0]
    for row in [HEADER, *rows]:
        print("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())
    return states


def _states(runs: Sequence[RunDir]) -> list[JobState]:
    problems: dict[RunDir, JobState] = {}
    for run in runs:
        try:
            life_of(run)
        except TrainkitError as error:
            problems[run] = JobState("UNKNOWN", reason=_words(error))
    told = iter(job_states([run for run in runs if run not in problems]))
    return [problems.get(run) or next(told) for run in runs]


def _words(error: TrainkitError) -> str:
    return f"{error.what} {error.why}"


def _row(run: RunDir, state: JobState, root: Path) -> tuple[str, ...]:
    name = str(run.path.relative_to(root)) if run.path.is_relative_to(root) else str(run.path)
    metrics, total, notes = [], "", [state.reason]
    try:
        metrics = read_metrics(run)
        total = f"/{started['total_steps']}" if "total_steps" in (started := life_of(run).started) else ""
    except TrainkitError as error:
        notes.append(_words(error))
    if not os.path.isfile(run.config):
        notes.append("config.yaml is no file")
    last: dict[str, Any] = metrics[-1] if metrics else {}
    scored = [record["acc1"] for record in metrics if record["split"] == "val" and record.get("acc1") is not None]
    cells = (
        name,
        state.state,
        state.job_id or "-",
        f"{last['step']}{total}" if last else "-",
        f"{last['epoch']:.1f}" if "epoch" in last else "-",
        f"{scored[-1]:.2f}" if scored else "-",
        age(time.time() - run.made()),
        "; ".join(dict.fromkeys(note for note in notes if note)),
    )
    return tuple(terminal.one_line(cell) for cell in cells)


def _print_detail(run: RunDir, state: JobState) -> None:
    print(f"\nfolder  {terminal.one_line(run.path, 5000)}")
    if state.nodes:
        print(f"nodes   {terminal.one_line(state.nodes)}")
    try:
        events = read_events(run)
    except TrainkitError:  # which its row has said
        return
    for event in events:
        when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(event.get("time", 0)))
        facts = {key: value for key, value in event.items() if key not in ("time", "event", "process_started")}
        print(f"{when}  {event['event']:10} " + " ".join(f"{key}={_plain(value)}" for key, value in facts.items()))


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
