"""Metrics: what a task measures, as its file states it and as readers that never load torch know it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A number that a task measures on a split."""

    unit: str = ""
    """``%``: it lies between 0 and 100."""
    higher_is_better: bool = True
    label: str = ""
    """For headings and axes."""

    @property
    def spec(self) -> str:
        """How its values are formatted."""
        return ".2f" if self.unit == "%" else ".4f"

    def text(self, value: float | None) -> str:
        """A value with its unit; ``nan`` for what a record holds as null."""
        number = "nan" if value is None else format(value, self.spec)
        return f"{number} {self.unit}".rstrip()


LOSS = Metric("", False, "Loss")
"""Every task has one."""


@dataclass(frozen=True)
class Described:
    """The metrics of a task, ``loss`` first. Records have them by these names; ``ema_NAME`` is that of averaged
    weights."""

    headline: str
    """The one to judge by."""
    metrics: Mapping[str, Metric]

    def find(self, key: str) -> Metric | None:
        """The metric of a record's key; None for one that is no metric."""
        return self.metrics.get(key.removeprefix("ema_"))
