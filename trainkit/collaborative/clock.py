"""Rounds are boxes of time: round ``r`` ends at ``(first + r + 1) * seconds`` on the clock that the peers share.

So every peer knows, without asking anybody, which round it is, how far the run is, and when it ends; nobody waits for
the slowest, and no message of a peer can move the others' clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

# Rates are set on a grid of so many points per epoch of the schedule.
_GRID = 1000


@dataclass(frozen=True)
class RoundClock:
    """``count`` rounds of ``seconds``; ``first`` is the number of round 0, counted since 1970."""

    seconds: float
    first: int
    count: int

    @classmethod
    def starting(cls, now: float, seconds: float, count: int, *, done: int = 0) -> RoundClock:
        """A clock whose round ``done`` is under way at ``now``.

        It ends at the boundary after the next one, so that it lasts at least ``seconds``: the first peers are starting.
        """
        return cls(seconds, math.floor(now / seconds) + 1 - done, count)

    def index(self, now: float) -> int:
        """The round under way; ``count`` when the run is over. Time before round 0 belongs to round 0."""
        return min(max(0, math.floor(now / self.seconds) - self.first), self.count)

    def boundary(self, index: int) -> float:
        """When round ``index`` ends."""
        return (self.first + index + 1) * self.seconds

    def is_over(self, now: float) -> bool:
        """Whether all rounds are."""
        return self.index(now) >= self.count

    @property
    def end(self) -> float:
        """When the last round ends."""
        return self.boundary(self.count - 1)

    @property
    def oldest_news(self) -> float:
        """Seconds; what peers know of one another must not be older."""
        return self.seconds

    def progress(self, now: float) -> float:
        """Share of the run that is over, 0 to 1."""
        return min(max(0.0, (now / self.seconds - self.first) / self.count), 1.0)

    def grid(self, now: float, epochs: int) -> tuple[int, int, int]:
        """``(step, steps_per_epoch, total_steps)`` for `trainkit.training.schedule.lr_at`.

        The schedule of ``train.epochs`` is stretched over the rounds: all peers have the same learning rate at the same
        moment, however many updates each of them makes.
        """
        total = epochs * _GRID
        return min(int(self.progress(now) * total), total - 1), _GRID, total


@dataclass(frozen=True)
class UpdateClock(RoundClock):
    """``sync: gradients``: a round is over when the peers have the samples of an update; ``seconds`` bound it.

    Only the state that they have in common says which round it is.
    """

    done: Callable[[], int] = lambda: 0
    """Rounds that are in that state."""

    def index(self, now: float) -> int:
        """The round under way, whatever the time is."""
        return min(self.done(), self.count)

    @property
    def oldest_news(self) -> float:
        """They say when the round is over."""
        return 3.0

    @property
    def end(self) -> float:
        """Asked when the last round is over: now."""
        return time.time()
