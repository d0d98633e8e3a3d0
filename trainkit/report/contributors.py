"""Who has contributed how much to a collaborative run, as a table of the log book."""

from __future__ import annotations

from trainkit import terminal
from trainkit.report.facts import Facts
from trainkit.report.tables import NONE, Row, number

HEADER = ("name", "samples", "of all", "rounds", "hours", "received from it")
_MOST_SHOWN = 100


def rows(facts: Facts) -> list[Row]:
    """Most samples first; the columns are those of `HEADER`. Empty for every other run."""
    total = sum(item.samples for item in facts.contributions)

    def row(name: str, samples: float, *more: str) -> Row:
        return (name, number(samples, ",.0f"), number(100 * samples / total, ".1f", " %"), *more)

    found = [
        row(
            item.name,
            item.samples,
            f"{item.rounds:,}",
            number(item.seconds / 3600, ",.2f"),
            terminal.size(item.bytes) if item.bytes else NONE,
        )
        for item in facts.contributions[:_MOST_SHOWN]
    ]
    if more := facts.contributions[_MOST_SHOWN:]:
        found.append(row(f"{len(more)} more", sum(item.samples for item in more), NONE, NONE, NONE))
    return found
