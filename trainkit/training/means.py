"""Means of what a user's own loop logs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainkit.common.errors import UserError
from trainkit.distributed.device import as_float64
from trainkit.distributed.process_group import Distributed

_NAME = re.compile(r"(?!ema_)[A-Za-z]\w{0,40}")
_OF_RECORDS = ("time", "step", "split", "epoch")
_SPLITS = ("train", "val", "test")


class Means:
    """Means of what was logged, over steps and ranks. Nothing is copied from a device until they are read."""

    def __init__(self, dist: Distributed) -> None:
        self._dist = dist
        self._totals: dict[str, Tensor] = {}
        self._counts: Counter[str] = Counter()

    def add(self, split: str, values: Mapping[str, Any]) -> None:
        """Add numbers, or tensors of one number. Raises UserError for anything else."""
        for name, value in values.items():
            if _NAME.fullmatch(name) is None or name in _OF_RECORDS or split not in _SPLITS:
                why = f"Splits are {', '.join(_SPLITS)}; a record itself has {', '.join(_OF_RECORDS)}."
                raise UserError(f"{split}/{name} cannot be logged.", why=why, fix="Use another name.")
            key = f"{split}/{name}"
            number = _number(name, value)
            self._totals[key] = self._totals[key] + number if key in self._totals else number
            self._counts[key] += 1

    def sums(self) -> dict[str, tuple[float, int]]:
        """Sum and count over all ranks of what was added since `clear`, by ``split/name``. Every rank must call it."""
        totals = defaultdict[str, float](float)
        counts = Counter[str]()
        for sums in self._dist.gather_json(self.own()):
            for key, (total, count) in sums.items():
                totals[key] += total
                counts[key] += count
        return {key: (totals[key], counts[key]) for key in sorted(counts)}

    def own(self) -> dict[str, tuple[float, int]]:
        """Sum and count of what this rank has added since `clear`."""
        return {key: (float(total), self._counts[key]) for key, total in self._totals.items()}

    def clear(self) -> None:
        """Begin anew."""
        self._totals.clear()
        self._counts.clear()

    def go_on(self, sums: Mapping[str, Any]) -> None:
        """Begin with what `sums` gave before a restart: a mean goes over its whole window."""
        for key, (total, count) in sums.items():
            if self._dist.is_main:
                self._totals[key] = torch.tensor(total, dtype=torch.float64)
                self._counts[key] = count

    @property
    def is_empty(self) -> bool:
        """True if this rank has added nothing since `clear`."""
        return not self._totals


def _number(name: str, value: Any) -> Tensor:
    """The value as a tensor without dimensions, where it is."""
    try:
        if isinstance(value, Tensor):
            return as_float64(value.detach().reshape(())).clone()  # which its owner may change in place
        return torch.tensor(float(value), dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError):
        shape = tuple(getattr(value, "shape", ()))
        why = f"It is a {type(value).__name__}{f' of the shape {shape}' if shape else ''}, and not one number."
        raise UserError(f"{name} cannot be logged.", why=why, fix="Log one number, for example its mean().") from None
