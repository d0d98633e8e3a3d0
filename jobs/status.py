"""``python -m jobs.status [RUN...]``: what runs are doing, asked from their scheduler; with names, in detail."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from jobs import cli, flags, output
from trainkit.cluster.job_states import KEPT_SECONDS
from trainkit.common import fileio, jsonl, terminal
from trainkit.common.errors import TrainkitError, UserError
from trainkit.common.terminal import age, long_line, one_line
from trainkit.launch.run_status import StatusRow, status_rows, words
from trainkit.run import find, metrics, selection
from trainkit.run.events import read_events
from trainkit.run.folder import HANG_LIMIT, RunDir

DISPENSABLE = ("epoch", "age", "attempts", "job", "val", "ends in")
"""Columns that a narrow terminal drops, in this order."""
LISTED = 20
ASK_SECONDS = 20.0
"""Seconds between questions to the scheduler while watching: two commands each, six a minute."""
LOOK_SECONDS = 2.0
"""Seconds between looks at the runs' own records while watching."""
_HIDDEN = ("time", "event", "process_started", "process_space")
"""Fields of events that a list of them leaves out."""


def parser() -> cli.Parser:
    parser = cli.Parser("status", "List the runs in the runs folder, and runs that you submitted from other folders.")
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="a run's name or folder: show it in detail")
    add("-a", "--all", action="store_true", help=f"all runs instead of the newest {LISTED}; also those of other clones")
    add("-w", "--watch", action="store_true", help="refresh until Ctrl-C")
    add("--sort", metavar="SPLIT/METRIC", help="best first, as by val/acc1; val means the task's headline metric")
    add("--best", metavar="N", type=int, help="only the best N, by --sort (default: val)")
    add("--since", metavar="AGE", help="created or resumed within this time: 7d, 12h, 90min, 2w")
    flags.add_selection(parser)
    return parser.taking("--json", "--host")


class _Asked:
    """The runs that a command is asked for, and how they are sorted."""

    def __init__(self, args: argparse.Namespace, env: Mapping[str, str]) -> None:
        self._args = args
        self._env = env
        self.root = find.runs_root(env)
        self.wanted = flags.selection(args)
        self.by = args.sort
        if args.best and not self.by:
            self.by = "val"

    def runs(self) -> list[RunDir]:
        """Runs to show, of which those that were not named may be too many."""
        if self._args.runs:
            runs = find.runs_named(self._args.runs, self._env)
        else:
            runs = find.known_runs(self._env, everywhere=self._args.all)
        return list(filter(self.wanted.takes, runs))

    def newest(self, runs: Sequence[RunDir]) -> Sequence[RunDir]:
        """The runs that are shown unless more were asked for."""
        is_all = self._args.all or self._args.runs or self.wanted or self.by
        if is_all:
            return runs
        return runs[-LISTED:]

    def ranked(self, rows: Sequence[StatusRow]) -> list[StatusRow]:
        """Rows of the wanted states, sorted as asked."""
        kept = [row for row in rows if self.wanted.takes_state(row.state.state)]
        if not self.by:
            return kept
        by_run: dict[RunDir, StatusRow] = {}
        for row in kept:
            by_run[row.run] = replace(row, measured=selection.measured(row.run, self.by))
        values = {run: row.measured for run, row in by_run.items()}
        return [by_run[run] for run in selection.best_first(values, self.by)[: self._args.best]]


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parsed(argv, env)
    if args.watch and args.json:
        raise UserError("--watch and --json exclude each other.", why="--json prints one list.", fix="Use one.")
    if args.best is not None and args.best < 1:
        raise UserError(f"--best {args.best} shows nothing.", why="It is a number of runs.", fix="Use --best 5.")
    asked = _Asked(args, env)
    runs = asked.runs()
    if not runs and not asked.wanted and not args.json:
        print(f"No runs in {asked.root}, and none submitted from elsewhere. Start one: python -m jobs.submit ddp")
        if not args.all:
            print("--all also lists runs of other clones.")
        return
    if args.watch:
        _watch(asked)
    ages: list[float] = []
    looked = status_rows(asked.newest(runs), asked.root, aged=ages.append)
    rows = asked.ranked(looked)
    if args.json:
        answered = time.time() - max(ages, default=0.0)
        from jobs.shapes import RunStatus

        output.emit([RunStatus.model_validate(_as_object(row, answered)) for row in rows])
        return
    if not rows:
        print(f"No such run in {asked.root}, and none submitted from elsewhere.")
        return
    print("\n".join(_table(rows, asked.by)))
    if args.runs:
        if len(rows) == 1:
            _print_detail(rows[0])
        _print_fit(rows)
    waiting = [row.state.reason for row in rows if row.state.waits]
    if len(waiting) > 1:
        print(f"{len(waiting)} runs are not in the queue yet. {one_line(waiting[0])}.")
    if ages:
        print(f"SLURM's answer is {age(max(ages))} old; it is asked again after {KEPT_SECONDS:.0f} s.")
    hidden = len(runs) - len(looked)
    if hidden:
        print(f"{hidden} older runs are not shown; --all shows them.")


def _watch(asked: _Asked) -> NoReturn:
    """Redraw until Ctrl-C: read records often, ask the scheduler rarely."""
    answered = 0.0
    rows: list[StatusRow] = []

    def text() -> str:
        nonlocal answered, rows
        runs = asked.newest(asked.runs())  # some may start meanwhile
        states = {row.run.path: row.state for row in rows}
        if time.monotonic() - answered >= ASK_SECONDS or not {run.path for run in runs} <= states.keys():
            answered = time.monotonic()
            rows = status_rows(runs, asked.root)
        else:
            rows = status_rows(runs, asked.root, states)
        return "\n".join(_table(asked.ranked(rows), asked.by))

    terminal.watch(text, every=LOOK_SECONDS)


def _table(rows: Sequence[StatusRow], by: str | None) -> list[str]:
    """One line per run, with its problems in the last column.

    Args:
        by: key that the runs are sorted by, which then stands in the place of the last validation.
    """
    score = f"best {by}" if by else "val"
    header = ("run", "state", "job", "attempts", "step", "epoch", score, "ends in", "age")
    notes = [one_line("; ".join(row.notes)) for row in rows]
    dispensable = [name for name in DISPENSABLE if name in header]
    return terminal.table(header, [_cells(row, by) for row in rows], notes, dispensable=dispensable)


def _cells(row: StatusRow, by: str | None) -> list[str]:
    last = row.progress.last
    step = str(last.get("step", ""))
    if last and row.total_steps is not None:
        step += f"/{row.total_steps}"
    epoch = _shown(last.get("epoch"), "{:.1f}".format)
    score = _shown(row.measured, "{:.6g}".format) if by else _validation(row)
    ends = _shown(row.forecast and row.forecast.seconds, age)
    attempts = len(row.run.attempts()) or ""
    made = age(time.time() - row.run.made())
    cells = (row.name, row.state.state, row.state.job_id, attempts, step, epoch, score, ends, made)
    return [one_line(cell or "-") for cell in cells]


def _shown(value: float | None, words: Callable[[float], str]) -> str:
    """A value in words; empty where it is not known."""
    return "" if value is None else words(value)


def _validation(row: StatusRow) -> str:
    """The headline of the last validation, or else its loss, or else what a script has measured instead."""
    val = row.progress.val
    of_task = metrics.task_metrics(row.run)
    for key in (of_task.headline, "loss", *metrics.measured_in(val)):
        if val.get(key) is not None:
            return of_task.words(key, val[key]).removesuffix(" %")
    return ""


def _as_object(row: StatusRow, asked: float) -> dict[str, Any]:
    """The stable format for programs. Times are seconds since 1970; unknown values are null.

    Args:
        asked: time of the scheduler's answer.
    """
    state = row.state
    last = row.progress.last
    val = {}
    for name, value in row.progress.val.items():
        if name != "time" and not isinstance(value, str):
            val[name] = value
    end: int | None = None
    if row.forecast is not None:
        end = round(time.time() + row.forecast.seconds)
    return {
        "run": row.name,
        "folder": str(row.run.path),
        "state": state.state,
        "alive": state.alive,
        "executor": state.executor or None,
        "job_id": state.job_id or None,
        "living_jobs": [job.job_id for job in state.living() if job.job_id],
        "nodes": state.nodes or None,
        "asked": round(asked, 1),
        "attempts": len(row.run.attempts()),
        "finished": row.history.finished,
        "step": last.get("step"),
        "total_steps": row.total_steps,
        "epoch": last.get("epoch"),
        "val": val or None,
        "estimated_end": end,
        "made": row.run.made(),
        "notes": row.notes,
        "tags": list(row.labels.tags),
        "said": [note.text for note in row.labels.notes],
        "sorted_by": row.measured,
    }


def _print_detail(row: StatusRow) -> None:
    from trainkit.diagnosis.activity import activity_of

    facts = {"folder": long_line(row.run.path), "nodes": one_line(row.state.nodes)}
    cause = row.cause
    if cause:
        facts |= {"cause": long_line(cause.what), "why": cause.why and cause.shown, "fix": long_line(cause.advice)}
    if row.forecast:
        facts["ends"] = f"about {_clock(time.time() + row.forecast.seconds)[:16]}, {words(row.forecast)}"
    if row.state.state == "RUNNING":
        facts["hangs"] = _hang_limit(row.run)
    hint = fileio.read_object(row.run.summary).get("advice")
    if isinstance(hint, str):
        facts["faster"] = one_line(hint)
    for note in row.labels.notes:
        facts[f"note {note.number}"] = f"{note.day} {long_line(note.text)}"
    print()
    for name, fact in facts.items():
        if fact:
            print(f"{name:6}  {fact}")
    try:
        if row.state.state == "RUNNING":
            for smell in activity_of(row.run).smells:
                print(f"smells  {smell.where}  {smell.text}")
        events = read_events(row.run)
    except TrainkitError:  # shown in its row
        return
    for event, following in zip(events, [*events[1:], {}], strict=False):
        # Of consecutive checkpoints only the last: a long training would fill pages.
        is_last = (following.get("event"), following.get("attempt")) != ("saved", event.get("attempt"))
        if event["event"] == "saved" and not is_last:
            continue
        fields = []
        for key, value in event.items():
            if key not in _HIDDEN:
                fields.append(f"{key}={value if isinstance(value, str) else json.dumps(value)}")
        print(f"{_clock(event.get('time', 0))}  {event['event']:10} {' '.join(fields)}")


def _print_fit(rows: Sequence[StatusRow]) -> None:
    """Print what finished runs were given and used, and what to ask for next time."""
    from trainkit.launch.requests import fit_of_runs
    from trainkit.report.fit import lines

    try:
        fit = fit_of_runs([row.run for row in rows])
    except TrainkitError:  # a record that cannot be read is shown in its row
        return
    if fit is not None:
        print("", *lines(fit), sep="\n")


def _hang_limit(run: RunDir) -> str:
    """The time that ranks of a run may make no progress; empty where that is not known."""
    found = fileio.read_object(HANG_LIMIT.at(run.attempt_logs(max(run.attempts(), default=0))))
    seconds = found.get("seconds")
    otherwise = found.get("otherwise")
    if not (jsonl.is_number(seconds) and jsonl.is_number(otherwise)):
        return ""
    return f"after {seconds:.0f} s without progress where all ranks compute an update, else after {otherwise:.0f} s"


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


if __name__ == "__main__":
    cli.run(main)
