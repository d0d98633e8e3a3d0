"""Batches from a data set in memory: a few operations on whole batches, no process and no copy in between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from trainkit.data import draws
from trainkit.data.batch import Batch, EvalBatch
from trainkit.data.tensors import TensorSamples, TensorTransform

if TYPE_CHECKING:
    from torch import Tensor


def train_from_memory(
    samples: TensorSamples, transform: TensorTransform, seed: int, shares: Iterable[tuple[int, Tensor]]
) -> Iterator[Batch]:
    """Augmented batches of ``samples``, on their device.

    Args:
        shares: epochs, and the indices of batches in each, int64 [count, N].
    """
    device = samples.images.device
    for epoch, share in shares:
        keys = draws.keys(seed, epoch, share)
        # For all of the epoch at once: what is drawn costs next to nothing then, and goes to the device in one piece.
        drawn = transform.draw(keys).to(device, non_blocking=True)
        indices = share.to(device, non_blocking=True)
        for one, key, how in zip(indices.unbind(), keys.unbind(), drawn.unbind(), strict=True):
            images = transform.batch(samples.images.index_select(0, one), how)
            yield Batch(images, samples.labels.index_select(0, one), key)


def train_batch(samples: TensorSamples, transform: TensorTransform, indices: Tensor, keys: Tensor) -> Batch:
    """One of them: ``indices`` and ``keys`` int64 [N], in the host's memory as the samples are."""
    images = transform.batch(samples.images.index_select(0, indices), transform.draw(keys))
    return Batch(images, samples.labels.index_select(0, indices), keys)


def eval_from_memory(
    samples: TensorSamples, transform: TensorTransform, starts: Iterable[int], size: int
) -> Iterator[EvalBatch]:
    """Batches of ``size`` that begin at ``starts``; what is missing at the end is filled with the last sample."""
    import torch

    total, device = len(samples), samples.images.device
    places = torch.arange(size, device=device)
    for start in starts:
        indices = (places + start).clamp_(max=total - 1)
        images = transform.batch(samples.images.index_select(0, indices))
        yield EvalBatch(images, samples.labels.index_select(0, indices), places < total - start)
