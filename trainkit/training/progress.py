"""The progress of a training: its position, its best, what is saved of both, and whether a sweep stops it there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from trainkit.common.errors import UserError
from trainkit.distributed.process_group import Distributed
from trainkit.run.events import attempts_that
from trainkit.run.find import list_runs
from trainkit.run.folder import RunDir
from trainkit.run.metrics import read_metrics
from trainkit.run.pruning import eta_of, is_behind, is_rung

_ROUNDED = 1e-3
"""Tolerance when matching a record to an epoch."""
JUDGED = ("validated_step", "best", "best_step", "best_by", "stalled", "flat", "falls", "reference", "val")
"""Fields of a `Progress` that a validation changes."""


@dataclass
class Progress:
    """Progress of a run. Everything else of its state is in the model and the optimizer."""

    step: int = 0
    """Updates. One that fp16 skips is none; one that came to nothing for other reasons is."""
    position: int = 0
    """Global batches taken from the data: ``step``, and those that fp16 skipped or a rollback passed over."""
    nonfinite: int = 0
    """Updates in a row, up to here, that were not finite."""
    rollbacks: int = 0
    validated_step: int = 0
    """Step of the last finished validation; behind ``step`` if a stop request fell into it."""
    best: float | None = None
    best_step: int | None = None
    best_by: str | None = None
    """Metric that ``best`` was judged by."""
    stalled: int = 0
    """Validations in a row, up to here, that were no better than ``reference``."""
    flat: int = 0
    """The same since the rate fell last, by ``schedule.name=plateau``."""
    falls: int = 0
    """Number of times that the rate has fallen."""
    reference: float | None = None
    """Value that the next validation is compared with: the last one that was better by ``early_stopping_min_delta``."""
    train_seconds: float = 0.0
    """Seconds spent in training steps over all attempts, validation and saving excluded."""
    seconds: dict[str, float] = field(default_factory=dict)
    """And on what all time went, by the names of `trainkit.training.clock.PARTS`."""
    images: int = 0
    """Images trained on over all attempts."""
    val: dict[str, float] = field(default_factory=dict)
    """The last validation's metrics."""
    window: list[float] = field(default_factory=list)
    """Measurements since the last train record: `Meter.sums`."""
    ema_updates: int = 0
    """Updates in the averaged weights; 0: there are none."""
    broken: list[str] = field(default_factory=list)
    """Files of images that are broken, of those that any rank has met."""
    owed: dict[str, Any] | None = None
    """Work that the last update still calls for, such as its record, as ranks have failed right after it; otherwise
    None. ``grad_norm`` is that record's."""
    before_end: dict[str, Any] | None = None
    """`JUDGED` before a validation that the end of the run has added to ``train.eval_every_epochs``; else None."""

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> Progress:
        """Read the progress as `Recorder.save` left it.

        Raises KeyError, TypeError or ValueError for what it has not written.
        """
        progress = cls(**state["progress"])
        if not 0 <= progress.validated_step <= progress.step or progress.position < 0:
            raise ValueError(f"its progress is impossible: {progress}")
        if progress.before_end is not None and set(progress.before_end) != set(JUDGED):
            raise ValueError(f"its progress is impossible: {progress.before_end}")
        return progress

    def take_over(self, other: Progress) -> None:
        """Be where ``other`` is."""
        vars(self).update(vars(other))

    def judged(self) -> dict[str, Any]:
        """Return what its validations so far have come to."""
        return {name: getattr(self, name) for name in JUDGED}

    @property
    def spared(self) -> int | None:
        """The step whose checkpoint is the best one for a run that is prolonged, if that of the end is not."""
        return None if self.before_end is None else self.before_end["best_step"]

    def take_back_end(self) -> None:
        """Be as if the run had been longer from the start: then its old end would not have been validated."""
        if self.before_end is not None:
            vars(self).update(self.before_end)
            self.before_end = None

    def forget_best(self) -> None:
        """Nobody should take the model that was the best so far: the next one that is validated takes its place."""
        self.best = None
        self.reference = None

    def judge(self, val: dict[str, float], by: str, *, higher_is_better: bool, min_delta: float = 0.0) -> bool:
        """Take note of a validation after the present step, and return whether this model is the best so far.

        What is not a finite number is never better, and neither is a model whose loss is none: a score of some images
        is NaN then, whatever the accuracy on the others.

        Args:
            by: what it is judged by, such as val/loss.
            min_delta: by how much it must be better to be no stand-still, for early stopping.
        """
        name = by.removeprefix("val/")
        value = val[name]
        loss = val.get("ema_loss" if name.startswith("ema_") else "loss", 0.0)
        self.val = val
        self.validated_step = self.step
        if self.best_by not in (None, by):  # two measures do not compare
            self.forget_best()

        is_finite = math.isfinite(value) and math.isfinite(loss)

        def beats(other: float | None, delta: float = 0.0) -> bool:
            if other is None or not is_finite:
                return is_finite
            gain = value - other if higher_is_better else other - value
            return gain > delta

        self.stalled += 1
        self.flat += 1
        if beats(self.reference, min_delta):
            self.stalled = 0
            self.flat = 0
            self.reference = value
        better = beats(self.best)
        if better:
            self.best = value
            self.best_step = self.step
            self.best_by = by
        return better


class Pruner:
    """Compares a run of a sweep with the others, on rank 0, for all ranks.

    Args:
        run: whose sweep says in its file `PRUNING` that it is to be pruned. One that was pruned and goes on, which
            somebody has asked for, is not pruned again.
    """

    def __init__(self, run: RunDir, dist: Distributed) -> None:
        self._run = run
        self._dist = dist
        is_asked = dist.is_main and not attempts_that(run, "pruned")
        self._eta: int = dist.broadcast_json(eta_of(run.path.parent) if is_asked else 0)
        self.why = ""
        """Why the run is to stop, as soon as it is."""

    def look(
        self, metrics: Mapping[str, float], name: str, epoch: float, *, every: float, higher_is_better: bool
    ) -> None:
        """After a validation. Every rank must call it.

        Args:
            metrics: what it has found.
            name: of the metric that runs are judged by.
            every: epochs between two validations.
        """
        if not self._eta or not is_rung(epoch / every, self._eta):
            return
        why = ""
        if self._dist.is_main:
            others = self._others(name, epoch)
            if is_behind(metrics.get(name), others, eta=self._eta, higher_is_better=higher_is_better):
                why = f"at epoch {epoch:g} it is not among the best of {len(others) + 1} runs, 1 in {self._eta}"
        self.why = self._dist.broadcast_json(why)

    def _others(self, name: str, epoch: float) -> list[float | None]:
        """Return the metric of the sweep's other runs at that epoch, of those that have come so far."""
        found: list[float | None] = []
        for other in list_runs(self._run.path.parent):
            if other.path == self._run.path:
                continue
            with suppress(UserError):  # its records cannot be read
                for record in read_metrics(other, "val"):
                    if record.get("epoch", 0.0) >= epoch - _ROUNDED:
                        found.append(record.get(name))
                        break
        return found
