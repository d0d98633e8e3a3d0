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
    if len(ran) < 2:
        which = f"only {ran[0].name} could run" if ran else "nothing could run"
        return f"There is nothing to compare: {which} here."
    whys = list(dict.fromkeys(row.why_none for row in ran if row.why_none))
    return f"No difference can be told here: {'; '.join(whys)}."


def worse_loss(first: Row, other: Row, results: Results) -> str:
    """A warning where an arm that is faster does not learn as well; else empty."""
    if first.loss is None:
        return ""
    if other.loss is None:
        return f"; but its loss is not finite after {results.updates} updates"
    if other.loss > first.loss * (1 + LOSS_TOLERANCE):
        return f"; but its loss after {results.updates} updates is {other.loss:.3g}, against {first.loss:.3g}"
    return ""
