"""Rounds of a collaborative run, and who has contributed how much to it, as tables of the log book."""

from __future__ import annotations

from trainkit import fileio, terminal
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


def rounds_rows(facts: Facts) -> list[Row]:
    """Rounds of this peer, and what it has sent and received in them. Empty for every other run."""
    told = [record for record in facts.train if fileio.is_number(record.get("round"))]
    if not told:
        return []

    def total(key: str) -> float:
        return float(sum(record[key] for record in told if fileio.is_number(record.get(key))))

    planned, groups = facts.setting("collaborative.rounds"), [record.get("peers") for record in told]
    together = [group for group in groups if fileio.is_number(group) and group > 1]
    expected = total("parts_expected")
    return [
        ("rounds", f"{told[-1]['round']:,} of {planned:,}" if isinstance(planned, int) else f"{told[-1]['round']:,}"),
        ("averaged with others", f"{len(together):,}, by up to {max(together)} peers" if together else "none"),
        ("parts received", number(100 * total("parts") / expected, ".1f", " %") if expected else NONE),
        ("sent", terminal.size(int(total("bytes_up")))),
        ("received", terminal.size(int(total("bytes_down")))),
    ]
