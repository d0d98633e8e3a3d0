"""Columns that tables of several benches have."""

from __future__ import annotations

from trainkit.bench.arms import Column

NONE = "-"


def rate(value: float | None) -> str:
    """A number of four digits, thousands apart."""
    if value is None:
        return NONE
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """A share."""
    return NONE if value is None else f"{100 * value:.0f} %"


ARM: Column = ("arm", lambda row, results: row.name)
RATE: Column = ("images/s", lambda row, results: rate(row.median))
SPREAD: Column = (
    "min to max",
    lambda row, results: f"{rate(min(row.rates))} to {rate(max(row.rates))}" if row.rates else NONE,
)
SPEED: Column = ("speed", lambda row, results: f"{row.speed:.2f} x" if row.ratio is not None else NONE)
MEMORY: Column = ("memory", lambda row, results: NONE if row.memory_mb is None else f"{row.memory_mb:,.0f} MiB")
MEMORY_RATIO: Column = (
    "of first",
    lambda row, results: f"{row.memory_ratio:.2f}" if row.memory_ratio is not None else NONE,
)
LARGEST: Column = ("largest batch", lambda row, results: str(row.largest) if row.largest else NONE)
LOSS: Column = ("loss", lambda row, results: NONE if row.loss is None else f"{row.loss:.4g}")
TIMED = (ARM, RATE, SPREAD, SPEED)
COMPARED = (*TIMED, MEMORY, MEMORY_RATIO)
EXPOSED: Column = ("exposed", lambda row, results: percent(row.extra.get("exposed_share")))
