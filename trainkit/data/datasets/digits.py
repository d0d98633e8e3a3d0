"""scikit-learn's digits: 1,797 real handwritten digits of 8x8 pixels that need no download."""

import importlib.util
from pathlib import Path
from typing import Any, Literal

from trainkit.common.errors import UserError, require
from trainkit.common.image_input import DataInfo
from trainkit.data.base import Splits
from trainkit.data.order import stratified_split

SHAPE = {"num_classes": 10, "train_size": 1259}


def build(
    root: Path, *, image_size: int = 8, in_chans: Literal[1, 3] = 1, augment: bool = True, shift: int = 1
) -> Splits:
    """About 70 / 15 / 15 % train, val, test, stratified, whatever the seed. Augmented by shifts of up to ``shift``."""
    import numpy
    import torch

    from trainkit.data.tensors import TensorSamples, tensor_splits

    # What `sklearn.datasets.load_digits` reads, 64 pixels of 0 to 16 and the label, [1797, 65]. Read without it:
    # importing scikit-learn takes every rank longer than an epoch does.
    (package,) = importlib.util.find_spec("sklearn").submodule_search_locations  # type: ignore[union-attr, misc]
    table = torch.from_numpy(numpy.loadtxt(Path(package, "datasets", "data", "digits.csv.gz"), delimiter=","))
    images = table[:, :-1].mul(255 / 16).round().to(torch.uint8).view(-1, 1, 8, 8).expand(-1, in_chans, -1, -1)
    labels = table[:, -1].to(torch.int64)
    classes = tuple(str(digit) for digit in range(10))
    info = DataInfo("digits", 10, in_chans, image_size, classes, (0.3054,) * in_chans, (0.3761,) * in_chans)
    parts = stratified_split(labels.tolist(), (0.15, 0.15))
    samples = [TensorSamples(images[part], labels[part]) for part in parts]
    return tensor_splits(info, samples, augment=augment, shift=shift, flip=False)


def train_size(root: Path, **options: Any) -> int:
    """Images to train on, of the file that scikit-learn brings; reading it would delay every submission."""
    return 1259


def locate(root: Path, *, shift: int, **options: Any) -> None:
    """Check the options. The data comes with scikit-learn, wherever ``root`` is."""
    require(0 <= shift < 8, "data.shift", shift, "between 0 and 7 pixels")
    if importlib.util.find_spec("sklearn") is None:
        why = "It is not installed in this environment."
        fix = "pip install scikit-learn"
        raise UserError("The data set 'digits' needs scikit-learn.", why=why, fix=fix)
