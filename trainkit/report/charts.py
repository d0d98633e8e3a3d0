"""Charts of lines and bars, drawn as SVG.

A chart is None where there is nothing to draw. Colours are the numbers 0 to 7 of ``chart.css``, which follow the
reader's light or dark scheme.

    rate = bar_chart("Images a second", "images/s", [Bar("fp32", 812, spread=(800, 820)), Bar("bf16", 1510)])
    path.write_text(drawing([rate], title="Which precision is fastest?"))
"""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from operator import itemgetter
from typing import NamedTuple

from markupsafe import Markup

from trainkit.common import jsonl
from trainkit.report.templates import STYLE, TEMPLATES

Point = tuple[float, float]
WIDTH = 400
"""Width of a line chart; this and all sizes here are in pixels."""
HEIGHT = 230
COLOURS = 8
GREY = 7
_LEFT = 44
_TOP = 12
_FOOT = HEIGHT - 30
_LETTER = 6.6
"""Width of a letter."""
_LINE = 14.0
"""Height of a line of text."""
_EDGE = 16
"""Margin around the charts of a file."""
_GAP = 28
"""Space between the charts of a file."""
_DOTS_APART = 5
"""Pixels between points from which on each has a dot."""
_LONG_CURVE = 120
"""Points from which on a curve is drawn faintly, with its trend on top."""
_TREND = 60
"""Columns of a trend: the median of each is drawn."""
_COLUMNS = 400
"""Columns of a longer curve: the lowest and the highest point of each are drawn."""
_TINY = 1e-100
_MOST_IN_WORDS = 12
"""Curves of a chart that are told in words."""
_NOT_OF_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def svg_of(kind: str, **values: object) -> Markup:
    """Draw SVG of that kind, see ``charts.svg``."""
    svg: Markup = getattr(TEMPLATES.get_template("charts.svg").module, kind)(**values)
    return svg


class Picture(NamedTuple):
    """One chart; ``words`` say what it shows to readers who do not see it, and a width of 0 fills the page's."""

    title: str
    unit: str
    body: Markup
    words: str
    height: float
    width: float = 0
    data: Mapping[str, str | None] = {}
    """Attributes for the page's script."""


class Series(NamedTuple):
    """One curve, its points in order of x."""

    name: str
    points: Sequence[Point]
    colour: int = 0
    faint: bool = False
    """Less important than others: thin, without a label."""
    dashed: bool = False
    """For comparison only: what would be ideal, or the most that is possible."""
    label: str = ""
    """At its right end."""
    lost: Sequence[float] = ()
    """Places where the value was not finite: they are marked, and no line is drawn across them."""
    pauses: Sequence[float] = ()
    """Places where nothing was measured: no line is drawn across them, either."""


class Axes(NamedTuple):
    """Title and axes of a line chart. The horizontal one begins at 0, or where the points do if it ``x_may_be_log``."""

    title: str
    unit: str
    x: str
    """Name of the horizontal axis."""
    group: str = ""
    """Charts of one group have the same horizontal axis, and their read-outs move together."""
    from_zero: bool = False
    """The vertical axis begins at 0; that of percents ends at 100 then."""
    x_to: float | None = None
    """Right end; None: as the points have it."""
    may_be_log: bool = False
    x_may_be_log: bool = False
    restarts: Sequence[Point] = ()
    """(x, colour) of vertical lines: where a later attempt went on."""


class Bar(NamedTuple):
    """One bar with ``text`` at its right, of no length below 0; ``spread``: its lowest and highest value."""

    name: str
    value: float
    text: str = ""
    spread: Point | None = None


class Scale(NamedTuple):
    """Values from ``low`` to ``high`` on pixels from ``start`` to ``end``; straight, or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        share = 0.5
        if self.high > self.low and self.log:
            share = math.log(value / self.low) / math.log(self.high / self.low)
        elif self.high > self.low:
            share = (value - self.low) / (self.high - self.low)
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 5) -> list[float]:
        """Round values inside the scale, about ``most``: multiples of 1, 2 or 5 times a power of ten."""
        if self.log:
            return self._ticks_of_powers(most)
        if not self.high - self.low > _TINY:
            return [self.low]
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = 10 * power
        for times in (5, 2, 1):
            if power * times >= rough * 0.9:
                step = power * times
        first = math.ceil(self.low / step - 1e-6)
        last = math.floor(self.high / step + 1e-6)
        return [float(f"{at * step:.12g}") for at in range(first, last + 1)]

    def _ticks_of_powers(self, most: int) -> list[float]:
        first = math.floor(math.log10(self.low))
        last = math.ceil(math.log10(self.high))
        inside: list[float] = []
        for steps in ((1, 2, 5), (1, 3), (1,)):
            inside = []
            for power, step in product(range(first, last + 1), steps):
                tick = step * 10.0**power
                if self.low <= tick <= self.high * (1 + 1e-9):
                    inside.append(tick)
            if len(inside) <= most + 1:
                return inside
        return inside[:: math.ceil(len(inside) / most)]


def shown(value: float, digits: int = 4) -> str:
    """A number for a tick or a label: ``0.05``, ``1,500``, ``12k``, ``3e-05``."""
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:g}M"
    if size >= 1e5:
        return f"{value / 1e3:g}k"
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 1e-3:
        return f"{value:.{digits}g}"
    return f"{value:.3g}"


def time_unit(seconds: float) -> tuple[str, float]:
    """Unit for an axis of that length, and its seconds."""
    if seconds < 180:
        return "s", 1.0
    if seconds < 3 * 3600:
        return "min", 60.0
    return "h", 3600.0


def line_chart(axes: Axes, curves: Iterable[Series]) -> Picture | None:
    """Draw curves over one axis."""
    drawn = []
    labels = []
    for item in curves:
        if item.points and _is_drawable(item.points):
            drawn.append(item)
            if item.label and not item.faint:
                labels.append(item)
    if not drawn or not _is_drawable([(axes.x_to or 0.0, 0.0)]):
        return None
    x = _horizontal(axes, drawn, WIDTH - min(_room_for(labels), WIDTH / 3))
    y = _vertical(axes, drawn)
    lost: list[float] = []
    marks: set[tuple[int, int]] = set()
    for item in drawn:
        lost += item.lost
        for place in item.lost:
            marks.add((round(x(place)), item.colour))
    body = svg_of(
        "lines", x=x, y=y, name=axes.x, shown=shown, restarts=axes.restarts, height=HEIGHT,
        curves=[_curve(item, x, y) for item in drawn], labels=_end_labels(labels, y),
        lost=sorted(marks), first_lost=shown(min(lost)) if lost else "",
    )  # fmt: skip
    logs = ""
    if x.log:
        logs += "x"
    if y.log:
        logs += "y"
    data = {
        "data-group": axes.group, "data-x": axes.x, "data-plot": f"{x.start:g} {x.end:g} {y.end:g} {y.start:g}",
        "data-range": f"{x.low:.10g} {x.high:.10g} {y.low:.10g} {y.high:.10g}",
        "data-log": logs or None,
    }  # fmt: skip
    unit = axes.unit
    if y.log:
        unit = f"{unit}, log scale".removeprefix(", ")
    words = "; ".join(_in_words(item, axes.x) for item in drawn[:_MOST_IN_WORDS])
    return Picture(axes.title, unit, body, f"{axes.title}: {words}", HEIGHT, WIDTH, data)


def _in_words(item: Series, axis: str) -> str:
    x_first, y_first = item.points[0]
    x_last, y_last = item.points[-1]
    return f"{item.name} from {shown(y_first)} at {axis} {shown(x_first)} to {shown(y_last)} at {shown(x_last)}"


def _room_for(labels: Sequence[Series]) -> float:
    """Pixels for the labels at the right of a chart."""
    if not labels:
        return 10
    return 18 + _LETTER * max(len(item.label) for item in labels)


def _is_drawable(pairs: Iterable[Point]) -> bool:
    """Refuse numbers that no picture has room for: a stranger may have recorded any."""
    return all(jsonl.is_number(x) and jsonl.is_number(y) for x, y in pairs)


def _is_wide(values: Sequence[float], above: float = 20) -> bool:
    """True for values that need a logarithmic scale: all above 0, and over a factor of ``above``."""
    return min(values) > _TINY and max(values) / min(values) > above


def _horizontal(axes: Axes, curves: Iterable[Series], right: float) -> Scale:
    x_from = 0.0
    if axes.x_may_be_log:
        x_from = min(item.points[0][0] for item in curves)
    x_to = axes.x_to
    if x_to is None:
        x_to = max(item.points[-1][0] for item in curves)
    if axes.x_may_be_log and _is_wide([x_from, x_to], above=5):
        return Scale(x_from / 1.2, x_to * 1.2, _LEFT, right, log=True)
    if x_to - x_from <= _TINY:
        x_to = x_from + 1
    return Scale(x_from, x_to, _LEFT, right)


def _vertical(axes: Axes, curves: Iterable[Series]) -> Scale:
    values: list[float] = []
    for item in curves:
        values += map(itemgetter(1), item.points)
    least = min(values)
    most = max(values)
    if axes.may_be_log and _is_wide(values):
        return Scale(least / 1.1, most * 1.1, _FOOT, _TOP, log=True)
    low = least
    if axes.from_zero:
        low = min(least, 0.0)
    room = 0.06 * (most - low) or abs(most) * 0.1 or 1.0
    if not axes.from_zero:
        low -= room
    high = most + room
    if axes.unit == "%":  # nothing is more than all
        whole = max(most, 100.0)
        low = max(low, min(least, 0.0))
        high = min(high, whole)
        if axes.from_zero:
            high = whole
    return Scale(low, high, _FOOT, _TOP)


def _curve(item: Series, x: Scale, y: Scale) -> dict[str, object]:
    """Values of a curve for the template."""
    points = _thinned(item.points)
    trend = _trend(item)
    breaks = sorted([*item.lost, *item.pauses])
    pixels = []
    xs = []
    ys = []
    for at, value in points:
        pixels.append((x(at), y(value)))
        xs.append(f"{at:.8g}")
        ys.append(f"{value:.5g}")
    are_apart = pixels[-1][0] - pixels[0][0] > _DOTS_APART * len(points) and not item.faint
    has_dots = not trend and not item.dashed and (len(points) == 1 or are_apart)
    return {
        "item": item,
        "path": _path(points, breaks, x, y),
        "trend": _path(trend, breaks, x, y),
        "dots": pixels if has_dots else [],
        "x": " ".join(xs),
        "y": " ".join(ys),
    }


def _path(points: Sequence[Point], breaks: Sequence[float], x: Scale, y: Scale) -> str:
    """The ``d`` of an SVG path through the points; empty without any."""
    path = ""
    before = -math.inf
    for at, value in points:
        command = "M"
        if path and bisect_left(breaks, at) <= bisect_right(breaks, before):
            command = "L"
        path += f"{command}{x(at):.1f} {y(value):.1f}"
        before = at
    return path


def _thinned(points: Sequence[Point]) -> list[Point]:
    """The points themselves, or of a long curve the lowest and the highest in each column, and its ends."""
    if len(points) <= 2 * _COLUMNS:
        return list(points)
    kept = {points[0], points[-1]}
    for column in _in_columns(points, _COLUMNS):
        kept.add(min(column, key=itemgetter(1)))
        kept.add(max(column, key=itemgetter(1)))
    return sorted(kept)


def _trend(item: Series) -> list[Point]:
    """Medians of a long curve; empty for a short one."""
    if len(item.points) <= _LONG_CURVE:
        return []
    medians = []
    for column in _in_columns(item.points, _TREND):
        middle, _ = column[len(column) // 2]
        medians.append((middle, statistics.median(y for _, y in column)))
    return medians


def _in_columns(points: Sequence[Point], columns: int) -> list[list[Point]]:
    """The points, which are in order of x, by columns of equal width; without columns that have none."""
    low = points[0][0]
    width = (points[-1][0] - low) / columns or 1.0
    found: dict[int, list[Point]] = {}
    for point in points:
        column = min(int((point[0] - low) / width), columns - 1)
        found.setdefault(column, []).append(point)
    return list(found.values())


def _end_labels(labels: Sequence[Series], y: Scale) -> list[tuple[float, Series]]:
    """Places of the labels at the right, apart from one another."""
    ends = []
    for item in labels:
        _, last = (_trend(item) or item.points)[-1]
        ends.append((y(last), item))
    ends.sort(key=itemgetter(0))
    places: list[float] = []
    least = -math.inf
    for wanted, _ in ends:
        places.append(max(wanted, least))
        least = places[-1] + _LINE
    limit = float(_FOOT)
    for at in reversed(range(len(ends))):
        places[at] = min(places[at], limit)
        limit = places[at] - _LINE
    return [(place, item) for place, (_, item) in zip(places, ends, strict=True)]


def bar_chart(title: str, unit: str, bars: Iterable[Bar], *, high: float | None = None) -> Picture | None:
    """Draw bars from the left, one below the other, each below its name; from 0 to ``high`` or to the longest."""
    drawn = []
    words = []
    most = high or 0.0
    for bar in bars:
        if jsonl.is_number(bar.value):
            drawn.append(bar._replace(text=bar.text or shown(bar.value)))
            words.append(f"{bar.name} {drawn[-1].text}")
            most = high or max(most, bar.value, *(bar.spread or ()))
    if not most > 0:
        return None
    body = svg_of("bars", bars=drawn, most=most)
    return Picture(title, unit, body, f"{title}: {'; '.join(words)}", 38 * len(drawn) + 2)


def drawing(
    pictures: Iterable[Picture | None], *, title: str = "", legend: Sequence[tuple[str, int]] = (), foot: str = "",
    wide: bool = False,
) -> str:  # fmt: skip
    """The text of an ``.svg`` file with these charts, two in a row; it needs nothing beside it. Empty without charts.

    Args:
        legend: (name, colour) of curves that all charts share.
        foot: what the charts come to, in words.
        wide: one chart in a row, twice as wide.
    """
    charts = [picture for picture in pictures if picture is not None]
    if not charts:
        return ""
    columns = min(2, len(charts))
    width = WIDTH
    if wide:
        columns = 1
        width = 2 * WIDTH
    room = columns * (width + _GAP) - _GAP
    heads = textwrap.wrap(title, int(room / _LETTER))
    feet = textwrap.wrap(foot, int(room / _LETTER))
    y = _EDGE + 20 * len(heads)
    names, y = _placed_legend(legend, room, y)
    placed = []
    for first in range(0, len(charts), columns):
        height = 0.0
        for at, chart in enumerate(charts[first : first + columns]):
            placed.append((_EDGE + at * (width + _GAP), y, chart))
            height = max(height, chart.height)
        y += math.ceil(height) + 40
    svg = svg_of(
        "file", style=STYLE, width=room + 2 * _EDGE, height=y + 18 * len(feet) + 8, edge=_EDGE, heads=heads,
        names=names, charts=placed, chart_width=width, feet=feet, feet_from=y,
    )  # fmt: skip
    return _NOT_OF_XML.sub("\N{REPLACEMENT CHARACTER}", svg) + "\n"


def _placed_legend(
    legend: Sequence[tuple[str, int]], room: float, y: int
) -> tuple[list[tuple[float, int, str, int]], int]:
    """(x, y, name, colour) of the names of a legend in columns from ``y`` on, and where what is below them begins."""
    if not legend:
        return [], y
    needed = 42 + _LETTER * max(len(name) for name, _ in legend)
    across = max(1, int(room / needed))
    names = []
    for at, (name, colour) in enumerate(legend):
        names.append((_EDGE + at % across * needed, y + 18 * (at // across), name, colour))
    return names, y + 18 * math.ceil(len(legend) / across) + 8
