"""Contributions to a collaborative run, counted by name: contributions.json."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainkit.common import fileio, jsonl, terminal
from trainkit.run.folder import RunDir

MOST_NAMES = 10_000
"""Names in ``contributions.json``; an open run may meet more, which are counted together as `OTHERS`."""
OTHERS = "(others)"


@dataclass
class Contribution:
    """Contribution to a collaborative run under one name. Several peers may share a name."""

    name: str
    rounds: int = 0
    """Rounds in which something of it was averaged."""
    samples: float = 0.0
    """Samples by their weight in the averages, after caps."""
    seconds: float = 0.0
    """Length of those rounds, for each of its peers."""
    bytes: int = 0
    """Bytes of it that the counting peer has received."""


@dataclass(frozen=True)
class Counted:
    """Contribution of one peer to one round."""

    name: str
    samples: float
    bytes: int = 0


class Contributions:
    """``contributions.json``: what was averaged, by name, as the peer that answers for the run counts it."""

    def __init__(self, known: Iterable[Contribution] = ()) -> None:
        self._known = {item.name: item for item in known}

    @classmethod
    def of(cls, run: RunDir) -> Contributions:
        """Read the run's file; nothing if it is missing or damaged."""
        return cls(typed_contributions(fileio.read_object(run.contributions).get("contributions")))

    def add(self, seconds: float, counted: Iterable[Counted]) -> None:
        """Count one round of ``seconds``."""
        seen: set[str] = set()
        for item in counted:
            if not (jsonl.is_number(item.samples) and item.samples > 0):
                continue
            name = terminal.name(item.name) or OTHERS
            if name not in self._known and len(self._known) >= MOST_NAMES:
                name = OTHERS
            total = self._known.setdefault(name, Contribution(name))
            total.rounds += name not in seen
            total.samples += item.samples
            total.seconds += seconds
            total.bytes += max(item.bytes, 0)
            seen.add(name)

    def withdraw(self, name: str) -> None:
        """Remove a cheater's contributions."""
        self._known.pop(name, None)

    def best_first(self) -> list[Contribution]:
        """Most samples first."""
        return sorted(self._known.values(), key=lambda item: (-item.samples, item.name))

    def rows(self) -> list[dict[str, Any]]:
        """Return plain values, best first."""
        return [asdict(item) for item in self.best_first()]

    def write(self, run: RunDir) -> None:
        """Replace the run's file. Raises OSError."""
        content = json.dumps({"contributions": self.rows()}, allow_nan=False)
        fileio.write(run.contributions, content + "\n", run.path)


def typed_contributions(rows: Any) -> list[Contribution]:
    """The rows of a file or a message that are contributions, each name once; text is one line."""
    found: dict[str, Contribution] = {}
    for row in rows[: MOST_NAMES + 1] if isinstance(rows, list | tuple) else ():
        if not isinstance(row, Mapping) or not isinstance(row.get("name"), str):
            continue
        numbers: list[Any] = list(map(row.get, ("rounds", "samples", "seconds", "bytes")))
        if all(map(jsonl.is_number, numbers)) and min(numbers) >= 0:
            rounds, samples, seconds, size = numbers
            name = terminal.name(row["name"])
            found.setdefault(name, Contribution(name, int(rounds), float(samples), float(seconds), int(size)))
    return list(found.values())
