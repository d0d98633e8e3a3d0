"""The causes of ``causes_of_*.yaml`` in this folder: how each is known, what it means and what mends it.

A cause is one row. The first row that fits what a job and its ranks have said is the cause, so the order matters:

- ``name``: what the row is called; several rows may share one.
- ``seen``: where it can show: ``job`` (the state and the reason that the scheduler gives, and what whoever looks after
  the ranks wrote down), ``batch`` (the words of the batch script and of srun), ``rank`` (the words of the rank that
  failed first) and ``end`` (how that rank ended, in the words of whoever looked after it).
- ``says``: a pattern, or a list of them. Named groups become fields of the sentences.
- ``unless``: evidence against it: where anything of the job says this, the row does not fit.
- ``of_code``: it may explain a KeyError, ValueError and the like that the user's own code raised; others may not.
- ``vague``: it names a consequence; it counts where no other row fits.
- ``what``, ``fix``, ``command``: the sentences and one command that mends it, or shows what to mend; ``fix`` is what to
  do before the command. ``{fields}`` are those of `trainkit.diagnosis.fields`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

Place = Literal["job", "batch", "rank", "end"]

RESUME = "python -m jobs.resume {run}"
AGAIN = "python -m jobs.submit {run}"
LOG = "python -m jobs.logs {run} --attempt {attempt} --rank {rank} --err"
_SHORT = {"RESUME": RESUME, "AGAIN": AGAIN, "LOG": LOG, "WITHOUT": RESUME + " --exclude {host}"}
"""What the rows may write for these commands."""


@dataclass(frozen=True)
class Case:
    """A cause: one row."""

    name: str
    seen: frozenset[str]
    says: tuple[re.Pattern[str], ...]
    what: str
    command: str
    fix: str = ""
    unless: re.Pattern[str] | None = None
    vague: bool = False
    of_code: bool = False

    def find(self, text: str) -> re.Match[str] | None:
        """Where a text shows it; of several places the one that says most: which node, which module."""
        found = [match for pattern in self.says if (match := pattern.search(text))]
        return max(found, key=lambda match: sum(map(bool, match.groupdict().values())), default=None)

    def contradicted(self, texts: Iterable[str]) -> bool:
        return self.unless is not None and any(map(self.unless.search, texts))


@cache
def rows() -> tuple[Case, ...]:
    """All of them, in the order in which they are tried."""
    items: list[dict[str, Any]] = []
    for name in ("causes_of_jobs.yaml", "causes_of_gpus.yaml", "causes_of_ranks.yaml", "causes_of_ends.yaml"):
        text = Path(__file__).with_name(name).read_text("utf-8")
        items += yaml.load(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return tuple(map(_row, items))


def _row(item: dict[str, Any]) -> Case:
    says = item.pop("says")
    unless = item.pop("unless", None)
    return Case(
        seen=frozenset(item.pop("seen").split()),
        says=tuple(re.compile(each, re.MULTILINE) for each in ([says] if isinstance(says, str) else says)),
        unless=re.compile(unless, re.MULTILINE) if unless else None,
        command=re.sub(r"\b[A-Z]{3,}\b", lambda word: _SHORT.get(word[0], word[0]), item.pop("command")),
        **item,
    )
