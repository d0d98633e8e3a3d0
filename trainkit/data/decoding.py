"""From an image file to pixels: one way for training, packs, shards and prediction.

Pixels are bytes, so each depth of a file has one scale, whatever the values in it: a whole data set has to have the
same. What has none, as 32-bit numbers of any size, is refused by its name, and never black.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.common import fileio
from trainkit.common.errors import UserError
from trainkit.data.image_kinds import START, kind_of

if TYPE_CHECKING:
    import numpy
    from PIL import Image
    from torch import Tensor

    Pixels = numpy.ndarray[Any, Any]

MOST_PIXELS = 2 * 89_478_485
"""Pillow takes a larger image for an attack."""
_LONGEST = 1 << 30
_WITHOUT_START = ("SGI", "PCX", "DIB", "TGA")
"""Plugins for kinds that have no beginning of their own."""
# Tags of TIFF.
_SUBFILE = 254
_BITS = 258
_PHOTOMETRIC = 262
_SAMPLE_FORMAT = 339


Box = tuple[int, int, int, int]
"""Top, left, height and width of a part of an image."""


@dataclass(frozen=True)
class Part:
    """The part of an image that is wanted."""

    choose: Callable[[int, int], Box]
    """Height and width of the image -> its part. It is asked once, for it may draw random numbers."""
    size: int
    """Sides that the part is resized to. From a part that is twice as large or more, a JPEG file may be decoded at half
    of its size, or at less."""

    def factor(self, box: Box) -> int:
        """Divisor of the size at which a JPEG file is decoded for this part of it."""
        for factor in (8, 4, 2):
            if min(box[2:]) >= factor * self.size:
                return factor
        return 1


def cut(pixels: Pixels, box: Box, factor: int = 1) -> Pixels:
    """The part ``box`` of pixels [H, W, C]; ``box`` is that of an image which is ``factor`` times as large."""
    top, left, height, width = box
    rows = slice(round(top / factor), round((top + height) / factor))
    columns = slice(round(left / factor), round((left + width) / factor))
    return pixels[rows, columns]


class BrokenImageError(UserError):
    """A file that holds no image, or a damaged one: it will be so the next time as well."""

    def __init__(self, what: str, *, why: str = "", fix: str = "", key: str | None = None, file: str = "") -> None:
        super().__init__(what, why=why, fix=fix, key=key)
        self.file = file


def read_image(path: Path, in_chans: int, *, exif: bool = False, part: Part | None = None) -> Tensor:
    """Read an image as uint8 [in_chans, H, W], in_chans 1 (gray) or 3 (RGB).

    Args:
        exif: turn it upright, as the orientation in its EXIF data says.
        part: what is wanted of it; None: all.

    Raises:
        UserError: the file cannot be read, or is no regular file.
        BrokenImageError: it cannot be decoded.
    """
    return decode_image(read_content(path), in_chans, str(path), exif=exif, part=part)


def read_content(path: Path) -> bytes:
    """Read a file's bytes. A FIFO called x.jpg is refused and not waited for."""
    fix = "Check the file, its permissions and its disk; if it is a link, check its target."
    with fileio.disk_errors_as(f"Cannot read {path}.", fix=fix):
        return fileio.read_bytes(path, _LONGEST, follow=True)


def decode_image(
    data: bytes | memoryview, in_chans: int, name: str, *, exif: bool = False, part: Part | None = None
) -> Tensor:
    """Decode the bytes of an image file as `read_image` does. Raises BrokenImageError naming the file."""
    import torch

    # In memory the channels stay side by side, as the decoder writes them and resizing likes them.
    return torch.from_numpy(decode_pixels(data, in_chans, name, exif=exif, part=part)).permute(2, 0, 1)


def decode_pixels(
    data: bytes | memoryview, in_chans: int, name: str, *, exif: bool = False, part: Part | None = None
) -> Pixels:
    """Decode the bytes of an image file to uint8 [H, W, in_chans], without torch.

    JPEG goes to libjpeg-turbo itself, whose pixels are Pillow's to the last bit, in half of the time; everything else,
    and what it does not read, to Pillow. Not to torchvision's decoders: a damaged PNG ends its libpng with SIGSEGV, and
    the whole process.
    """
    box: Box | None = None
    if data[:3] == b"\xff\xd8\xff":
        with suppress(Exception):  # of 4:4:1 it is a KeyError. Pillow says what is wrong, or makes what it can of it
            photo = _JpegPhoto(data, exif=exif)
            if part is None:
                return photo.decode(in_chans)
            box = part.choose(photo.height, photo.width)
            return cut(photo.decode(in_chans, part.factor(box)), box, part.factor(box))
    pixels = _decode_with_pillow(data, name, in_chans, exif=exif)
    if part is None:
        return pixels
    return cut(pixels, box or part.choose(*pixels.shape[:2]))


class _JpegPhoto:
    """A JPEG file whose header is read; ``height`` and ``width`` are those of the photo as it is turned."""

    def __init__(self, data: bytes | memoryview, *, exif: bool) -> None:
        import simplejpeg

        height, width, self._colours, _ = simplejpeg.decode_jpeg_header(data)
        # With two bytes changed, a thumbnail claims 60000 x 60000, and a decoder fills 11 GB with gray.
        if height * width > MOST_PIXELS or self._colours not in ("Gray", "YCbCr", "RGB"):
            raise ValueError
        self._data = data
        self._stored = (height, width)
        self._turn = _orientation(data) if exif else 1
        self._is_lying = self._turn in (5, 6, 7, 8)  # rows and columns are exchanged
        self.height = width if self._is_lying else height
        self.width = height if self._is_lying else width

    def decode(self, in_chans: int, factor: int = 1) -> Pixels:
        """uint8 [H, W, in_chans], or at a size divided by ``factor``: 2, 4 or 8."""
        import numpy
        import simplejpeg

        is_gray = self._colours == "Gray" and in_chans == 1
        height, width = self._stored
        least = (-(-height // factor), -(-width // factor))
        pixels: Pixels = simplejpeg.decode_jpeg(
            self._data, "GRAY" if is_gray else "RGB", min_height=least[0], min_width=least[1]
        )
        if pixels.shape[:2] != least:
            raise ValueError
        if in_chans == 1 and not is_gray:
            pixels = gray_of(pixels)
        if self._is_lying:
            pixels = pixels.swapaxes(0, 1)
        if self._turn in (3, 4, 7, 8):  # upside down
            pixels = pixels[::-1]
        if self._turn in (2, 3, 6, 7):  # mirrored
            pixels = pixels[:, ::-1]
        return numpy.ascontiguousarray(pixels)


def _orientation(data: bytes | memoryview) -> int:
    """Read from a JPEG file's EXIF data how the camera was held; 1, upright, where there is none or it is broken.

    It is turned as Pillow's `ImageOps.exif_transpose` does, which takes no arrays.
    """
    from PIL import ExifTags

    with suppress(Exception), _opened(io.BytesIO(data)) as file:  # it reads the header alone
        return int(file.getexif().get(ExifTags.Base.Orientation, 1))
    return 1


def gray_of(pixels: Pixels) -> Pixels:
    """Gray [H, W, 1] of RGB pixels [H, W, 3], by the one formula that files, packs and arrays have in common.

    Not what a JPEG file stores as its brightness, which packs do not have: where colours are clipped, it is another.
    """
    import numpy
    from PIL import Image

    return numpy.array(Image.fromarray(pixels).convert("L"))[:, :, None]


def _opened(file: io.BytesIO | Any) -> Image.Image:
    """An image whose header is read, by the plugin for what the file begins with."""
    from PIL import Image

    kind = kind_of(file.read(START))
    file.seek(0)
    # Pillow tries no other plugin than that of the kind: one for EPS runs another program.
    plugins = (kind.upper().replace(" ", ""),) if kind else _WITHOUT_START
    try:
        return Image.open(file, formats=plugins)
    except KeyError:
        raise _refused(f"This Pillow does not read {kind}; newer ones do.", "Install pillow>=11.3.") from None


def _refused(why: str, fix: str) -> BrokenImageError:
    return BrokenImageError("Cannot decode the image.", why=why, fix=fix)


def _decode_with_pillow(data: bytes | memoryview, name: str, in_chans: int, *, exif: bool) -> Pixels:
    from PIL import UnidentifiedImageError

    try:
        with _opened(io.BytesIO(data)) as file:
            return pixels_of(file, in_chans, exif=exif)
    except BrokenImageError as error:
        why = error.why
        fix = error.fix
    except UnidentifiedImageError:  # its own words name an address in memory
        kind = kind_of(bytes(data[:START]))
        why = "It is not an image in a known format."
        fix = _REPLACE
        if kind:
            why = f"It begins as a {kind} file, but is damaged, or a variant that Pillow does not read."
    except Exception as error:  # Pillow's plugins raise anything on a damaged file
        why = f"{type(error).__name__}: {error}"
        fix = _REPLACE
    raise BrokenImageError(f"Cannot decode the image {name}.", why=why, fix=fix, file=name)


_SCALE = "Convert all images to 8 bits with one scale: the files do not say which value is white."
_REPLACE = "Replace or delete the file; or skip some with data.max_broken=10."


def pixels_of(picture: Image.Image, in_chans: int, *, exif: bool = False) -> Pixels:
    """The pixels of a picture of Pillow's, uint8 [H, W, in_chans].

    Raises BrokenImageError for values without a scale, and what Pillow raises.
    """
    import numpy
    from PIL import ImageOps

    tags: Any = {}
    if picture.format == "TIFF":
        tags = getattr(picture, "tag_v2", {})
    scaled_to_16 = picture.format in ("PPM", "PNG")  # its mode may be that of 32 bits
    if tags.get(_SUBFILE, 0) & 1:
        raise _refused("Its first picture is a preview, as in raw data of a camera.", "Convert it to JPEG or PNG.")
    if exif:
        picture = ImageOps.exif_transpose(picture) or picture  # Pillow 11 declares that it may be None
    if picture.mode[0] in "IF" or _is_signed(tags):
        gray = _eight_bits(numpy.asarray(picture), picture.mode, tags, scaled_to_16)[:, :, None]
        return gray if in_chans == 1 else numpy.repeat(gray, 3, axis=2)
    if in_chans == 1 and picture.mode in ("1", "L", "LA"):
        return numpy.array(picture.convert("L"))[:, :, None]
    if picture.mode != "RGB":  # it would be copied
        picture = picture.convert("RGB")
    pixels = numpy.array(picture)
    return gray_of(pixels) if in_chans == 1 else pixels


def _is_signed(tags: Any) -> bool:
    formats = tags.get(_SAMPLE_FORMAT, (1,))
    return 2 in (formats if isinstance(formats, tuple) else (formats,))


def _eight_bits(values: Pixels, mode: str, tags: Any, scaled_to_16: bool) -> Pixels:
    """Gray values of more than 8 bits, or with a sign, as bytes."""
    import numpy

    bits = tags.get(_BITS, (16,))[0]
    photometric = tags.get(_PHOTOMETRIC, 1)
    if mode.startswith("I;16") or (mode == "I" and scaled_to_16):
        whole: Pixels = (values >> max(bits - 8, 0)).astype(numpy.uint8)
        if not whole.any() and values.any():
            why = f"Its values are at most {values.max()}, and white is {(1 << bits) - 1}: the image would be black."
            raise _refused(why, _SCALE)
        return 255 - whole if photometric == 0 else whole  # Pillow inverts 8 bits alone
    if mode not in ("I", "F"):  # bytes with a sign, which Pillow takes for bytes without
        values = values.view(numpy.int8)
    least = values.min()
    most = values.max()
    what = f"integers with a sign, or of more than 16 bits, in {bits} bits"
    if mode == "F":
        what = "32-bit floats"
    if not (least >= 0 and most <= 255):  # NaN is neither
        raise _refused(f"It has {what}, from {least:.4g} to {most:.4g}; only 0 to 255 are accepted.", _SCALE)
    if mode == "F" and (0 < most <= 1 or photometric == 0):
        raise _refused(f"It has {what}, from {least:.4g} to {most:.4g}: white may be 1 or 255.", _SCALE)
    return values.astype(numpy.uint8)


def is_image(data: bytes) -> bool:
    """Tell whether these bytes begin as an image's do."""
    return bool(kind_of(data[:START]) or shorter_sides([data]))


def shorter_sides(files: Iterable[Path | bytes]) -> list[int]:
    """Return the shorter sides of images, read from their headers alone; unreadable files are skipped."""
    sides: list[int] = []
    for file in files:
        with suppress(Exception):
            opened = io.BytesIO(file) if isinstance(file, bytes) else fileio.open_regular(file, follow=True)
            with opened as content, _opened(content) as image:
                sides.append(min(image.size))
    return sides
