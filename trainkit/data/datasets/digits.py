"""scikit-learn's digits: 1,797 real handwritten digits of 8x8 pixels that need no download."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.data.base import DataInfo, Splits, require, stratified_split
from trainkit.data.download import Say
from trainkit.errors import UserError

if TYPE_CHECKING:
    import numpy


def build(root: Path, *, image_size: int = 8, in_chans: int = 1, augment: bool = True, shift: int = 1) -> Splits:
    """About 70 / 15 / 15 % train, val, test, stratified, whatever the seed. Augmented by shifts of up to ``shift``."""
    import torch

    from trainkit.data.loader import TensorSamples, tensor_transforms

    locate(root, image_size=image_size, in_chans=in_chans, shift=shift)
    table = torch.from_numpy(_table())
    images = table[:, :-1].mul(255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8).expand(-1, in_chans, -1, -1)
    labels = table[:, -1].to(torch.int64)
    train, val, test = (
        TensorSamples(images[part], labels[part]) for part in stratified_split(labels.tolist(), (0.15, 0.15))
    )
    train_transform, eval_transform = tensor_transforms(image_size, augment=augment, shift=shift, flip=False)
    return Splits(
        info=DataInfo(
            name="digits",
            num_classes=10,
            in_chans=in_chans,
            image_size=image_size,
            class_names=tuple(str(digit) for digit in range(10)),
            mean=(0.3054,) * in_chans,
            std=(0.3761,) * in_chans,
        ),
        train=train,
        val=val,
        test=test,
        train_transform=train_transform,
        eval_transform=eval_transform,
        in_memory=True,
    )


def _table() -> numpy.ndarray[Any, Any]:
    """64 pixels of 0 to 16 and the label, float64 [1797, 65]: what `sklearn.datasets.load_digits` reads.

    Read without it, because importing scikit-learn takes every rank longer than an epoch does.
    """
    import numpy

    spec = importlib.util.find_spec("sklearn")
    assert spec is not None, "`locate` has looked"
    assert spec.origin is not None, "a package has a file"
    return numpy.loadtxt(Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz", delimiter=",")


def train_size(root: Path, **options: object) -> int:
    """How many images the training split has."""
    return 1259  # of the file that scikit-learn brings; reading it would cost every submission more than all the rest


def locate(root: Path, *, image_size: int, in_chans: int, shift: int, **others: object) -> None:
    """Check the options. The data comes with scikit-learn, wherever ``root`` is."""
    require(image_size >= 8, "image_size", image_size, "8 or more")
    require(in_chans in (1, 3), "in_chans", in_chans, "1, or 3 (the gray channel thrice)")
    require(0 <= shift < 8, "shift", shift, "between 0 and 7 pixels")
    if importlib.util.find_spec("sklearn") is None:
        raise UserError(
            "The data set 'digits' needs scikit-learn.",
            why="It is not installed in this environment.",
            fix="pip install scikit-learn",
        )


def prepare(root: Path, archives: list[Path], say: Say) -> None:
    """Nothing to fetch."""
    say("digits comes with scikit-learn: nothing to fetch.")
