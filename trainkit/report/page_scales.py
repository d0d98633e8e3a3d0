"""Where a value is on an axis, which ticks it has, and which points of a long curve are drawn."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

Point = tuple[float, float]
TINY = 1e-100
COLUMNS = 400
"""Of a chart: of all points that share one, the lowest and the highest are drawn."""


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
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            for steps in ((1, 2, 5), (1, 3), (1,)):
                found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
                found = [value for value in found if self.low <= value <= self.high * (1 + 1e-9)]
                if len(found) <= most + 1:
                    return found
            return found[:: math.ceil(len(found) / most)]
        return linear_ticks(self.low, self.high, most)


def linear_ticks(low: float, high: float, most: int = 5) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from ``low`` to ``high``, at most ``most`` + 1 of them."""
    if not high - low > TINY:
        return [low]
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * 0.9)
    first, last = math.ceil(low / step - 1e-6), math.floor(high / step + 1e-6)
    return [round(at * step, 12 - math.floor(math.log10(step)) if step < 1 else 6) for at in range(first, last + 1)]


def shown(value: float, digits: int = 4) -> str:
    """A number for a tick or a label: ``0.05``, ``1,500``, ``12k``, ``3e-05``."""
    if value == 0:
        return "0"
    size = abs(value)
    if size >= 1e5:
        return f"{value / 1e6:g}M" if size >= 1e6 else f"{value / 1e3:g}k"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.{digits}g}" if size >= 1e-3 else f"{value:.3g}"


def is_wide(values: Sequence[float], above: float = 20) -> bool:
    """Whether they need a logarithmic scale: all above 0, and over a factor of ``above``."""
    return bool(values) and min(values) > TINY and max(values) / min(values) > above


def thinned(points: Sequence[Point], columns: int = COLUMNS) -> list[Point]:
    """The points themselves, or of a long curve the lowest and the highest in each column, and its ends."""
    if len(points) <= 2 * columns:
        return list(points)
    kept = {0, len(points) - 1}
    for places in in_columns(points, columns):
        kept |= {min(places, key=lambda at: points[at][1]), max(places, key=lambda at: points[at][1])}
    return [points[at] for at in sorted(kept)]


def smoothed(points: Sequence[Point], columns: int = 60) -> list[Point]:
    """The median in each column."""
    return [
        (points[places[len(places) // 2]][0], statistics.median(points[at][1] for at in places))
        for places in in_columns(points, columns)
    ]


def in_columns(points: Sequence[Point], columns: int) -> list[list[int]]:
    """Places of the points, in order of x, in so many columns of equal width; without those that have none."""
    low, high = points[0][0], points[-1][0]
    width = (high - low) / columns or 1.0
    found: dict[int, list[int]] = {}
    for at, (x, _) in enumerate(points):
        found.setdefault(min(int((x - low) / width), columns - 1), []).append(at)
    return [found[column] for column in sorted(found)]
