"""The digits with a third of the labels wrong, in training and in validation: nobody gets to 100 %, so harm shows."""

from dataclasses import replace
from pathlib import Path

import torch

from trainkit.data.base import Splits
from trainkit.data.datasets.digits import build
from trainkit.data.tensors import TensorSamples


def data(root: Path) -> Splits:
    """Of the honest digits; which labels are wrong is the same on all peers."""
    splits = build(root)
    return replace(
        splits, info=replace(splits.info, name="noisy"), train=_noisy(splits.train, 1), val=_noisy(splits.val, 2)
    )


def _noisy(samples: object, seed: int) -> TensorSamples:
    assert isinstance(samples, TensorSamples)
    generator = torch.Generator().manual_seed(seed)
    wrong = torch.rand(len(samples.labels), generator=generator) < 1 / 3
    shift = torch.randint(1, 10, (len(samples.labels),), generator=generator)
    return TensorSamples(samples.images, torch.where(wrong, (samples.labels + shift) % 10, samples.labels))
