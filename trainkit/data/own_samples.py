"""The first samples of a user's own data set, which are read before training begins.

What is wrong with the images to validate on would otherwise end the run after its first epoch, and pixels of the wrong
range never.
"""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import IterableDataset

from trainkit.data.base import Samples, Splits, Transform, normalize, refused_data
from trainkit.data.loader import Loading, eval_batches

if TYPE_CHECKING:
    from trainkit.common.image_input import DataInfo

_FAINT = 0.1
"""An image whose pixels differ by less than so many deviations of the data has been scaled before it was normalised."""


def check_first_samples(splits: Splits, label_kind: str | None, workers: int) -> None:
    """Read the first sample of each split as training will read it.

    Args:
        label_kind: ``LABELS`` of the task; None: any label will do.
        workers: loader processes in training. With some a sample is read in one: files that a data set opens when the
            first sample is asked for must not be open in this process when others are forked from it.

    Raises:
        UserError: training could not use it.
    """
    parts = {
        "train": (splits.train, splits.train_transform),
        "val": (splits.val, splits.eval_transform),
        "test": (splits.test, splits.eval_transform),
    }
    for split, (samples, transform) in parts.items():
        if isinstance(samples, IterableDataset) or not isinstance(samples, Sized):
            why = f"It is {type(samples).__name__}: training asks for sample number i of n, in an order of its own."
            fix = "Give it __len__ and __getitem__(index), or write shards, which the data set 'stream' reads."
            raise refused_data(f"The {split} split has no samples by number.", why, fix)
        if split == "val" and not len(samples):
            fix = "Give it some images that are not trained on."
            raise refused_data("The val split has no images.", "The best model is found by them.", fix)
        if len(samples):
            _check_first(split, samples, transform, splits.info, label_kind, workers)


@dataclass(frozen=True)
class _First:
    """The first of some samples."""

    samples: Samples

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        return self.samples[0]


def _check_first(
    split: str, samples: Samples, transform: Transform, info: DataInfo, label_kind: str | None, workers: int
) -> None:
    with eval_batches(_First(samples), transform, Loading(workers=min(workers, 1)), batch_size=1) as batches:
        image, label, _ = next(batches)
    where = f"the first sample of {split}"
    if image.shape[1] != info.in_chans:
        why = f"That of {where} has {image.shape[1]}; the order is [channels, height, width]."
        fix = "Correct in_chans of DataInfo, or what the transform returns."
        raise refused_data(f"DataInfo says in_chans={info.in_chans}, and an image has other channels.", why, fix)
    if image.is_floating_point():
        low, high = normalize(image, info).aminmax()
        if 0 < high - low < _FAINT:
            why = f"The pixels of {where} are floats from {image.min():.2f} to {image.max():.2f}. Training expects 0 "
            why += "to 255, and scales and normalises them by mean and std of DataInfo itself: nothing would be left."
            fix = "Return uint8 pixels: no ToTensor(), no Normalize(), no division by 255."
            raise refused_data("Images are scaled already.", why, fix)
    _check_label(label, info, label_kind, where)


def _check_label(label: Tensor, info: DataInfo, label_kind: str | None, where: str) -> None:
    """``label`` is that of a batch of one sample."""
    classes = info.num_classes
    shown = f"That of {where} is {label[0].tolist() if label[0].numel() <= 10 else list(label[0].shape)}"
    if label_kind == "one":
        if label.is_floating_point() or label.dim() != 1 or not 0 <= int(label) < classes:
            why = f"{shown}, of the type {str(label.dtype).removeprefix('torch.')}."
            fix = f"Give each image a whole number from 0 to {classes - 1}, or choose a task for such labels."
            raise refused_data(f"A label is not one of {classes} classes.", why, fix)
    elif label_kind == "several" and label.shape != (1, classes):
        fix = f"Give each image a tensor of {classes} numbers, 1 for each class that it has and 0 for the others."
        raise refused_data(f"A label does not say which of {classes} classes an image has.", f"{shown}.", fix)
