"""The points of a sweep: all combinations of values, or so many trials drawn from values and ranges."""

import hashlib
import itertools
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

from trainkit.config import yaml
from trainkit.config.schema import reach
from trainkit.errors import UserError, require_package

_MOST_RUNS = 10_000
"""Runs of one sweep: more is a typing error."""
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?")
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_DRAWN = re.compile(rf"{_NUMBER}\.\.{_NUMBER}(:log)?")
"""Of numbers with a point or an exponent, or on a logarithmic scale: no list of values, but something to draw from."""


class Axis(NamedTuple):
    """A setting of a sweep, and what it takes: one of some values, or a number between two ends."""

    key: str
    values: Sequence[str]
    """Of a range its ends, as they were written."""
    ends: tuple[float, float] | None = None
    """Of a range; rounded as what is drawn of it."""
    is_log: bool = False
    is_whole: bool = False

    def drawn(self, trial: int) -> str:
        """The override that a trial draws: a function of the setting and the trial's number alone."""
        digest = hashlib.sha256(f"{self.key} {trial}".encode()).digest()
        fraction = int.from_bytes(digest[:7], "big") / (1 << 56)
        if self.ends is None:
            return self.override(self.values[int(fraction * len(self.values))])
        low, high = self.ends
        return self.override(low * (high / low) ** fraction if self.is_log else low + (high - low) * fraction)

    def override(self, value: str | float) -> str:
        """``key=value``; a number of a range has four digits."""
        text = value if isinstance(value, str) else str(round(value)) if self.is_whole else f"{value:.4g}"
        return f"{self.key}={text}"


def sweep_points(sweeps: Sequence[str], trials: int | None = None) -> list[list[str]]:
    """The overrides of every run: the product of all sweeps. One empty list if there are none.

    Args:
        trials: so many points are drawn instead, each setting by itself: evenly from values and ranges, or on a
            logarithmic scale. More trials begin with those that fewer have.
    """
    if trials is not None and not (sweeps and 0 < trials <= _MOST_RUNS):
        why = f"It draws so many points of a sweep, 1 to {_MOST_RUNS}."
        fix = "For example --sweep optim.lr=1e-4..1e-1:log --trials 20."
        raise UserError(f"--trials {trials} is not possible.", why=why, fix=fix)
    axes = [axis_of(text) for text in sweeps]
    if trials is not None:
        drawn = [tuple(axis.drawn(trial) for axis in axes) for trial in range(trials)]
        return [list(point) for point in dict.fromkeys(drawn)]  # of few values some are drawn twice
    for axis, text in zip(axes, sweeps, strict=True):
        if axis.ends is not None:
            why, fix = "Its values have no end.", "Add --trials 20 to draw so many, or list values: A,B,C."
            raise UserError(f"--sweep {text!r} is a range to draw from.", why=why, fix=fix)
    if (count := math.prod(len(axis.values) for axis in axes)) > _MOST_RUNS:
        why = f"A sweep has {_MOST_RUNS} at most."
        raise UserError(f"The sweep has {count} runs.", why=why, fix="Give fewer values, or fewer keys.")
    return [list(point) for point in itertools.product(*([*map(axis.override, axis.values)] for axis in axes))]


def axis_of(sweep: str) -> Axis:
    """What ``KEY=A,B,C``, ``KEY=0..4`` or ``KEY=1e-4..1e-1:log`` means. Raises UserError."""
    key, _, values = sweep.partition("=")
    if not values:
        why = "It takes KEY=A,B,C, or KEY=0..4 for whole numbers from 0 to 4."
        fix = "For example --sweep optim.lr=1e-3,3e-3 --sweep seed=0..4."
        raise UserError(f"--sweep {sweep!r} has no values.", why=why, fix=fix)
    if key.startswith("launch."):
        raise changed_resources()
    span = _DRAWN.fullmatch(values) if _RANGE.fullmatch(values) is None else None
    if span is None:
        return Axis(key, [value for item in values.split(",") for value in _values(sweep, item)])
    low, high = float(span[1]), float(span[2])
    if not low < high < math.inf or (span[3] and low <= 0):
        why = "A range goes up; on a logarithmic scale it begins above 0."
        raise UserError(f"--sweep {sweep!r} has no such range.", why=why, fix="For example optim.lr=1e-4..1e-1:log.")
    if not (is_whole := span[1].isdecimal() and span[2].isdecimal()):
        low, high = float(f"{low:.4g}"), float(f"{high:.4g}")
    return Axis(key, [span[1], span[2]], (low, high), span[3] is not None, is_whole)


def check_sampler(sampler: str, sweeps: Sequence[str], trials: int | None) -> list[str]:
    """The overrides that a sampler may choose once jobs run, each by itself; of a range its ends. Random chooses none.

    Raises:
        UserError: it cannot choose; or a value would be code, files or data that nobody has checked by then.
    """
    if sampler == "random":
        return []
    if trials is None or sampler != "tpe":
        why, fix = "tpe chooses so many points of a sweep as it is told.", "Use --sampler tpe --trials 40."
        raise UserError(f"--sampler {sampler} is not possible.", why=why, fix=fix)
    require_package("optuna", f"--sampler {sampler} needs optuna.", extra="sweep")
    axes = [axis_of(text) for text in sweeps]
    for key, values, *_ in axes:
        section, _, name = key.partition(".")
        is_plain = all(reach(key, yaml.parse_value(value)).does == "nothing" for value in values)
        if section == "data" or key == "model.checkpoint" or not (is_plain and (name or section == "seed")):
            why, fix = "Code, files and data of a run are settled before it is queued.", "Submit a sweep for each."
            raise UserError(f"--sampler {sampler} cannot choose {key}.", why=why, fix=fix, key=key)
    return [axis.override(value) for axis in axes for value in axis.values]


def check_prune(prune: int | None, sweeps: Sequence[str]) -> None:
    """Raise UserError unless a sweep can be pruned by that."""
    if prune is not None and not (sweeps and prune > 1):
        why = "Of N runs of a sweep one goes on, at each of some epochs."
        fix = "Give --sweep as well, and --prune 3; 2 stops fewer runs, 4 more."
        raise UserError(f"--prune {prune} is not possible.", why=why, fix=fix)


def changed_resources() -> UserError:
    """The error for a sweep of resources."""
    why = "All its runs are one job array."
    return UserError("A sweep cannot change resources.", why=why, fix="Submit them one by one.")


def _values(sweep: str, item: str) -> Sequence[str]:
    """Expand ``0..4`` to 0,1,2,3,4 and ``0..8..4`` to 0,4,8; anything else is one value."""
    if (match := _RANGE.fullmatch(item)) is None:
        return [item]
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if first > last or step == 0 or (last - first) // step >= _MOST_RUNS:
        why = f"A range goes up, in steps of 1 or more, and has {_MOST_RUNS} values at most."
        fix = "For example seed=0..4, or 0..8..2 for every second."
        raise UserError(f"--sweep {sweep!r} has no such range.", why=why, fix=fix)
    return list(map(str, range(first, last + 1, step)))
