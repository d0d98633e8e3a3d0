"""Samples in shards, tar files as webdataset's or parquet: indexed once, read by byte range, in a block-wise order.

No library that iterates over shards resumes exactly. An index can: it says where each image lies, so that a shard is
as good as a folder of files. The order of an epoch is a function of (seed, epoch) as for other data: shards in random
order, and the samples of some shards at a time in random order. So each shard is needed for a while, and then no more.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainkit.common import fileio, jsonl, terminal
from trainkit.common.errors import UserError
from trainkit.data import decoding, image_kinds, losses, parquet
from trainkit.data.base import Keys
from trainkit.data.cache import LARGEST_SHARD, Cache, Shard
from trainkit.data.decoding import Part
from trainkit.data.losses import LostSamples
from trainkit.data.order import derive_seed
from trainkit.data.tar_samples import LARGEST_IMAGE, MEASURED, About, Found, Image, TarReader, are_numbers, refused

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

    Records = numpy.ndarray[Any, Any]

RECORD = [("start", "<u8"), ("size", "<u4"), ("crc", "<u4"), ("label", "<i4")]
"""A record of numpy: where an image's bytes lie in its shard, their CRC-32, and the number of its class."""
ColumnNames = tuple[str | None, str | None]
"""Columns of parquet that hold images and labels, as the user chose them; None: as the file says of itself."""
LONGEST_INDEX = 1 << 32
"""Bytes: two hundred million images."""
MOST_CLASSES = 100_000
_HEADER = 512
"""Bytes of what a tar file says of a member, just before its content."""
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


class Piece(NamedTuple):
    """The index of one shard."""

    shard: Shard
    labels: list[str]
    """Labels of the classes in it."""
    sides: list[int]
    """The shorter sides of its first images."""
    records: Records
    about: About

    def to_bytes(self) -> bytes:
        """Write the index of this shard for a file."""
        head = json.dumps([self.shard, self.labels, self.sides, self.about])
        return head.encode() + b"\n" + self.records.tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> Piece:
        """Read what `to_bytes` gave. Raises ValueError or TypeError for anything else: it may be a stranger's."""
        import numpy

        head, _, rest = content.partition(b"\n")
        shard_facts, labels, sides, *more = fileio.parse(head)
        shard = Shard.checked(*shard_facts)
        are_texts = isinstance(labels, list) and all(isinstance(item, str) for item in labels)
        if not are_texts or len(labels) > MOST_CLASSES:
            raise ValueError(f"the classes of {shard.name} are no list of names")
        if not isinstance(sides, list) or not all(map(jsonl.is_whole, sides)):
            raise ValueError(f"the sizes of the images in {shard.name} are no numbers")
        about = About.checked(*more[0]) if more else About.of_before(labels)
        if about.numbers and not are_numbers(labels):
            raise ValueError(f"the classes of {shard.name} are no numbers")
        records = numpy.frombuffer(rest, RECORD)
        if not len(records) and about.lost.keys() == {losses.NO_LABEL}:  # of a test split without labels
            return cls(shard, labels, sides, records, about)
        starts = records["start"]
        sizes = records["size"]
        numbers = records["label"]
        first = 0 if shard.columns else _HEADER
        if not len(records) or starts.min() < first or starts.max() > shard.kept or sizes.max() > LARGEST_IMAGE:
            raise ValueError(f"an image lies outside of {shard.name}, or is too large")
        if (starts + sizes).max() > shard.kept:  # the sum of two such numbers does not overflow
            raise ValueError(f"an image lies outside of {shard.name}")
        if numbers.min() < 0 or numbers.max() >= len(labels):
            raise ValueError(f"{shard.name} has images of a class without a name")
        return cls(shard, labels, sides, records, about)


def index(
    name: str,
    blocks: Iterator[bytes],
    where: str,
    columns: ColumnNames = (None, None),
    *,
    may_lack_labels: bool = False,
) -> Piece:
    """Read a shard, and say what is in it.

    Args:
        columns: of a tar file the first is the extension of the images, or several, as in ``jpg;png``.
        may_lack_labels: it is of a test split, which may be without them.

    Raises:
        UserError: it is no such file, or out of all proportion, or nothing in it can be trained on.
    """
    import numpy

    stream = _Stream(blocks, where)
    used: tuple[str, str] | None = None
    image, label = columns
    if stream.first().startswith(_COMPRESSED):  # before any of it is unpacked, to whatever size that has
        raise refused(where, "It is compressed", "Unpack it: single images cannot be read from a compressed file.")
    if name.endswith(".parquet"):
        with tempfile.TemporaryFile() as file:
            file.writelines(iter(lambda: stream.read(1 << 20), b""))
            lost = LostSamples()
            with parquet.opened(file, where, image, label, lost=lost, may_lack_labels=may_lack_labels) as (known, rows):
                found = _in_rows(rows, known, lost, where)
        used = (known.image, known.label or "")
    else:
        wanted = image.split(";") if image else ()
        found = TarReader(where, wanted, LARGEST_SHARD).read(stream)
        while stream.read(1 << 20):  # zeros behind the end, which the hash is of, too
            pass
    lost_here = found.about.lost
    if not found.images and not (may_lack_labels and lost_here.keys() == {losses.NO_LABEL}):
        why = f"There is no image in it: {image_kinds.left_out_in_words(lost_here) or 'nothing'}"
        raise refused(where, why, "Give images with labels; in a tar file each image needs a .cls member or a folder.")
    numbers = dict[str, int]()
    for one in found.images:
        numbers.setdefault(one.label, len(numbers))
    records = numpy.array([(*one[:3], numbers[one.label]) for one in found.images], RECORD)
    kept = int(records["size"].sum()) if used else stream.size
    shard = Shard(name, stream.size, stream.digest.hexdigest(), kept, used)
    return Piece(shard, list(numbers), found.sides, records, found.about)


def _in_rows(rows: parquet.Rows, columns: parquet.Columns, lost: LostSamples, where: str) -> Found:
    """The images of a parquet file: on a disk they lie one after another."""
    at = 0
    images: list[Image] = []
    sides: list[int] = []
    for data, value in rows:
        if len(data) > LARGEST_IMAGE:
            raise refused(where, f"An image in it has {len(data):,} bytes", "Leave it out.")
        images.append(Image(at, len(data), zlib.crc32(data), columns.word(value)))
        at += len(data)
        if len(images) <= MEASURED:
            sides += decoding.shorter_sides([data])
    numbers = columns.numbers and are_numbers(image.label for image in images)
    return Found(images, sides, About(columns.image, "column" if images else "", numbers, lost, LostSamples()))


class _Stream:
    """Blocks as a file that is read forward."""

    def __init__(self, blocks: Iterator[bytes], name: str) -> None:
        self.name = name
        self.digest = hashlib.sha256()
        self.size = 0
        self._blocks = blocks
        self._block = io.BytesIO()

    def first(self) -> bytes:
        """First bytes of the file, which are still to be read."""
        if not self.size:
            self._take()
        return self._block.getvalue()[:8]

    def read(self, size: int) -> bytes:
        found = self._block.read(size)
        while len(found) < size and self._take():
            found += self._block.read(size - len(found))
        return found

    def _take(self) -> bool:
        """Put the next block in the place of the one that has been read; False at the end."""
        block = next(self._blocks, b"")
        if block:
            self.digest.update(block)
            self.size += len(block)
            self._block = io.BytesIO(block)
        return bool(block)


class Classes(NamedTuple):
    """The classes of a data set, in the order of their numbers in training."""

    names: list[str]
    are_numbers: bool
    """Labels are numbers: 7 and 07 are one class."""

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> Classes:
        """Collect the classes of the shards to train on."""
        labels = labels_of(pieces)
        if all(piece.about.numbers for piece in pieces):
            count = max(map(int, labels), default=-1) + 1
            return cls([str(number) for number in range(count)], are_numbers=True)
        return cls(sorted(labels), are_numbers=False)

    def name(self, label: str) -> str:
        """The class that a label means."""
        if self.are_numbers and label.isdecimal():
            return str(int(label))
        return label

    def unknown(self, labels: Iterable[str]) -> list[str]:
        """Labels that are none of the classes."""
        known = set(self.names)
        return sorted(label for label in labels if self.name(label) not in known)


def labels_of(pieces: Sequence[Piece]) -> set[str]:
    """Collect the labels in some shards."""
    return {label for piece in pieces for label in piece.labels}


def without_labels(pieces: Sequence[Piece], train: Sequence[Piece], classes: Classes) -> str:
    """Say why shards to test on have no labels; empty where they have some."""
    labels = labels_of(pieces)
    if not labels:
        return losses.NO_LABEL
    places = {piece.about.labels_by for piece in pieces}
    if places == {"folder"} and all(piece.about.labels_by == "cls" for piece in train):
        return "without a .cls member, which the training images have"
    if len(classes.unknown(labels)) == len(labels):
        return f"in folders that are not training classes ({terminal.one_line(min(labels), 100)})"
    return ""


class ShardImages:
    """The images of some shards. Sample -> uint8 [in_chans, H, W], label. Their numbers go shard by shard."""

    def __init__(
        self, cache: Cache, pieces: Sequence[Piece], classes: Classes, *, in_chans: int, block: int, exif: bool
    ) -> None:
        import numpy

        self.cache = cache
        self.in_chans = in_chans
        self.block = block
        self.exif = exif
        self.shards = [piece.shard for piece in pieces]
        number = {name: at for at, name in enumerate(classes.names)}
        parts: list[Records] = []
        for piece in pieces:
            require_known(piece, classes, cache.url)
            in_training = numpy.array([number[classes.name(name)] for name in piece.labels], "i4")
            part = piece.records.copy()
            part["label"] = in_training[part["label"]]
            parts.append(part)
        self.records = numpy.concatenate(parts)
        self.ends = numpy.cumsum(list(map(len, parts)))
        # A cache holds the block that is read, the one before and the one after it.
        need = sum(sorted((shard.kept for shard in self.shards), reverse=True)[: 3 * block])
        if not cache.is_near and need > cache.most:
            what = f"data.cache_gb={cache.most / 1e9:g} is too little."
            why = f"A node's disk holds three times data.shuffle_block={block} shards, {need / 1e9:.3g} GB."
            fix = "Raise data.cache_gb, or lower data.shuffle_block."
            raise UserError(what, why=why, fix=fix, key="data.cache_gb")

    def __len__(self) -> int:
        return len(self.records)

    def shard_of(self, index: int) -> int:
        """The number of the shard that a sample is in."""
        return int(self.ends.searchsorted(index, side="right"))

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        return self.read_part(index)

    def read_part(self, index: int, part: Part | None = None) -> tuple[Tensor, int]:
        """Read the part of a sample that is wanted, and its label."""
        start, size, crc, label = self.records[index].item()
        shard = self.shards[self.shard_of(index)]
        data = self.cache.read(shard, start, size)
        if zlib.crc32(data) != crc:
            self.cache.drop(shard)  # the disk has damaged it: another copy is fetched
            data = self.cache.read(shard, start, size)
        name = f"{shard.name} at {start}"
        try:
            return decoding.decode_image(data, self.in_chans, name, exif=self.exif, part=part), label
        except decoding.BrokenImageError as error:
            number = index - [0, *self.ends][self.shard_of(index)]
            error.file = f"{shard.name}/{self._member(shard, start) or f'image {number}'}"
            raise

    def _member(self, shard: Shard, start: int) -> str:
        """Name of the member of a tar file whose content begins there; empty where no member does: an index of
        somebody else's may name any file, whose bytes are nobody's business."""
        with suppress(tarfile.HeaderError):
            if not shard.columns:
                header = self.cache.read(shard, start - _HEADER, _HEADER)
                return fileio.TarMember.frombuf(header, "utf-8", "replace").name
        return ""

    def blocks(self, seed: int | None, epoch: int) -> list[list[int]]:
        """Numbers of the shards whose samples are mixed, in the order of an epoch; without a seed in their own."""
        import torch

        numbers = list(range(len(self.shards)))
        if seed is not None:
            numbers = torch.randperm(len(numbers), generator=_generator(seed, epoch)).tolist()
        return [numbers[at : at + self.block] for at in range(0, len(numbers), self.block)]

    def order(self, seed: int, epoch: int) -> Tensor:
        """Permutation of the samples in an epoch, as `trainkit.data.order.epoch_order`, but block by block."""
        import torch

        generator = _generator(seed, epoch, 1)
        starts = [0, *self.ends.tolist()]
        parts: list[Tensor] = []
        for block in self.blocks(seed, epoch):
            own = torch.cat([torch.arange(starts[at], starts[at + 1]) for at in block])
            parts.append(own[torch.randperm(len(own), generator=generator)])
        return torch.cat(parts)

    def ahead(self, keys: Iterable[Keys], seed: int | None, last_epoch: int) -> Iterator[Keys]:
        """Yield ``keys`` as they are; meanwhile fetch the block of shards that the last sample of each is in, and the
        next one.

        Args:
            seed, last_epoch: of training, and its last epoch; None evaluates.
        """

        @lru_cache(maxsize=2)
        def blocks_of(epoch: int) -> tuple[list[list[int]], dict[int, int]]:
            """Blocks of an epoch, and the block of each shard."""
            blocks = self.blocks(seed, epoch)
            return blocks, {shard: at for at, block in enumerate(blocks) for shard in block}

        asked: set[tuple[int, int]] = set()
        with self.cache.ahead() as fetch:
            for first, indices in keys:
                epoch = 0 if seed is None else first
                blocks, block_of = blocks_of(epoch)
                at = block_of[self.shard_of(indices[-1] % len(self))]
                following = (epoch, at + 1) if at + 1 < len(blocks) else (epoch + 1, 0)
                for this, number in ((epoch, at), following):
                    if this <= last_epoch and (this, number) not in asked:
                        asked.add((this, number))
                        fetch(map(self.shards.__getitem__, blocks_of(this)[0][number]))
                yield first, indices

    def take_waited(self) -> dict[str, float]:
        """Shards that this process has waited for since the last call, and for how many seconds."""
        taken = self.cache.waited
        self.cache.waited = {}
        return taken


def require_known(piece: Piece, classes: Classes, url: str) -> None:
    """Refuse a shard with a class that no shard to train on has."""
    unknown = classes.unknown(piece.labels)
    if unknown:
        why = f"It has the class {unknown[0]!r}, which no training shard has"
        raise refused(f"{url}/{piece.shard.name}", why, "Correct the labels.")


def _generator(*parts: int) -> Any:
    import torch

    return torch.Generator().manual_seed(derive_seed(*parts))


def read_index(file: Path) -> list[Piece]:
    """The index of a data set, shard by shard. Raises UserError where it is damaged."""
    pieces: list[Piece] = []
    try:
        content = fileio.read_bytes(file, LONGEST_INDEX, follow=True)
        sizes, _, content = content.partition(b"\n")
        at = 0
        for size in fileio.parse(sizes):
            pieces.append(Piece.from_bytes(content[at : at + size]))
            at += size
        if not pieces or at != len(content):
            raise ValueError("it is cut short")
        return pieces
    except (OSError, ValueError, TypeError) as error:
        fix = "Remove it, and prepare the data again."
        raise UserError(f"The index {file} cannot be read.", why=f"{error}.", fix=fix, key="data.root") from None


def write_index(file: Path, pieces: Sequence[bytes]) -> None:
    """Write an index, of what `Piece.to_bytes` gave for each shard."""
    fileio.write(file, json.dumps([len(piece) for piece in pieces]).encode() + b"\n" + b"".join(pieces))
