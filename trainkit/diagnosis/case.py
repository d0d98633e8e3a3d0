"""One row of the table of causes: how it is known, what it means, and what mends it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Place = Literal["job", "batch", "rank", "end"]
"""Where a cause can show: the job's state and reason as the scheduler gives them and what whoever looks after the ranks
wrote down; the words of the batch script and of srun; the words of the rank that failed first; and how that rank ended,
in the words of whoever looked after it, which is looked at with a rank's own words and, for some causes, alone."""


@dataclass(frozen=True)
class Case:
    """A cause. ``what``, ``fix`` and ``command`` may use ``{fields}``: see `trainkit.diagnosis.fields`, and the
    pattern's own named groups."""

    name: str
    places: tuple[Place, ...]
    pattern: re.Pattern[str]
    what: str
    command: str
    """One command that mends it, or, where nobody can mend it from here, that shows what to mend."""
    fix: str = ""
    """What to do before the command; empty if the command is enough."""


RESUME = "python -m jobs.resume {run}"
AGAIN = "python -m jobs.submit {run}"
LOG = "python -m jobs.logs {run} --attempt {attempt} --rank {rank} --err"
WITHOUT = RESUME + " --exclude {host}"


def case(places: str, name: str, pattern: str, what: str, command: str, fix: str = "") -> Case:
    """A row as it is written in the tables; ``places`` with a space between them."""
    where: tuple[Place, ...] = tuple(place for place in ("job", "batch", "rank", "end") if place in places.split())
    return Case(name, where, re.compile(pattern, re.MULTILINE), what, command, fix)
