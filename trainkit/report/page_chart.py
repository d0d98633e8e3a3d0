"""Line charts as SVG that is complete without a script; `page.js` adds the read-out, from the numbers in ``data-x``,
``data-y``."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from trainkit import fileio
from trainkit.report.page_markup import NOTHING, Html, tag
from trainkit.report.page_scales import TINY, Point, Scale, is_wide, shown, smoothed, thinned

WIDTH, HEIGHT = 400, 230
LEFT, TOP, BOTTOM = 44, 12, 30
COLOURS = 8
_LETTER, _LINE = 6.6, 14.0
"""Width of a letter and height of a line of a label, in the chart's own units."""
_APART = 5
"""Pixels between points from which on each has a dot."""
_LONG = 120
"""A curve of more points is drawn faintly, with its trend before it."""


@dataclass(frozen=True)
class Series:
    """One curve."""

    name: str
    points: list[Point]
    """In order of x."""
    colour: int = 0
    faint: bool = False
    """Less important than others: thin, without a label."""
    label: str = ""
    """At its right end."""
    lost: list[float] = field(default_factory=list)
    """Places without a value: no line is drawn across them."""


@dataclass(frozen=True)
class Axes:
    """What a chart is about."""

    title: str
    unit: str
    x: str
    """Name of the horizontal axis."""
    group: str
    """Charts of one group have the same horizontal axis, and their read-outs move together."""
    low: float | None = None
    high: float | None = None
    """Ends of the vertical axis; None: as the values have it."""
    may_be_log: bool = False
    x_may_be_log: bool = False
    lost: str = ""
    """What it means that a value is missing."""


def line_chart(
    axes: Axes, series: Sequence[Series], *, x_from: float, x_to: float, marks: Sequence[Point] = ()
) -> Html:
    """A figure; nothing if there is no point to draw.

    Args:
        marks: (x, colour) of vertical lines: where a later attempt went on.
    """
    series = [item for item in series if item.points and all(map(_can_be_drawn, item.points))]
    if not series or not _can_be_drawn((x_from, x_to)):
        return NOTHING
    y = _vertical(axes, [value for item in series for _, value in item.points])
    labels = [item for item in series if item.label]
    margin = 10 + _LETTER * max((len(item.label) for item in labels), default=0) + 8 * bool(labels)
    right = WIDTH - min(margin, WIDTH / 3)
    if axes.x_may_be_log and is_wide([x_from, x_to], above=5):
        x = Scale(x_from / 1.2, x_to * 1.2, LEFT, right, log=True)
    else:
        x = Scale(x_from, x_to if x_to - x_from > TINY else x_from + 1, LEFT, right)
    body = [*_grid(axes, x, y), *(_mark(x, place, int(colour)) for place, colour in marks)]
    body += [_curve(item, x, y) for item in series]
    body += _end_labels(labels, x, y)
    if axes.lost and (lost := [(item, place) for item in series for place in item.lost]):
        places = sorted({(item.colour, round(x(place))) for item, place in lost})
        body += [tag("path", d=f"M{at} {HEIGHT - BOTTOM}v-7", class_=f"lost c{colour}") for colour, at in places]
        first = min(place for _, place in lost)
        goes_on = any(item.points[-1][0] > item.lost[0] for item in series if item.lost)
        more = f" and {len(lost) - 1} more places" if len(lost) > 1 else ""
        words = f"{axes.lost} at {shown(first)}{more}" if goes_on else f"{axes.lost} from {shown(first)} on"
        body.append(tag("text", words, x=LEFT + 4, y=HEIGHT - BOTTOM - 11, class_="said"))
    picture = tag(
        "svg", *body, viewBox=f"0 0 {WIDTH} {HEIGHT}", role="img", aria_label=_in_words(axes, series),
        data_group=axes.group, data_x=axes.x, data_plot=f"{x.start:g} {x.end:g} {y.end:g} {y.start:g}",
        data_range=f"{x.low:.10g} {x.high:.10g} {y.low:.10g} {y.high:.10g}", data_log="x" * x.log + "y" * y.log or None,
    )  # fmt: skip
    unit = tag("span", axes.unit + (", log scale" if y.log else ""), class_="unit") if axes.unit or y.log else None
    return tag("figure", tag("figcaption", axes.title, " ", unit), tag("div", picture, class_="plot"), class_="chart")


def _can_be_drawn(pair: Point) -> bool:
    """What a stranger has recorded may be of no size that a picture has."""
    return all(fileio.is_number(value) for value in pair)


def _vertical(axes: Axes, values: Sequence[float]) -> Scale:
    low, high = min(values), max(values)
    if axes.may_be_log and is_wide(values):
        return Scale(low / 1.1, high * 1.1, HEIGHT - BOTTOM, TOP, log=True)
    low = low if axes.low is None else min(axes.low, low)
    high = high if axes.high is None else max(axes.high, high)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    low = low if axes.low is not None else low - room
    high = high if axes.high is not None else high + room
    if axes.unit == "%":  # nothing is more than all
        low, high = max(low, min(0.0, *values)), min(high, max(100.0, *values))
    return Scale(low, high, HEIGHT - BOTTOM, TOP)


def _grid(axes: Axes, x: Scale, y: Scale) -> list[Html]:
    found = []
    for value in y.ticks():
        at = f"{y(value):.1f}"
        found.append(tag("path", d=f"M{LEFT} {at}H{x.end:.1f}", class_="grid"))
        found.append(tag("text", shown(value, 6), x=LEFT - 6, y=at, dy="0.35em", class_="tick end"))
    found.append(tag("path", d=f"M{LEFT} {HEIGHT - BOTTOM}H{x.end:.1f}", class_="axis"))
    last_end = -1e9
    for value in x.ticks(6):
        text = shown(value)
        if x(value) - len(text) * _LETTER / 2 > last_end + 4:
            found.append(tag("text", text, x=f"{x(value):.1f}", y=HEIGHT - BOTTOM + 14, class_="tick middle"))
            last_end = x(value) + len(text) * _LETTER / 2
    found.append(tag("text", axes.x, x=f"{x.end:.1f}", y=HEIGHT - 3, class_="tick end"))
    return found


def _mark(x: Scale, place: float, colour: int) -> Html:
    return tag("path", d=f"M{x(place):.1f} {TOP}V{HEIGHT - BOTTOM}", class_=f"restart c{colour}")


def _curve(item: Series, x: Scale, y: Scale) -> Html:
    drawn = thinned(item.points)
    long = len(drawn) > _LONG
    style = " faint" if item.faint or long else ""
    lines = [tag("path", d=_path(drawn, item.lost, x, y), class_=f"line{style}")]
    if long:
        lines.append(tag("path", d=_path(smoothed(item.points), item.lost, x, y), class_="line" + " thin" * item.faint))
    elif len(drawn) == 1 or (not item.faint and x(drawn[-1][0]) - x(drawn[0][0]) > _APART * len(drawn)):
        lines += [tag("circle", cx=f"{x(a):.1f}", cy=f"{y(b):.1f}", r=2.2) for a, b in drawn]
    return tag(
        "g", *lines, class_=f"series c{item.colour % COLOURS}", data_name=item.name,
        data_x=" ".join(f"{a:.8g}" for a, _ in drawn), data_y=" ".join(f"{b:.5g}" for _, b in drawn),
    )  # fmt: skip


def _path(points: Sequence[Point], lost: Sequence[float], x: Scale, y: Scale) -> str:
    words = [f"M{x(points[0][0]):.1f} {y(points[0][1]):.1f}"]
    for before, after in pairwise(points):
        broken = bisect_left(lost, after[0]) > bisect_right(lost, before[0])
        words.append(f"{'M' if broken else 'L'}{x(after[0]):.1f} {y(after[1]):.1f}")
    return "".join(words)


def _end_labels(labels: Sequence[Series], x: Scale, y: Scale) -> list[Html]:
    """The labels at the right, apart from one another, each with a dot in its curve's colour."""
    ends = sorted(((y(_end(item)), item) for item in labels), key=lambda end: end[0])
    places: list[float] = []
    for wanted, _ in ends:
        places.append(wanted if not places else max(wanted, places[-1] + _LINE))
    for at in reversed(range(len(places))):
        limit = HEIGHT - BOTTOM if at == len(places) - 1 else places[at + 1] - _LINE
        places[at] = min(places[at], limit)
    found = []
    for (_, item), place in zip(ends, places, strict=True):
        colour = f"dot c{item.colour % COLOURS}"
        found.append(tag("circle", cx=f"{x.end + 6:.1f}", cy=f"{place:.1f}", r=3, class_=colour))
        found.append(tag("text", item.label, x=f"{x.end + 13:.1f}", y=f"{place:.1f}", dy="0.35em", class_="label"))
    return found


def _end(item: Series) -> float:
    """Where the drawn line ends."""
    return smoothed(item.points)[-1][1] if len(item.points) > _LONG else item.points[-1][1]


def _in_words(axes: Axes, series: Sequence[Series]) -> str:
    def ends(item: Series) -> str:
        (x0, y0), (x1, y1) = item.points[0], item.points[-1]
        return f"{item.name} from {shown(y0)} at {axes.x} {shown(x0)} to {shown(y1)} at {shown(x1)}"

    return f"{axes.title}: " + "; ".join(ends(item) for item in series[:12])
