"""How far a training is: what a checkpoint holds besides tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass
class Progress:
    """How far a run is. Everything else of its state is in the model and the optimizer."""

    step: int = 0
    """Updates. One that fp16 skips is none; one that came to nothing for other reasons is."""
    position: int = 0
    """Global batches taken from the data: ``step``, and those that fp16 skipped or a rollback passed over."""
    nonfinite: int = 0
    """How many updates in a row, up to here, were not finite."""
    rollbacks: int = 0
    validated_step: int = 0
    """Step of the last finished validation; behind ``step`` if a stop request fell into it."""
    best: float | None = None
    best_step: int | None = None
    best_by: str | None = None
    """What ``best`` was judged by."""
    stalled: int = 0
    """Validations in a row, up to here, that were no better than ``reference``."""
    reference: float | None = None
    """What the next validation is measured against: the last one that was better by ``early_stopping_min_delta``."""
    train_seconds: float = 0.0
    """Seconds spent in training steps over all attempts, validation and saving excluded."""
    seconds: dict[str, float] = field(default_factory=dict)
    """And on what all time went, by the names of `trainkit.training.timing.PARTS`."""
    images: int = 0
    """Images trained on over all attempts."""
    val: dict[str, float] = field(default_factory=dict)
    """The last validation's metrics."""
    window: list[float] = field(default_factory=list)
    """What has been measured since the last train record: `Meter.sums`."""
    ema_updates: int = 0
    """How many updates are in the averaged weights; 0: there are none."""
    broken: list[str] = field(default_factory=list)
    """Files of images that are broken, of those that any rank has met."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Progress:
        """As `Keeper.save` left it.

        Raises KeyError, TypeError or ValueError for what it has not written.
        """
        progress = cls(**state["progress"])
        if not 0 <= progress.validated_step <= progress.step or progress.position < 0:
            raise ValueError(f"its progress is impossible: {progress}")
        return progress

    def take_over(self, other: Progress) -> None:
        """Be where ``other`` is."""
        for item in fields(self):
            setattr(self, item.name, getattr(other, item.name))

    def judge(self, val: dict[str, float], by: str, *, higher_is_better: bool, min_delta: float = 0.0) -> bool:
        """Take note of a validation after the present step. Is this model the best so far?

        What is not a finite number is never better, and neither is a model whose loss is none: a score of some images
        is NaN then, whatever the accuracy on the others.

        Args:
            by: what it is judged by, such as val/loss.
            min_delta: by how much it must be better to be no stand-still, for early stopping.
        """
        name = by.removeprefix("val/")
        value = val[name]
        self.val, self.validated_step = val, self.step
        is_finite = all(math.isfinite(val.get(key, 0.0)) for key in (name, f"{'ema_' * name.startswith('ema_')}loss"))
        sign = 1.0 if higher_is_better else -1.0
        if self.best_by not in (None, by):  # two measures do not compare
            self.best = self.reference = None

        def beats(other: float | None, delta: float = 0.0) -> bool:
            return is_finite and (other is None or sign * (value - other) > delta)

        moved = beats(self.reference, min_delta)
        self.stalled = 0 if moved else self.stalled + 1
        self.reference = value if moved else self.reference
        better = beats(self.best)
        if better:
            self.best, self.best_step, self.best_by = value, self.step, by
        return better
