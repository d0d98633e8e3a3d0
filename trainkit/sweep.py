"""The points of a sweep: all combinations of values, or so many trials drawn from values and ranges."""

import hashlib
import itertools
import math
import re
from collections.abc import Sequence

from trainkit.errors import UserError

_MOST_RUNS = 10_000
"""Runs of one sweep: more is a typing error."""
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?")
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_DRAWN = re.compile(rf"{_NUMBER}\.\.{_NUMBER}(:log)?")
"""Of numbers with a point or an exponent, or on a logarithmic scale: no list of values, but something to draw from."""


def sweep_points(sweeps: Sequence[str], trials: int | None = None) -> list[list[str]]:
    """The overrides of every run: the product of all sweeps. One empty list if there are none.

    Args:
        trials: so many points are drawn instead, each setting by itself: evenly from values and ranges, or on a
            logarithmic scale. A draw is a function of the setting and the trial's number, so that more trials begin
            with those that fewer have.
    """
    if trials is not None and not (sweeps and 0 < trials <= _MOST_RUNS):
        why = f"It draws so many points of a sweep, 1 to {_MOST_RUNS}."
        fix = "For example --sweep optim.lr=1e-4..1e-1:log --trials 20."
        raise UserError(f"--trials {trials} is not possible.", why=why, fix=fix)
    axes: list[tuple[str, Sequence[str] | re.Match[str]]] = []
    for text in sweeps:
        key, _, values = text.partition("=")
        if not values:
            why = "It takes KEY=A,B,C, or KEY=0..4 for whole numbers from 0 to 4."
            fix = "For example --sweep optim.lr=1e-3,3e-3 --sweep seed=0..4."
            raise UserError(f"--sweep {text!r} has no values.", why=why, fix=fix)
        if key.startswith("launch."):
            raise changed_resources()
        span = _DRAWN.fullmatch(values) if _RANGE.fullmatch(values) is None else None
        if span is not None:
            _check_span(text, span, trials)
        axes.append((key, span or [value for item in values.split(",") for value in _values(text, item)]))
    if trials is not None:
        drawn = [tuple(_drawn(key, axis, trial) for key, axis in axes) for trial in range(trials)]
        return [list(point) for point in dict.fromkeys(drawn)]  # of few values some are drawn twice
    lists = [[f"{key}={value}" for value in axis] for key, axis in axes if not isinstance(axis, re.Match)]
    count = math.prod(map(len, lists))
    if count > _MOST_RUNS:
        why = f"A sweep has {_MOST_RUNS} at most."
        raise UserError(f"The sweep has {count} runs.", why=why, fix="Give fewer values, or fewer keys.")
    return [list(point) for point in itertools.product(*lists)]


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
    match = _RANGE.fullmatch(item)
    if match is None:
        return [item]
    first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
    if first > last or step == 0 or (last - first) // step >= _MOST_RUNS:
        why = f"A range goes up, in steps of 1 or more, and has {_MOST_RUNS} values at most."
        fix = "For example seed=0..4, or 0..8..2 for every second."
        raise UserError(f"--sweep {sweep!r} has no such range.", why=why, fix=fix)
    return list(map(str, range(first, last + 1, step)))


def _check_span(sweep: str, span: re.Match[str], trials: int | None) -> None:
    low, high = float(span[1]), float(span[2])
    if trials is None:
        why, fix = "It has endless values between its ends.", "Add --trials 20 to draw so many, or list values: A,B,C."
        raise UserError(f"--sweep {sweep!r} is a range to draw from.", why=why, fix=fix)
    if not low < high < math.inf or (span[3] and low <= 0):
        why = "A range goes up; on a logarithmic scale it begins above 0."
        raise UserError(f"--sweep {sweep!r} has no such range.", why=why, fix="For example optim.lr=1e-4..1e-1:log.")


def _drawn(key: str, axis: Sequence[str] | re.Match[str], trial: int) -> str:
    digest = hashlib.sha256(f"{key} {trial}".encode()).digest()
    fraction = int.from_bytes(digest[:7], "big") / (1 << 56)
    if not isinstance(axis, re.Match):
        return f"{key}={axis[int(fraction * len(axis))]}"
    low, high = float(axis[1]), float(axis[2])
    value = low * (high / low) ** fraction if axis[3] else low + (high - low) * fraction
    is_whole = axis[1].isdecimal() and axis[2].isdecimal()
    return f"{key}={round(value)}" if is_whole else f"{key}={value:.4g}"
