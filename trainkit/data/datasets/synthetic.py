"""Made-up images that can be learned: a smooth pattern for each class, plus noise. For trying models and machines."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.common.errors import require
from trainkit.common.image_input import DataInfo
from trainkit.data.base import Splits
from trainkit.data.order import derive_seed

if TYPE_CHECKING:
    from torch import Tensor

    from trainkit.data.tensors import TensorSamples

MOST_IN_MEMORY = 20_000
"""This many small images are made within a second."""
MOST_PATTERN_BYTES = 64 << 20
"""Patterns of all classes are held up to this size: those of ImageNet would take 600 MB and 4 s at every start."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Number of images of each split."""

    train_size: int = 2048
    val_size: int = 512
    test_size: int = 512


def build(
    root: Path, *, num_classes: int = 10, image_size: int = 32, in_chans: int = 3, sizes: Sizes, noise: float = 0.5,
    augment: bool = True,
) -> Splits:  # fmt: skip
    """The same images on every machine and for every seed. ``noise`` is the noise's share of the contrast, 0 to 1.

    A few small ones are made at the start. Others are made from their index when they are asked for, so that
    ``train_size=1281167 image_size=224`` costs no memory.
    """
    import torch

    from trainkit.data.tensors import tensor_splits

    generator = torch.Generator().manual_seed(derive_seed(num_classes, in_chans))
    coarse = torch.rand((num_classes, in_chans, 4, 4), generator=generator)
    patterns = None
    if num_classes * in_chans * image_size**2 * coarse.itemsize <= MOST_PATTERN_BYTES:
        patterns = _smooth(coarse, image_size)
    made = [_Made(coarse, patterns, image_size, noise, size, split) for split, size in enumerate(astuple(sizes))]
    small = image_size <= 64  # larger ones take long enough to make that loader processes pay
    few = sum(astuple(sizes)) <= MOST_IN_MEMORY
    parts = [item.in_memory() if small and few else item for item in made]
    classes = tuple(f"class {label}" for label in range(num_classes))
    info = DataInfo("synthetic", num_classes, in_chans, image_size, classes, (0.5,) * in_chans, (0.25,) * in_chans)
    return tensor_splits(info, parts, augment=augment, shift=image_size // 8, in_memory=small)


def train_size(root: Path, *, train_size: int, **others: Any) -> int:
    """Images to train on."""
    return train_size


def locate(root: Path, *, num_classes: int, in_chans: int, noise: float, **others: Any) -> None:
    """Check the options. There is nothing to find: the images are computed."""
    require(num_classes >= 2, "data.num_classes", num_classes, "2 or more")
    require(in_chans >= 1, "data.in_chans", in_chans, "1 or more")
    require(0.0 <= noise <= 1.0, "data.noise", noise, "between 0 and 1")
    for option in ("train_size", "val_size", "test_size"):
        require(others[option] >= 1, f"data.{option}", others[option], "1 or more")


@dataclass(frozen=True, eq=False)
class _Made:
    coarse: Tensor
    """Four by four pixels for each class."""
    patterns: Tensor | None
    """All of them smoothed, or None: each is made when it is needed."""
    image_size: int
    noise: float
    size: int
    split: int

    def __len__(self) -> int:
        return self.size

    @property
    def labels(self) -> list[int]:
        return [index % len(self.coarse) for index in range(self.size)]

    def pattern(self, label: int) -> Tensor:
        """The pattern of a class [in_chans, image_size, image_size]."""
        if self.patterns is not None:
            return self.patterns[label]
        return _smooth(self.coarse[label : label + 1], self.image_size)[0]

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        import torch

        if not 0 <= index < self.size:
            raise IndexError(index)
        label = index % len(self.coarse)
        generator = torch.Generator().manual_seed(derive_seed(self.split, index))
        pattern = self.pattern(label)
        noise = torch.rand(pattern.shape, generator=generator)
        image = pattern + self.noise * (noise - pattern)
        return image.mul_(255).to(torch.uint8), label

    def in_memory(self) -> TensorSamples:
        """All of them, made at once."""
        import torch

        from trainkit.data.tensors import TensorSamples

        return TensorSamples(torch.stack([self[at][0] for at in range(self.size)]), torch.tensor(self.labels))


def _smooth(coarse: Tensor, image_size: int) -> Tensor:
    """One smooth image in 0..1 for each coarse one [N, in_chans, image_size, image_size], symmetric as a face is:
    mirroring, which is part of the augmentation, leaves its class as it is."""
    import torch.nn.functional as F

    smooth = F.interpolate(coarse, size=(image_size, image_size), mode="bicubic", align_corners=False).clamp_(0, 1)
    return (smooth + smooth.flip(-1)) / 2
