"""What a checkpoint says of the images that its model takes, and the model that is made of it without its data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from trainkit.data.base import DataInfo, Splits
from trainkit.data.folders import CenterCrop
from trainkit.data.loader import TensorTransform
from trainkit.tasks.base import classes_in, told_classes

_KEY = "input"
"""Where a checkpoint's state has the facts below, beside the names of the classes."""
_LARGEST = 1 << 14
"""Pixels of a side, channels: of more a stranger's checkpoint could ask for all memory."""
_MODES = ("nearest", "nearest-exact", "bilinear", "bicubic", "box", "hamming", "lanczos")


def told_input(splits: Splits) -> dict[str, Any]:
    """For the state of a checkpoint: its classes, and how images are prepared for the model.

    ``resize`` is the length of the shorter side in pixels, ``crop`` that of the square which is then cut out of the
    middle. Only the classes of a data set with transforms of its own, which nobody else can make; nothing of a peer
    that has no data.
    """
    info, transform, told = splits.info, splits.eval_transform, dict[str, Any](told_classes(splits))
    if isinstance(transform, TensorTransform):  # made for images of one size: of others the middle
        transform = CenterCrop(info.image_size, info.image_size, "bilinear")
    if isinstance(transform, CenterCrop) and told:
        told[_KEY] = {
            "data": info.name, "outputs": info.num_classes, "in_chans": info.in_chans, "image_size": info.image_size,
            "mean": [*map(float, info.mean)], "std": [*map(float, info.std)], "resize": transform.shorter, "crop": transform.image_size,
            "interpolation": transform.mode,
        }  # fmt: skip
    return told


def input_in(state: Mapping[str, Any]) -> tuple[DataInfo, CenterCrop] | None:
    """What a checkpoint says of its input; None where it does not, or says what cannot be. Anybody may have edited it.

    Older checkpoints name their classes at most.
    """
    told, classes = state.get(_KEY), classes_in(state)
    if not isinstance(told, dict) or classes is None:
        return None
    try:
        outputs, in_chans, size = (told[key] for key in ("outputs", "in_chans", "image_size"))
        mean, std = (tuple(float(value) for value in told[key]) for key in ("mean", "std"))
        crop = CenterCrop(told["crop"], told["resize"], told["interpolation"])
        sizes = (outputs, in_chans, size, crop.image_size, crop.shorter)
        is_sound = all(type(value) is int and 0 < value <= _LARGEST for value in sizes[1:])
        is_sound &= type(outputs) is int and outputs > 0 and len(classes) in (0, outputs) and crop.mode in _MODES
        is_sound &= len(mean) == len(std) == in_chans and all(map(math.isfinite, mean + std)) and min(std) > 0
        return (DataInfo(str(told["data"]), outputs, in_chans, size, classes, mean, std), crop) if is_sound else None
    except (KeyError, TypeError, ValueError):
        return None
