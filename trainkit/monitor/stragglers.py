"""Ranks that make all others wait: seen from the time that each needs without waiting for anybody.

A slow rank is hidden from whoever looks at steps, which take equally long on all ranks: the others wait for it. So what
counts is the time of a rank's own part, data and passes and update. A busy moment makes nobody a straggler, nor does a
difference that costs little: only a rank is named that has been slow for minutes.

Where ranks already wait for one another within the passes (`fsdp` gathers weights there, BatchNorm may sum statistics)
the own parts grow alike, and no straggler is seen, rather than the wrong one.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

TIMES = 1.5
"""So much slower than the median of the others it is noticed,"""
COST = 0.1
"""if the others could be faster by this part of the time;"""
SECONDS = 15.0
"""each time over so long,"""
WINDOWS = 4
"""and so many times in a row."""


@dataclass(frozen=True)
class Straggler:
    """A rank that has been slow for some time, and since when."""

    rank: int
    host: str
    times: float
    """As slow as the median of the other ranks."""

    def __str__(self) -> str:
        return (
            f"Rank {self.rank} on {self.host} is a straggler: its own part of a step takes {self.times:.1f} times as "
            "long as that of the others, who wait for it."
        )

    def facts(self) -> dict[str, Any]:
        """For the event."""
        return {"rank": self.rank, "host": self.host, "times": round(self.times, 2)}


class Stragglers:
    """Looks at windows of a training; names each straggler once, and again if it has been quick in between.

    Args:
        hosts: of each rank; none: look at nothing.
    """

    def __init__(self, hosts: Sequence[str], *, seconds: float = SECONDS, windows: int = WINDOWS) -> None:
        self._hosts, self._seconds, self._windows = hosts, seconds, windows
        self._own, self._wall = [0.0] * len(hosts), 0.0
        self._slow = [0] * len(hosts)  # windows in a row

    def look(self, own: Sequence[float], wall: float) -> list[Straggler]:
        """Those that are newly known.

        Args:
            own: seconds that each rank has spent on its own part since the last look; empty where there is one rank.
            wall: seconds that all have taken for it, waiting included.
        """
        if len(own) < 2 or not self._hosts:
            return []
        self._own = [before + now for before, now in zip(self._own, own, strict=True)]
        self._wall += wall
        if self._wall < self._seconds:
            return []
        found = []
        for rank, seconds in enumerate(self._own):
            others = statistics.median(self._own[:rank] + self._own[rank + 1 :])
            is_slow = seconds > TIMES * others and seconds - others > COST * self._wall
            self._slow[rank] = self._slow[rank] + 1 if is_slow else 0
            if self._slow[rank] == self._windows:
                found.append(Straggler(rank, self._hosts[rank], seconds / max(others, 1e-9)))
        self._own, self._wall = [0.0] * len(own), 0.0
        return found
