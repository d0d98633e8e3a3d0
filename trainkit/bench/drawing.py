"""The picture of a bench: how fast each arm is, with its lowest and highest round; and what memory it takes."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.bench.words import meaning_of
from trainkit.report.drawing import BLUE, CYCLE, GREY, VERMILION, new_figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from trainkit.bench.results import Results, Row


def draw(results: Results, path: Path) -> bool:
    """Draw into ``path``, a PNG. False if nothing was measured."""
    rows = [row for row in results.rows if row.rates]
    if not rows:
        return False
    memory = [row for row in rows if row.memory_mb is not None]
    with new_figure(path, 10.5 if memory else 6.5, 4.2, columns=2 if memory else 1) as (figure, axes):
        title = f"{results.bench.question}  {results.where}"
        figure.suptitle(title, x=0.01, ha="left", fontsize=11, color=GREY)
        is_line = bool(results.bench.axis)
        rates = [row.median or 0.0 for row in rows]
        if is_line:
            draw_lines(axes[0], rows, rates, BLUE, spread=True, ideal=results.bench.ideal)
        else:
            _bars(axes[0], rows, rates, BLUE, spread=True)
        words = textwrap.fill(meaning_of(results), 125 if memory else 75)
        figure.supxlabel(words, x=0.01, ha="left", fontsize=10, color="#333333")
        axes[0].set(title=results.bench.unit[0].upper() + results.bench.unit[1:], ylabel=results.bench.unit)
        if memory:
            (draw_lines if is_line else _bars)(axes[1], memory, [row.memory_mb or 0.0 for row in memory], VERMILION)
            axes[1].set(title="Peak memory of a rank", ylabel="MiB")
        for one in axes:
            one.set_ylim(bottom=0)
            one.yaxis.set_major_formatter("{x:,.10g}")
            if is_line:
                one.set_xlabel(results.bench.axis)
    return True


def _bars(axes: Axes, rows: Sequence[Row], values: Sequence[float], colour: str, *, spread: bool = False) -> None:
    places = range(len(rows))
    bars = axes.bar(places, values, color=colour, width=0.6)
    axes.bar_label(
        bars,
        [f"{value:,.4g}" if value < 1000 else f"{value:,.0f}" for value in values],
        label_type="center",
        color="white",
    )
    if spread:
        axes.errorbar(places, values, yerr=_whiskers(rows), fmt="none", ecolor="#333333", capsize=4, linewidth=1)
    axes.set_xticks(places, [row.name for row in rows])
    axes.margins(y=0.15)


def draw_lines(
    axes: Axes, rows: Sequence[Row], values: Sequence[float], colour: str, *, spread: bool = False, ideal: bool = False
) -> None:
    """``ideal``: dotted, where a line would go if each rank were worth as much as the first."""
    series = list(dict.fromkeys(row.arm.series for row in rows))
    for name, own in zip(series, CYCLE, strict=False):
        chosen = [(row, value) for row, value in zip(rows, values, strict=True) if row.arm.series == name]
        chosen.sort(key=lambda pair: pair[0].arm.x)
        one, label = [row for row, _ in chosen], name.removeprefix(", ") or "as configured"
        if one[0].arm.work == "ceiling":  # whatever x is
            axes.axhline(chosen[0][1], color=GREY, linestyle="--", linewidth=1, label=name)
            continue
        if ideal:
            (first, begun), (last, _) = chosen[0], chosen[-1]
            times = last.arm.x / first.arm.x
            axes.plot([first.arm.x, last.arm.x], [begun, begun * times], ":", color=GREY, linewidth=1, zorder=1)
        axes.errorbar(
            [row.arm.x for row in one], [value for _, value in chosen], yerr=_whiskers(one) if spread else None,
            color=own if len(series) > 1 else colour, marker="o", markersize=4, capsize=3, elinewidth=1, label=label,
        )  # fmt: skip
    places = sorted({row.arm.x for row in rows if row.arm.work != "ceiling"})
    if len(places) > 1 and places[-1] / max(places[0], 1) >= 8:
        axes.set_xscale("symlog" if places[0] == 0 else "log", base=2)
    axes.set_xticks(places, [f"{place:.3g}" if place < 100 else f"{place:,.0f}" for place in places])
    axes.minorticks_off()
    if len(series) > 1:
        axes.legend(frameon=False)


def _whiskers(rows: Sequence[Row]) -> list[list[float]]:
    """How far the lowest and the highest round are from the median."""
    return [
        [(row.median or 0.0) - min(row.rates) for row in rows],
        [max(row.rates) - (row.median or 0.0) for row in rows],
    ]
