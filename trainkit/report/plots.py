"""Plots of the log book, as PNG. Colours are those of Okabe and Ito, which colour-blind readers can tell apart."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.report.facts import Facts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY = "#0072B2", "#D55E00", "#009E73", "#E69F00", "#CC79A7", "#56B4E9"
CYCLE = (BLUE, VERMILION, GREEN, ORANGE, PURPLE, SKY)
TRAIN, VAL = BLUE, VERMILION
GREY = "#666666"
TIMES = "\N{MULTIPLICATION SIGN}"

STYLE: dict[str, Any] = {
    "figure.dpi": 150,
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


def draw_curves(facts: Facts, path: Path) -> bool:
    """Loss and accuracy over epochs, train and val. False if there is nothing to draw."""
    series = {
        (split, key): _points(records, key)
        for split, records in (("train", facts.train), ("val", facts.val))
        for key in ("loss", "acc1")
    }
    if not any(series.values()):
        return False
    with _figure(path, 10.5, 4.2, columns=2) as (figure, (left, right)):
        figure.suptitle(facts.label, x=0.01, ha="left", fontsize=11, color=GREY)
        for axes, key, title, unit in ((left, "loss", "Loss", "cross-entropy"), (right, "acc1", "Top-1 accuracy", "%")):
            axes.set(title=title, xlabel="epoch", ylabel=unit)
            ends = []
            for split, colour in (("train", TRAIN), ("val", VAL)):
                points = series[split, key]
                if points:
                    _line(axes, points, colour, raw_too=split == "train")
                    shown = _smooth(points)[-1] if split == "train" else points[-1]
                    ends.append((f"{split} {points[-1][1]:.{1 if key == 'acc1' else 3}f}", shown, colour))
            if key == "loss":
                _log_if_wide(axes, [value for split in ("train", "val") for _, value in series[split, key]])
            elif max((value for split in ("train", "val") for _, value in series[split, key]), default=0) > 90:
                axes.set_ylim(top=102)
            _mark_restarts(axes, facts, at_top=key == "loss")  # where the curve is not
            _label_ends(axes, ends)
        best = facts.best_val
        if best and isinstance(best.get("acc1"), int | float) and "epoch" in best:
            where = (best["epoch"], best["acc1"])
            right.plot(*where, "o", color=VAL, markersize=8, markerfacecolor="white", zorder=5)
            right.annotate("best", where, xytext=(0, -17), textcoords="offset points", color=VAL, ha="center")
    return True


def draw_pace(facts: Facts, path: Path) -> bool:
    """Learning rate and images per second over epochs. False if there is nothing to draw."""
    rates, speeds = _points(facts.train, "lr"), _points(facts.train, "images_per_sec")
    if not rates and not speeds:
        return False
    with _figure(path, 10.5, 3.4, columns=2) as (figure, (left, right)):
        figure.suptitle(facts.label, x=0.01, ha="left", fontsize=11, color=GREY)
        left.set(title="Learning rate", xlabel="epoch", ylabel="lr")
        left.yaxis.set_major_formatter("{x:g}")
        right.set(title="Throughput", xlabel="epoch", ylabel="images/s")
        if rates:
            _line(left, rates, GREEN)
            peak = max(rates, key=lambda point: point[1])
            left.annotate(f"peak {peak[1]:.3g}", peak, xytext=(6, 4), textcoords="offset points", color=GREEN)
        if speeds and facts.images_per_sec is not None:
            right.plot(*zip(*speeds, strict=True), color=PURPLE, linewidth=1.2)
            right.axhline(facts.images_per_sec, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
            right.set_ylim(0, max(value for _, value in speeds) * 1.15)
            right.yaxis.set_major_formatter("{x:,.0f}")
            _label_ends(right, [(f"median {facts.images_per_sec:,.0f}", (speeds[-1][0], facts.images_per_sec), GREY)])
        for axes in (left, right):
            _mark_restarts(axes, facts)
    return True


def draw_hardware(facts: Facts, path: Path) -> bool:
    """Use of GPUs, or of CPUs where there are none, and of memory, over time. False if there are no two samples."""
    use: list[tuple[str, Points]] = []
    memory: list[tuple[str, Points]] = []
    one = len(facts.hosts) == 1
    with_gpus = any(host.gpu_indices() for host in facts.hosts)
    for host in facts.hosts:
        for index in host.gpu_indices():
            name = f"GPU {index}" if one else f"{host.host}:{index}"
            use.append((name, host.series("util_percent", index)))
            memory.append((name, host.series("memory_used_mb", index)))
        if not with_gpus:
            use.append((host.host, host.series("cpu_percent")))
            memory.append((host.host, host.series("memory_used_mb")))
    if max((len(points) for _, points in use), default=0) < 2:
        return False
    began = min(points[0][0] for _, points in use if points)
    what = "GPU" if with_gpus else "CPU"
    with _figure(path, 10.5, 3.4, columns=2) as (figure, (left, right)):
        figure.suptitle(facts.label, x=0.01, ha="left", fontsize=11, color=GREY)
        unit, seconds = _time_unit(max(points[-1][0] for _, points in use if points) - began)
        left.set(title=f"{what} utilisation", xlabel=f"time ({unit})", ylabel="%", ylim=(0, 104))
        right.set(title=f"{'GPU' if with_gpus else 'Machine'} memory used", xlabel=f"time ({unit})", ylabel="GB")
        for axes, lines, scale in ((left, use, 1.0), (right, memory, 1024.0)):
            ends = []
            for number, (name, points) in enumerate(lines):
                scaled = [((time - began) / seconds, value / scale) for time, value in _with_gaps(points)]
                if scaled:
                    colour = CYCLE[number % len(CYCLE)]
                    axes.plot(*zip(*scaled, strict=True), color=colour, linewidth=1.5)
                    ends.append((name, scaled[-1], colour))
            axes.set_ylim(bottom=0)
            if len(ends) <= 8:  # more labels than that are a thicket
                _label_ends(axes, ends)
    return True


def draw_comparison(runs: Sequence[Facts], path: Path) -> bool:
    """Images per second of every run as bars, the first being the reference. False if no run has any."""
    known = [(facts, speed) for facts in runs if (speed := facts.images_per_sec)]
    if not known:
        return False
    reference, reference_speed = known[0]
    with _figure(path, 9.0, 1.5 + 0.55 * len(known)) as (_, (axes,)):
        axes.set(title="Training throughput", xlabel="images/s (median)")
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        linear = [
            reference_speed * facts.processors / reference.processors
            if facts.processors and reference.processors and facts.processors != reference.processors
            else None
            for facts, _ in known
        ]
        widest = max(*(speed for _, speed in known), *(place or 0.0 for place in linear))
        for row, ((_, speed), place) in enumerate(zip(known, linear, strict=True)):
            axes.barh(row, speed, height=0.62, color=BLUE if row else GREY)
            text = f" {speed:,.0f}" + (f"   {speed / reference_speed:.2f}{TIMES} " if row else " ")
            if place:
                axes.plot([place, place], [row - 0.38, row + 0.38], color=VERMILION, linewidth=2)
            if speed > widest / 3:  # room in the bar; beside it the number could be taken for that of the mark
                axes.text(speed, row, text, va="center", ha="right", color="white", fontweight="bold")
            else:
                axes.text(max(speed, place or 0.0), row, text, va="center", ha="left")
        axes.set_yticks(range(len(known)), [facts.label for facts, _ in known])
        axes.invert_yaxis()
        axes.set_xlim(0, widest * 1.08)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        if any(linear):
            axes.set_title("| linear scaling", loc="right", color=VERMILION, fontsize=10, fontweight="normal")
    return True


def draw_accuracies(runs: Sequence[Facts], path: Path) -> bool:
    """Validation accuracy of every run over epochs. False if fewer than two runs have one."""
    known = [(facts, points) for facts in runs if (points := _points(facts.val, "acc1"))]
    if len(known) < 2:
        return False
    from matplotlib.ticker import MaxNLocator

    with _figure(path, 9.0, 4.2) as (_, (axes,)):
        axes.set(title="Validation top-1 accuracy", xlabel="epoch", ylabel="%")
        longest = max(points[-1][0] for _, points in known)
        ends = []
        for number, (facts, points) in enumerate(known):
            colour = CYCLE[number % len(CYCLE)]
            # Thinner and thinner, so that equal curves do not hide one another.
            marker = "o" if len(points) == 1 else None
            axes.plot(*zip(*points, strict=True), color=colour, linewidth=max(1.2, 4.2 - number), marker=marker)
            ended = f" (epoch {points[-1][0]:g})" if points[-1][0] < longest else ""
            ends.append((f"{facts.label}  {points[-1][1]:.1f}{ended}", points[-1], colour))
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        _label_ends(axes, ends)
    return True


@contextmanager
def _figure(path: Path, width: float, height: float, columns: int = 1) -> Iterator[tuple[Figure, list[Axes]]]:
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    # No pyplot: it keeps figures, and picks a backend, for the whole process.
    with matplotlib.rc_context(STYLE):  # type: ignore[arg-type]
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure, list(figure.subplots(1, columns, squeeze=False)[0])
        figure.savefig(path)


def _points(records: Sequence[dict[str, Any]], key: str) -> Points:
    return [
        (float(record["epoch"]), float(record[key]))
        for record in records
        if isinstance(record.get("epoch"), int | float) and isinstance(record.get(key), int | float)
    ]


def _line(axes: Axes, points: Points, colour: str, *, raw_too: bool = False) -> None:
    if raw_too and len(points) > 60:  # noise hides the trend: draw it faintly behind
        axes.plot(*zip(*points, strict=True), color=colour, linewidth=0.8, alpha=0.3)
        points = _smooth(points)
    marker = "o" if len(points) == 1 or (len(points) <= 30 and not raw_too) else None
    axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=3.5)


def _smooth(points: Points) -> Points:
    """Running median over a thirtieth of the curve; short curves stay as they are."""
    if len(points) <= 60:
        return points
    half = max(1, len(points) // 60)
    values = [value for _, value in points]
    return [
        (x, statistics.median(values[max(0, index - half) : index + half + 1])) for index, (x, _) in enumerate(points)
    ]


def _with_gaps(points: Points) -> Points:
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


def _log_if_wide(axes: Axes, values: list[float]) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter

    positive = [value for value in values if value > 0]
    if positive and len(positive) == len(values) and max(positive) / min(positive) > 20:
        axes.set_yscale("log")
        axes.set_ylabel("cross-entropy (log scale)")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def _mark_restarts(axes: Axes, facts: Facts, *, at_top: bool = True) -> None:
    for number, epoch in enumerate(facts.restarted_at):
        axes.axvline(epoch, color=GREY, linewidth=1, linestyle=":")
        if number == 0:
            axes.annotate(
                "restart", (epoch, float(at_top)), xycoords=("data", "axes fraction"), xytext=(3, -2 if at_top else 2),
                textcoords="offset points", color=GREY, fontsize=9, va="top" if at_top else "bottom",
            )  # fmt: skip


def _label_ends(axes: Axes, ends: Sequence[tuple[str, tuple[float, float], str]]) -> None:
    """Name each line at its right end, the names apart from one another: nobody has to match a legend's colours."""
    if not ends:
        return
    axes.figure.canvas.draw()  # limits and scales must be final before places in the axes are asked for
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


def _time_unit(seconds: float) -> tuple[str, float]:
    if seconds < 180:
        return "s", 1.0
    return ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)
