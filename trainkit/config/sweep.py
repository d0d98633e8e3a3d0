"""The points of a sweep: all combinations of values, or so many trials drawn from values and ranges."""

import hashlib
import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from trainkit.common.errors import UserError, require_package
from trainkit.config import yaml
from trainkit.config.schema import reach

_MOST_RUNS = 10_000
"""Runs of one sweep: more is a typing error."""
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?")
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_DRAWN = re.compile(rf"{_NUMBER}\.\.{_NUMBER}(:log)?")
"""Values to draw from: numbers with a point or an exponent, or on a logarithmic scale."""


class Axis(NamedTuple):
    """A setting of a sweep, and what it takes: one of some values, or a number between two ends."""

    key: str
    values: Sequence[str]
    """Ends of a range, as they were written."""
    ends: tuple[float, float] | None = None
    """Step of a range; draws are rounded to it."""
    is_log: bool = False
    is_whole: bool = False

    def drawn(self, trial: int) -> str:
        """The override that a trial draws: a function of the setting and the trial's number alone."""
        digest = hashlib.sha256(f"{self.key} {trial}".encode()).digest()
        fraction = int.from_bytes(digest[:7], "big") / (1 << 56)
        if self.ends is None:
            return self.override(self.values[int(fraction * len(self.values))])
        low, high = self.ends
        if self.is_log:
            return self.override(low * (high / low) ** fraction)
        return self.override(low + (high - low) * fraction)

    def override(self, value: str | float) -> str:
        """``key=value``; a number of a range has four digits."""
        if isinstance(value, float):
            value = f"{value:.0f}" if self.is_whole else f"{value:.4g}"
        return f"{self.key}={value}"


def sweep_points(sweeps: Sequence[str], trials: int | None = None) -> list[list[str]]:
    """The overrides of every run: the product of all sweeps. One empty list if there are none.

    Args:
        trials: so many points are drawn instead, each setting by itself: evenly from values and ranges, or on a
            logarithmic scale. More trials begin with those that fewer have.
    """
    if trials is not None and not (sweeps and 0 < trials <= _MOST_RUNS):
        why = f"It is the number of points to draw, 1 to {_MOST_RUNS}."
        fix = "For example --sweep optim.lr=1e-4..1e-1:log --trials 20."
        raise UserError(f"--trials {trials} is not possible.", why=why, fix=fix)
    axes = [axis_of(text) for text in sweeps]
    if trials is not None:
        points = list[list[str]]()
        for trial in range(trials):
            point = [axis.drawn(trial) for axis in axes]
            if point not in points:  # of few values some are drawn twice
                points.append(point)
        return points
    for axis, text in zip(axes, sweeps, strict=True):
        if axis.ends is not None:
            why = "It has infinitely many values."
            fix = "Add --trials 20 to draw 20 of them, or list values: A,B,C."
            raise UserError(f"--sweep {text!r} is a range to draw from.", why=why, fix=fix)
    choices = [list(dict.fromkeys(map(axis.override, axis.values))) for axis in axes]  # a value given twice is one
    count = math.prod(map(len, choices))
    if count > _MOST_RUNS:
        why = f"A sweep has {_MOST_RUNS} at most."
        raise UserError(f"The sweep has {count} runs.", why=why, fix="Give fewer values, or fewer keys.")
    return list(map(list, itertools.product(*choices)))


def axis_of(sweep: str) -> Axis:
    """Parse ``KEY=A,B,C``, ``KEY=0..4`` or ``KEY=1e-4..1e-1:log``. Raises UserError."""
    key, _, values = sweep.partition("=")
    if not values:
        why = "It takes KEY=A,B,C, or KEY=0..4 for whole numbers from 0 to 4."
        fix = "For example --sweep optim.lr=1e-3,3e-3 --sweep seed=0..4."
        raise UserError(f"--sweep {sweep!r} has no values.", why=why, fix=fix)
    if key.startswith("launch."):
        raise changed_resources()
    span = _DRAWN.fullmatch(values)
    if span is None or _RANGE.fullmatch(values):
        listed = list[str]()
        for item in values.split(","):
            listed += _values(sweep, item)
        return Axis(key, listed)
    low = float(span[1])
    high = float(span[2])
    if not low < high < math.inf or (span[3] and low <= 0):
        why = "A range must increase; on a logarithmic scale it starts above 0."
        raise UserError(f"--sweep {sweep!r} has no such range.", why=why, fix="For example optim.lr=1e-4..1e-1:log.")
    is_whole = span[1].isdecimal() and span[2].isdecimal()
    if not is_whole:
        low = float(f"{low:.4g}")
        high = float(f"{high:.4g}")
    return Axis(key, [span[1], span[2]], (low, high), span[3] is not None, is_whole)


def check_sampler(sampler: str, sweeps: Sequence[str], trials: int | None) -> list[str]:
    """The overrides that a sampler may choose once jobs run, each by itself; of a range its ends. Random chooses none.

    Raises:
        UserError: it cannot choose; or a value would be code, files or data that nobody has checked by then.
    """
    if sampler == "random":
        return []
    if trials is None or sampler != "tpe":
        why = "tpe needs the number of trials to choose."
        fix = "Use --sampler tpe --trials 40."
        raise UserError(f"--sampler {sampler} is not possible.", why=why, fix=fix)
    require_package("optuna", f"--sampler {sampler} needs optuna.", extra="sweep")
    axes = [axis_of(text) for text in sweeps]
    for key, values, *_ in axes:
        section, _, name = key.partition(".")
        is_of_script = key.startswith("script.values.")  # a word of a program that is settled
        is_plain = is_of_script or all(reach(key, yaml.parse_value(value)).does == "nothing" for value in values)
        if section == "data" or key == "model.checkpoint" or not (is_plain and (name or section == "seed")):
            why = "Code, files and data of a run are fixed before it is queued."
            fix = "Submit one sweep for each value."
            raise UserError(f"--sampler {sampler} cannot choose {key}.", why=why, fix=fix, key=key)
    return [axis.override(value) for axis in axes for value in axis.values]


def check_prune(prune: int | None, sweeps: Sequence[str]) -> None:
    """Raise UserError unless a sweep can be pruned by that."""
    if prune is not None and not (sweeps and prune > 1):
        why = "It keeps the best 1 in N runs of a sweep at certain epochs."
        fix = "Give --sweep as well, and --prune 3; 2 stops fewer runs, 4 more."
        raise UserError(f"--prune {prune} is not possible.", why=why, fix=fix)


def changed_resources() -> UserError:
    """The error for a sweep of resources."""
    why = "All its runs are one job array."
    return UserError("A sweep cannot change resources.", why=why, fix="Submit them one by one.")


def _values(sweep: str, item: str) -> Sequence[str]:
    """Expand ``0..4`` to 0,1,2,3,4 and ``0..8..4`` to 0,4,8; anything else is one value."""
    match = _RANGE.fullmatch(item)
    if match is None:
        return [item]
    first = int(match[1])
    last = int(match[2])
    step = int(match[3] or 1)
    if first > last or step == 0 or (last - first) // step >= _MOST_RUNS:
        why = f"A range must increase, in steps of 1 or more, and have at most {_MOST_RUNS} values."
        fix = "For example seed=0..4, or 0..8..2 for every second."
        raise UserError(f"--sweep {sweep!r} has no such range.", why=why, fix=fix)
    return list(map(str, range(first, last + 1, step)))
