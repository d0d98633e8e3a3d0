"""``contributions.json``: what was contributed to a collaborative run, by name.

The peer that answers for the run counts what was averaged, round by round; what peers say of themselves is not in it.
It goes on over restarts.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainkit import fileio, terminal
from trainkit.run.folder import RunDir

MOST_NAMES = 10_000
"""An open run may meet many; those that come later are counted together."""
OTHERS = "(others)"


@dataclass(frozen=True)
class Contribution:
    """What went into the model under one name. Several peers may share a name."""

    name: str
    rounds: int = 0
    """Rounds in which something of it was averaged."""
    samples: float = 0.0
    """By their weight in the averages, after caps."""
    seconds: float = 0.0
    """Length of those rounds, for each of its peers."""
    bytes: int = 0
    """Bytes of it that the counting peer has received."""


@dataclass(frozen=True)
class Counted:
    """What one peer gave to one round."""

    name: str
    samples: float
    bytes: int = 0


class Contributions:
    """All names of a run."""

    def __init__(self, known: Iterable[Contribution] = ()) -> None:
        self._known = {item.name: item for item in known}

    @classmethod
    def of(cls, run: RunDir) -> Contributions:
        """As the run's file has it; of one without, or with a broken one, none."""
        return cls(typed(fileio.read_object(file_of(run)).get("contributions")))

    def add(self, seconds: float, counted: Iterable[Counted]) -> None:
        """Count one round of ``seconds``."""
        seen: set[str] = set()
        for item in counted:
            if not (fileio.is_number(item.samples) and item.samples > 0):
                continue
            name = terminal.name(item.name) or OTHERS
            if name not in self._known and len(self._known) >= MOST_NAMES:
                name = OTHERS
            before = self._known.get(name, Contribution(name))
            self._known[name] = replace(
                before,
                rounds=before.rounds + (name not in seen),
                samples=before.samples + item.samples,
                seconds=before.seconds + seconds,
                bytes=before.bytes + max(item.bytes, 0),
            )
            seen.add(name)

    def best_first(self) -> list[Contribution]:
        """Most samples first."""
        return sorted(self._known.values(), key=lambda item: (-item.samples, item.name))

    def write(self, run: RunDir) -> None:
        """Write the file anew; a reader finds it whole. Raises OSError."""
        fileio.write(file_of(run), json.dumps({"contributions": self.rows()}, allow_nan=False) + "\n", run.path)

    def rows(self) -> list[dict[str, Any]]:
        """As plain values, best first."""
        return [asdict(item) for item in self.best_first()]


def file_of(run: RunDir) -> Path:
    """Where a run has it."""
    return run.path / "contributions.json"


def typed(rows: Any) -> list[Contribution]:
    """Of what a file or a message holds, that which can be one, each name once; text is one line."""
    found: dict[str, Contribution] = {}
    for row in rows[: MOST_NAMES + 1] if isinstance(rows, list | tuple) else ():
        if not isinstance(row, Mapping) or not isinstance(row.get("name"), str):
            continue
        numbers: list[Any] = [row.get(key) for key in ("rounds", "samples", "seconds", "bytes")]
        if all(fileio.is_number(value) and value >= 0 for value in numbers):
            rounds, samples, seconds, size = numbers
            name = terminal.name(row["name"])
            found.setdefault(name, Contribution(name, int(rounds), float(samples), float(seconds), int(size)))
    return list(found.values())
