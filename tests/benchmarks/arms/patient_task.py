"""What the swarms of the benchmarks learn, at a pace that does not depend on what else the machine does.

Digits of 8x8 pixels, moved, blurred by noise of half their contrast: 30,000 to train on, made of the training images
of `trainkit.data.datasets.digits`, and 5,000 to validate with, made of those that nobody trains on. Nobody gets to
100 %, so harm shows, and half a point is 25 images.

A peer computes for a tenth of its time and sleeps for the rest of what `SECONDS` says that a sample takes: two cores
hold four peers of unequal speed.
"""

import os
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from trainkit.common.image_input import DataInfo
from trainkit.data.base import Splits
from trainkit.data.datasets.digits import build
from trainkit.data.tensors import TensorSamples, TensorTransform

SECONDS = "BENCHMARK_SECONDS_A_SAMPLE"
"""In a peer's environment; without it nobody sleeps."""
TRAIN, VAL, NOISE = 30_000, 5_000, 0.3


def data(root: Path) -> Splits:
    """The same on all peers, whatever the seed."""
    digits = build(root)
    plain = TensorTransform(8)
    info = DataInfo("patient_task", 10, 1, 8, digits.info.class_names, mean=(0.3,), std=(0.5,))
    samples = (_noisy(digits.train, TRAIN, 1), _noisy(digits.val, VAL, 2), _noisy(digits.test, VAL, 3))
    return Splits(info, *samples, train_transform=plain, eval_transform=plain, in_memory=True)


def _noisy(samples: object, count: int, seed: int) -> TensorSamples:
    assert isinstance(samples, TensorSamples)
    generator = torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(samples.labels), (count,), generator=generator)
    images, labels = samples.images[chosen].float() / 255, samples.labels[chosen]
    padded = torch.nn.functional.pad(images, (1, 1, 1, 1))
    moves = torch.randint(3, (count, 2), generator=generator)
    moved = torch.stack([image[:, y : y + 8, x : x + 8] for image, (y, x) in zip(padded, moves.tolist(), strict=True)])
    noise = NOISE * torch.randn(moved.shape, generator=generator)
    return TensorSamples(((moved + noise).clamp(-1, 2) + 1).mul(85).round().to(torch.uint8), labels)


class Paced(nn.Sequential):
    """Passes of training begin as far apart as their samples take."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.seconds = float(os.environ.get(SECONDS, "0"))
        self._began = 0.0

    def forward(self, images: Tensor) -> Tensor:
        """Scores, [N, 10]."""
        if self.training and self.seconds:
            time.sleep(max(0.0, self._began + len(images) * self.seconds - time.monotonic()))
            self._began = time.monotonic()
        scores: Tensor = super().forward(images)
        return scores


def model(info: DataInfo, *, width: int) -> nn.Module:
    """It costs little to train."""
    size = info.in_chans * info.image_size**2
    hidden = (nn.Linear(size, width), nn.GELU(), nn.Linear(width, width), nn.GELU())
    return Paced(nn.Flatten(), *hidden, nn.Linear(width, info.num_classes))
