"""The loop: one for every strategy, precision and data set."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trainkit.config.schema import Config
from trainkit.data.base import Splits, normalize
from trainkit.data.loader import train_batches
from trainkit.data.order import mix, steps_per_epoch
from trainkit.distributed.device import seed_random
from trainkit.distributed.process_group import Distributed, StopVote
from trainkit.monitor.base import Logger
from trainkit.strategies.base import Strategy
from trainkit.training.evaluate import evaluate, sync_buffers
from trainkit.training.meter import Meter
from trainkit.training.optim import set_lr
from trainkit.training.precision import Precision
from trainkit.training.schedule import lr_at


@dataclass
class Progress:
    """How far a run is. Everything else of its state is in the model and the optimizer."""

    step: int = 0
    validated_step: int = 0
    """Step of the last finished validation; behind ``step`` if a stop request fell into it."""
    best: float | None = None
    best_step: int | None = None
    train_seconds: float = 0.0
    """Seconds spent in training steps over all attempts, validation and saving excluded."""
    images: int = 0
    """Images trained on over all attempts."""
    val: dict[str, float] = field(default_factory=dict)
    """The last validation's metrics."""


@dataclass
class Training:
    """Everything the loop works on; built by the composition floor."""

    config: Config
    dist: Distributed
    splits: Splits
    model: nn.Module
    """As made by the strategy: the one to call."""
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    precision: Precision
    workers: int
    metrics: Logger
    progress: Progress
    save: Callable[[], None]
    """Write a checkpoint of ``progress.step``; every rank calls it."""
    stop_requested: Callable[[], bool]
    """Has this rank been told to stop? The ranks agree before anybody does."""

    @property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(len(self.splits.train), self.config.train.global_batch_size)

    @property
    def total_steps(self) -> int:
        return self.config.train.max_steps or self.config.train.epochs * self.steps_per_epoch

    @property
    def micro_batch_size(self) -> int:
        """Samples per rank and forward pass."""
        return self.config.train.micro_batch_size or self.config.train.global_batch_size // self.dist.world_size

    @property
    def grad_accum_steps(self) -> int:
        return self.config.train.global_batch_size // (self.micro_batch_size * self.dist.world_size)


def train(t: Training) -> bool:
    """Train from ``t.progress.step`` to the end. True when done; False when stopped, saved, and to be continued.

    Data, augmentation, dropout and learning rates are functions of (seed, step), so a run that was interrupted anywhere
    and resumed does the very updates of one that was not.
    """
    vote = StopVote(t.dist)

    def should_stop() -> bool:
        return vote.poll(t.stop_requested())

    try:
        return _train(t, should_stop)
    finally:
        vote.finish()


def _train(t: Training, should_stop: Callable[[], bool]) -> bool:
    config, dist, progress = t.config, t.dist, t.progress
    # A stop request fell into the validation of this step: it is still owed.
    if progress.step > progress.validated_step and _validation_is_due(t) and not _validate(t, should_stop):
        return _stop(t)
    parameters = [parameter for parameter in t.model.parameters() if parameter.requires_grad]
    meter, clock = Meter(dist), _Clock(dist)
    t.model.train()
    loader = train_batches(
        t.splits,
        seed=config.seed,
        start_step=progress.step,
        stop_step=t.total_steps,
        global_batch_size=config.train.global_batch_size,
        micro_batch_size=t.micro_batch_size,
        rank=dist.rank,
        world_size=dist.world_size,
        workers=t.workers,
        pin_memory=dist.device.type == "cuda",
    )
    with loader as batches:
        for step in range(progress.step, t.total_steps):
            lr = _lr(t, step)
            set_lr(t.optimizer, lr)
            # Dropout and the like: a function of step and rank, so that resuming needs no random state.
            seed_random(mix(config.seed, step, dist.rank), dist.device)
            for micro_step in range(t.grad_accum_steps):
                is_last = micro_step == t.grad_accum_steps - 1  # gradients are exchanged once per update
                images, labels = next(batches)
                images = normalize(images.to(dist.device, non_blocking=True), t.splits.info)
                labels = labels.to(dist.device, non_blocking=True)
                with t.strategy.grad_sync(t.model, enabled=is_last):
                    with t.precision.autocast():
                        logits = t.model(images)
                        losses = functional.cross_entropy(
                            logits.float(), labels, reduction="none", label_smoothing=config.train.label_smoothing
                        )
                    t.precision.backward(losses.mean() / t.grad_accum_steps)
                meter.add(losses, logits, labels)
            norm = t.precision.step(t.optimizer, parameters, config.train.grad_clip_norm)
            progress.step = step + 1
            progress.images += config.train.global_batch_size
            clock.steps += 1
            is_final = progress.step == t.total_steps
            if progress.step % config.monitor.log_every == 0 or is_final:
                measured = meter.read()
                seconds = clock.lap(progress)
                _log_training(t, measured, lr, norm, seconds)
            if _validation_is_due(t):
                clock.pause(progress)
                if not _validate(t, should_stop):
                    return _stop(t)
                clock.resume()
            if should_stop() and not is_final:
                clock.pause(progress)
                return _stop(t)
            if _saving_is_due(t) or is_final:
                clock.pause(progress)
                t.save()
                clock.resume()
    return True


def _validation_is_due(t: Training) -> bool:
    step = t.progress.step
    return step == t.total_steps or step % (t.steps_per_epoch * t.config.train.eval_every_epochs) == 0


def _saving_is_due(t: Training) -> bool:
    step, checkpoint = t.progress.step, t.config.checkpoint
    by_epoch = checkpoint.every_epochs is not None and step % (t.steps_per_epoch * checkpoint.every_epochs) == 0
    by_step = checkpoint.every_steps is not None and step % checkpoint.every_steps == 0
    return by_epoch or by_step


def _validate(t: Training, should_stop: Callable[[], bool]) -> bool:
    """Validate, record, judge. False when told to stop half way."""
    sync_buffers(t.model, t.dist)
    result = evaluate(
        t.model,
        t.splits.val,
        t.splits,
        batch_size=t.micro_batch_size,
        workers=t.workers,
        precision=t.precision,
        dist=t.dist,
        should_stop=should_stop,
    )
    if result is None:
        return False
    progress = t.progress
    progress.validated_step, progress.val = progress.step, result
    name = t.config.checkpoint.best.removeprefix("val/")
    value = result[name]
    better = progress.best is None or (value < progress.best if name == "loss" else value > progress.best)
    if better:
        progress.best, progress.best_step = value, progress.step
    t.metrics.log({**_where(t), "split": "val", **result, "lr": _lr(t, progress.step - 1)})
    if better and progress.step != t.total_steps and not _saving_is_due(t):
        t.save()  # the best must be on disk, whatever the rhythm of saving
    return True


def _stop(t: Training) -> bool:
    t.save()
    return False


def _log_training(
    t: Training, measured: dict[str, float], lr: float, norm: torch.Tensor | None, seconds: tuple[float, int]
) -> None:
    elapsed, steps = seconds
    record: dict[str, Any] = {
        **_where(t),
        "split": "train",
        **measured,
        "lr": lr,
        "images_per_sec": round(steps * t.config.train.global_batch_size / elapsed, 2) if elapsed > 0 else None,
    }
    if norm is not None:
        record["grad_norm"] = norm.item()
    if t.precision.name == "fp16":
        record["skipped_steps"] = t.precision.skipped_steps
    if t.dist.device.type == "cuda":
        record["max_memory_mb"] = round(torch.cuda.max_memory_allocated(t.dist.device) / 2**20, 1)
    t.metrics.log(record)


def _lr(t: Training, step: int) -> float:
    """Learning rate of update ``step``, from 0."""
    config, total = t.config, t.total_steps
    return lr_at(
        step, optim=config.optim, schedule=config.schedule, steps_per_epoch=t.steps_per_epoch, total_steps=total
    )


def _where(t: Training) -> dict[str, Any]:
    step = t.progress.step
    return {"time": round(time.time(), 3), "step": step, "epoch": round(step / t.steps_per_epoch, 4)}


class _Clock:
    """Time spent in training steps, validation and saving excluded."""

    def __init__(self, dist: Distributed) -> None:
        self._dist = dist
        self._began = time.perf_counter()
        self._lap = 0.0
        self.steps = 0

    def pause(self, progress: Progress) -> None:
        """Stop counting."""
        if self._dist.device.type == "cuda":
            torch.cuda.synchronize(self._dist.device)  # or work still queued would be counted as somebody else's
        seconds = time.perf_counter() - self._began
        self._lap += seconds
        progress.train_seconds += seconds
        self._began = time.perf_counter()

    def resume(self) -> None:
        """Count again."""
        self._began = time.perf_counter()

    def lap(self, progress: Progress) -> tuple[float, int]:
        """Seconds and steps since the last lap."""
        self.pause(progress)
        seconds, steps = self._lap, self.steps
        self._lap, self.steps = 0.0, 0
        return seconds, steps
