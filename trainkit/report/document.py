"""What a report is made of: sections of text, tables and charts, which are drawn as SVG.

All text in them is plain, and a run may be a stranger's: `tag` and the writers escape it. A chart is None where there
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
from pathlib import Path
from typing import Any, NamedTuple

from markupsafe import Markup, escape

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
STYLE = fileio.read_text(Path(__file__).parent / "chart.css", follow=True)
_LEFT, _TOP, _FOOT = 44, 12, HEIGHT - 30
_LETTER, _LINE = 6.6, 14.0
"""Width of a letter and height of a line of text."""
_NAME = 48
"""Letters that fit above a bar on a phone."""
_DOTS_APART = 5
"""Pixels between points from which on each has a dot."""
_LONG_CURVE, _TREND = 120, 60
"""A curve of more points is drawn faintly, with the medians of so many columns before it."""
_COLUMNS = 400
"""Of a longer curve: of all points in one column, the lowest and the highest are drawn."""
_TINY = 1e-100
_NOT_OF_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def tag(name: str, *content: object, **attributes: object) -> Markup:
    """An element of SVG. Text is escaped, None is left out; ``class_`` is class, ``data_x`` data-x."""
    words = name
    for key, value in attributes.items():
        if value is not None:
            written = escape(f"{value:.6g}" if isinstance(value, float) else value)
            words += f' {key.rstrip("_").replace("_", "-")}="{written}"'
    return Markup(f"<{words}>{joined(content)}</{name}>")


def joined(parts: Iterable[object]) -> Markup:
    return Markup("").join(part for part in parts if part is not None)  # type: ignore[misc]  # escapes any object


class Picture(NamedTuple):
    """One chart; ``words`` say what it shows to readers who do not see it, and a width of 0 fills the page's."""

    title: str
    unit: str
    body: Markup
    words: str
    height: float
    width: float = 0
    data: Mapping[str, object] = {}

    def svg(self, **place: object) -> Markup:
        """The element; ``place``: x, y, width and height inside of a drawing."""
        fluid = {"width": "100%", "class_": "fluid", "height": self.height}
        box = {"viewBox": f"0 0 {self.width} {self.height:g}"} if self.width else fluid
        return tag("svg", self.body, **{**box, "role": "img", "aria_label": self.words, **self.data, **place})


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
    """Places without a value: no line is drawn across them."""
    ring: Point | None = None
    """A point to stand out."""


class Axes(NamedTuple):
    """What a line chart is about. The horizontal axis begins at 0, or where the points do if it ``x_may_be_log``."""

    title: str
    unit: str
    x: str
    """Name of the horizontal axis."""
    group: str = ""
    """Charts of one group have the same horizontal axis, and their read-outs move together."""
    low: float | None = None
    high: float | None = None
    """Ends of the vertical axis; None: as the values have it."""
    x_to: float | None = None
    """Right end; None: as the points have it."""
    may_be_log: bool = False
    x_may_be_log: bool = False
    lost: str = ""
    """What it means that a value is missing."""
    restarts: Sequence[Point] = ()
    """(x, colour) of vertical lines: where a later attempt went on."""


class Bar(NamedTuple):
    """One bar with ``text`` at its right; ``spread``: its lowest and highest value."""

    name: str
    value: float
    text: str = ""
    colour: int = 0
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
    curves = [item for item in curves if item.points and _is_drawable(*item.points)]
    places = [x for item in curves for x, _ in item.points]
    x_from = min(places, default=0.0) if axes.x_may_be_log else 0.0
    x_to = max(places, default=0.0) if axes.x_to is None else axes.x_to
    if not curves or not _is_drawable((x_from, x_to)):
        return None
    labels = [item for item in curves if item.label and not item.faint]
    margin = 10 + _LETTER * max((len(item.label) for item in labels), default=0) + 8 * bool(labels)
    right, y = WIDTH - min(margin, WIDTH / 3), _vertical(axes, curves)
    if axes.x_may_be_log and _is_wide([x_from, x_to], above=5):
        x = Scale(x_from / 1.2, x_to * 1.2, _LEFT, right, log=True)
    else:
        x = Scale(x_from, x_to if x_to - x_from > _TINY else x_from + 1, _LEFT, right)
    restarts = [
        tag("path", d=f"M{x(at):.1f} {_TOP}V{_FOOT}", class_=f"restart c{colour:g}") for at, colour in axes.restarts
    ]
    parts = [*_grid(axes, x, y), *restarts, *(_curve(item, x, y) for item in curves), *_end_labels(labels, x, y)]
    data = {
        "data_group": axes.group, "data_x": axes.x, "data_plot": f"{x.start:g} {x.end:g} {y.end:g} {y.start:g}",
        "data_range": f"{x.low:.10g} {x.high:.10g} {y.low:.10g} {y.high:.10g}",
        "data_log": "".join(name for name, scale in (("x", x), ("y", y)) if scale.log) or None,
    }  # fmt: skip
    words = "; ".join(
        f"{item.name} from {shown(y0)} at {axes.x} {shown(x0)} to {shown(y1)} at {shown(x1)}"
        for item in curves[:12]
        for (x0, y0), (x1, y1) in [(item.points[0], item.points[-1])]
    )
    unit = axes.unit
    if y.log:
        unit = f"{unit}, log scale" if unit else "log scale"
    body = joined([*parts, *_losses(axes, curves, x)])
    return Picture(axes.title, unit, body, f"{axes.title}: {words}", HEIGHT, WIDTH, data)


def _is_drawable(*pairs: Point) -> bool:
    """A stranger may have recorded numbers that no picture has room for."""
    return all(fileio.is_number(value) for pair in pairs for value in pair)


def _is_wide(values: Sequence[float], above: float = 20) -> bool:
    """Whether they need a logarithmic scale: all above 0, and over a factor of ``above``."""
    return min(values) > _TINY and max(values) / min(values) > above


def _vertical(axes: Axes, curves: Iterable[Series]) -> Scale:
    values = [y for item in curves for _, y in item.points]
    low, high = min(values), max(values)
    if axes.may_be_log and _is_wide(values):
        return Scale(low / 1.1, high * 1.1, _FOOT, _TOP, log=True)
    low = low if axes.low is None else min(axes.low, low)
    high = high if axes.high is None else max(axes.high, high)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    low, high = low - room * (axes.low is None), high + room * (axes.high is None)
    if axes.unit == "%":  # nothing is more than all
        low, high = max(low, min(0.0, *values)), min(high, max(100.0, *values))
    return Scale(low, high, _FOOT, _TOP)


def _grid(axes: Axes, x: Scale, y: Scale) -> list[Markup]:
    lines = []
    for value in y.ticks():
        lines.append(tag("path", d=f"M{_LEFT} {y(value):.1f}H{x.end:.1f}", class_="grid"))
        lines.append(tag("text", shown(value, 6), x=_LEFT - 6, y=y(value), dy="0.35em", class_="tick end"))
    lines.append(tag("path", d=f"M{_LEFT} {_FOOT}H{x.end:.1f}", class_="axis c7"))
    last_end = -1e9
    for value in x.ticks(6):
        half = len(shown(value)) * _LETTER / 2
        if x(value) - half > last_end + 4:
            lines.append(tag("text", shown(value), x=x(value), y=_FOOT + 14, class_="tick middle"))
            last_end = x(value) + half
    return [*lines, tag("text", axes.x, x=x.end, y=HEIGHT - 3, class_="tick end")]


def _losses(axes: Axes, curves: Sequence[Series], x: Scale) -> list[Markup]:
    """Marks at the foot where values are missing, and in words from where on."""
    lost = [(item.colour, place) for item in curves for place in item.lost]
    if not axes.lost or not lost:
        return []
    at_foot = sorted({(colour, round(x(place))) for colour, place in lost})
    first = shown(min(place for _, place in lost))
    words = f"{axes.lost} from {first} on"
    if any(item.points[-1][0] > item.lost[0] for item in curves if item.lost):
        words = f"{axes.lost} at {first}" + (f" and {len(lost) - 1} more places" if len(lost) > 1 else "")
    marks = [tag("path", d=f"M{at} {_FOOT}v-7", class_=f"lost c{colour}") for colour, at in at_foot]
    return [*marks, tag("text", words, x=_LEFT + 4, y=_FOOT - 11, class_="said c1")]


def _curve(item: Series, x: Scale, y: Scale) -> Markup:
    drawn, trend = _thinned(item.points), _trend(item)
    style = "line faint" if item.faint or trend else "line"
    if item.dashed:
        style += " dashed"
    parts = [tag("path", d=_path(drawn, item.lost, x, y), class_=style)]
    apart = x(drawn[-1][0]) - x(drawn[0][0]) > _DOTS_APART * len(drawn) and not item.faint
    if trend:
        parts.append(tag("path", d=_path(trend, item.lost, x, y), class_="line thin" if item.faint else "line"))
    elif not item.dashed and (len(drawn) == 1 or apart):
        parts += [tag("circle", cx=x(a), cy=y(b), r=2.2) for a, b in drawn]
    if item.ring is not None and _is_drawable(item.ring):
        parts.append(tag("circle", cx=x(item.ring[0]), cy=y(item.ring[1]), r=4.5, class_="ring"))
    return tag(
        "g", *parts, class_=f"series c{item.colour % COLOURS}", data_name=item.name,
        data_x=" ".join(f"{a:.8g}" for a, _ in drawn), data_y=" ".join(f"{b:.5g}" for _, b in drawn),
    )  # fmt: skip


def _path(points: Sequence[Point], lost: Sequence[float], x: Scale, y: Scale) -> str:
    words = f"M{x(points[0][0]):.1f} {y(points[0][1]):.1f}"
    for before, after in pairwise(points):
        broken = bisect_left(lost, after[0]) > bisect_right(lost, before[0])
        words += f"{'M' if broken else 'L'}{x(after[0]):.1f} {y(after[1]):.1f}"
    return words


def _y(point: Point) -> float:
    return point[1]


def _thinned(points: Sequence[Point]) -> list[Point]:
    """The points themselves, or of a long curve the lowest and the highest in each column, and its ends."""
    if len(points) <= 2 * _COLUMNS:
        return list(points)
    ends = [ends for group in _in_columns(points, _COLUMNS) for ends in (min(group, key=_y), max(group, key=_y))]
    return sorted({points[0], points[-1], *ends})


def _trend(item: Series) -> list[Point]:
    """Of a long curve the medians; empty for a short one."""
    groups = _in_columns(item.points, _TREND) if len(_thinned(item.points)) > _LONG_CURVE else []
    return [(group[len(group) // 2][0], statistics.median(map(_y, group))) for group in groups]


def _in_columns(points: Sequence[Point], columns: int) -> list[list[Point]]:
    """The points, which are in order of x, by columns of equal width; without columns that have none."""
    low, width = points[0][0], (points[-1][0] - points[0][0]) / columns or 1.0
    return [list(group) for _, group in groupby(points, lambda point: min(int((point[0] - low) / width), columns - 1))]


def _end_labels(labels: Sequence[Series], x: Scale, y: Scale) -> list[Markup]:
    """The labels at the right, apart from one another, each with a dot in its curve's colour."""
    ends = sorted(((y((_trend(item) or item.points)[-1][1]), item) for item in labels), key=lambda end: end[0])
    places: list[float] = []
    for wanted, _ in ends:
        places.append(max([wanted, *(place + _LINE for place in places[-1:])]))
    limit, parts = float(_FOOT), []
    for place, (_, item) in zip(reversed(places), reversed(ends), strict=True):
        at = min(place, limit)
        limit = at - _LINE
        parts.append(tag("circle", cx=x.end + 6, cy=at, r=3, class_=f"dot c{item.colour % COLOURS}"))
        parts.append(tag("text", item.label, x=x.end + 13, y=at, dy="0.35em", class_="label"))
    return parts[::-1]


def bar_chart(title: str, unit: str, bars: Iterable[Bar], *, high: float | None = None) -> Picture | None:
    """Bars from the left, one below the other, each below its name; from 0 to ``high`` or to the longest."""
    bars = [bar for bar in bars if _is_drawable((bar.value, 0.0))]
    most = high or max((end for bar in bars for end in (bar.value, *(bar.spread or ()))), default=0.0)
    if not bars or not most > 0:
        return None
    room, step, body = 72, 38, list[Markup]()  # percent of the width; pixels

    def wide(value: float) -> str:
        return f"{room * min(max(value / most, 0.0), 1.0):.2f}%"

    for at, bar in enumerate(bars):
        y, style = step * at + 16, f"part c{bar.colour % COLOURS}"
        name = bar.name if len(bar.name) <= _NAME else f"{bar.name[: _NAME - 1]}…"
        body.append(tag("text", name, x=0, y=y - 3))
        body.append(tag("rect", x=0, y=y + 4, width=f"{room}%", height=13, class_="track"))
        body.append(tag("rect", x=0, y=y + 4, width=wide(bar.value), height=13, class_=style))
        body.append(tag("text", bar.text or shown(bar.value), x="100%", y=y + 14, class_="end"))
        if bar.spread:
            low, high_end = map(wide, bar.spread)
            body.append(tag("line", x1=low, x2=high_end, y1=y + 10.5, y2=y + 10.5, class_="whisker"))
    words = "; ".join(f"{bar.name} {bar.text or shown(bar.value)}" for bar in bars)
    return Picture(title, unit, joined(body), f"{title}: {words}", step * len(bars) + 2)


def drawing(
    pictures: Iterable[Picture | None], *, title: str = "", legend: Sequence[tuple[str, int]] = (), foot: str = "",
    columns: int = 2,
) -> str:  # fmt: skip
    """The text of an ``.svg`` file with these charts side by side; it needs nothing beside it. Empty without charts.

    Args:
        legend: (name, colour) of curves that all charts share.
        foot: what the charts come to, in words.
    """
    charts = [picture for picture in pictures if picture is not None]
    if not charts:
        return ""
    narrow = all(chart.width for chart in charts)
    columns = min(columns, len(charts)) if narrow else columns
    edge, gap, width = 16, 28, WIDTH if narrow or columns > 1 else 2 * WIDTH
    whole = columns * (width + gap) - gap + 2 * edge
    body, x, y, letters = [], float(edge), float(edge), int((whole - 2 * edge) / _LETTER)
    for line in textwrap.wrap(title, letters):
        body.append(tag("text", line, x=edge, y=y + 12, class_="tick"))
        y += 20
    for name, colour in legend:
        needed = 24 + _LETTER * len(name) + 18
        if x > edge and x + needed > whole - edge:
            x, y = float(edge), y + 18
        body.append(tag("rect", x=x, y=y + 6, width=18, height=4, class_=f"part c{colour % COLOURS}"))
        body.append(tag("text", name, x=x + 24, y=y + 12))
        x += needed
    y += 26 * bool(legend)
    for first in range(0, len(charts), columns):
        row = charts[first : first + columns]
        for left, chart in zip(range(edge, whole, width + gap), row, strict=False):
            unit = tag("tspan", chart.unit, class_="tick", dx=6)
            body.append(tag("text", chart.title, unit, x=left, y=y + 12, class_="title"))
            body.append(chart.svg(x=left, y=y + 22, width=chart.width or width, height=chart.height))
        y += 22 + max(chart.height for chart in row) + 18
    for line in textwrap.wrap(foot, letters):
        body.append(tag("text", line, x=edge, y=y + 8))
        y += 18
    svg = tag(
        "svg", tag("style", Markup(STYLE)), tag("rect", width="100%", height="100%", class_="paper"), *body,
        xmlns="http://www.w3.org/2000/svg", viewBox=f"0 0 {whole} {y + edge - 8:g}", width=whole, height=y + edge - 8,
        role="img", aria_label="; ".join(chart.words for chart in charts),
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


class Photo(NamedTuple):
    """A small image with what it is and what the model took it for."""

    png: str
    """In base64."""
    label: str
    told: str
    sure: str
    is_large: bool


class Gallery(NamedTuple):
    """Images side by side."""

    photos: Sequence[Photo]


Part = Table | Charts | Text | Items | Block | Heading | Fold | Gallery


class Section(NamedTuple):
    """A part of the report, with its name for links; left out where it has no parts."""

    name: str
    title: str
    parts: Sequence[Part]
    note: str = ""


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


def plural(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"1 {noun}" if count == 1 else f"{count} {noun}s"
