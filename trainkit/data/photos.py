"""Photographs of any size: the usual augmentation, and how they are cut for evaluation."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from trainkit.data.base import ModelInput, Transform

if TYPE_CHECKING:
    from torch import Tensor

PHOTO_MEAN, PHOTO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, which pretrained models expect."""

AREA, RATIO = (0.08, 1.0), (3 / 4, 4 / 3)
"""Of the random part: its share of the photo, its width over its height. As in Szegedy et al., "Going Deeper with
Convolutions", and in torchvision since."""


def photo_statistics(in_chans: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of photographs for RGB or, averaged, for gray images."""
    if in_chans == 3:
        return PHOTO_MEAN, PHOTO_STD
    return (sum(PHOTO_MEAN) / 3,) * in_chans, (sum(PHOTO_STD) / 3,) * in_chans


def photo_transforms(
    image_size: int, expected: ModelInput | None = None, *, augment: bool
) -> tuple[Transform, Transform]:
    """Train and eval transform of photographs of any size: random part and mirror image; centre of the shorter side.

    Pretrained weights have their own way of resizing and cropping: ``expected``.
    """
    mode = expected.interpolation if expected else "bilinear"
    evaluate = Centre(image_size, round(image_size / (expected.crop if expected else 224 / 256)), mode)
    return (RandomPart(image_size, mode) if augment else evaluate), evaluate


class RandomPart:
    """A random part of the photo, resized, and mirrored every second time.

    The pixels of torchvision's RandomResizedCrop and RandomHorizontalFlip for the same draw, at two thirds of the cost
    and without torchvision's import: numbers are drawn as numbers, and a photo is resized as it lies in memory.
    """

    def __init__(self, image_size: int, mode: str) -> None:
        self.image_size, self.mode = image_size, mode

    def __call__(self, image: Tensor) -> Tensor:
        import torch

        height, width = image.shape[-2:]
        top, left, tall, wide = random_part(height, width)
        part = _resized(image[:, top : top + tall, left : left + wide], (self.image_size, self.image_size), self.mode)
        # As they are collated, which is quicker image by image.
        return (part.flip(-1) if torch.rand(()).item() < 0.5 else part).contiguous()


class Centre:
    """The shorter side resized to ``shorter``, then the square in the middle."""

    def __init__(self, image_size: int, shorter: int, mode: str) -> None:
        self.image_size, self.shorter, self.mode = image_size, shorter, mode

    def __call__(self, image: Tensor) -> Tensor:
        size, (height, width) = self.image_size, image.shape[-2:]
        least = min(height, width)
        # Rounded down, as torchvision does.
        image = _resized(image, (self.shorter * height // least, self.shorter * width // least), self.mode)
        top, left = (round((length - size) / 2) for length in image.shape[-2:])
        return image[:, top : top + size, left : left + size]


def random_part(height: int, width: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random part, drawn as torchvision's RandomResizedCrop does."""
    import torch

    low, high = math.log(RATIO[0]), math.log(RATIO[1])
    for _ in range(10):
        share, ratio, down, right = torch.rand(4).tolist()
        area = height * width * (AREA[0] + (AREA[1] - AREA[0]) * share)
        aspect = math.exp(low + (high - low) * ratio)
        wide, tall = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            return int(down * (height - tall + 1)), int(right * (width - wide + 1)), tall, wide
    # Too long or too high for any of these: the middle, as wide and as high as the ratios allow.
    aspect = min(max(width / height, RATIO[0]), RATIO[1])
    wide, tall = min(width, round(height * aspect)), min(height, round(width / aspect))
    return (height - tall) // 2, (width - wide) // 2, tall, wide


def _resized(image: Tensor, size: tuple[int, int], mode: str) -> Tensor:
    if image.shape[-2:] == size:
        return image
    import torch
    import torch.nn.functional as F

    if mode not in ("bilinear", "bicubic"):  # of few weights; torchvision knows them
        from torchvision.transforms import InterpolationMode, v2

        return v2.functional.resize(image, list(size), InterpolationMode(mode), antialias=True)  # type: ignore[no-any-return]
    # uint8 in, uint8 out: the kernel for bytes is the fast one, and rounds as an image viewer does. It takes half
    # of the time for channels that lie side by side, and does not see it of a part that was cut out.
    image = image[None].contiguous(memory_format=torch.channels_last)
    return F.interpolate(image, size=size, mode=mode, align_corners=False, antialias=True)[0]
