"""A pack: all images of a data set in one file that is mapped into memory, smaller than they were and quick to read.

ROOT/NAME-SIDE.pack/ holds ``images.bin``, the records one after the other; ``index.bin``, one `RECORD` for each;
``files.bin``, the listing of the files that they were; and ``pack.json``, which names the hashes of the other two.
"""

from __future__ import annotations

import hashlib
import mmap
import zlib
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit import reading, terminal
from trainkit.data.images import BrokenImageError, decode_image
from trainkit.data.tree import Listing
from trainkit.errors import TrainkitError, UserError

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

LONGEST = 1 << 32
"""Bytes of the index or the listing: a hundred million images."""
IMAGES, INDEX, FILES, ABOUT = "images.bin", "index.bin", "files.bin", "pack.json"
FORMAT = 1

RECORD = [("start", "<u8"), ("size", "<u4"), ("crc", "<u4"), ("height", "<u2"), ("width", "<u2"), ("kind", "u1")]
"""Of numpy: where a record's bytes lie, their CRC-32, the image's size, and one of these kinds:"""
BROKEN, PIXELS, ENCODED = 0, 1, 2
"""Nothing, the file was no image; RGB pixels [H, W, 3]; an image file, as a rule JPEG."""


def pack_folder(root: Path, name: str, side: int) -> Path:
    """Where the pack of a data set is."""
    return root / f"{name}-{side}.pack"


class Pack:
    """The files of a pack, as those of a `trainkit.data.tree.Tree`.

    Raises:
        UserError: naming the pack, where it is damaged or cut short.
    """

    def __init__(self, folder: Path) -> None:
        import numpy

        self.folder = folder
        try:
            about: dict[str, Any] = reading.parse(reading.read_bytes(folder / ABOUT, follow=True))
            if about["format"] != FORMAT:
                raise ValueError(f"its format is {about['format']}, not {FORMAT}")
            for file in (INDEX, FILES):
                if (
                    hashlib.sha256(reading.read_bytes(folder / file, LONGEST, follow=True)).hexdigest()
                    != about["sha256"][file]
                ):
                    raise ValueError(f"{file} has another hash")
            self._listing = Listing.from_bytes(reading.read_bytes(folder / FILES, LONGEST, follow=True))
            self._index = numpy.memmap(folder / INDEX, RECORD, mode="r")
            self.size = int(self._index["start"][-1]) + int(self._index["size"][-1])
            if len(self._index) != len(self._listing) or (folder / IMAGES).stat().st_size != self.size:
                raise ValueError(f"{IMAGES} is cut short, or of another pack")
        except (OSError, ValueError, KeyError, TypeError, IndexError, TrainkitError) as error:
            raise broken_pack(folder, str(error)) from None
        self.splits = self._listing.splits

    def __len__(self) -> int:
        return len(self._index)

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["folder"])  # type: ignore[misc]  # a worker that is not forked maps the files anew

    @cached_property
    def _images(self) -> memoryview:
        """Mapped when it is first read: so its pages are shared by all ranks and workers of a node."""
        with (self.folder / IMAGES).open("rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)) if self.size else memoryview(b"")

    @cached_property
    def stacked(self) -> Tensor | None:
        """All images, uint8 [N, 3, H, W], where they are mapped; None if they are not pixels of one size."""
        import torch

        index = self._index
        height, width = int(index["height"][0]), int(index["width"][0])
        size = height * width * 3
        alike = (index["kind"] == PIXELS) & (index["height"] == height) & (index["width"] == width)
        if not size or not alike.all() or self.size != size * len(self):
            return None
        with (self.folder / IMAGES).open("rb") as file:  # a tensor may be written to: that would be ours alone
            pixels = torch.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8)
        return pixels.view(len(self), height, width, 3).permute(0, 3, 1, 2)

    def name(self, position: int) -> str:
        """Below its class's folder."""
        return self._listing.name(position)

    def path(self, position: int) -> str:
        """SPLIT/CLASS/NAME."""
        return self._listing.path(position)

    def read(self, position: int, in_chans: int) -> Tensor:
        """As `trainkit.data.images.read_image` gives it.

        Raises:
            BrokenImageError: the file was no image when it was packed.
            UserError: the pack is damaged here. Pixels are not looked at for that, which would take longer than all the
                rest: `verify` does.
        """
        import numpy
        import torch

        start, size, crc, height, width, kind = self._index[position].item()
        if kind == BROKEN:
            raise BrokenImageError(
                f"Cannot decode the image {self.path(position)} in {self.folder}.",
                why="It was broken already when it was packed.",
                fix="Replace or delete the file and pack again; or skip some with data.max_broken=10.",
                file=self.path(position),
            )
        data = numpy.frombuffer(self._images[start : start + size], numpy.uint8)
        if kind == ENCODED:
            if zlib.crc32(data.data) != crc:
                raise self._damaged(position)
            return decode_image(data, in_chans, self.path(position))
        pixels = data.reshape(height, width, 3)
        if in_chans == 1:
            from PIL import Image

            return torch.from_numpy(numpy.array(Image.fromarray(pixels).convert("L"))[None])
        return torch.from_numpy(pixels.copy()).permute(2, 0, 1)  # a tensor could be written to, the mapping not

    def verify(self) -> list[str]:
        """Read everything. The files that were broken already when they were packed.

        Raises UserError for the first record that is not as it was written.
        """
        broken = []
        for position, (start, size, crc, _, _, kind) in enumerate(self._index.tolist()):
            if zlib.crc32(self._images[start : start + size]) != crc:
                raise self._damaged(position)
            if kind == BROKEN:
                broken.append(self.path(position))
        return broken

    def _damaged(self, position: int) -> UserError:
        return broken_pack(self.folder, f"the record of {self.path(position)} has another checksum")


def require_pack(folder: Path, name: str, side: int) -> None:
    """Refuse, without reading it, a pack that is not there."""
    if not (folder / ABOUT).is_file():
        raise UserError(
            f"There is no pack {folder}.",
            why=f"data.pack={side} reads the images from it.",
            fix=terminal.command("prepare", name, "--root", folder.parent, "--pack", side),
            key="data.pack",
        )


def broken_pack(folder: Path, why: str) -> UserError:
    """The error for a pack that is not as it was written."""
    return UserError(
        f"The pack {folder} is damaged.",
        why=f"{why}.",
        fix="Delete the folder and prepare it again, or copy it again.",
        key="data.pack",
    )


def smaller(pixels: numpy.ndarray[Any, Any], side: int) -> numpy.ndarray[Any, Any]:
    """An image uint8 [H, W, 3] whose shorter side is at most ``side``."""
    import numpy
    from PIL import Image

    height, width = pixels.shape[:2]
    least = min(height, width)
    if least <= side:
        return pixels
    size = (side * width // least, side * height // least)  # rounded as for evaluation
    return numpy.asarray(Image.fromarray(pixels).resize(size, Image.Resampling.BILINEAR))
