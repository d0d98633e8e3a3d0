"""Image files: decoding, and the augmentation of photographs."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.data.base import Transform
from trainkit.errors import UserError

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")

PHOTO_MEAN, PHOTO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, which pretrained models expect."""


def photo_statistics(in_chans: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and std of photographs for RGB or, averaged, for gray images."""
    if in_chans == 3:
        return PHOTO_MEAN, PHOTO_STD
    return (sum(PHOTO_MEAN) / 3,) * in_chans, (sum(PHOTO_STD) / 3,) * in_chans


def photo_transforms(image_size: int, *, augment: bool) -> tuple[Transform, Transform]:
    """Train and eval transform of photographs of any size: random part and mirror image; centre of the shorter side."""
    from torchvision.transforms import v2

    evaluate = v2.Compose([v2.Resize(round(image_size * 256 / 224), antialias=True), v2.CenterCrop(image_size)])
    if not augment:
        return evaluate, evaluate
    train = v2.Compose([v2.RandomResizedCrop(image_size, antialias=True), v2.RandomHorizontalFlip()])
    return train, evaluate


def read_image(path: Path, in_chans: int) -> Tensor:
    """The image in ``path`` as uint8 [in_chans, H, W], in_chans 1 (gray) or 3 (RGB).

    torchvision's decoder, a third faster than Pillow; Pillow for what it does not read (CMYK, TIFF, BMP and others).
    Raises UserError, naming the file, for what neither reads.
    """
    import numpy
    import torch

    try:
        data = numpy.fromfile(path, dtype=numpy.uint8)
    except OSError as error:
        raise UserError(
            f"Cannot read {path}.", why=str(error), fix="Check the file; it was there when the run began."
        ) from None
    decode = _torchvision_decoder()
    if decode is not None:
        try:
            image: Tensor = decode(torch.from_numpy(data), in_chans)
            if image.ndim == 4:  # an animation: its first picture
                image = image[0]
            if image.dtype != torch.uint8:  # PNG of 16 bits a channel
                image = (image.to(torch.int32) >> 8).to(torch.uint8)
            return image
        except RuntimeError:
            pass
    return _read_with_pillow(data, path, in_chans)


@lru_cache(maxsize=1)
def _torchvision_decoder() -> Callable[[Tensor, int], Tensor] | None:
    try:
        from torchvision.io import ImageReadMode, decode_image
    except ImportError:  # announced for a later torchvision
        return None
    modes = {1: ImageReadMode.GRAY, 3: ImageReadMode.RGB}

    def decode(data: Tensor, in_chans: int) -> Tensor:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the announcement
            return decode_image(data, mode=modes[in_chans])  # type: ignore[no-any-return]

    return decode


def _read_with_pillow(data: numpy.ndarray[Any, Any], path: Path, in_chans: int) -> Tensor:
    import io

    import numpy
    import torch
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data.tobytes())) as picture:
            if picture.mode.startswith("I"):  # 16 bits gray, which Pillow would clip instead of scale
                picture = Image.fromarray((numpy.asarray(picture) >> 8).astype(numpy.uint8))
            pixels = numpy.array(picture.convert("L" if in_chans == 1 else "RGB"))
    except Exception as error:  # Pillow's plugins raise anything on a damaged file
        raise UserError(
            f"Cannot decode the image {path}.",
            why=f"{type(error).__name__}: {error}",
            fix="Replace the file, or delete it: a damaged image helps nobody.",
        ) from None
    return torch.from_numpy(pixels[None] if in_chans == 1 else pixels.transpose(2, 0, 1).copy())
