"""Values as reports read them from run folders, which are untrusted, and as they write them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainkit.common import jsonl, terminal
from trainkit.config.task_metrics import Metric

TIMES = "\N{MULTIPLICATION SIGN}"
NONE = "–"  # noqa: RUF001  an en dash: a value that this run does not have


def numbers(values: Iterable[Any]) -> list[float]:
    """Keep only numbers; run folders are untrusted input."""
    return [float(value) for value in values if jsonl.is_number(value)]


def numbers_of(records: Iterable[Mapping[str, Any]], key: str) -> list[float]:
    """Collect the numbers that records have under a key."""
    return numbers(record.get(key) for record in records)


def list_of(value: Any) -> list[Any]:
    """Return the value if it is a list, else an empty list; run folders are untrusted input."""
    return value if isinstance(value, list) else []


def text(value: Any) -> str:
    """Any value, or a dash for None."""
    if value is None:
        return NONE
    return str(value)


def known_rows(rows: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Leave out rows whose second cell, the value, is a dash."""
    return [row for row in rows if row[1] != NONE]


def number(value: Any, spec: str, unit: str = "") -> str:
    """A number in ``spec`` with its unit, or a dash."""
    if not jsonl.is_number(value):
        return NONE
    return format(value, spec) + unit


def with_unit(value: Any, metric: Metric) -> str:
    """A value of a metric with its unit, or a dash."""
    return number(value, metric.spec, f" {metric.unit}".rstrip())


def duration(seconds: float | None) -> str:
    """Seconds in words as `terminal.duration` has them, or a dash."""
    if not jsonl.is_number(seconds):
        return NONE
    return terminal.duration(seconds)


def rate(images_per_sec: float | None) -> str:
    """Images a second, with decimals for slow runs: ``2,010``, ``10.5``, ``0.42``."""
    speed = images_per_sec or 0.0
    if speed >= 20:
        return number(images_per_sec, ",.0f")
    if speed >= 2:
        return number(images_per_sec, ".1f")
    return number(images_per_sec, ".2g")


def memory(mb: Any) -> str:
    """Megabytes as ``812 MB`` or ``15.2 GB``."""
    if jsonl.is_number(mb) and mb >= 1024:
        return f"{mb / 1024:,.1f} GB"
    return number(mb, ",.0f", " MB")
