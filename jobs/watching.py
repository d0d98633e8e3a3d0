"""What ``jobs.status --watch`` shows on a terminal: the table, and how the runs go that run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from trainkit import fileio, terminal
from trainkit.monitor.loggers import number
from trainkit.run.events import Life
from trainkit.run.folder import RunDir
from trainkit.run.metrics import Standing, described, typed
from trainkit.schedulers.base import JobState

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

MOST_BARS = 6
_TAIL_BYTES = 16384
_RECORDS = 24
_HEIGHTS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "RUNNING": "cyan", "COMPLETED": "green", "FAILED": "bold red", "TIMEOUT": "red", "CANCELLED": "yellow",
    "NODE_FAIL": "red", "OUT_OF_MEMORY": "bold red", "PENDING": "blue", "UNKNOWN": "magenta",
}  # fmt: skip


class Watched(Protocol):
    """Of a run as `jobs.status` knows it."""

    @property
    def run(self) -> RunDir: ...
    @property
    def name(self) -> str: ...
    @property
    def state(self) -> JobState: ...
    @property
    def life(self) -> Life: ...
    @property
    def standing(self) -> Standing: ...


def view(table: Sequence[str], shown: Sequence[Watched], height: int) -> RenderableType:
    """The table, of a long one its head and the newest runs, and a bar for each run that trains.

    Args:
        table: its lines, the header first.
        height: lines of the terminal.
    """
    from rich.console import Group
    from rich.table import Table

    going_on = [item for item in shown if item.state.state == "RUNNING" and item.standing.last][-MOST_BARS:]
    room = max(height - len(going_on) - 3, 3)
    rows = table if len(table) <= room else [table[0], *table[len(table) - room + 1 :]]
    bars = Table.grid(padding=(0, 2))
    for item in going_on:
        bars.add_row(*_going_on(item))
    return Group(_coloured(rows), "", bars) if going_on else Group(_coloured(rows))


def _coloured(rows: Sequence[str]) -> Text:
    """Not Rich's own markup: [red] may be a name."""
    from rich.text import Text

    text = Text("\n".join(rows), no_wrap=True)
    for word, style in _STYLES.items():
        text.highlight_regex(rf"(?m)(?<=\s){word}(?=\s)", style)
    text.highlight_regex("DIVERGED", "bold red")
    return text


def _going_on(item: Watched) -> list[RenderableType]:
    from rich.progress_bar import ProgressBar
    from rich.text import Text

    total, step = item.life.started.get("total_steps"), item.standing.step or 0
    losses = losses_of_late(item.run)
    loss = f"loss {number(losses[-1], '.4f')}" if losses else ""
    speed = item.standing.train.get("images_per_sec")
    known = float(total) if fileio.is_whole(total) and total > 0 else None
    return [
        Text(terminal.one_line(item.name)),
        ProgressBar(total=known, completed=float(step), width=24, pulse=not known),
        Text(f"{step}/{total}" if known else str(step)),
        Text(loss),
        Text(sparkline(losses), style="cyan"),
        Text(f"{speed:,.0f} images/s" if fileio.is_number(speed) else ""),
    ]


def losses_of_late(run: RunDir) -> list[float | None]:
    """Of the newest train records; None where it was no number."""
    try:
        text = fileio.read_end(run.metrics, _TAIL_BYTES)
    except OSError:
        return []
    metrics = described(run)
    records = [typed(raw, metrics) for line in text.splitlines() if (raw := fileio.parse_object(line)) is not None]
    return [r["loss"] for r in records if r is not None and r["split"] == "train" and "loss" in r][-_RECORDS:]


def sparkline(values: Sequence[float | None]) -> str:
    """A character a value, the higher the larger it is among them; a cross for what is no number."""
    known = [value for value in values if value is not None]
    if not known:
        return "x" * len(values)
    low, span = min(known), (max(known) - min(known)) or 1.0
    steps = len(_HEIGHTS) - 1
    return "".join("x" if value is None else _HEIGHTS[round(steps * (value - low) / span)] for value in values)
