"""``python -m tests.benchmarks.loader_cost``: small images a second and core, to torchvision's own pipeline.

Both arms make batches of CIFAR-10's size on one thread: shifted by up to 4 pixels, mirrored, normalised, float32; and
then with RandAugment, random erasing, mixup and CutMix as well. torchvision's are PIL images through RandomCrop(32,
padding=4), RandomHorizontalFlip, ToTensor, Normalize and a DataLoader. The pixels' mean, deviation and histogram must
agree before a time is printed. The arms alternate (A B B A), CPU time is measured, and a control must lie within 0.97
to 1.03, or the run is void.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torchvision.transforms import v2

from trainkit.config.augment import AugmentConfig
from trainkit.data import synthetic
from trainkit.data.base import Splits, normalize
from trainkit.data.loader import train_batches
from trainkit.data.tensors import TensorSamples
from trainkit.training.augment import Augment

BATCH, IMAGES, ROUNDS = 256, 5_120, 9
EPOCHS = 8
"""Of the fast arm for one of the slow one, so that both take a time that can be measured."""
ALL = AugmentConfig(rand_augment_ops=2, random_erasing_prob=0.25, mixup_alpha=0.8, cutmix_alpha=1.0)

Arm = Callable[[], Iterator[Tensor]]


def main() -> int:
    """Measure and print; 1 if the control says that the run is void, or the pixels differ."""
    torch.set_num_threads(1)
    splits = synthetic.build(Path(), train_size=IMAGES)
    versions = f"torch {torch.__version__}, torchvision {torchvision.__version__}"
    print(f"{versions}, one thread, batches of {BATCH} x 3 x 32 x 32")
    # Pillow blends and turns with other roundings than tensors, so RandAugment's pixels agree a little less.
    arms: list[tuple[str, Arm, Arm, int, float]] = [
        ("shift and mirror", lambda: theirs(splits), lambda: ours(splits, AugmentConfig()), EPOCHS, 0.01),
        ("all", lambda: theirs(splits, more=True), lambda: ours(splits, ALL), 1, 0.03),
    ]
    for name, slow, fast, epochs, tolerance in arms:
        differ = difference(statistics_of(slow), statistics_of(fast))
        print(f"{name}: mean, deviation and histogram differ by at most {differ:.4f}")
        if differ > tolerance:
            print("The two make different pixels, so their times say nothing.")
            return 1
        if not measured(slow, fast, epochs):
            return 1
    return 0


def measured(slow: Arm, fast: Arm, epochs: int) -> bool:
    """Print how many images a second each makes; False if the control is off."""
    ratios, controls, seconds = [], [], []
    for _ in range(ROUNDS):
        a1, b1, b2, a2, a3 = (
            took(slow, 1), took(fast, epochs), took(fast, epochs), took(slow, 1), took(slow, 1),
        )  # fmt: skip
        ratios.append((a1 + a2) / (b1 + b2))
        controls.append(a3 / a2)
        seconds.append(((a1 + a2) / 2, (b1 + b2) / 2))
    control = statistics.median(controls)
    rates = [IMAGES / statistics.median(column) for column in zip(*seconds, strict=True)]
    print(f"  images/s a core: torchvision {rates[0]:,.0f}, the kit {rates[1]:,.0f}")
    print(f"  kit / torchvision {statistics.median(ratios):.1f}  ({min(ratios):.1f} to {max(ratios):.1f})")
    print(f"  control {control:.3f}  ({min(controls):.3f} to {max(controls):.3f})")
    if not 0.97 <= control <= 1.03:
        print("void: the control is off; the machine is busy")
    return 0.97 <= control <= 1.03


def took(arm: Arm, epochs: int) -> float:
    """CPU seconds for one epoch."""
    began = time.process_time()
    for _ in range(epochs):
        for _ in arm():
            pass
    return (time.process_time() - began) / epochs


class Pictures(Dataset[Any]):
    """As torchvision's CIFAR10 has them: arrays, made into PIL images when they are asked for."""

    def __init__(self, samples: TensorSamples, transform: Callable[[Any], Tensor]) -> None:
        self.data, self.targets = samples.images.permute(0, 2, 3, 1).numpy(), samples.labels.tolist()
        self.transform = transform

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.data[index])), self.targets[index]


def theirs(splits: Splits, *, more: bool = False) -> Iterator[Tensor]:
    """One epoch of torchvision's."""
    info, train = splits.info, splits.train
    assert isinstance(train, TensorSamples)
    transforms = torchvision.transforms
    transform = transforms.Compose(
        [
            transforms.RandomCrop(32, padding=4),
            transforms.RandomHorizontalFlip(),
            *([transforms.RandAugment(2, 9)] if more else []),
            transforms.ToTensor(),
            transforms.Normalize(info.mean, info.std),
            *([transforms.RandomErasing(0.25, scale=(0.02, 1 / 3), ratio=(0.3, 1 / 0.3))] if more else []),
        ]
    )
    mix = v2.RandomChoice(
        [v2.MixUp(alpha=0.8, num_classes=info.num_classes), v2.CutMix(alpha=1.0, num_classes=info.num_classes)]
    )

    def collate(items: list[Any]) -> Any:
        batch = default_collate(items)
        return mix(*batch) if more else batch

    for images, _ in DataLoader(Pictures(train, transform), BATCH, shuffle=True, collate_fn=collate):
        yield images


def ours(splits: Splits, augment: AugmentConfig) -> Iterator[Tensor]:
    """One epoch of the kit's."""
    prepared = Augment(augment, splits.info, lambda images: normalize(images, splits.info))
    sizes: Any = {"global_batch_size": BATCH, "micro_batch_size": BATCH, "rank": 0, "world_size": 1, "workers": 0}
    with train_batches(splits, seed=0, start_step=0, stop_step=IMAGES // BATCH, **sizes) as batches:
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


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


if __name__ == "__main__":
    raise SystemExit(main())
