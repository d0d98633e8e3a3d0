"""Small images a second and core, to torchvision's own pipeline.

Both arms make batches of CIFAR-10's size on one thread: shifted by up to 4 pixels, mirrored, normalised, float32.
torchvision's are PIL images through RandomCrop(32, padding=4), RandomHorizontalFlip, ToTensor, Normalize and a
DataLoader. The pixels' mean, deviation and histogram must agree before a time is printed. CPU time is measured.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from tests.benchmarks.measuring import Figure, against, cpu_seconds, loaded, take_turns
from trainkit.config.schema import AugmentConfig
from trainkit.data.base import Splits, normalize
from trainkit.data.batch_augment import Augment
from trainkit.data.datasets import synthetic
from trainkit.data.tensors import TensorSamples

BATCH, IMAGES, ROUNDS = 256, 5_120, 25
BATCHES = 4
"""In a turn of the slow arm: a fifth of a second."""

Arm = Callable[[], Iterator[Tensor]]


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The line of the table.

    Raises AssertionError where the arms make other pixels.
    """
    torch.set_num_threads(1)
    splits = synthetic.build(Path(), sizes=synthetic.Sizes(train_size=IMAGES))
    slow, fast = partial(theirs, splits), partial(ours, splits)
    differ = float((statistics_of(slow) - statistics_of(fast)).abs().max())
    assert differ <= 0.01, f"the two make different pixels: {differ:.4f}"
    turns = {
        "torchvision": partial(took, slow, 1, BATCHES),
        "kit": partial(took, fast, 8, IMAGES // BATCH),  # so many, for a time that can be measured
    }
    measured = take_turns(turns, rounds)
    what = "images of 32x32 a second and core, shifted and mirrored, to torchvision's pipeline"
    headline = "small images a second and core, to torchvision's pipeline"
    return [
        against(measured, "kit", what=what, at_least=8, faster=True, tolerance=0.03, headline=headline,
                shown=lambda seconds: f"{1 / seconds:,.0f}/s")
    ]  # fmt: skip


def took(arm: Arm, times: int, batches: int) -> float:
    """CPU seconds for an image, of so many batches of an epoch, so many times."""
    seconds = cpu_seconds(lambda: deque((0 for _ in range(times) for _ in islice(arm(), batches)), maxlen=0))
    return seconds / (times * batches * BATCH)


class Pictures(Dataset[Any]):
    """As torchvision's CIFAR10 has them: arrays, made into PIL images when they are asked for."""

    def __init__(self, images: Any, labels: list[int], transform: Callable[[Image.Image], Tensor]) -> None:
        self.images, self.labels, self.transform = images, labels, transform

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.images[index])), self.labels[index]


def theirs(splits: Splits) -> Iterator[Tensor]:
    """One epoch of torchvision's."""
    info, train = splits.info, splits.train
    assert isinstance(train, TensorSamples)
    shifted = [transforms.RandomCrop(32, padding=4), transforms.RandomHorizontalFlip()]
    transform = transforms.Compose([*shifted, transforms.ToTensor(), transforms.Normalize(info.mean, info.std)])
    pictures = Pictures(train.images.permute(0, 2, 3, 1).numpy(), train.labels.tolist(), transform)
    for images, _ in DataLoader(pictures, BATCH, shuffle=True):
        yield images


def ours(splits: Splits) -> Iterator[Tensor]:
    """One epoch of the kit's."""
    prepared = Augment(AugmentConfig(), splits.info, lambda images: normalize(images, splits.info))
    with loaded(splits, 0, IMAGES // BATCH, BATCH) as batches:
        for batch in batches:
            images, _ = prepared(batch)
            yield images


def statistics_of(arm: Arm) -> Tensor:
    """Of four epochs' pixels: mean, deviation, and how many are below each of 8 values."""
    found = []
    for _ in range(4):
        for images in arm():
            below = [(images < value).float().mean() for value in torch.linspace(-1.75, 1.75, 8).tolist()]
            found.append(torch.stack([images.mean(), images.std(), *below]))
    return torch.stack(found).mean(0)
