"""Transforms of photographs of any size: a random part, or the middle."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

from trainkit.common import image_input
from trainkit.common.image_input import DataInfo, ModelInput
from trainkit.data.base import Samples, Splits, Transform

if TYPE_CHECKING:
    from torch import Tensor


PHOTO_MEAN = (0.485, 0.456, 0.406)
"""Mean of ImageNet's pixels, which pretrained models expect."""
PHOTO_STD = (0.229, 0.224, 0.225)

AREA = (0.08, 1.0)
"""Smallest and largest share of the photo that a random part has. This and `RATIO` are those of Szegedy et al., "Going
Deeper with Convolutions", and of torchvision since."""
RATIO = (3 / 4, 4 / 3)
"""Smallest and largest width of a random part over its height."""


@dataclass(frozen=True, kw_only=True)
class Photos:
    """Options of data sets of photographs of any size."""

    image_size: int = 224
    """Side of the images in pixels; a new run without it uses the median of the shorter sides, up to 224."""
    in_chans: Literal[1, 3] = 3
    augment: bool = True
    exif: bool = False
    """Turn photos upright, as their EXIF data says."""


def photo_splits(name: str, classes: Sequence[str], parts: Iterable[Samples], photos: Photos) -> Splits:
    """A data set of photographs; ``parts`` are train, val and test, upright where that is asked for."""
    channels = photos.in_chans
    mean = image_input.of_channels(PHOTO_MEAN, channels)
    std = image_input.of_channels(PHOTO_STD, channels)
    info = DataInfo(name, len(classes), channels, photos.image_size, tuple(classes), mean, std, photos.exif)
    transforms_for = partial(photo_transforms, photos.image_size, augment=photos.augment)
    train, val, test = parts
    return Splits(info, train, val, test, *transforms_for(), transforms_for=transforms_for)


def photo_transforms(
    image_size: int, expected: ModelInput | None = None, *, augment: bool
) -> tuple[Transform, Transform]:
    """Train and eval transform of photographs of any size: random part and mirror image; centre of the shorter side.

    Pretrained weights, ``expected``, have their own way of resizing and cropping.
    """
    mode = "bilinear"
    shorter = round(image_size * 256 / 224)
    if expected is not None:
        mode = expected.interpolation
        # Rounded down, as timm does; but 224 / (224 / 354) is less than 354.
        shorter = math.floor(image_size / expected.crop + 1e-6)
    evaluate = CenterCrop(image_size, shorter, mode)
    if not augment:
        return evaluate, evaluate
    return RandomResizedCrop(image_size, mode), evaluate


@dataclass(frozen=True)
class RandomResizedCrop:
    """A random part of the photo, resized, and mirrored every second time.

    The pixels of torchvision's RandomResizedCrop and RandomHorizontalFlip for the same draw, at two thirds of the cost
    and without torchvision's import: numbers are drawn as numbers, and a photo is resized as it lies in memory. Who
    loads photos draws the part with `random_part` while one is read, and calls `finish`.
    """

    image_size: int
    mode: str

    def __call__(self, image: Tensor) -> Tensor:
        top, left, tall, wide = random_part(*image.shape[-2:])
        return self.finish(image[:, top : top + tall, left : left + wide])

    def finish(self, part: Tensor) -> Tensor:
        """Resize a part, and mirror it every second time."""
        import torch

        part = _resized(part, (self.image_size, self.image_size), self.mode)
        return part.flip(-1) if torch.rand(()).item() < 0.5 else part


@dataclass(frozen=True)
class CenterCrop:
    """The shorter side resized to ``shorter``, then the square in the middle, with black around what is smaller."""

    image_size: int
    shorter: int
    mode: str

    def __call__(self, image: Tensor) -> Tensor:
        image = _shortened(image)
        size = self.image_size
        height, width = image.shape[-2:]
        least = min(height, width)
        # Rounded down, as torchvision does.
        image = _resized(image, (self.shorter * height // least, self.shorter * width // least), self.mode)
        down, right = (max(size - side, 0) for side in image.shape[-2:])
        if down or right:  # timm has weights of which an image is 0.87 times as large as what they see
            from torch.nn.functional import pad

            image = pad(image, (right // 2, (right + 1) // 2, down // 2, (down + 1) // 2))
        top = round((image.shape[-2] - size) / 2)
        left = round((image.shape[-1] - size) / 2)
        return image[:, top : top + size, left : left + size]


LONGEST_STRIP = 16
"""Longer side over the shorter one: of a longer strip the middle is resized, or one of 2 x 10,000 takes a gigabyte."""


def _shortened(image: Tensor) -> Tensor:
    """The middle of a strip; any other image as it is."""
    height, width = image.shape[-2:]
    most = LONGEST_STRIP * min(height, width)
    # So many are cut off that the middle stays the middle.
    top = (max(height - most, 0) + 1) // 2
    left = (max(width - most, 0) + 1) // 2
    return image[..., top : height - top, left : width - left]


def random_part(height: int, width: int) -> tuple[int, int, int, int]:
    """Top, left, height and width of a random part, drawn as torchvision's RandomResizedCrop does."""
    import torch

    low = math.log(RATIO[0])
    high = math.log(RATIO[1])
    for _ in range(10):
        share, ratio, down, right = torch.rand(4).tolist()
        area = height * width * (AREA[0] + (AREA[1] - AREA[0]) * share)
        aspect = math.exp(low + (high - low) * ratio)
        wide = round(math.sqrt(area * aspect))
        tall = round(math.sqrt(area / aspect))
        if 0 < wide <= width and 0 < tall <= height:
            return int(down * (height - tall + 1)), int(right * (width - wide + 1)), tall, wide
    # Too long or too high for any of these: the middle, as wide and as high as the ratios allow.
    aspect = min(max(width / height, RATIO[0]), RATIO[1])
    wide = min(width, round(height * aspect))
    tall = min(height, round(width / aspect))
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
    # of the time for channels that lie side by side, and goes by the stride of the batch of one.
    batch = image.permute(1, 2, 0)[None].permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
    return F.interpolate(batch, size=size, mode=mode, align_corners=False, antialias=True)[0]
