"""Sentences that several benches say."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trainkit.bench.results import Results, Row

LOSS_TOLERANCE = 0.05
"""Losses that differ by more are said to."""


def meaning_of(results: Results) -> str:
    """What the figures mean, in one sentence."""
    ran = sum(bool(row.rates) for row in results.rows)
    return results.bench.meaning(results) if ran > 1 else no_difference(results)


def no_difference(results: Results) -> str:
    """Why no ratio is printed."""
    ran = [row for row in results.rows if row.rates]
    if not ran and not results.ended:
        return "There is nothing to compare yet: no arm has been measured."
    if len(ran) < 2:
        which = f"only {ran[0].name} could run" if ran else "nothing could run"
        return f"There is nothing to compare: {which} here."
    whys = list(dict.fromkeys(row.why_none for row in ran if row.why_none))
    return f"No difference can be told here: {'; '.join(whys)}."


def untold(results: Results) -> str:
    """The arms of which nothing can be told, where it can of others; empty if there are none."""
    names = [row.name for row in results.rows[1:] if row.rates and row.why_none]
    return f"; nothing can be told of {', '.join(names)}" if names else ""


def ranks(count: int) -> str:
    """So many of them."""
    return f"{count} rank{'s' * (count != 1)}"


def losses_alike(results: Results) -> str:
    """Whether all arms have learned the same."""
    ran = [row for row in results.rows if row.rates]
    if len(ran) < 2 or ran[0].loss is None:
        return ""
    first = ran[0].loss
    other = [row for row in ran if row.loss is None or abs(row.loss - first) > LOSS_TOLERANCE * abs(first)]
    if not other:
        return f"All come to the same loss after {results.updates} updates."
    told = ", ".join(f"{row.name} {row.loss:.3g}" if row.loss is not None else f"{row.name} none" for row in other)
    return f"But after {results.updates} updates the loss differs: {ran[0].name} {first:.3g}, {told}."


def worse_loss(first: Row, other: Row, results: Results) -> str:
    """A warning where an arm that is faster does not learn as well; else empty."""
    if first.loss is None:
        return ""
    if other.loss is None:
        return f"; but its loss is not finite after {results.updates} updates"
    if other.loss > first.loss * (1 + LOSS_TOLERANCE):
        return f"; but its loss after {results.updates} updates is {other.loss:.3g}, against {first.loss:.3g}"
    return ""
