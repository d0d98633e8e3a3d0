"""``python -m jobs.status [RUN...]``: what runs are doing, asked from their scheduler; with names, in detail."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jobs import cli
from trainkit import fileio, terminal
from trainkit.errors import TrainkitError, UserError
from trainkit.run import folder, metrics, selection
from trainkit.run.events import RunHistory, history_of, read_events
from trainkit.run.folder import RunDir
from trainkit.run.labels import NO_LABELS, Labels, labels_of
from trainkit.run.metrics import Forecast, RunProgress
from trainkit.schedulers.base import KEPT_SECONDS, JobState, job_states
from trainkit.terminal import age, long_line, one_line

if TYPE_CHECKING:
    from rich.console import RenderableType

    from trainkit.diagnosis.causes import Cause

HEADER = ("run", "state", "job", "attempts", "step", "epoch", "val", "ends in", "age")
DISPENSABLE = ("epoch", "age", "attempts", "job", "val", "ends in")
"""Columns that a narrow terminal drops, in this order."""
LISTED = 20
ASK_SECONDS = 20.0
"""Seconds between questions to the scheduler while watching: two commands each, six a minute."""
LOOK_SECONDS = 2.0
"""Seconds between looks at the runs' own records while watching."""
GOING_ON = ("RUNNING", "PENDING", "CONFIGURING", "COMPLETING", "REQUEUED")
MOST_BARS = 6
_HIDDEN = ("time", "event", "process_started", "process_space")
"""Fields of events that a list of them leaves out."""
_STYLES = {
    "RUNNING": "cyan", "COMPLETED": "green", "FAILED": "bold red", "TIMEOUT": "red", "CANCELLED": "yellow",
    "NODE_FAIL": "red", "OUT_OF_MEMORY": "bold red", "PENDING": "blue", "UNKNOWN": "magenta", "DIVERGED": "bold red",
}  # fmt: skip


@dataclass(frozen=True)
class StatusRow:
    """Everything to show of one run."""

    run: RunDir
    name: str
    state: JobState
    history: RunHistory = field(default_factory=RunHistory)
    progress: RunProgress = field(default_factory=RunProgress)
    problems: Sequence[str] = ()
    forecast: Forecast | None = None
    """Time to the end of training, further attempts included; None if unknown."""
    diverged: str = ""
    """How the loss diverged; empty if it did not."""
    labels: Labels = NO_LABELS
    measured: float | None = None
    """What it is sorted by."""

    @property
    def total_steps(self) -> Any:
        return self.history.started.get("total_steps")

    @property
    def cause(self) -> Cause | None:
        from trainkit.diagnosis.causes import cause_of

        with suppress(TrainkitError):  # shown in its row
            return cause_of(self.run, self.state)
        return None

    @property
    def notes(self) -> list[str]:
        """Remarks for the last column."""
        state = self.state
        notes = [" ".join(f"#{tag}" for tag in self.labels.tags), state.reason, *self.problems]
        notes += ["made-up images"] if self.history.started.get("made_up") is True else []
        notes += [f"to start about {state.start.replace('T', ' ')[:16]}"] if state.start else []
        notes += [f"job {job.job_id or '?'} is {job.state} too" for job in state.also]
        if state.state == "COMPLETED" and self.progress.last.get("step") != self.total_steps:
            early = fileio.read_object(self.run.summary).get("stopped_early")
            how = "pruned" if self.history.pruned else "stopped early"
            notes += [f"{how}: {early}"] if isinstance(early, str) else []
        notes += [f"DIVERGED: {self.diverged}"] if self.diverged else []
        if state.alive == "no" and state.state not in ("COMPLETED", "CANCELLED", "NOT SUBMITTED"):
            failures = self.history.failures
            last = max((item.attempt or 0 for item in failures), default=0)
            errors = [item.error for item in failures if (item.attempt or 0) == last]
            if not errors and (cause := self.cause):  # ranks that fail before they meet write no event
                errors = [cause.what]
            notes += [*errors[:1], fileio.full(self.run.path)]
        return list(dict.fromkeys(filter(None, notes)))


def parser() -> cli.Parser:
    parser = cli.Parser("status", "Runs in the runs folder, and those submitted from other folders.")
    add = parser.add_argument
    add("runs", nargs="*", metavar="RUN", help="a run's name or folder: show it in detail")
    add("-a", "--all", action="store_true", help=f"all, not the newest {LISTED}; of other clones too")
    add("-w", "--watch", action="store_true", help="show it anew as it changes, until Ctrl-C")
    add("--json", action="store_true", help="a list of objects, for programs")
    add("--sort", metavar="SPLIT/METRIC", help="best first, by val/acc1 say; val is the headline of the task")
    add("--best", metavar="N", type=int, help="only so many, the best first, by --sort (default: val)")
    add("--since", metavar="AGE", help="made or resumed no longer ago: 7d, 12h, 90min, 2w")
    return cli.add_selection(parser).taking("--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parsed(argv, env)
    if args.watch and args.json:
        raise UserError("--watch and --json do not go together.", why="A list of objects has an end.", fix="Use one.")
    if args.best is not None and args.best < 1:
        raise UserError(f"--best {args.best} shows nothing.", why="It is a number of runs.", fix="Use --best 5.")
    root, wanted, by = folder.runs_root(env), cli.selection(args), args.sort or ("val" if args.best else "")

    def chosen() -> list[RunDir]:
        """The runs to show, of which those that were not named may be too many."""
        named = [run for reference in args.runs for run in folder.find_runs(reference, env)]
        runs = named if args.runs else folder.known_runs(env, everywhere=args.all)
        return [run for run in runs if wanted.takes(run)]

    def ranked(rows: Sequence[StatusRow]) -> list[StatusRow]:
        """Those of the wanted states, sorted as asked."""
        kept = {row.run: row for row in rows if wanted.takes_state(row.state.state)}
        if not by:
            return list(kept.values())
        values = {run: selection.measured(run, by) for run in kept}
        return [replace(kept[run], measured=values[run]) for run in selection.best_first(values, by)[: args.best]]

    shown = slice(0 if args.all or args.runs or wanted or by else -LISTED, None)
    if not (runs := chosen()) and not wanted and not args.json:
        others = "" if args.all else " (--all looks at those of other clones too)"
        print(f"No runs in {root}, and none submitted from elsewhere{others}. Start one: python -m jobs.submit ddp")
        return
    if args.watch:  # chosen anew: runs may start meanwhile
        _watch(lambda: chosen()[shown], root, ranked, by)
    ages: list[float] = []
    rows = ranked(looked := look(runs[shown], root, aged=ages.append))
    if args.json:
        asked = time.time() - max(ages, default=0.0)
        print(json.dumps([_as_object(row, asked) for row in rows], indent=2, allow_nan=False))
        return
    if not rows:
        print(f"No such run in {root}, and none submitted from elsewhere.")
        return
    print("\n".join(_table(rows, by)))
    if args.runs and len(rows) == 1:
        _print_detail(rows[0])
    if ages:
        print(f"SLURM said so {age(max(ages))} ago; it is asked again after {KEPT_SECONDS:.0f} s.")
    if hidden := len(runs) - len(looked):
        print(f"{hidden} older runs are not shown; --all shows them.")


def look(
    runs: Sequence[RunDir], root: Path, states: Mapping[Path, JobState] | None = None,
    aged: Callable[[float], None] | None = None,
) -> list[StatusRow]:  # fmt: skip
    """Collect what is known of the runs, asking each scheduler once. An unreadable run does not hide the others.

    Args:
        states: recent answers of the scheduler to this process.
        aged: see `job_states`.
    """
    histories: dict[RunDir, RunHistory] = {}
    rows: dict[RunDir, StatusRow] = {}
    names = {run: str(run.path.relative_to(root) if run.path.is_relative_to(root) else run.path) for run in runs}
    for run, name in names.items():
        try:
            histories[run] = history_of(run)
        except TrainkitError as error:
            rows[run] = StatusRow(run, name, JobState("UNKNOWN", reason=f"{error.what} {error.why}"))
    if states is None:
        asked = job_states(list(histories), list(histories.values()), aged=aged)
        states = {run.path: state for run, state in zip(histories, asked, strict=True)}
    for run, history in histories.items():
        state, progress, ends, problems = states[run.path], RunProgress(), None, list[str]()
        since = history.started.get("time", 0.0) if state.state in GOING_ON else None
        try:
            progress = metrics.progress_of(run, pace_since=since)
            ends = forecast_of(run, state, history, progress)
        except TrainkitError as error:
            problems.append(f"{error.what} {error.why}")
        labels = NO_LABELS
        try:
            labels = labels_of(run)
        except TrainkitError as error:
            problems.append(f"{error.what} {error.why}")
        if not os.path.isfile(run.config):
            problems.append("config.yaml is no file")
        is_lost = progress.train.get("loss", 0.0) is None
        lost = metrics.divergence_of(run) if is_lost else ""  # only then read the whole record
        rows[run] = StatusRow(run, names[run], state, history, progress, problems, ends, lost, labels)
    return [rows[run] for run in runs]


def _watch(
    chosen: Callable[[], Sequence[RunDir]],
    root: Path,
    ranked: Callable[[Sequence[StatusRow]], list[StatusRow]],
    by: str,
) -> NoReturn:
    """Redraw until Ctrl-C: read records often, ask the scheduler rarely."""
    asked, rows = 0.0, list[StatusRow]()

    def text() -> str:
        nonlocal asked, rows
        runs, states = chosen(), {row.run.path: row.state for row in rows}
        is_old = time.monotonic() - asked >= ASK_SECONDS or any(run.path not in states for run in runs)
        asked = time.monotonic() if is_old else asked
        rows = look(runs, root, None if is_old else states)
        return "\n".join(_table(ranked(rows), by))

    def shown(height: int) -> RenderableType:
        return view(_table(now := ranked(rows), by), now, height)

    terminal.watch(text, every=LOOK_SECONDS, view=shown)


def _table(rows: Sequence[StatusRow], by: str = "") -> list[str]:
    """One line per run, with its problems in the last column.

    Args:
        by: what the runs are sorted by, which then stands in the place of the last validation.
    """
    notes = [one_line("; ".join(row.notes)) for row in rows]
    header = [f"best {by}" if by and name == "val" else name for name in HEADER]
    dispensable = [name for name in DISPENSABLE if name in header]
    return terminal.table(header, [_cells(row, by) for row in rows], notes, dispensable=dispensable)


def _cells(row: StatusRow, by: str) -> list[str]:
    last, val, of_task = row.progress.last, row.progress.val, metrics.described(row.run)
    measured = [key for key in (of_task.headline, "loss") if val.get(key) is not None][:1]
    of_all = f"/{row.total_steps}" if row.total_steps is not None else ""
    cells = [row.name, row.state.state, row.state.job_id, str(len(row.run.attempts()) or "")]
    cells += [f"{last['step']}{of_all}" if last else "", f"{last['epoch']:.1f}" if "epoch" in last else ""]
    value = "".join(of_task.words(key, val[key]).removesuffix(" %") for key in measured)
    cells.append((f"{row.measured:.6g}" if row.measured is not None else "") if by else value)
    cells += [age(row.forecast.seconds) if row.forecast is not None else "", age(time.time() - row.run.made())]
    return [one_line(cell or "-") for cell in cells]


def _as_object(row: StatusRow, asked: float) -> dict[str, Any]:
    """The stable format for programs. Times are seconds since 1970; unknown values are null.

    Args:
        asked: time of the scheduler's answer.
    """
    state, last = row.state, row.progress.last
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
        "val": {key: value for key, value in row.progress.val.items() if key not in ("split", "time")} or None,
        "estimated_end": round(time.time() + row.forecast.seconds) if row.forecast is not None else None,
        "made": row.run.made(),
        "notes": row.notes,
        "tags": list(row.labels.tags),
        "said": [note.text for note in row.labels.notes],
        "sorted_by": row.measured,
    }


def _print_detail(row: StatusRow) -> None:
    from trainkit.diagnosis.evidence import course_of

    cause, ends = row.cause, row.forecast
    hint = fileio.read_object(row.run.summary).get("advice")
    facts = {
        "folder": long_line(row.run.path),
        "nodes": one_line(row.state.nodes),
        "cause": long_line(cause.what) if cause else "",
        "why": cause.shown if cause and cause.why else "",
        "fix": long_line(cause.advice) if cause else "",
        "ends": f"about {_clock(time.time() + ends.seconds)[:16]}, {words(ends)}" if ends else "",
        "faster": one_line(hint) if isinstance(hint, str) else "",
    }
    facts |= {f"note {note.number}": f"{note.day} {long_line(note.text)}" for note in row.labels.notes}
    print("\n" + "\n".join(f"{name:6}  {fact}" for name, fact in facts.items() if fact))
    try:
        for smell in course_of(row.run).smells if row.state.state == "RUNNING" else ():
            print(f"smells  {smell.where}  {smell.text}")
        events = read_events(row.run)
    except TrainkitError:  # shown in its row
        return
    for event, following in zip(events, [*events[1:], {}], strict=False):
        # Of consecutive checkpoints only the last: a long training would fill pages.
        if event["event"] == "saved" and all(event.get(key) == following.get(key) for key in ("event", "attempt")):
            continue
        shown = {key: value if isinstance(value, str) else json.dumps(value) for key, value in event.items()}
        fields = " ".join(f"{key}={value}" for key, value in shown.items() if key not in _HIDDEN)
        print(f"{_clock(event.get('time', 0))}  {event['event']:10} {fields}")


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def forecast_of(run: RunDir, state: JobState, history: RunHistory, progress: RunProgress) -> Forecast | None:
    """Extrapolate the present pace and the past waits between attempts; None if too little is known."""
    from trainkit.launch.plan import Plan

    left = progress.seconds_to(history.started.get("total_steps"))
    if left is None or history.finished or state.state not in GOING_ON:
        return None
    now, runs, limit = time.time(), state.state == "RUNNING", math.inf
    if runs:
        left = max(left - (now - progress.last.get("time", now)), 0.0)
    if history.submission is not None and history.submission.executor != "launch":
        with suppress(OSError, ValueError, TrainkitError):  # runs of templates have no plan
            plan = Plan.read(run.plan)
            limit = max(float(plan.time_limit_seconds - plan.lead_seconds), 1.0)
    events = read_events(run, metrics.FORECAST_EVENTS)
    return metrics.forecast(events, left, now=now, attempt_seconds=limit, runs=runs)


def words(found: Forecast) -> str:
    """The assumptions of a forecast, for people."""
    if not found.restarts:
        return "if it goes on as it does"
    many = f"with {terminal.plural(found.restarts, 'further start')}"
    if found.restart_seconds is None:
        return f"{many}, and without waiting in the queue for them"
    return f"{many}, if each takes {found.restart_seconds:.0f} s as before, the wait in the queue included"


def view(table: Sequence[str], rows: Sequence[StatusRow], height: int) -> RenderableType:
    """The table (if too long, its head and the newest runs) and a progress bar for each running training.

    Args:
        table: its lines, the header first.
        height: lines of the terminal.
    """
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    from trainkit.monitor import number

    going_on = [row for row in rows if row.state.state == "RUNNING" and row.progress.last][-MOST_BARS:]
    room = max(height - len(going_on) - 3, 3)
    lines = table if len(table) <= room else [table[0], *table[len(table) - room + 1 :]]
    text = Text("\n".join(lines), no_wrap=True)  # not Rich's markup: [red] may be a name
    for word, style in _STYLES.items():
        text.highlight_regex(rf"(?m)(?<=\s){word}(?=[\s:])", style)
    bars = Table.grid(padding=(0, 2))
    for row in going_on:
        total, step = row.total_steps, row.progress.step or 0
        loss, speed = row.progress.train.get("loss"), row.progress.train.get("images_per_sec")
        known = float(total) if fileio.is_whole(total) and total > 0 else None
        bars.add_row(
            Text(one_line(row.name)),
            ProgressBar(total=known, completed=float(step), width=24, pulse=not known),
            Text(f"{step}/{total}" if known else str(step)),
            Text(f"loss {number(loss, '.4f')}" if "loss" in row.progress.train else ""),
            Text(f"{speed:,.0f} images/s" if fileio.is_number(speed) else ""),
        )
    return Group(text, "", bars) if going_on else text


if __name__ == "__main__":
    cli.run(main)
