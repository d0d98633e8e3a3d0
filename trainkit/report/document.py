"""What a report is made of: sections, tables, and charts drawn as SVG."""

from __future__ import annotations

import html
import math
import re
import statistics
import textwrap
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from trainkit import fileio
from trainkit.report.facts import Facts

# Charts as SVG: for the page, where `page.js` adds a read-out, and as files of their own for the log book and a
# bench.
#
#     rate = bar_chart("Images a second", "images/s", [Bar("fp32", 812, spread=(800, 820)), Bar("bf16", 1510)])
#     path.write_text(drawing([rate], title="Which precision is fastest?"))
#
# A chart is None where there is nothing to draw. Text is escaped: a run may be a stranger's. Colours are the numbers
# 0 to 7 of ``chart.css``, which follow the reader's light or dark scheme.

Point = tuple[float, float]
WIDTH, HEIGHT = 400, 230
"""Of a line chart."""
COLOURS = 8
GREY = 7
STYLE = fileio.read_text(Path(__file__).parent / "chart.css", follow=True)
_LEFT, _TOP, _BOTTOM = 44, 12, 30
_LETTER, _LINE = 6.6, 14.0
"""Width of a letter and height of a line of text."""
_NAME = 48
"""Letters that fit above a bar on a phone."""
_DOTS_APART = 5
"""Pixels between points from which on each has a dot."""
_LONG_CURVE = 120
"""A curve of more points is drawn faintly, with its trend before it."""
_TINY = 1e-100
_NOT_OF_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
_COLUMNS = 400
"""Of a long curve: of all points in one column, the lowest and the highest are drawn."""


class Html(str):
    """Markup. Everything else is text."""

    __slots__ = ()


def tag(name: str, *content: object, **attributes: object) -> Html:
    """An element. Content that is not `Html` is escaped, None is left out.

    Args:
        attributes: ``class_`` is class, ``name_`` name, ``data_x`` data-x; None and False: left out, True: no value.
    """
    names = {"class_": "class", "name_": "name", "viewBox": "viewBox"}
    written = "".join(
        f" {names.get(key, key.replace('_', '-'))}" + ("" if value is True else f'="{html.escape(str(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    return Html(f"<{name}{written}>" + ("" if name in ("br", "img", "meta") else f"{join(content)}</{name}>"))


def join(parts: Iterable[object]) -> Html:
    """All of it, in a row; what is not `Html` is escaped."""
    there = (part for part in parts if part is not None)
    return Html("".join(part if isinstance(part, Html) else html.escape(str(part), quote=False) for part in there))


@dataclass(frozen=True)
class Picture:
    """One chart."""

    title: str
    unit: str
    body: Html
    words: str
    """What it shows, for readers who do not see it."""
    height: float
    width: float = 0
    """0: as wide as the place where it stands."""
    data: Mapping[str, object] = field(default_factory=dict)

    def svg(self, **place: object) -> Html:
        """The element; ``place``: x, y, width and height inside of a drawing."""
        box = {"viewBox": f"0 0 {self.width} {self.height:g}"} if self.width else {"width": "100%", "class_": "fluid"}
        size = {} if self.width else {"height": f"{self.height:g}"}
        return tag("svg", self.body, **{**box, **size, "role": "img", "aria_label": self.words, **self.data, **place})


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    points: Sequence[Point]
    """In order of x."""
    colour: int = 0
    faint: bool = False
    """Less important than others: thin, without a label."""
    dashed: bool = False
    """For comparison only: what would be ideal, or the most that is possible."""
    label: str = ""
    """At its right end."""
    lost: Sequence[float] = ()
    """Places without a value: no line is drawn across them."""
    spread: Sequence[Point] = ()
    """Lowest and highest value at each point."""
    ring: Point | None = None
    """A point to stand out."""


@dataclass(frozen=True)
class Axes:
    """What a line chart is about."""

    title: str
    unit: str
    x: str
    """Name of the horizontal axis."""
    group: str = ""
    """Charts of one group have the same horizontal axis, and their read-outs move together."""
    low: float | None = None
    high: float | None = None
    """Ends of the vertical axis; None: as the values have it."""
    may_be_log: bool = False
    x_may_be_log: bool = False
    x_ticks: Sequence[float] = ()
    """Values named at the horizontal axis; none: round ones."""
    lost: str = ""
    """What it means that a value is missing."""


@dataclass(frozen=True)
class Bar:
    """One bar with ``text`` at its right; ``spread``: its lowest and highest value; ``mark``: a value to compare."""

    name: str
    value: float
    text: str = ""
    colour: int = 0
    spread: Point | None = None
    mark: float | None = None


@dataclass(frozen=True)
class Scale:
    """Values from ``low`` to ``high`` on pixels from ``start`` to ``end``; straight, or by logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(at)
        share = (at - low) / (high - low) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, most: int = 5) -> list[float]:
        """Round values, inside the scale."""
        if not self.log:
            return linear_ticks(self.low, self.high, most)
        first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
        for steps in ((1, 2, 5), (1, 3), (1,)):
            found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
            found = [value for value in found if self.low <= value <= self.high * (1 + 1e-9)]
            if len(found) <= most + 1:
                return found
        return found[:: math.ceil(len(found) / most)]


def linear_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from ``low`` to ``high``, at most ``most`` + 1 of them."""
    if not high - low > _TINY:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.9)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [round(at * step, 12 - math.floor(math.log10(step)) if step < 1 else 6) for at in range(first, last + 1)]


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


def line_chart(
    axes: Axes,
    series: Iterable[Series],
    *,
    x_from: float | None = None,
    x_to: float | None = None,
    marks: Sequence[Point] = (),
) -> Picture | None:
    """Curves over one axis.

    Args:
        x_from, x_to: ends of the horizontal axis; None: as the points have it.
        marks: (x, colour) of vertical lines: where a later attempt went on.
    """
    series = [item for item in series if item.points and all(map(_is_drawable, (*item.points, *item.spread)))]
    places = [x for item in series for x, _ in item.points]
    x_from = min(places, default=0.0) if x_from is None else x_from
    x_to = max(places, default=0.0) if x_to is None else x_to
    if not series or not _is_drawable((x_from, x_to)):
        return None
    values = [value for item in series for _, value in item.points]
    y = _vertical(axes, [*values, *(value for item in series for ends in item.spread for value in ends)])
    labels = [item for item in series if item.label]
    margin = 10 + _LETTER * max((len(item.label) for item in labels), default=0) + 8 * bool(labels)
    right = WIDTH - min(margin, WIDTH / 3)
    if axes.x_may_be_log and _is_wide([x_from, x_to], above=5):
        x = Scale(x_from / 1.2, x_to * 1.2, _LEFT, right, log=True)
    else:
        x = Scale(x_from, x_to if x_to - x_from > _TINY else x_from + 1, _LEFT, right)
    foot = HEIGHT - _BOTTOM
    body = _grid(axes, x, y)
    body += [tag("path", d=f"M{x(at):.1f} {_TOP}V{foot}", class_=f"restart c{colour:g}") for at, colour in marks]
    body += [_curve(item, x, y) for item in series]
    body += _end_labels(labels, x, y)
    if axes.lost and (lost := [(item.colour, place) for item in series for place in item.lost]):
        at_foot = sorted({(colour, round(x(place))) for colour, place in lost})
        body += [tag("path", d=f"M{at} {foot}v-7", class_=f"lost c{colour}") for colour, at in at_foot]
        first = shown(min(place for _, place in lost))
        goes_on = any(item.points[-1][0] > item.lost[0] for item in series if item.lost)
        more = f" and {len(lost) - 1} more places" if len(lost) > 1 else ""
        words = f"{axes.lost} at {first}{more}" if goes_on else f"{axes.lost} from {first} on"
        body.append(tag("text", words, x=_LEFT + 4, y=foot - 11, class_="said c1"))
    data = {
        "data_group": axes.group, "data_x": axes.x, "data_plot": f"{x.start:g} {x.end:g} {y.end:g} {y.start:g}",
        "data_range": f"{x.low:.10g} {x.high:.10g} {y.low:.10g} {y.high:.10g}",
        "data_log": "x" * x.log + "y" * y.log or None,
    }  # fmt: skip
    unit = ", ".join(filter(None, [axes.unit, "log scale" * y.log]))
    return Picture(axes.title, unit, join(body), _in_words(axes, series), HEIGHT, WIDTH, data)


def _is_drawable(pair: Point) -> bool:
    """A stranger may have recorded numbers that no picture has room for."""
    return all(fileio.is_number(value) for value in pair)


def _is_wide(values: Sequence[float], above: float = 20) -> bool:
    """Whether they need a logarithmic scale: all above 0, and over a factor of ``above``."""
    return bool(values) and min(values) > _TINY and max(values) / min(values) > above


def _vertical(axes: Axes, values: Sequence[float]) -> Scale:
    low, high = min(values), max(values)
    if axes.may_be_log and _is_wide(values):
        return Scale(low / 1.1, high * 1.1, HEIGHT - _BOTTOM, _TOP, log=True)
    low = low if axes.low is None else min(axes.low, low)
    high = high if axes.high is None else max(axes.high, high)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    low = low if axes.low is not None else low - room
    high = high if axes.high is not None else high + room
    if axes.unit == "%":  # nothing is more than all
        low, high = max(low, min(0.0, *values)), min(high, max(100.0, *values))
    return Scale(low, high, HEIGHT - _BOTTOM, _TOP)


def _grid(axes: Axes, x: Scale, y: Scale) -> list[Html]:
    found, foot = [], HEIGHT - _BOTTOM
    for value in y.ticks():
        found.append(tag("path", d=f"M{_LEFT} {y(value):.1f}H{x.end:.1f}", class_="grid"))
        found.append(tag("text", shown(value, 6), x=_LEFT - 6, y=f"{y(value):.1f}", dy="0.35em", class_="tick end"))
    found.append(tag("path", d=f"M{_LEFT} {foot}H{x.end:.1f}", class_="axis c7"))
    last_end = -1e9
    for value in axes.x_ticks or x.ticks(6):
        half = len(shown(value)) * _LETTER / 2
        if x(value) - half > last_end + 4:
            found.append(tag("text", shown(value), x=f"{x(value):.1f}", y=foot + 14, class_="tick middle"))
            last_end = x(value) + half
    found.append(tag("text", axes.x, x=f"{x.end:.1f}", y=HEIGHT - 3, class_="tick end"))
    return found


def _curve(item: Series, x: Scale, y: Scale) -> Html:
    drawn = _thinned(item.points)
    is_long = len(drawn) > _LONG_CURVE
    style = "line" + " faint" * (item.faint or is_long) + " dashed" * item.dashed
    parts = [tag("path", d=_path(drawn, item.lost, x, y), class_=style)]
    if is_long:
        trend = _path(_smoothed(item.points), item.lost, x, y)
        parts.append(tag("path", d=trend, class_="line" + " thin" * item.faint))
    elif not item.dashed and (len(drawn) == 1 or (not item.faint and _width(drawn, x) > _DOTS_APART * len(drawn))):
        parts += [tag("circle", cx=f"{x(a):.1f}", cy=f"{y(b):.1f}", r=2.2) for a, b in drawn]
    for (at, _), (low, high) in zip(item.points, item.spread, strict=False):
        parts.append(tag("path", d=f"M{x(at):.1f} {y(low):.1f}V{y(high):.1f}", class_="whisker"))
    if item.ring is not None and _is_drawable(item.ring):
        parts.append(tag("circle", cx=f"{x(item.ring[0]):.1f}", cy=f"{y(item.ring[1]):.1f}", r=4.5, class_="ring"))
    return tag(
        "g", *parts, class_=f"series c{item.colour % COLOURS}", data_name=item.name,
        data_x=" ".join(f"{a:.8g}" for a, _ in drawn), data_y=" ".join(f"{b:.5g}" for _, b in drawn),
    )  # fmt: skip


def _width(points: Sequence[Point], x: Scale) -> float:
    return x(points[-1][0]) - x(points[0][0])


def _path(points: Sequence[Point], lost: Sequence[float], x: Scale, y: Scale) -> str:
    words = [f"M{x(points[0][0]):.1f} {y(points[0][1]):.1f}"]
    for before, after in pairwise(points):
        broken = bisect_left(lost, after[0]) > bisect_right(lost, before[0])
        words.append(f"{'M' if broken else 'L'}{x(after[0]):.1f} {y(after[1]):.1f}")
    return "".join(words)


def _thinned(points: Sequence[Point]) -> list[Point]:
    """The points themselves, or of a long curve the lowest and the highest in each column, and its ends."""
    if len(points) <= 2 * _COLUMNS:
        return list(points)
    ends = [ends for group in _in_columns(points, _COLUMNS) for ends in (min(group, key=_y), max(group, key=_y))]
    return sorted({points[0], points[-1], *ends})


def _smoothed(points: Sequence[Point]) -> list[Point]:
    """The median in each of 60 columns."""
    groups = _in_columns(points, 60)
    return [(group[len(group) // 2][0], statistics.median(map(_y, group))) for group in groups]


def _in_columns(points: Sequence[Point], columns: int) -> list[list[Point]]:
    """The points, which are in order of x, by columns of equal width; without columns that have none."""
    low, width = points[0][0], (points[-1][0] - points[0][0]) / columns or 1.0
    return [list(group) for _, group in groupby(points, lambda point: min(int((point[0] - low) / width), columns - 1))]


def _y(point: Point) -> float:
    return point[1]


def _end_labels(labels: Sequence[Series], x: Scale, y: Scale) -> list[Html]:
    """The labels at the right, apart from one another, each with a dot in its curve's colour."""
    ends = sorted(((y(_end(item)), item) for item in labels), key=lambda end: end[0])
    places: list[float] = []
    for wanted, _ in ends:
        places.append(wanted if not places else max(wanted, places[-1] + _LINE))
    for at in reversed(range(len(places))):
        limit = HEIGHT - _BOTTOM if at == len(places) - 1 else places[at + 1] - _LINE
        places[at] = min(places[at], limit)
    found = []
    for (_, item), place in zip(ends, places, strict=True):
        dot = f"dot c{item.colour % COLOURS}"
        found.append(tag("circle", cx=f"{x.end + 6:.1f}", cy=f"{place:.1f}", r=3, class_=dot))
        found.append(tag("text", item.label, x=f"{x.end + 13:.1f}", y=f"{place:.1f}", dy="0.35em", class_="label"))
    return found


def _end(item: Series) -> float:
    """Where the drawn line ends."""
    return _smoothed(item.points)[-1][1] if len(item.points) > _LONG_CURVE else item.points[-1][1]


def _in_words(axes: Axes, series: Sequence[Series]) -> str:
    def ends(item: Series) -> str:
        (x0, y0), (x1, y1) = item.points[0], item.points[-1]
        return f"{item.name} from {shown(y0)} at {axes.x} {shown(x0)} to {shown(y1)} at {shown(x1)}"

    return f"{axes.title}: " + "; ".join(ends(item) for item in series[:12])


def bar_chart(title: str, unit: str, bars: Iterable[Bar], *, high: float | None = None) -> Picture | None:
    """Bars from the left, one below the other, from 0 to ``high`` or to the longest."""
    bars = [bar for bar in bars if _is_drawable((bar.value, bar.mark or 0.0))]
    most = high or max((end for bar in bars for end in (bar.value, bar.mark or 0.0, *(bar.spread or ()))), default=0.0)
    if not bars or not most > 0:
        return None
    longest = max(len(bar.name) for bar in bars)
    above = longest > 16  # names stand above their bars
    begins = 0 if above else min(34, 6 + 2 * longest)  # percent of the width
    room, step = 72 - begins, 22 + 16 * above

    def wide(value: float) -> float:
        return room * min(max(value / most, 0.0), 1.0)

    body = []
    for at, bar in enumerate(bars):
        y, top = step * at + 16 * above, step * at + 14 - above
        name = bar.name if len(bar.name) <= _NAME else f"{bar.name[: _NAME - 1]}…"
        place, style = {"x": f"{begins}%", "y": y + 4}, f"part c{bar.colour % COLOURS}"
        body.append(tag("text", name, x=0, y=top))
        body.append(tag("rect", **place, width=f"{room}%", height=13, class_="track"))
        body.append(tag("rect", **place, width=f"{wide(bar.value):.2f}%", height=13, class_=style))
        body.append(tag("text", bar.text or shown(bar.value), x="100%", y=y + 14, class_="end"))
        marks = [(bar.spread, y + 10.5, y + 10.5, "whisker")] if bar.spread is not None else []
        marks += [((bar.mark, bar.mark), y + 1, y + 20, "mark c1")] if bar.mark is not None else []
        for ends, y1, y2, style in marks:
            x1, x2 = (f"{begins + wide(end):.2f}%" for end in ends)
            body.append(tag("line", x1=x1, x2=x2, y1=y1, y2=y2, class_=style))
    words = "; ".join(f"{bar.name} {bar.text or shown(bar.value)}" for bar in bars)
    return Picture(title, unit, join(body), f"{title}: {words}", step * len(bars) + 2)


def drawing(
    pictures: Sequence[Picture | None],
    *,
    title: str = "",
    legend: Sequence[tuple[str, int]] = (),
    foot: str = "",
    columns: int = 2,
) -> str:
    """The text of an ``.svg`` file with these charts side by side; it needs nothing beside it. Empty without charts.

    Args:
        legend: (name, colour) of curves that all charts share.
        foot: what the charts come to, in words.
    """
    there = [picture for picture in pictures if picture is not None]
    if not there:
        return ""
    narrow = all(item.width for item in there)
    columns = min(columns, len(there)) if narrow else columns
    edge, gap, width = 16, 28, WIDTH if narrow or columns > 1 else 2 * WIDTH
    whole = columns * (width + gap) - gap + 2 * edge
    letters = int((whole - 2 * edge) / _LETTER)
    body, y = [], float(edge)
    for line in textwrap.wrap(title, letters):
        body.append(tag("text", line, x=edge, y=y + 12, class_="tick"))
        y += 20
    x = float(edge)
    for name, colour in legend:
        needed = 24 + _LETTER * len(name) + 18
        if x > edge and x + needed > whole - edge:
            x, y = float(edge), y + 18
        body.append(tag("rect", x=f"{x:g}", y=f"{y + 6:g}", width=18, height=4, class_=f"part c{colour % COLOURS}"))
        body.append(tag("text", name, x=f"{x + 24:g}", y=f"{y + 12:g}"))
        x += needed
    y += 26 * bool(legend)
    for first in range(0, len(there), columns):
        row = there[first : first + columns]
        for at, picture in enumerate(row):
            left = edge + at * (width + gap)
            unit = tag("tspan", picture.unit, class_="tick", dx=6)
            body.append(tag("text", picture.title, unit, x=left, y=f"{y + 12:g}", class_="title"))
            size = {"width": picture.width or width, "height": f"{picture.height:g}"}
            body.append(picture.svg(x=left, y=f"{y + 22:g}", **size))
        y += 22 + max(picture.height for picture in row) + 18
    for line in textwrap.wrap(foot, letters):
        body.append(tag("text", line, x=edge, y=f"{y + 8:g}"))
        y += 18
    size, words = {"width": whole, "height": f"{y + edge - 8:g}"}, "; ".join(picture.words for picture in there)
    paper, style = tag("rect", width="100%", height="100%", class_="paper"), Html(f"<style>{STYLE}</style>")
    about = {"xmlns": "http://www.w3.org/2000/svg", "viewBox": f"0 0 {whole} {size['height']}", **size, "role": "img"}
    whole_svg = tag("svg", style, paper, *body, **about, aria_label=words)
    return _NOT_OF_XML.sub("\N{REPLACEMENT CHARACTER}", whole_svg) + "\n"


# What a report is made of: sections of text, tables and charts, which `write_html` and `write_markdown` write.
#
# All text in them is plain, and a run may be a stranger's: the writers escape it.

Row = tuple[str, ...]
TIMES = "\N{MULTIPLICATION SIGN}"
NONE = "–"  # noqa: RUF001  an en dash: a value that this run does not have
MEASURE = ("measure", "value")


class Code(str):
    """A command, a path or an output: shown as it is typed."""

    __slots__ = ()


@dataclass(frozen=True)
class Table:
    """A table, or nothing where it has no rows. Columns from ``numbers_from`` on are numbers."""

    header: Row
    rows: Sequence[Row]
    numbers_from: int = 99
    caption: str = ""

    def __bool__(self) -> bool:
        return bool(self.rows)


@dataclass(frozen=True)
class Charts:
    """Charts side by side; in the log book they are one file of that name."""

    name: str
    pictures: Sequence[Picture | None]
    title: str = ""
    """What they show, in a few words."""
    legend: Sequence[tuple[str, int]] = ()
    """(name, colour) of runs or parts."""
    wide: bool = False
    """One below the other."""

    def __bool__(self) -> bool:
        return any(self.pictures)


class Text(NamedTuple):
    """A paragraph; of its words those that are `Code` are shown as such."""

    words: Sequence[str]


@dataclass(frozen=True)
class Items:
    """A list."""

    lines: Sequence[Sequence[str]]

    def __bool__(self) -> bool:
        return bool(self.lines)


class Block(NamedTuple):
    """Lines of code or output."""

    text: str
    caption: str = ""


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
    confidence: float
    is_large: bool = False


class Gallery(NamedTuple):
    """Images side by side."""

    photos: Sequence[Photo]


Part = Table | Charts | Text | Items | Block | Heading | Fold | Gallery


@dataclass(frozen=True)
class Section:
    """A part of the report; left out where it has no parts."""

    name: str
    """For links."""
    title: str
    parts: Sequence[Part]
    note: str = ""


def of_each(name: str, title: str, parts_of: Callable[[Facts], Iterable[Part]]) -> Callable[[Sequence[Facts]], Section]:
    """A section with the parts of each run, under its label where there are several."""

    def section(runs: Sequence[Facts]) -> Section:
        found: list[Part] = []
        for facts in runs:
            parts = [part for part in parts_of(facts) if part]
            found += [Heading(facts.label)] * (len(runs) > 1 and bool(parts)) + parts
        return Section(name, title, found)

    return section


def text(value: Any) -> str:
    """Any value, or a dash for None."""
    return NONE if value is None else str(value)


def number(value: Any, spec: str, unit: str = "") -> str:
    """A number in ``spec`` with its unit, or a dash."""
    return format(value, spec) + unit if fileio.is_number(value) else NONE


def duration(seconds: float | None) -> str:
    """``40 ms``, ``12.3 s``, ``4 min 05 s``, ``1 h 30 min``."""
    if seconds is None or not fileio.is_number(seconds):
        return NONE
    if 0 < seconds < 0.05:
        return f"{seconds * 1000:.2g} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, second = divmod(round(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours} h {minute:02} min" if hours else f"{minute} min {second:02} s"


def rate(images_per_sec: float | None) -> str:
    """Images a second, with decimals for slow runs: ``2,010``, ``10.5``, ``0.42``."""
    speed = images_per_sec or 0.0
    return number(images_per_sec, ",.0f" if speed >= 20 else ".1f" if speed >= 2 else ".2g")


def memory(mb: Any) -> str:
    """Megabytes as ``812 MB`` or ``15.2 GB``."""
    return number(mb, ",.0f", " MB") if not fileio.is_number(mb) or mb < 1024 else f"{mb / 1024:,.1f} GB"


def plural(count: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{count} {noun}{'s' * (count != 1)}"
