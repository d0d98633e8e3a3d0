"""A pack of equally large pixels, as small sets are that live in memory: nothing is read or decoded any more."""

from __future__ import annotations

from dataclasses import replace

from trainkit.data.base import Samples, Splits
from trainkit.data.folders import ImageFiles
from trainkit.data.pack import Pack
from trainkit.data.tensors import TensorSamples, TensorTransform


def mapped(splits: Splits) -> Splits:
    """``splits`` with the mapped pixels of their pack as tensors, not copied, if that is what they are.

    They are augmented in whole batches then, and may move to the GPU. Only for a data set that augments images of one
    size: the photos of others are cut out each in another size.
    """
    if not isinstance(splits.train_transform, TensorTransform):
        return splits
    train, val, test = (_tensor(part) for part in (splits.train, splits.val, splits.test))
    if train is None or val is None or test is None:
        return splits
    return replace(splits, train=train, val=val, test=test, in_memory=True)


def _tensor(samples: Samples) -> TensorSamples | None:
    import torch

    if not isinstance(samples, ImageFiles) or not isinstance(samples.files, Pack) or samples.in_chans != 3:
        return None
    images, first, count = samples.files.stacked, samples.positions[0], len(samples)
    if images is None or samples.positions.tolist() != [*range(first, first + count)]:
        return None
    return TensorSamples(images[first : first + count], torch.tensor(samples.labels.tolist()))
