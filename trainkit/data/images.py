"""Image files: reading and decoding."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit import reading
from trainkit.errors import UserError

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".ppm", ".pgm", ".tif", ".tiff")

_LONGEST = 1 << 30
MOST_PIXELS = 2 * 89_478_485
"""Beyond that Pillow takes an image for an attack."""


class BrokenImageError(UserError):
    """A file that holds no image, or a damaged one: a matter of the data, which will be so the next time."""

    def __init__(self, what: str, *, why: str = "", fix: str = "", key: str | None = None, file: str = "") -> None:
        super().__init__(what, why=why, fix=fix, key=key)
        self.file = file


def read_image(path: Path, in_chans: int) -> Tensor:
    """The image in ``path`` as uint8 [in_chans, H, W], in_chans 1 (gray) or 3 (RGB).

    Raises:
        UserError: naming the file, for what cannot be read or is no file.
        BrokenImageError: for what cannot be decoded.
    """
    return decode_image(read_content(path), in_chans, str(path))


def decode_image(data: numpy.ndarray[Any, Any], in_chans: int, name: str) -> Tensor:
    """The image whose file holds the bytes ``data``, as `read_image` gives it.

    JPEG goes to libjpeg-turbo itself, whose pixels are Pillow's to the last bit, in half of its time; everything else,
    and what it does not read (CMYK, damaged ones), to Pillow. Not to torchvision's decoders: a damaged PNG ends its
    libpng with SIGSEGV, and the whole process.

    Raises BrokenImageError naming the file.
    """
    import torch

    # In memory the channels stay side by side, as the decoder writes them and resizing likes them.
    return torch.from_numpy(decode_pixels(data, in_chans, name)).permute(2, 0, 1)


def decode_pixels(data: numpy.ndarray[Any, Any], in_chans: int, name: str) -> numpy.ndarray[Any, Any]:
    """The same as uint8 [H, W, in_chans], without torch."""
    if data[:3].tobytes() == b"\xff\xd8\xff" and _is_of_sane_size(data):
        import simplejpeg

        with suppress(ValueError):  # Pillow says what is wrong with it, or makes what it can of it
            return simplejpeg.decode_jpeg(data, "GRAY" if in_chans == 1 else "RGB")  # type: ignore[no-any-return]
    return _decode_with_pillow(data, name, in_chans)


def read_content(path: Path) -> numpy.ndarray[Any, Any]:
    """A file's bytes. A FIFO called x.jpg would be waited for without end."""
    import numpy

    try:
        with reading.open_regular(path, buffering=0, follow=True) as file:
            reading.require_size(file, _LONGEST)
            data = numpy.empty(os.fstat(file.fileno()).st_size, numpy.uint8)
            done = 0
            while done < data.size and (
                count := file.readinto(data.data[done:])  # type: ignore[attr-defined]
            ):  # network file systems give less at a time
                done += count
            return data[:done]
    except OSError as error:
        fix = "Check the file, its permissions and the disk that it is on."
        if isinstance(error, FileNotFoundError):
            fix = "Put it back: it was there when the data's folder was listed."
            if os.path.islink(path):
                fix = f"It is a link to {os.readlink(path)}, where nothing is: bring that, or remove the link."
        raise UserError(f"Cannot read {path}.", why=str(error), fix=fix) from None


def _is_of_sane_size(data: numpy.ndarray[Any, Any]) -> bool:
    """Whether a JPEG says at its beginning that it is no larger than what Pillow lets pass: with two bytes changed, a
    thumbnail claims 60000 x 60000 pixels, and a decoder fills 11 GB with gray."""
    view, at = data.data, 2
    while at + 9 < len(view) and view[at] == 0xFF:
        kind, length = view[at + 1], view[at + 2] << 8 | view[at + 3]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):  # the start of a frame, in any of its kinds
            height, width = view[at + 5] << 8 | view[at + 6], view[at + 7] << 8 | view[at + 8]
            return height * width <= MOST_PIXELS
        at += 2 + length if kind != 0xFF else 1  # markers may be padded
    return False  # let Pillow make what it can of it


def _decode_with_pillow(data: numpy.ndarray[Any, Any], name: str, in_chans: int) -> numpy.ndarray[Any, Any]:
    import io

    import numpy
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(data.tobytes())) as file:
            picture: Image.Image = file
            if picture.mode.startswith("I"):  # 16 bits gray, which Pillow would clip instead of scale
                picture = Image.fromarray((numpy.asarray(picture) >> 8).astype(numpy.uint8))
            pixels = numpy.array(picture.convert("L" if in_chans == 1 else "RGB"))
    except Exception as error:  # Pillow's plugins raise anything on a damaged file
        unknown = isinstance(error, UnidentifiedImageError)  # whose words name an address in memory
        raise BrokenImageError(
            f"Cannot decode the image {name}.",
            why="It is no image in any known format." if unknown else f"{type(error).__name__}: {error}",
            fix="Replace the file, or delete it: a damaged image helps nobody. Or skip some with data.max_broken=10.",
            file=name,
        ) from None
    return pixels[:, :, None] if in_chans == 1 else pixels
