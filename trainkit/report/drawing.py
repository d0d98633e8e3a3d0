"""How the log book draws: its style, curves, and their labels.

Colours are those of Okabe and Ito, which colour-blind readers can tell apart.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.fileio import replacing
from trainkit.run.folder import run_at

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9"
CYCLE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
GREY = "#666666"

STYLE: Any = {
    "figure.dpi": 150,
    "text.parse_math": False,  # a run may be called a$b$
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": "#333333",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#E4E4E4",
    "xtick.color": "#333333",
    "ytick.color": "#333333",
    "lines.linewidth": 2.0,
    "lines.solid_capstyle": "round",
}

Points = list[tuple[float, float]]


@contextmanager
def new_figure(path: Path, width: float, height: float, columns: int = 1) -> Iterator[tuple[Figure, list[Axes]]]:
    """A figure of the book's style in inches, with its axes side by side; saved as ``path`` at the end."""
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it keeps figures, and picks a backend, for the whole process.
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, list(figure.subplots(1, columns, squeeze=False)[0])
        with warnings.catch_warnings(), replacing(path, run_at(path.parent)) as out:
            warnings.simplefilter("ignore", UserWarning)  # absurd numbers leave the curves no room: drawn all the same
            figure.savefig(out, format=path.suffix[1:])


def points_of(records: Sequence[dict[str, Any]], key: str, x: str = "epoch") -> Points:
    """Epochs (or steps) and values of ``key``, where a record has both."""
    return [
        (float(record[x]), float(record[key]))
        for record in records
        if isinstance(record.get(x), int | float) and isinstance(record.get(key), int | float)
    ]


FEW_EPOCHS = 2.0


def x_of(records: Sequence[dict[str, Any]]) -> str:
    """What to draw over: ``epoch``; of a run of one or two, whose axis would have two numbers, ``step``."""
    longest = max((record["epoch"] for record in records if "epoch" in record), default=0.0)
    return "epoch" if longest > FEW_EPOCHS else "step"


def whole_ticks(axes: Axes) -> None:
    """Whole numbers on the x axis, at distances that can be counted: 0, 5, 10 and not 0, 2, 5, 8, 10."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter("{x:,.0f}")


def mark_nan(axes: Axes, begin: float | None, end: float) -> None:
    """From where on the loss was no number, and there is no curve."""
    if begin is None:
        return
    axes.axvspan(begin, max(end, begin), color=VERMILION, alpha=0.12, linewidth=0)
    axes.axvline(begin, color=VERMILION, linewidth=1)
    axes.annotate(
        "loss nan", (begin, 0.5), xycoords=("data", "axes fraction"), xytext=(4, 0), textcoords="offset points",
        color=VERMILION, fontweight="bold", va="center",
    )  # fmt: skip


def mark_lost(axes: Axes, places: Sequence[float]) -> None:
    """Where the loss was no number, and became one again."""
    if not places:
        return
    foot = axes.get_xaxis_transform()
    axes.plot(places, [0.03] * len(places), "|", color=VERMILION, markersize=9, transform=foot, clip_on=False)
    axes.annotate(
        "loss nan", (places[0], 0.03), xycoords=foot, xytext=(3, 6), textcoords="offset points", color=VERMILION
    )


def draw_line(axes: Axes, points: Points, colour: str, *, raw_too: bool = False) -> None:
    """A curve; ``raw_too``: a long one smoothed, with itself behind it."""
    if raw_too and len(points) > 60:  # noise hides the trend: draw it faintly behind
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.8, alpha=0.3)
        points = smooth(points)
    marker = "o" if len(points) == 1 or (len(points) <= 30 and not raw_too) else None
    axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=3.5)


_PLACES = 1000
"""No curve is wider on paper."""


def smooth(points: Points) -> Points:
    """Running median over a thirtieth of the curve, at so many places; short curves stay as they are."""
    if len(points) <= 60:
        return points
    half = max(1, len(points) // 60)
    values = [value for _, value in points]
    places = [*range(0, len(points), max(1, len(points) // _PLACES)), len(points) - 1]
    return [
        (points[index][0], statistics.median(values[max(0, index - half) : index + half + 1]))
        for index in dict.fromkeys(places)
    ]


def with_gaps(points: Points) -> Points:
    """The samples with a NaN where some are missing, between two attempts: a line across would invent them."""
    if len(points) < 3:
        return points
    usual = statistics.median(after[0] - before[0] for before, after in pairwise(points))
    broken = points[:1]
    for before, after in pairwise(points):
        if after[0] - before[0] > 3 * usual:
            broken.append((after[0], float("nan")))
        broken.append(after)
    return broken


def log_if_wide(axes: Axes, values: list[float]) -> None:
    """A logarithmic scale where the values span more than a factor of 20."""
    from matplotlib.ticker import LogLocator, NullFormatter

    positive = [value for value in values if value > 0]
    if positive and len(positive) == len(values) and max(positive) / min(positive) > 20:
        axes.set_yscale("log")
        axes.set_ylabel("cross-entropy (log scale)")
        wide = max(positive) / min(positive) > 1e4  # there is no room for three numbers a decade
        axes.yaxis.set_major_locator(LogLocator(subs=(1,) if wide else (1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def mark_restarts(axes: Axes, epochs: Sequence[float], *, at_top: bool = True) -> None:
    """A dotted line where a later attempt went on."""
    for number, epoch in enumerate(epochs):
        axes.axvline(epoch, color=GREY, linewidth=1, linestyle=":")
        if number == 0:
            axes.annotate(
                "restart", (epoch, float(at_top)), xycoords=("data", "axes fraction"), xytext=(3, -2 if at_top else 2),
                textcoords="offset points", color=GREY, fontsize=9, va="top" if at_top else "bottom",
            )  # fmt: skip


def label_ends(axes: Axes, ends: Sequence[tuple[str, tuple[float, float], str]]) -> None:
    """Name each line at its right end, the names apart from one another: nobody has to match a legend's colours."""
    if not ends:
        return
    axes.autoscale_view()  # limits must be final before places in the axes are asked for
    to_fraction = axes.transData + axes.transAxes.inverted()
    order = sorted(ends, key=lambda end: float(to_fraction.transform(end[1])[1]))
    gap = 1.3 * axes.figure.dpi * STYLE["font.size"] / 72 / max(axes.get_window_extent().height, 1.0)
    places: list[float] = []
    for _, point, _ in order:
        wanted = float(to_fraction.transform(point)[1])
        places.append(wanted if not places else max(wanted, places[-1] + gap))
    for index in reversed(range(len(places))):  # what was pushed over the top comes down again
        limit = 1.0 if index == len(places) - 1 else places[index + 1] - gap
        places[index] = min(places[index], limit)
    for (text, _, colour), place in zip(order, places, strict=True):
        axes.annotate(
            text, (1.0, place), xycoords="axes fraction", xytext=(6, 0), textcoords="offset points", color=colour,
            va="center", fontweight="bold", annotation_clip=False,
        )  # fmt: skip


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit for an axis of that length, and its seconds."""
    if seconds < 180:
        return "s", 1.0
    return ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)
