"""Plots of the log book, as PNG."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from trainkit.report.comparing import no_speed_up
from trainkit.report.drawing import (
    BLUE,
    CYCLE,
    GREEN,
    GREY,
    PURPLE,
    VERMILION,
    Points,
    draw_line,
    label_ends,
    log_if_wide,
    mark_lost,
    mark_nan,
    mark_restarts,
    new_figure,
    points_of,
    smooth,
    time_unit,
    whole_ticks,
    with_gaps,
    x_of,
)
from trainkit.report.facts import Facts
from trainkit.report.tables import TIMES, speed_spec

TRAIN, VAL = BLUE, VERMILION
_LONG_LABEL = 40


def draw_curves(facts: Facts, path: Path) -> bool:
    """Loss and accuracy over epochs, or steps of a short run, train and val. False if there is nothing to draw."""
    splits = {"train": (facts.drawn, TRAIN), "val": (facts.val, VAL)}
    x = x_of(facts.train + facts.val)
    series = {
        (split, key): points_of(records, key, x)
        for split, (records, _) in splits.items()
        for key in ("loss", "acc1", "acc5")
    }
    if not any(series.values()):
        return False
    with new_figure(path, 10.5, 4.2, columns=2) as (figure, (left, right)):
        figure.suptitle(facts.label, x=0.01, ha="left", fontsize=11, color=GREY)
        for axes, key, title, unit in ((left, "loss", "Loss", "cross-entropy"), (right, "acc1", "Accuracy", "%")):
            axes.set(title=title, xlabel=x, ylabel=unit)
            ends = []
            for split, (_, colour) in splits.items():
                points = series[split, key]
                if points:
                    draw_line(axes, points, colour, raw_too=split == "train")
                    shown = smooth(points)[-1] if split == "train" else points[-1]
                    ends.append((f"{split} {points[-1][1]:{'.1f' if key == 'acc1' else '.3g'}}", shown, colour))
            if key == "loss":
                log_if_wide(axes, [value for split in splits for _, value in series[split, key]])
            else:
                top5 = series["val", "acc5"]
                if top5 and min(value for _, value in top5) < 99.5:  # of few classes it says nothing
                    axes.plot(*zip(*top5, strict=True), color=VAL, linewidth=1.2, linestyle=(0, (4, 3)))
                    ends.append((f"val top-5 {top5[-1][1]:.1f}", top5[-1], VAL))
                if max((value for split in splits for _, value in series[split, key]), default=0) > 90 or top5:
                    axes.set_ylim(top=102)
            mark_restarts(axes, _restarts(facts, x), at_top=key == "loss")  # where the curve is not
            mark_nan(axes, *_nan(facts, x))
            if key == "loss":
                mark_lost(axes, _lost(facts, x))
            whole_ticks(axes)
            label_ends(axes, ends)
        best = facts.best_val
        if best and isinstance(best.get("acc1"), int | float) and x in best:
            where = (best[x], best["acc1"])
            right.plot(*where, "o", color=VAL, markersize=8, markerfacecolor="white", zorder=5)
            right.annotate("best", where, xytext=(0, -17), textcoords="offset points", color=VAL, ha="center")
    return True


def draw_pace(facts: Facts, path: Path) -> bool:
    """Learning rate and images per second over epochs, or steps. False if there is nothing to draw."""
    x = x_of(facts.train + facts.val)
    rates, speeds = points_of(facts.train, "lr", x), points_of(facts.train, "images_per_sec", x)
    if not rates and not speeds:
        return False
    with new_figure(path, 10.5, 3.4, columns=2) as (figure, (left, right)):
        figure.suptitle(facts.label, x=0.01, ha="left", fontsize=11, color=GREY)
        left.set(title="Learning rate", xlabel=x, ylabel="lr")
        left.yaxis.set_major_formatter("{x:g}")
        right.set(title="Throughput", xlabel=x, ylabel="images/s")
        if rates:
            draw_line(left, rates, GREEN)
            peak = max(rates, key=lambda point: point[1])
            left.annotate(f"peak {peak[1]:.3g}", peak, xytext=(6, 4), textcoords="offset points", color=GREEN)
        if speeds and facts.images_per_sec is not None:
            right.plot(
                *zip(*speeds, strict=True), color=PURPLE, linewidth=1.2, marker="o" if len(speeds) == 1 else None
            )
            right.axhline(facts.images_per_sec, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
            highest = max(value for _, value in speeds)
            right.set_ylim(0, highest * 1.15 or 1.0)
            right.yaxis.set_major_formatter("{x:,.0f}" if highest >= 5 else "{x:g}")
            median = f"median {facts.images_per_sec:{speed_spec(facts.images_per_sec)}}"
            label_ends(right, [(median, (speeds[-1][0], facts.images_per_sec), GREY)])
        for axes in (left, right):
            mark_restarts(axes, _restarts(facts, x))
            mark_nan(axes, *_nan(facts, x))
            whole_ticks(axes)
    return True


def _restarts(facts: Facts, x: str) -> list[float]:
    if x == "epoch":
        return facts.restarted_at
    return [float(event["step"]) for event in facts.events if event.get("event") == "started" and event.get("step")]


def _lost(facts: Facts, x: str) -> list[float]:
    """Where the loss was no number, and became one again."""
    lost = [record for record in facts.drawn if record.get("loss", 0.0) is None]
    end = facts.setbacks.nan_from
    return [float(record[x]) for record in lost if x in record and (end is None or record["step"] < end)]


def _nan(facts: Facts, x: str) -> tuple[float | None, float]:
    """Where the loss was no number any more, and where the records end."""
    begin = next((record.get(x) for record in facts.train if record["step"] == facts.setbacks.nan_from), None)
    return begin, max((record[x] for record in facts.train if x in record), default=0.0)


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
    with new_figure(path, 10.5, 3.4, columns=2) as (figure, (left, right)):
        figure.suptitle(facts.label, x=0.01, ha="left", fontsize=11, color=GREY)
        unit, seconds = time_unit(max(points[-1][0] for _, points in use if points) - began)
        left.set(title=f"{what} utilisation", xlabel=f"time ({unit})", ylabel="%", ylim=(0, 104))
        right.set(title=f"{'GPU' if with_gpus else 'Machine'} memory used", xlabel=f"time ({unit})", ylabel="GB")
        for axes, lines, scale in ((left, use, 1.0), (right, memory, 1024.0)):
            ends = []
            for number, (name, points) in enumerate(lines):
                scaled = [((time - began) / seconds, value / scale) for time, value in with_gaps(points)]
                if scaled:
                    colour = CYCLE[number % len(CYCLE)]
                    axes.plot(*zip(*scaled, strict=True), color=colour, linewidth=1.5)
                    ends.append((name, scaled[-1], colour))
            axes.set_ylim(bottom=0)
            if len(ends) <= 8:  # more labels than that are a thicket
                label_ends(axes, ends)
    return True


def draw_comparison(runs: Sequence[Facts], path: Path) -> bool:
    """Images per second of every run as bars, the first being the reference; no ratio where speeds do not compare.
    False if no run has any."""
    known = [(facts, speed) for facts in runs if (speed := facts.images_per_sec)]
    if not known:
        return False
    reference, reference_speed = known[0]
    with new_figure(path, 9.0, 1.5 + 0.55 * len(known)) as (_, (axes,)):
        axes.set(title="Training throughput", xlabel="images/s (median)")
        axes.grid(axis="y", visible=False)
        axes.grid(axis="x", visible=True)
        axes.spines["left"].set_visible(False)
        axes.tick_params(axis="y", length=0)
        compared = [reference is runs[0] and not no_speed_up(facts, reference) for facts, _ in known]
        linear = [
            reference_speed * facts.processors / reference.processors
            if same and facts.processors and reference.processors and facts.processors != reference.processors
            else None
            for same, (facts, _) in zip(compared, known, strict=True)
        ]
        widest = max(*(speed for _, speed in known), *(place or 0.0 for place in linear))
        for row, ((_, speed), place) in enumerate(zip(known, linear, strict=True)):
            axes.barh(row, speed, height=0.62, color=BLUE if row else GREY)
            ratio = f"   {speed / reference_speed:.2f}{TIMES} " if row and compared[row] else " "
            text = f" {speed:{speed_spec(speed)}}{ratio}"
            if place:
                axes.plot([place, place], [row - 0.38, row + 0.38], color=VERMILION, linewidth=2)
            if speed > widest / 3:  # room in the bar; beside it the number could be taken for that of the mark
                axes.text(speed, row, text, va="center", ha="right", color="white", fontweight="bold")
            else:
                axes.text(max(speed, place or 0.0), row, text, va="center", ha="left")
        axes.set_yticks(range(len(known)), [_wrapped(facts.label) for facts, _ in known])
        axes.invert_yaxis()
        axes.set_xlim(0, widest * 1.08)
        axes.xaxis.set_major_formatter("{x:,.0f}" if widest >= 5 else "{x:g}")
        if any(linear):
            axes.set_title("| linear scaling", loc="right", color=VERMILION, fontsize=10, fontweight="normal")
    return True


def draw_accuracies(runs: Sequence[Facts], path: Path) -> bool:
    """Validation accuracy of every run over epochs. False if fewer than two runs have one."""
    known = [(facts, points) for facts in runs if (points := points_of(facts.val, "acc1"))]
    if len(known) < 2:
        return False
    with new_figure(path, 9.0, 4.2) as (figure, (axes,)):
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
        whole_ticks(axes)
        axes.set_xlim(left=0)
        if max(len(text) for text, _, _ in ends) > _LONG_LABEL:  # beside the curves they would leave no room for them
            for (text, _, _), line in zip(ends, axes.lines, strict=True):
                line.set_label(text)
            figure.legend(loc="outside lower left", frameon=False)
        else:
            label_ends(axes, ends)
    return True


def _wrapped(label: str) -> str:
    """A name in lines that leave room for its bar."""
    return "\n".join(textwrap.wrap(label, 32, break_on_hyphens=False)) or label
