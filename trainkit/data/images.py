"""Image files: decoding, and the augmentation of photographs."""

from __future__ import annotations

import os
import stat
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.data.base import ModelInput, Transform
from trainkit.errors import UserError

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")

PHOTO_MEAN, PHOTO_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""Of ImageNet's pixels, which pretrained models expect."""


MOST_PIXELS = 2 * 89_478_485
"""Beyond that Pillow takes an image for an attack."""


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
    from torchvision.transforms import InterpolationMode, v2

    mode = InterpolationMode(expected.interpolation if expected else "bilinear")
    crop = expected.crop if expected else 224 / 256
    resize = v2.Resize(round(image_size / crop), interpolation=mode, antialias=True)
    evaluate = v2.Compose([resize, v2.CenterCrop(image_size)])
    if not augment:
        return evaluate, evaluate
    part = v2.RandomResizedCrop(image_size, interpolation=mode, antialias=True)
    return v2.Compose([part, v2.RandomHorizontalFlip()]), evaluate


def read_image(path: Path, in_chans: int) -> Tensor:
    """The image in ``path`` as uint8 [in_chans, H, W], in_chans 1 (gray) or 3 (RGB).

    JPEG and WebP go to torchvision's decoder, half as fast again as Pillow; everything else, and what it does not read
    (CMYK), to Pillow. PNG above all: a damaged one ends torchvision's libpng with SIGSEGV, and the whole process.

    Raises:
        UserError: naming the file, for what cannot be read, is no file, or is decoded by neither.
    """
    import torch

    data = _content(path)
    head = data[:12].tobytes()
    decode = _torchvision_decoder() if head.startswith(b"\xff\xd8\xff") or head[8:] == b"WEBP" else None
    if decode is not None and _is_of_sane_size(data):
        with suppress(RuntimeError):
            return decode(torch.from_numpy(data), in_chans)
    return _read_with_pillow(data, path, in_chans)


def _content(path: Path) -> numpy.ndarray[Any, Any]:
    """A file's bytes. A FIFO called x.jpg would be waited for without end."""
    import numpy

    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb", buffering=0) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode):
                raise OSError("It is no regular file.")
            data = numpy.empty(about.st_size, numpy.uint8)
            done = 0
            while done < data.size and (
                count := file.readinto(data.data[done:])
            ):  # network file systems give less at a time
                done += count
            return data[:done]
    except OSError as error:
        raise UserError(
            f"Cannot read {path}.", why=str(error), fix="Check the file; it was there when the run began."
        ) from None


def _is_of_sane_size(data: numpy.ndarray[Any, Any]) -> bool:
    """Whether a JPEG says at its beginning that it is no larger than what Pillow lets pass: with two bytes changed, a
    thumbnail claims 60000 x 60000 pixels, and torchvision fills 11 GB with gray. What is no JPEG passes."""
    view, at = data.data, 2
    if view[0] != 0xFF:
        return True
    while at + 9 < len(view) and view[at] == 0xFF:
        kind, length = view[at + 1], view[at + 2] << 8 | view[at + 3]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # the start of a frame, in any of its kinds
            height, width = view[at + 5] << 8 | view[at + 6], view[at + 7] << 8 | view[at + 8]
            return height * width <= MOST_PIXELS
        at += 2 + length if kind != 0xFF else 1  # markers may be padded
    return False  # let Pillow make what it can of it


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
