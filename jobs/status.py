"""``python -m jobs.status [RUN...]``: what runs are doing, asked from their scheduler; with names, in detail."""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from jobs import cli, login_node
from trainkit import fileio, terminal
from trainkit.diagnosis.causes import Cause, cause_of
from trainkit.diagnosis.evidence import course_of
from trainkit.errors import TrainkitError, UserError
from trainkit.launch.plan import Plan
from trainkit.monitor import number
from trainkit.run import folder
from trainkit.run.events import RunHistory, history_of, read_events
from trainkit.run.folder import RunDir, find_runs, list_runs, runs_root
from trainkit.run.metrics import (
    FORECAST_EVENTS,
    Forecast,
    RunProgress,
    described,
    divergence_of,
    forecast,
    progress_of,
    typed_record,
)
from trainkit.schedulers.base import KEPT_SECONDS, JobState, job_states
from trainkit.terminal import age

if TYPE_CHECKING:
    from rich.console import RenderableType

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
_TAIL_BYTES = 16384
_RECORDS = 24
_HEIGHTS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "RUNNING": "cyan", "COMPLETED": "green", "FAILED": "bold red", "TIMEOUT": "red", "CANCELLED": "yellow",
    "NODE_FAIL": "red", "OUT_OF_MEMORY": "bold red", "PENDING": "blue", "UNKNOWN": "magenta", "DIVERGED": "bold red",
}  # fmt: skip


@dataclass(frozen=True)
class Shown:
    """Everything to show of one run."""

    run: RunDir
    name: str
    state: JobState
    life: RunHistory = RunHistory()  # noqa: RUF009  frozen
    standing: RunProgress = RunProgress()  # noqa: RUF009
    problems: tuple[str, ...] = ()
    forecast: Forecast | None = None
    """Time to the end of training, further attempts included; None if unknown."""
    diverged: str = ""
    """How the loss diverged; empty if it did not."""

    @property
    def cause(self) -> Cause | None:
        try:
            return cause_of(self.run, self.state)
        except TrainkitError:  # shown in its row
            return None

    @property
    def notes(self) -> list[str]:
        """Remarks for the last column."""
        notes = [self.state.reason, *self.problems]
        notes += [f"to start about {self.state.start.replace('T', ' ')[:16]}"] if self.state.start else []
        notes += [f"job {job.job_id or '?'} is {job.state} too" for job in self.state.also]
        if self.state.state == "COMPLETED" and self.standing.last.get("step") != self.life.started.get("total_steps"):
            early = fileio.read_object(self.run.summary).get("stopped_early")
            notes += [f"stopped early: {early}"] if isinstance(early, str) else []
        notes += [f"DIVERGED: {self.diverged}"] if self.diverged else []
        if self.state.alive == "no" and self.state.state not in ("COMPLETED", "CANCELLED", "NOT SUBMITTED"):
            last = max((item.attempt or 0 for item in self.life.failures), default=0)
            errors = [item.error for item in self.life.failures if (item.attempt or 0) == last]
            if not errors and (cause := self.cause):  # ranks that fail before they meet write no event
                errors = [cause.what]
            notes += [*errors[:1], fileio.full(self.run.path)]
        return list(dict.fromkeys(note for note in notes if note))


def parser() -> cli.Parser:
    parser = cli.Parser("status", "Runs in the runs folder, and those submitted from other folders.")
    parser.add_argument("runs", nargs="*", metavar="RUN", help="a run's name or folder: show it in detail")
    parser.add_argument("-a", "--all", action="store_true", help=f"all, not the newest {LISTED}; of other clones too")
    parser.add_argument("-w", "--watch", action="store_true", help="show it anew as it changes, until Ctrl-C")
    parser.add_argument("--json", action="store_true", help="a list of objects, for programs")
    login_node.add_host_flag(parser)
    return parser


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    args = parser().parse_args(list(argv))
    if args.host is not None:
        return login_node.forward("status", argv, args.host, env)
    if args.watch and args.json:
        raise UserError("--watch and --json do not go together.", why="A list of objects has an end.", fix="Use one.")
    root = runs_root(env)
    runs, hidden = _chosen(args.runs, root, args.all, env)
    if not runs and not args.json:
        others = "" if args.all else " (--all looks at those of other clones too)"
        print(f"No runs in {root}, and none submitted from elsewhere{others}. Start one: python -m jobs.submit ddp")
        return 0
    if args.watch:
        _watch(lambda: _chosen(args.runs, root, args.all, env)[0], root)  # chosen anew: runs may start meanwhile
    ages: list[float] = []
    shown = look(runs, root, aged=ages.append)
    if args.json:
        asked = time.time() - max(ages, default=0.0)
        print(json.dumps([_as_object(item, asked) for item in shown], indent=2, allow_nan=False))
        return 0
    print("\n".join(_table(shown)))
    if args.runs and len(shown) == 1:
        _print_detail(shown[0])
    if ages:
        print(f"SLURM said so {age(max(ages))} ago; it is asked again after {KEPT_SECONDS:.0f} s.")
    if hidden:
        print(f"{hidden} older runs are not shown; --all shows them.")
    return 0


def _chosen(
    references: Sequence[str], root: Path, everything: bool, env: Mapping[str, str]
) -> tuple[list[RunDir], int]:
    """The runs to show, and the number of hidden ones."""
    if references:
        return [run for reference in references for run in find_runs(reference, env)], 0
    found = folder.known(everywhere=everything)
    made = {run.path: run for run in [*(RunDir(path) for path in found), *list_runs(root)]}
    runs = sorted(made.values(), key=RunDir.made)
    hidden = 0 if everything else max(len(runs) - LISTED, 0)
    return runs[hidden:], hidden


def look(
    runs: Sequence[RunDir], root: Path, states: Mapping[Path, JobState] | None = None,
    aged: Callable[[float], None] | None = None,
) -> list[Shown]:  # fmt: skip
    """Collect what is known of the runs, asking each scheduler once. An unreadable run does not hide the others.

    Args:
        states: recent answers of the scheduler to this process.
        aged: see `job_states`.
    """
    lives: dict[RunDir, RunHistory] = {}
    problems: dict[RunDir, tuple[str, ...]] = {}
    for run in runs:
        try:
            lives[run] = history_of(run)
        except TrainkitError as error:
            problems[run] = (f"{error.what} {error.why}",)
    if states is None:
        asked = job_states(list(lives), list(lives.values()), aged=aged)
        states = {run.path: state for run, state in zip(lives, asked, strict=True)}
    shown = []
    for run in runs:
        name = str(run.path.relative_to(root)) if run.path.is_relative_to(root) else str(run.path)
        if run not in lives or run.path not in states:
            shown.append(Shown(run, name, JobState("UNKNOWN", reason="".join(problems.get(run, ())))))
            continue
        life, state, standing, expected, found = lives[run], states[run.path], RunProgress(), None, list[str]()
        try:
            standing = progress_of(run, pace_since=life.started.get("time", 0.0) if state.state in GOING_ON else None)
            expected = forecast_of(run, state, life, standing)
        except TrainkitError as error:
            found.append(f"{error.what} {error.why}")
        if not os.path.isfile(run.config):
            found.append("config.yaml is no file")
        lost = divergence_of(run) if standing.train.get("loss", 0.0) is None else ""  # only then read the whole record
        shown.append(Shown(run, name, state, life, standing, tuple(found), expected, lost))
    return shown


def _watch(chosen: Callable[[], Sequence[RunDir]], root: Path) -> NoReturn:
    """Redraw until Ctrl-C: read records often, ask the scheduler rarely."""
    states: dict[Path, JobState] | None = None
    asked, shown = 0.0, list[Shown]()

    def text() -> str:
        nonlocal states, asked, shown
        runs = chosen()
        if time.monotonic() - asked >= ASK_SECONDS or (states is not None and any(r.path not in states for r in runs)):
            states, asked = None, time.monotonic()
        shown = look(runs, root, states)
        states = {item.run.path: item.state for item in shown}
        return "\n".join(_table(shown))

    terminal.watch(text, every=LOOK_SECONDS, view=lambda height: view(_table(shown), shown, height))


def _table(shown: Sequence[Shown]) -> list[str]:
    """One row per run, with its problems in the last column."""
    notes = [terminal.one_line("; ".join(item.notes)) for item in shown]
    return terminal.table(HEADER, [_row(item) for item in shown], notes, dispensable=DISPENSABLE)


def _row(item: Shown) -> tuple[str, ...]:
    total = item.life.started.get("total_steps")
    last, val, metrics = item.standing.last, item.standing.val, described(item.run)
    measured = [key for key in (metrics.headline, "loss") if val.get(key) is not None][:1]
    cells = (
        item.name,
        item.state.state,
        item.state.job_id or "-",
        str(len(item.run.attempts()) or "-"),
        (f"{last['step']}" + (f"/{total}" if total is not None else "")) if last else "-",
        f"{last['epoch']:.1f}" if "epoch" in last else "-",
        "".join(metrics.words(key, val[key]).removesuffix(" %") for key in measured) or "-",
        age(item.forecast.seconds) if item.forecast is not None else "-",
        age(time.time() - item.run.made()),
    )
    return tuple(terminal.one_line(cell) for cell in cells)


def _as_object(item: Shown, asked: float) -> dict[str, Any]:
    """The stable format for programs. Times are seconds since 1970; unknown values are null.

    Args:
        asked: time of the scheduler's answer.
    """
    last = item.standing.last
    return {
        "run": item.name,
        "folder": str(item.run.path),
        "state": item.state.state,
        "alive": item.state.alive,
        "executor": item.state.executor or None,
        "job_id": item.state.job_id or None,
        "living_jobs": [job.job_id for job in item.state.living() if job.job_id],
        "nodes": item.state.nodes or None,
        "asked": round(asked, 1),
        "attempts": len(item.run.attempts()),
        "finished": item.life.finished,
        "step": last.get("step"),
        "total_steps": item.life.started.get("total_steps"),
        "epoch": last.get("epoch"),
        "val": {key: value for key, value in item.standing.val.items() if key not in ("split", "time")} or None,
        "estimated_end": round(time.time() + item.forecast.seconds) if item.forecast is not None else None,
        "made": item.run.made(),
        "notes": item.notes,
    }


def _print_detail(item: Shown) -> None:
    print(f"\nfolder  {terminal.one_line(item.run.path, 5000)}")
    if item.state.nodes:
        print(f"nodes   {terminal.one_line(item.state.nodes)}")
    if cause := item.cause:
        print(f"cause   {terminal.one_line(cause.what, 5000)}")
        if cause.why:
            print(f"why     {cause.shown}")
        print(f"fix     {terminal.one_line(cause.advice, 5000)}")
    if item.forecast is not None:
        print(f"ends    about {_clock(time.time() + item.forecast.seconds)[:16]}, {words(item.forecast)}")
    if isinstance(hint := fileio.read_object(item.run.summary).get("advice"), str):
        print(f"faster  {terminal.one_line(hint)}")
    try:
        for smell in course_of(item.run).smells if item.state.state == "RUNNING" else ():
            print(f"smells  {smell.where}  {smell.text}")
        events = read_events(item.run)
    except TrainkitError:  # shown in its row
        return
    for event, following in zip(events, [*events[1:], {}], strict=False):
        # Of consecutive checkpoints only the last: a long training would fill pages.
        again = all(event.get(key) == following.get(key) for key in ("event", "attempt"))
        if not (again and event["event"] == "saved"):
            hidden = ("time", "event", "process_started", "process_space")
            facts = {key: value for key, value in event.items() if key not in hidden}
            told = (f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in facts.items())
            print(f"{_clock(event.get('time', 0))}  {event['event']:10} {' '.join(told)}")


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))


def forecast_of(run: RunDir, state: JobState, life: RunHistory, standing: RunProgress) -> Forecast | None:
    """Extrapolate the present pace and the past waits between attempts; None if too little is known."""
    left = standing.seconds_to(life.started.get("total_steps"))
    if left is None or life.finished or state.state not in GOING_ON:
        return None
    now, runs, limit = time.time(), state.state == "RUNNING", math.inf
    if runs:
        left = max(left - (now - standing.last.get("time", now)), 0.0)
    if life.submission is not None and life.submission.executor != "launch":
        with suppress(OSError, ValueError, TrainkitError):  # runs of templates have no plan
            plan = Plan.read(run.plan)
            limit = max(float(plan.time_limit_seconds - plan.lead_seconds), 1.0)
    return forecast(read_events(run, FORECAST_EVENTS), left, now=now, attempt_seconds=limit, runs=runs)


def words(found: Forecast) -> str:
    """The assumptions of a forecast, for people."""
    if not found.restarts:
        return "if it goes on as it does"
    many = f"{found.restarts} further start{'s' * (found.restarts > 1)}"
    if found.restart_seconds is None:
        return f"with {many}, and without waiting in the queue for them"
    return f"with {many}, if each takes {found.restart_seconds:.0f} s as before, the wait in the queue included"


def view(table: Sequence[str], shown: Sequence[Shown], height: int) -> RenderableType:
    """The table (if too long, its head and the newest runs) and a progress bar for each running training.

    Args:
        table: its lines, the header first.
        height: lines of the terminal.
    """
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    going_on = [item for item in shown if item.state.state == "RUNNING" and item.standing.last][-MOST_BARS:]
    room = max(height - len(going_on) - 3, 3)
    rows = table if len(table) <= room else [table[0], *table[len(table) - room + 1 :]]
    text = Text("\n".join(rows), no_wrap=True)  # not Rich's markup: [red] may be a name
    for word, style in _STYLES.items():
        text.highlight_regex(rf"(?m)(?<=\s){word}(?=[\s:])", style)
    bars = Table.grid(padding=(0, 2))
    for item in going_on:
        total, step = item.life.started.get("total_steps"), item.standing.step or 0
        losses, speed = losses_of_late(item.run), item.standing.train.get("images_per_sec")
        known = float(total) if fileio.is_whole(total) and total > 0 else None
        bars.add_row(
            Text(terminal.one_line(item.name)),
            ProgressBar(total=known, completed=float(step), width=24, pulse=not known),
            Text(f"{step}/{total}" if known else str(step)),
            Text(f"loss {number(losses[-1], '.4f')}" if losses else ""),
            Text(sparkline(losses), style="cyan"),
            Text(f"{speed:,.0f} images/s" if fileio.is_number(speed) else ""),
        )
    return Group(text, "", bars) if going_on else Group(text)


def losses_of_late(run: RunDir) -> list[float | None]:
    """Losses of the newest train records; None if not finite."""
    try:
        text = fileio.read_end(run.metrics, _TAIL_BYTES)
    except OSError:
        return []
    metrics = described(run)
    records = [
        typed_record(raw, metrics) for line in text.splitlines() if (raw := fileio.parse_object(line)) is not None
    ]
    return [r["loss"] for r in records if r is not None and r["split"] == "train" and "loss" in r][-_RECORDS:]


def sparkline(values: Sequence[float | None]) -> str:
    """One bar character per value, scaled between the smallest and the largest; x for no number."""
    known = [value for value in values if value is not None]
    if not known:
        return "x" * len(values)
    low, span = min(known), (max(known) - min(known)) or 1.0
    steps = len(_HEIGHTS) - 1
    return "".join("x" if value is None else _HEIGHTS[round(steps * (value - low) / span)] for value in values)


if __name__ == "__main__":
    cli.run(main)
