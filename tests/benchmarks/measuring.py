"""What all measurements have in common: arms that take turns, a control, and a figure that says what it is worth.

The first arm is the one to compare with. It is measured twice in each round, and the ratio of the two is the control:
what that is off, the machine is too busy to say anything, and the figure is void.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

CONTROL = "control"


@dataclass(frozen=True)
class Figure:
    """A line of the table."""

    what: str
    figure: str
    goal: str = ""
    met: bool | None = None
    """None where there is no goal, or the figure is void."""
    note: str = ""

    def row(self) -> str:
        """In Markdown."""
        met = {None: "", True: "met", False: "missed"}[self.met]
        return f"| {self.what} | {self.figure} | {self.goal} | {met or self.note} |"


def take_turns(arms: Mapping[str, Callable[[], float]], rounds: int) -> dict[str, list[float]]:
    """What each arm measured in each round, the first one under `CONTROL` as well; every other round goes backwards."""
    turns = [*arms.items(), (CONTROL, next(iter(arms.values())))]
    measured: dict[str, list[float]] = {name: [] for name, _ in turns}
    for number in range(rounds):
        for name, measure in turns if number % 2 == 0 else reversed(turns):
            measured[name].append(measure())
    return measured


def ratios(measured: Mapping[str, Sequence[float]], name: str) -> list[float]:
    """Of an arm to the first one, round by round: to the mean of its two turns, but for the control."""
    first = next(iter(measured.values()))
    if name == CONTROL:
        return [other / one for one, other in zip(first, measured[CONTROL], strict=True)]
    both = [(one + other) / 2 for one, other in zip(first, measured[CONTROL], strict=True)]
    return [own / one for own, one in zip(measured[name], both, strict=True)]


def against(
    measured: Mapping[str, Sequence[float]], name: str, *, what: str, goal: float, tolerance: float = 0.05
) -> Figure:
    """An arm's ratio to the first one, which should be at most ``goal``; void if the control is off by more than
    ``tolerance``."""
    values, control = ratios(measured, name), statistics.median(ratios(measured, CONTROL))
    valid = abs(control - 1) <= tolerance
    first, own = (statistics.median(measured[arm]) for arm in (next(iter(measured)), name))
    return Figure(
        what,
        f"{describe(values)}; control {control:.3f}; {own:.2f} to {first:.2f} s",
        f"at most {goal:g}",
        statistics.median(values) <= goal if valid else None,
        "" if valid else "void: the control is off",
    )


def describe(values: Sequence[float]) -> str:
    """Median, and all but a twentieth of the measurements; all of them if they are few."""
    ordered = sorted(values)
    spared = len(ordered) // 40
    low, high = ordered[spared], ordered[len(ordered) - 1 - spared]
    return f"{statistics.median(ordered):.3f} ({low:.3f} to {high:.3f}, {len(ordered)} rounds)"
