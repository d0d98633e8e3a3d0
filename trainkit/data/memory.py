"""Batches from a data set in memory: a few operations on whole batches, no process and no copy in between."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from trainkit.data import draws
from trainkit.data.base import Splits
from trainkit.data.batch import Batch, EvalBatch
from trainkit.data.tensors import TensorSamples, TensorTransform

if TYPE_CHECKING:
    import torch
    from torch import Tensor

SHARE_OF_FREE = 0.1
"""Of a GPU's free memory, what the data may take: the model and its activations need the rest."""


def placed(splits: Splits, where: Literal["auto", "cpu"], device: torch.device, *, workers: int) -> Splits:
    """``splits`` on the GPU that trains, if they are in memory and take little of what it has free (`auto`).

    Bytes are cut out alike wherever they lie. Only resizing rounds otherwise on a GPU, by one level of 255 at most.
    """
    import torch

    parts = (splits.train, splits.val, splits.test)
    if where == "cpu" or device.type != "cuda" or workers:  # a loader process has no GPU
        return splits
    train, val, test = (part if isinstance(part, TensorSamples) else None for part in parts)
    if train is None or val is None or test is None:
        return splits
    free, _ = torch.cuda.mem_get_info(device)
    if train.nbytes + val.nbytes + test.nbytes > free * SHARE_OF_FREE:
        return splits
    return replace(splits, train=train.on(device), val=val.on(device), test=test.on(device))


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
