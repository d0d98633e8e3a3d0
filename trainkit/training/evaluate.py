"""Evaluation with exact counts on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional

from trainkit.data.base import Samples
from trainkit.data.loader import eval_batches
from trainkit.distributed.process_group import Distributed
from trainkit.training.confusion import Confusion
from trainkit.training.meter import Meter
from trainkit.training.mistakes import Mistakes
from trainkit.training.parts import Parts


def evaluate(
    parts: Parts,
    samples: Samples,
    *,
    batch_size: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    beat: Callable[[], None] = lambda: None,
    confusion: Confusion | None = None,
    mistakes: Mistakes | None = None,
) -> dict[str, float] | None:
    """``loss``, ``acc1``, ``acc5`` and ``samples`` of one pass over ``samples``; None if it was told to stop.

    Each sample counts once, whatever the number of ranks: the ranks run equally many forward passes, because
    collectives inside them would otherwise wait for ever, and what pads the last ones is masked. So are broken images.

    Args:
        batch_size: samples per rank and forward pass; None: as in training.
        should_stop: asked before each batch; must answer alike on all ranks.
        beat: called for each batch.
        confusion: counts which class is taken for which.
        mistakes: keeps the images that are told wrong most surely.
    """
    model, dist, splits = parts.model, parts.dist, parts.splits
    was_training = model.training
    model.eval()
    meter = Meter(dist)
    loader = eval_batches(
        samples,
        splits.eval_transform,
        batch_size=batch_size or parts.micro_batch_size,
        rank=dist.rank,
        world_size=dist.world_size,
        workers=parts.workers,
        device=dist.device,
        broken=parts.broken,
    )
    try:
        with torch.no_grad(), loader as batches:
            for images, labels, mask in batches:
                beat()
                if should_stop():
                    return None
                with parts.precision.autocast():
                    logits = model(parts.normalized(images))
                logits = logits.float()
                losses = functional.cross_entropy(logits, labels, reduction="none")
                meter.add_masked(losses, logits, labels, mask)
                if confusion is not None:
                    confusion.add(logits, labels, mask)
                if mistakes is not None:
                    mistakes.add(images, logits, labels, mask)
        return meter.read()
    finally:
        model.train(was_training)


def sync_buffers(model: nn.Module, dist: Distributed) -> None:
    """Give every rank rank 0's buffers (BatchNorm's running statistics).

    Without it ranks that shard a model would evaluate with statistics of their own samples only.
    """
    if dist.world_size > 1:
        for buffer in model.buffers():
            torch.distributed.broadcast(buffer, src=0)
