"""Evaluation: one pass over a split, summed over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from trainkit.checkpoint.save import Checkpoints
from trainkit.data.base import Samples
from trainkit.distributed.process_group import Distributed
from trainkit.training.saved_model import STEMS
from trainkit.training.tasks.meter import MOST_CLASSES, Calibration, Confusion, ConfusionCounts, Meter, Mistakes, Pool
from trainkit.training.tasks.returned import losses_of, require_all
from trainkit.training.train_state import TrainState


@dataclass(frozen=True)
class Measured:
    """Measurements of each kind of weights."""

    metrics: dict[str, float] = field(default_factory=dict)
    """``loss``, the task's metrics and ``samples``; of averaged weights ``ema_loss`` and so on."""
    counts: dict[str, ConfusionCounts] = field(default_factory=dict)
    """Empty where nobody asked for them, and where the task knows no classes or too many."""
    ece: dict[str, float] = field(default_factory=dict)
    """`Calibration`; as ``counts``."""
    mistakes: dict[str, Mistakes] = field(default_factory=dict)
    """Empty where the task does not say what is wrong."""


@dataclass(frozen=True)
class EvaluationPass:
    """One pass over samples."""

    samples: Samples
    batch_size: int | None = None
    """Samples per rank and forward pass; None: as in training."""
    should_stop: Callable[[], bool] = lambda: False
    """Asked before each batch; must answer alike on all ranks."""
    beat: Callable[[], None] = lambda: None
    """Called for each batch."""
    confusion: bool = False
    """Count which class is taken for which."""


def measure(state: TrainState, one_pass: EvaluationPass) -> Measured | None:
    """Evaluate the model as it is, and its average; None if it was told to stop."""
    found = Measured()
    sync_buffers(state.model, state.dist)
    if not evaluate(state, one_pass, found):
        return None
    if state.ema is not None:
        with state.survivor.set_aside(), state.ema.in_model():
            sync_buffers(state.model, state.dist)
            if not evaluate(state, one_pass, found, "ema"):
                return None
    return found


def measure_saved(
    state: TrainState,
    checkpoints: Checkpoints,
    step: int,
    one_pass: EvaluationPass,
    *,
    kinds: Sequence[str],
    or_newest: bool = True,
) -> tuple[int, Measured]:
    """Evaluate the weights in the checkpoint of ``step``, which the model then has; and the step whose they were.

    Further kinds than the first are left out where that checkpoint has none.

    Raises:
        UserError: as `Checkpoints.load_weights` does.
    """
    found = Measured()
    for kind in kinds:
        if found.metrics and STEMS[kind] not in checkpoints.manifest_of(step).stems:
            continue
        step = checkpoints.load_weights(state.model, step, or_newest=or_newest, stem=STEMS[kind])
        evaluate(state, one_pass, found, kind)
    return step, found


def evaluate(state: TrainState, one_pass: EvaluationPass, found: Measured, kind: str = "raw") -> bool:
    """Add to ``found`` what a pass gives for the weights that the model has now; False if it was told to stop.

    Each sample counts once, whatever the number of ranks: the ranks run equally many forward passes, because
    collectives inside them would otherwise wait for ever, and what pads the last ones is masked. So are broken images.
    """
    model = state.model
    dist = state.dist
    task = state.task
    classes = state.splits.info.num_classes
    meter = Meter(task, dist)
    pool = Pool(task, dist) if task.has("pooled") else None
    mistakes = Mistakes(task, dist) if task.has("wrong") else None
    counts = None
    calibration = None
    if one_pass.confusion and task.has("taken_for") and classes <= MOST_CLASSES:
        counts = Confusion(task, classes, dist)
        if task.has("probabilities"):
            calibration = Calibration(task, dist)
    meters = [each for each in (pool, mistakes, counts, calibration) if each is not None]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad(), state.eval_batches(one_pass.samples, one_pass.batch_size) as batches:
            for images, labels, mask in batches:
                one_pass.beat()
                if one_pass.should_stop():
                    return False
                with state.precision.autocast():
                    output = model(state.normalized(images))
                output = output.float()
                meter.add_masked(losses_of(task, output, labels), output, labels, mask)
                for each in meters:
                    each.add(images, output, labels, mask)
    finally:
        model.train(was_training)
    metrics = meter.read()
    if pool is not None and metrics["samples"]:
        metrics |= pool.read()
        require_all(task, metrics)
    found.metrics.setdefault("samples", metrics.pop("samples"))
    prefix = "ema_" if kind == "ema" else ""
    for name, value in metrics.items():
        found.metrics[f"{prefix}{name}"] = value
    if counts is not None:
        found.counts[kind] = counts.read()
    if calibration is not None:
        found.ece[kind] = calibration.read()
    if mistakes is not None:
        found.mistakes[kind] = mistakes
    return True


def sync_buffers(model: nn.Module, dist: Distributed) -> None:
    """Give every rank rank 0's buffers (BatchNorm's running statistics).

    Without it ranks that shard a model would evaluate with statistics of their own samples only.
    """
    if dist.world_size > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, src=0)
