"""Metrics of the weights that a run has on any number of ranks: the model's own (raw), and their average (ema)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from trainkit.checkpoint.save import Checkpoints
from trainkit.data.base import Samples
from trainkit.data.loader import eval_batches
from trainkit.distributed.process_group import Distributed
from trainkit.errors import UserError
from trainkit.tasks.meter import MOST_CLASSES, Confusion, Counts, Meter, Mistakes, Pool
from trainkit.training.build import TrainState

STEMS = {"raw": "model", "ema": "ema"}
"""Kind of weights -> where a checkpoint has them."""


@dataclass(frozen=True)
class Measured:
    """What `evaluate` found of each kind of weights."""

    metrics: dict[str, float]
    """``loss``, the task's metrics and ``samples``; of averaged weights ``ema_loss`` and so on."""
    counts: dict[str, Counts]
    """Empty where nobody asked for them, and where the task knows no classes or too many."""
    mistakes: dict[str, Mistakes] = field(default_factory=dict)
    """Empty where the task does not say what is wrong."""


def no_average(step: int) -> UserError:
    """The error for who asks for averaged weights where a checkpoint has none."""
    return UserError(
        f"The checkpoint of step {step} has no averaged weights.",
        why="The run, or this part of it, was trained with train.ema_decay=null.",
        fix="Leave --weights out.",
    )


def measure(state: TrainState, samples: Samples, *, confusion: bool = False, **how: Any) -> Measured | None:
    """Of the model as it is, and of its average; None if it was told to stop. ``how``: as `evaluate` takes it."""
    found = Measured({}, {})
    for kind in STEMS if state.ema is not None else ("raw",):
        with state.ema.in_model() if state.ema is not None and kind == "ema" else nullcontext():
            sync_buffers(state.model, state.dist)
            if not _add(found, kind, state, samples, confusion=confusion, **how):
                return None
    return found


def measure_saved(
    state: TrainState,
    checkpoints: Checkpoints,
    step: int,
    samples: Samples,
    *,
    kinds: Sequence[str],
    or_newest: bool = True,
    **how: Any,
) -> tuple[int, Measured]:
    """Of the weights in the checkpoint of ``step``, which the model then has; and the step whose weights they were.

    Raises:
        UserError: as `Checkpoints.load_weights` does.
    """
    found = Measured({}, {})
    for kind in kinds:
        step = checkpoints.load_weights(state.model, step, or_newest=or_newest, stem=STEMS[kind])
        _add(found, kind, state, samples, confusion=True, **how)
    return step, found


def _add(found: Measured, kind: str, state: TrainState, samples: Samples, *, confusion: bool, **how: Any) -> bool:
    task, classes = state.task, state.splits.info.num_classes
    is_counted = confusion and task.has("taken_for") and classes <= MOST_CLASSES
    counts = Confusion(classes, state.dist) if is_counted else None
    mistakes = Mistakes(task) if task.has("wrong") else None
    result = evaluate(state, samples, confusion=counts, mistakes=mistakes, **how)
    if result is None:
        return False
    prefix = "ema_" if kind == "ema" else ""
    seen = result.pop("samples")
    found.metrics.update({f"{prefix}{key}": value for key, value in result.items()})
    found.metrics.setdefault("samples", seen)
    if counts is not None:
        found.counts[kind] = counts.read()
    if mistakes is not None:
        found.mistakes[kind] = mistakes
    return True


def evaluate(
    state: TrainState,
    samples: Samples,
    *,
    batch_size: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    beat: Callable[[], None] = lambda: None,
    confusion: Confusion | None = None,
    mistakes: Mistakes | None = None,
) -> dict[str, float] | None:
    """``loss``, the task's metrics and ``samples`` of one pass over ``samples``; None if it was told to stop.

    Each sample counts once, whatever the number of ranks: the ranks run equally many forward passes, because
    collectives inside them would otherwise wait for ever, and what pads the last ones is masked. So are broken images.

    Args:
        batch_size: samples per rank and forward pass; None: as in training.
        should_stop: asked before each batch; must answer alike on all ranks.
        beat: called for each batch.
        confusion: counts which class is taken for which.
        mistakes: keeps the images that are told wrong most surely.
    """
    model, dist, task = state.model, state.dist, state.task
    was_training = model.training
    model.eval()
    meter = Meter(task, dist)
    pool = Pool(task, dist) if task.has("pooled") else None
    loader = eval_batches(
        samples,
        state.splits.eval_transform,
        batch_size=batch_size or state.micro_batch_size,
        rank=dist.rank,
        world_size=dist.world_size,
        workers=state.workers,
        device=dist.device,
        broken=state.broken,
    )
    try:
        with torch.no_grad(), loader as batches:
            for images, labels, mask in batches:
                beat()
                if should_stop():
                    return None
                with state.precision.autocast():
                    output = model(state.normalized(images))
                output = output.float()
                meter.add_masked(task.loss(output, labels, "none"), output, labels, mask)
                if pool is not None:
                    pool.add(output, labels, mask)
                if confusion is not None:
                    confusion.add(task.taken_for(output), labels, mask)
                if mistakes is not None:
                    mistakes.add(images, output, labels, mask)
        found = meter.read()
        if pool is not None and found["samples"]:
            found = {**found, **pool.read()}
        return found
    finally:
        model.train(was_training)


def sync_buffers(model: nn.Module, dist: Distributed) -> None:
    """Give every rank rank 0's buffers (BatchNorm's running statistics).

    Without it ranks that shard a model would evaluate with statistics of their own samples only.
    """
    if dist.world_size > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, src=0)
