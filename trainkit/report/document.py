"""What a report is made of: sections of text, tables and charts, which are drawn as SVG.

All text in them is plain, and a run may be a stranger's: the templates escape it. A chart is None where there
is nothing to draw. Colours are the numbers 0 to 7 of ``chart.css``, which follow the reader's light or dark scheme.

    rate = bar_chart("Images a second", "images/s", [Bar("fp32", 812, spread=(800, 820)), Bar("bf16", 1510)])
    path.write_text(drawing([rate], title="Which precision is fastest?"))
"""

from __future__ import annotations

import math
import re
import statistics
import textwrap
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from markupsafe import Markup

from trainkit import fileio, terminal
from trainkit.config.components import Metric
from trainkit.report.facts import Facts

Point = tuple[float, float]
Row = tuple[str, ...]
TIMES = "\N{MULTIPLICATION SIGN}"
NONE = "–"  # noqa: RUF001  an en dash: a value that this run does not have
MEASURE = ("measure", "value")
WIDTH, HEIGHT = 400, 230
"""Of a line chart."""
COLOURS, GREY = 8, 7
_LEFT, _TOP, _FOOT = 44, 12, HEIGHT - 30
_LETTER, _LINE = 6.6, 14.0
"""Width of a letter and height of a line of text."""
_EDGE, _GAP = 16, 28
"""Around and between the charts of a file."""
_DOTS_APART = 5
"""Pixels between points from which on each has a dot."""
_LONG_CURVE, _TREND = 120, 60
"""A curve of more points is drawn faintly, with the medians of this many columns on top."""
_COLUMNS = 400
"""Of a longer curve: of all points in one column, the lowest and the highest are drawn."""
_TINY = 1e-100
_y = itemgetter(1)
_NOT_OF_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def source(name: str) -> str:
    """The text of a file beside this one."""
    return fileio.read_text(Path(__file__).parent / name, follow=True)


STYLE = source("chart.css")
TEMPLATES = jinja2.Environment(
    loader=jinja2.FunctionLoader(source),
    autoescape=lambda name: not str(name).endswith(".md"),
    undefined=jinja2.StrictUndefined,
    finalize=lambda value: f"{value:.6g}" if isinstance(value, float) else value,
)
TEMPLATES.tests["code"] = lambda word: isinstance(word, Code)
TEMPLATES.filters |= {
    "literal": terminal.literal, "code": terminal.code, "block": terminal.block, "table": lambda table: markdown(table),
}  # fmt: skip


def drawn(kind: str, **values: object) -> Markup:
    """SVG of that kind, see ``charts.svg``."""
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
    """What a line chart is about. The horizontal axis begins at 0, or where the points do if it ``x_may_be_log``."""

    title: str
    unit: str
    x: str
    """Name of the horizontal axis."""
    group: str = ""
    """Charts of one group have the same horizontal axis, and their read-outs move together."""
    from_zero: bool = False
    """Whether the vertical axis begins at 0; of percents it ends at 100 then."""
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
        low, high, at = (math.log10(each) if self.log else each for each in (self.low, self.high, value))
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 5) -> list[float]:
        """Round values inside the scale, about ``most``: multiples of 1, 2 or 5 times a power of ten."""
        if self.log:
            powers = range(math.floor(math.log10(self.low)), math.ceil(math.log10(self.high)) + 1)
            for steps in ((1, 2, 5), (1, 3), (1,)):
                every = [step * 10.0**power for power in powers for step in steps]
                inside = [value for value in every if self.low <= value <= self.high * (1 + 1e-9)]
                if len(inside) <= most + 1:
                    return inside
            return inside[:: math.ceil(len(inside) / most)]
        if not self.high - self.low > _TINY:
            return [self.low]
        rough = (self.high - self.low) / most
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.9)
        first, last = math.ceil(self.low / step - 1e-6), math.floor(self.high / step + 1e-6)
        return [float(f"{at * step:.12g}") for at in range(first, last + 1)]


def shown(value: float, digits: int = 4) -> str:
    """A number for a tick or a label: ``0.05``, ``1,500``, ``12k``, ``3e-05``."""
    size = abs(value)
    if size >= 1e5:
        return f"{value / 1e6:g}M" if size >= 1e6 else f"{value / 1e3:g}k"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.{digits}g}" if size >= 1e-3 else f"{value:.3g}"


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit for an axis of that length, and its seconds."""
    if seconds < 180:
        return "s", 1.0
    return ("min", 60.0) if seconds < 3 * 3600 else ("h", 3600.0)


def line_chart(axes: Axes, curves: Iterable[Series]) -> Picture | None:
    """Curves over one axis."""
    curves = [item for item in curves if item.points and _is_drawable(item.points)]
    places = [x for item in curves for x, _ in item.points]
    x_from = min(places, default=0.0) if axes.x_may_be_log else 0.0
    x_to = max(places, default=0.0) if axes.x_to is None else axes.x_to
    if not curves or not _is_drawable([(x_from, x_to)]):
        return None
    labels = [item for item in curves if item.label and not item.faint]
    margin = 10 + _LETTER * max((len(item.label) for item in labels), default=0) + 8 * bool(labels)
    right, y = WIDTH - min(margin, WIDTH / 3), _vertical(axes, curves)
    if axes.x_may_be_log and _is_wide([x_from, x_to], above=5):
        x = Scale(x_from / 1.2, x_to * 1.2, _LEFT, right, log=True)
    else:
        x = Scale(x_from, x_to if x_to - x_from > _TINY else x_from + 1, _LEFT, right)
    lost = [(place, item.colour) for item in curves for place in item.lost]
    body = drawn(
        "lines", x=x, y=y, name=axes.x, shown=shown, restarts=axes.restarts, height=HEIGHT,
        curves=[_curve(item, x, y) for item in curves], labels=_end_labels(labels, y),
        lost=sorted({(round(x(place)), colour) for place, colour in lost}),
        first_lost=shown(min(lost)[0]) if lost else "",
    )  # fmt: skip
    data = {
        "data-group": axes.group, "data-x": axes.x, "data-plot": f"{x.start:g} {x.end:g} {y.end:g} {y.start:g}",
        "data-range": f"{x.low:.10g} {x.high:.10g} {y.low:.10g} {y.high:.10g}",
        "data-log": "x" * x.log + "y" * y.log or None,
    }  # fmt: skip
    words = "; ".join(
        f"{item.name} from {shown(y0)} at {axes.x} {shown(x0)} to {shown(y1)} at {shown(x1)}"
        for item in curves[:12]
        for (x0, y0), (x1, y1) in [(item.points[0], item.points[-1])]
    )
    unit = ", ".join(filter(None, (axes.unit, "log scale" * y.log)))
    return Picture(axes.title, unit, body, f"{axes.title}: {words}", HEIGHT, WIDTH, data)


def _is_drawable(pairs: Iterable[Point]) -> bool:
    """A stranger may have recorded numbers that no picture has room for."""
    return all(fileio.is_number(value) for pair in pairs for value in pair)


def _is_wide(values: Sequence[float], above: float = 20) -> bool:
    """Whether they need a logarithmic scale: all above 0, and over a factor of ``above``."""
    return min(values) > _TINY and max(values) / min(values) > above


def _vertical(axes: Axes, curves: Iterable[Series]) -> Scale:
    values = [y for item in curves for _, y in item.points]
    least, most = min(values), max(values)
    if axes.may_be_log and _is_wide(values):
        return Scale(least / 1.1, most * 1.1, _FOOT, _TOP, log=True)
    low = min(least, 0.0) if axes.from_zero else least
    room = 0.06 * (most - low) or abs(most) * 0.1 or 1.0
    low, high = low - room * (not axes.from_zero), most + room
    if axes.unit == "%":  # nothing is more than all
        whole = max(most, 100.0)
        low, high = max(low, min(least, 0.0)), whole if axes.from_zero else min(high, whole)
    return Scale(low, high, _FOOT, _TOP)


def _curve(item: Series, x: Scale, y: Scale) -> dict[str, object]:
    """What the template draws of it."""
    points, trend, breaks = _thinned(item.points), _trend(item), sorted([*item.lost, *item.pauses])
    are_apart = x(points[-1][0]) - x(points[0][0]) > _DOTS_APART * len(points) and not item.faint
    has_dots = not trend and not item.dashed and (len(points) == 1 or are_apart)
    return {
        "item": item, "path": _path(points, breaks, x, y), "trend": _path(trend, breaks, x, y) if trend else "",
        "dots": [(x(a), y(b)) for a, b in points] if has_dots else [],
        "x": " ".join(f"{a:.8g}" for a, _ in points), "y": " ".join(f"{b:.5g}" for _, b in points),
    }  # fmt: skip


def _path(points: Sequence[Point], breaks: Sequence[float], x: Scale, y: Scale) -> str:
    words = f"M{x(points[0][0]):.1f} {y(points[0][1]):.1f}"
    for before, after in pairwise(points):
        broken = bisect_left(breaks, after[0]) > bisect_right(breaks, before[0])
        words += f"{'M' if broken else 'L'}{x(after[0]):.1f} {y(after[1]):.1f}"
    return words


def _thinned(points: Sequence[Point]) -> list[Point]:
    """The points themselves, or of a long curve the lowest and the highest in each column, and its ends."""
    if len(points) <= 2 * _COLUMNS:
        return list(points)
    ends = [ends for group in _in_columns(points, _COLUMNS) for ends in (min(group, key=_y), max(group, key=_y))]
    return sorted({points[0], points[-1], *ends})


def _trend(item: Series) -> list[Point]:
    """Of a long curve the medians; empty for a short one."""
    groups = _in_columns(item.points, _TREND) if len(item.points) > _LONG_CURVE else []
    return [(group[len(group) // 2][0], statistics.median(map(_y, group))) for group in groups]


def _in_columns(points: Sequence[Point], columns: int) -> list[list[Point]]:
    """The points, which are in order of x, by columns of equal width; without columns that have none."""
    low, width = points[0][0], (points[-1][0] - points[0][0]) / columns or 1.0
    return [list(group) for _, group in groupby(points, lambda point: min(int((point[0] - low) / width), columns - 1))]


def _end_labels(labels: Sequence[Series], y: Scale) -> list[tuple[float, Series]]:
    """Where the labels at the right are, apart from one another."""
    ends = sorted(((y((_trend(item) or item.points)[-1][1]), item) for item in labels), key=lambda end: end[0])
    places: list[float] = []
    for wanted, _ in ends:
        places.append(max([wanted, *(place + _LINE for place in places[-1:])]))
    limit = float(_FOOT)
    for at in reversed(range(len(ends))):
        places[at] = min(places[at], limit)
        limit = places[at] - _LINE
    return [(place, item) for place, (_, item) in zip(places, ends, strict=True)]


def bar_chart(title: str, unit: str, bars: Iterable[Bar], *, high: float | None = None) -> Picture | None:
    """Bars from the left, one below the other, each below its name; from 0 to ``high`` or to the longest."""
    bars = [bar._replace(text=bar.text or shown(bar.value)) for bar in bars if fileio.is_number(bar.value)]
    most = high or max((end for bar in bars for end in (bar.value, *(bar.spread or ()))), default=0.0)
    if not most > 0:
        return None
    words = "; ".join(f"{bar.name} {bar.text}" for bar in bars)
    return Picture(title, unit, drawn("bars", bars=bars, most=most), f"{title}: {words}", 38 * len(bars) + 2)


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
    columns, width = 1 if wide else min(2, len(charts)), 2 * WIDTH if wide else WIDTH
    room = columns * (width + _GAP) - _GAP
    heads, feet = (textwrap.wrap(words, int(room / _LETTER)) for words in (title, foot))
    needed = 42 + _LETTER * max((len(name) for name, _ in legend), default=0)
    across = max(1, int(room / needed))
    y = _EDGE + 20 * len(heads)
    names = [(_EDGE + at % across * needed, y + 18 * (at // across), *each) for at, each in enumerate(legend)]
    y += 18 * math.ceil(len(legend) / across) + 8 * bool(legend)
    placed = []
    for first in range(0, len(charts), columns):
        row = charts[first : first + columns]
        placed += [(_EDGE + at * (width + _GAP), y, chart) for at, chart in enumerate(row)]
        y += math.ceil(max(chart.height for chart in row)) + 40
    svg = drawn(
        "file", style=STYLE, width=room + 2 * _EDGE, height=y + 18 * len(feet) + 8, edge=_EDGE, heads=heads,
        names=names, charts=placed, chart_width=width, feet=feet, feet_from=y,
    )  # fmt: skip
    return _NOT_OF_XML.sub("\N{REPLACEMENT CHARACTER}", svg) + "\n"


class Code(str):
    """A command, a path or an output: shown as it is typed."""

    __slots__ = ()


class Table(NamedTuple):
    """A table, or nothing where it has no rows. Columns from ``numbers_from`` on are numbers."""

    header: Row
    rows: Sequence[Row]
    numbers_from: int = 99
    caption: str = ""

    def __bool__(self) -> bool:
        return bool(self.rows)


class Charts(NamedTuple):
    """Charts side by side, or one below the other if ``wide``; in the log book they are one file of that name."""

    name: str
    pictures: Sequence[Picture | None]
    title: str = ""
    """What they show, in a few words."""
    legend: Sequence[tuple[str, int]] = ()
    """(name, colour) of runs or parts."""
    wide: bool = False

    def __bool__(self) -> bool:
        return any(self.pictures)


class Items(NamedTuple):
    """A list; of the words of a line those that are `Code` are shown as such."""

    lines: Sequence[Sequence[str]]

    def __bool__(self) -> bool:
        return bool(self.lines)


class Text(NamedTuple):
    """A paragraph, of words as in `Items`."""

    words: Sequence[str]


class Block(NamedTuple):
    """Lines of code or output."""

    text: str


class Heading(NamedTuple):
    """A line above parts that belong together."""

    text: str


class Fold(NamedTuple):
    """Parts that a page shows on request."""

    title: str
    parts: Sequence[Part]


class Gallery(NamedTuple):
    """Small images, each a PNG in base64, side by side; the table says what each is, and what it was taken for."""

    pngs: Sequence[str]
    table: Table


Part = Table | Charts | Text | Items | Block | Heading | Fold | Gallery


class Section(NamedTuple):
    """A part of the report, with its name for links; left out where it has no parts."""

    name: str
    title: str
    parts: Sequence[Part]
    note: str = ""

    def __bool__(self) -> bool:
        return any(self.parts)


def of_each(name: str, title: str, parts_of: Callable[[Facts], Iterable[Part]]) -> Callable[[Sequence[Facts]], Section]:
    """A section with the parts of each run, under its label where there are several."""

    def section(runs: Sequence[Facts]) -> Section:
        whole: list[Part] = []
        for facts in runs:
            parts = [part for part in parts_of(facts) if part]
            if parts and len(runs) > 1:
                whole.append(Heading(facts.label))
            whole += parts
        return Section(name, title, whole)

    return section


def markdown(table: Table) -> str:
    """As GitHub and GitLab show it."""
    return terminal.markdown_table(table.header, table.rows, numbers_from=table.numbers_from)


def text(value: Any) -> str:
    """Any value, or a dash for None."""
    return NONE if value is None else str(value)


def number(value: Any, spec: str, unit: str = "") -> str:
    """A number in ``spec`` with its unit, or a dash."""
    return format(value, spec) + unit if fileio.is_number(value) else NONE


def measured(value: Any, metric: Metric) -> str:
    """A value of a metric with its unit, or a dash."""
    return number(value, metric.spec, f" {metric.unit}".rstrip())


def duration(seconds: float | None) -> str:
    """As `terminal.duration`, or a dash."""
    return terminal.duration(seconds) if fileio.is_number(seconds) else NONE


def rate(images_per_sec: float | None) -> str:
    """Images a second, with decimals for slow runs: ``2,010``, ``10.5``, ``0.42``."""
    speed = images_per_sec or 0.0
    return number(images_per_sec, ",.0f" if speed >= 20 else ".1f" if speed >= 2 else ".2g")


def memory(mb: Any) -> str:
    """Megabytes as ``812 MB`` or ``15.2 GB``."""
    return number(mb, ",.0f", " MB") if not fileio.is_number(mb) or mb < 1024 else f"{mb / 1024:,.1f} GB"
