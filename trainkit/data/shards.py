"""Samples in shards, tar files as webdataset's or parquet: indexed once, read by byte range, in a block-wise order.

No library that iterates over shards resumes exactly. An index can: it says where each image lies, so that a shard is
as good as a folder of files. The order of an epoch is a function of (seed, epoch) as for other data: shards in random
order, and the samples of some shards at a time in random order. So each shard is needed for a while, and then no more.
"""

from __future__ import annotations

import hashlib
import io
import json
import tempfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from trainkit import fileio
from trainkit.data import folders, parquet
from trainkit.data.base import Keys, derive_seed
from trainkit.data.cache import Cache, Shard
from trainkit.data.download import opened_tar, regular
from trainkit.errors import UserError

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

    Records = numpy.ndarray[Any, Any]

RECORD = [("start", "<u8"), ("size", "<u4"), ("crc", "<u4"), ("label", "<i4")]
"""Of numpy: where an image's bytes lie in its shard, their CRC-32, and the number of its class."""
LONGEST_INDEX = 1 << 32
"""Bytes: two hundred million images."""
LARGEST_SHARD, LARGEST_IMAGE, LONGEST_LABEL = 1 << 35, 1 << 28, 200
MEASURED = 64
"""Images of a shard whose sizes are looked at."""
MOST_CLASSES = 100_000
_Image = tuple[int, bytes, str]
"""Where it begins, its bytes, and the name of its class."""
_COMPRESSED = (b"\x1f\x8b", b"BZh", b"\xfd7zXZ", b"\x28\xb5\x2f\xfd")


class Piece(NamedTuple):
    """The index of one shard."""

    shard: Shard
    labels: list[str]
    """Of the classes in it."""
    sides: list[int]
    """The shorter sides of its first images."""
    records: Records

    def to_bytes(self) -> bytes:
        """For a file."""
        return json.dumps([self.shard, self.labels, self.sides]).encode() + b"\n" + self.records.tobytes()

    @classmethod
    def from_bytes(cls, content: bytes) -> Piece:
        """Raises ValueError for anything but what `to_bytes` gave."""
        import numpy

        head, _, records = content.partition(b"\n")
        (name, size, sha256, kept, columns), labels, sides = fileio.parse(head)
        shard = Shard(name, size, sha256, kept, None if columns is None else (columns[0], columns[1]))
        return cls(shard, labels, sides, numpy.frombuffer(records, RECORD))


def index(name: str, blocks: Iterator[bytes], where: str, columns: Sequence[str | None] = ()) -> Piece:
    """Read a shard, and say what is in it.

    Args:
        columns: of parquet those of the images and of the labels; none, or None: as it says of itself.

    Raises:
        UserError: it is no such file, or out of all proportion.
    """
    stream, used, fix = _Stream(blocks, where), None, "Give tar files of images."
    if name.endswith(".parquet"):
        with tempfile.TemporaryFile() as file:
            file.writelines(iter(lambda: stream.read(1 << 20), b""))
            with parquet.opened(file, where, *columns) as (known, rows):
                labels, sides, records = _noted(_one_after_another(rows, known))
        used, fix = (known.image, known.label), "Give files of images that have labels."
    else:
        labels, sides, records = _noted(_in_tar(stream, where))
        while stream.read(1 << 20):  # zeros behind the end, which the hash is of, too
            pass
    if stream.start.startswith(_COMPRESSED) or not len(records):
        raise _refused(where, "It is compressed" if len(records) else "There is no image in it", fix)
    kept = int(records["size"].sum()) if used else stream.size
    return Piece(Shard(name, stream.size, stream.digest.hexdigest(), kept, used), labels, sides, records)


def _noted(images: Iterable[_Image]) -> tuple[list[str], list[int], Records]:
    """What a `Piece` says of images: their classes, the shorter sides of the first, and where each lies."""
    import numpy

    labels, first, records = dict[str, int](), list[bytes](), list[tuple[int, int, int, int]]()
    for start, data, label in images:
        records.append((start, len(data), zlib.crc32(data), labels.setdefault(label, len(labels))))
        if len(records) <= MEASURED:
            first.append(data)
    return list(labels), folders.shorter_sides(first), numpy.array(records, RECORD)


def _one_after_another(rows: parquet.Rows, columns: parquet.Columns) -> Iterator[_Image]:
    at = 0
    for data, value in rows:
        yield at, data, columns.word(value)
        at += len(data)


def _in_tar(stream: _Stream, where: str) -> Iterator[_Image]:
    """A sample is the members whose names are alike up to the first dot of the file's name. Its image is the first that
    ends as images do; its class is in the member that ends in .cls, else the folder that the image is in."""
    sample, label = "", ""
    image: tuple[int, bytes] | None = None

    def whole() -> Iterator[_Image]:
        if image is not None:
            if not label:
                raise _refused(where, f"{sample!r} has no class", "Give each image a .cls member, or a folder.")
            yield *image, label

    with opened_tar(stream) as tar:  # type: ignore[arg-type]
        for member in regular(tar, LARGEST_SHARD):
            folder, _, file = member.name.rpartition("/")
            stem, _, end = file.partition(".")
            is_image, is_class = file.lower().endswith(folders.SUFFIXES) and bool(stem), end == "cls"
            if not is_image and not is_class:
                continue
            if f"{folder}/{stem}" != sample:
                yield from whole()
                sample, image, label = f"{folder}/{stem}", None, folder.rpartition("/")[2]
            if member.size > (LARGEST_IMAGE if is_image else LONGEST_LABEL):
                raise _refused(where, f"{member.name[:200]!r} has {member.size:,} bytes", "Leave it out.")
            data = tar.extractfile(member).read()  # type: ignore[union-attr]
            if is_class:
                label = data.decode(errors="replace").strip()
            elif image is None:
                image = member.offset_data, data
        yield from whole()


class _Stream:
    """Blocks as a file that is read forward."""

    def __init__(self, blocks: Iterator[bytes], name: str) -> None:
        self.name, self._blocks, self._block = name, blocks, io.BytesIO()
        self.digest, self.size, self.start = hashlib.sha256(), 0, b""

    def read(self, size: int) -> bytes:
        found = self._block.read(size)
        while len(found) < size and (block := next(self._blocks, b"")):
            self.digest.update(block)
            self.size, self.start, self._block = self.size + len(block), self.start or block[:8], io.BytesIO(block)
            found += self._block.read(size - len(found))
        return found


def _refused(where: str, why: str, fix: str) -> UserError:
    return UserError(f"{where} is no shard of images.", why=f"{why}.", fix=fix, key="data.url")


def classes_of(labels: set[str]) -> list[str]:
    """The classes, in the order of their numbers: where all labels are numbers, they are those."""
    if all(label.isdecimal() and len(label) < 6 for label in labels):
        return [str(number) for number in range(max(map(int, labels)) + 1)]
    return sorted(labels)


class ShardImages:
    """The images of some shards. Sample -> uint8 [in_chans, H, W], label. Their numbers go shard by shard."""

    def __init__(
        self, cache: Cache, pieces: Sequence[Piece], classes: Sequence[str], *, in_chans: int, block: int, exif: bool
    ) -> None:
        import numpy

        self.cache, self.in_chans, self.block, self.exif = cache, in_chans, block, exif
        self.shards = [piece.shard for piece in pieces]
        number = {name: at for at, name in enumerate(classes)}
        parts = [piece.records.copy() for piece in pieces]
        for piece, part in zip(pieces, parts, strict=True):
            if unknown := sorted(set(piece.labels) - number.keys()):
                why, fix = f"It has the class {unknown[0]!r}, which no shard to train on has", "Correct the labels."
                raise _refused(f"{cache.url}/{piece.shard.name}", why, fix)
            part["label"] = numpy.array([number[name] for name in piece.labels], "i4")[part["label"]]
        self.records = numpy.concatenate(parts)
        self.ends = numpy.cumsum([len(part) for part in parts])
        self._require_room()

    def __len__(self) -> int:
        return len(self.records)

    def shard_of(self, index: int) -> int:
        """The number of the shard that a sample is in."""
        return int(self.ends.searchsorted(index, side="right"))

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        start, size, crc, label = self.records[index].item()
        shard = self.shards[self.shard_of(index)]
        data = self.cache.read(shard, start, size)
        if zlib.crc32(data) != crc:
            self.cache.drop(shard)  # the disk has damaged it: another copy is fetched
            data = self.cache.read(shard, start, size)
        try:
            return folders.decode_image(data, self.in_chans, f"{shard.name} at {start}", exif=self.exif), label
        except folders.BrokenImageError as error:
            member = f"image {index - [0, *self.ends][self.shard_of(index)]}"
            if not shard.columns:
                member = self.cache.read(shard, start - 512, 100).partition(b"\0")[0].decode(errors="replace")
            error.file = f"{shard.name}/{member}"
            raise

    def blocks(self, seed: int | None, epoch: int) -> list[list[int]]:
        """Numbers of the shards whose samples are mixed, in the order of an epoch; without a seed in their own."""
        import torch

        numbers = list(range(len(self.shards)))
        if seed is not None:
            numbers = torch.randperm(len(numbers), generator=_generator(seed, epoch)).tolist()
        return [numbers[at : at + self.block] for at in range(0, len(numbers), self.block)]

    def order(self, seed: int, epoch: int) -> Tensor:
        """As `trainkit.data.base.epoch_order`, but block by block."""
        import torch

        generator, starts = _generator(seed, epoch, 1), [0, *self.ends.tolist()]
        parts = []
        for block in self.blocks(seed, epoch):
            own = torch.cat([torch.arange(starts[at], starts[at + 1]) for at in block])
            parts.append(own[torch.randperm(len(own), generator=generator)])
        return torch.cat(parts)

    def ahead(self, keys: Iterable[Keys], seed: int | None, last_epoch: int) -> Iterator[Keys]:
        """``keys`` as they are; meanwhile the block of shards that the last sample of each is in is fetched, and the
        next one.

        Args:
            seed, last_epoch: of training, and its last epoch; None evaluates.
        """
        told, asked = -1, set[tuple[int, int]]()
        blocks: list[list[int]] = []
        block_of: dict[int, int] = {}
        with self.cache.ahead() as fetch:
            for first, indices in keys:
                epoch = 0 if seed is None else first
                if epoch != told:
                    told, blocks = epoch, self.blocks(seed, epoch)
                    block_of = {shard: at for at, block in enumerate(blocks) for shard in block}
                at = block_of[self.shard_of(indices[-1] % len(self))]
                following = (epoch, at + 1) if at + 1 < len(blocks) else (epoch + 1, 0)
                for this, number in ((epoch, at), following):
                    if this <= last_epoch and (this, number) not in asked:
                        asked.add((this, number))
                        of = blocks if this == epoch else self.blocks(seed, this)
                        fetch(self.shards[shard] for shard in of[number])
                yield first, indices

    def take_waited(self) -> dict[str, float]:
        """Shards that this process has waited for since the last call, and for how many seconds."""
        taken, self.cache.waited = self.cache.waited, {}
        return taken

    def _require_room(self) -> None:
        """Refuse a cache that does not hold the block that is read, the one before and the one after it."""
        sizes = sorted((shard.kept for shard in self.shards), reverse=True)
        if not self.cache.is_near and (need := sum(sizes[: 3 * self.block])) > self.cache.most:
            what = f"data.cache_gb={self.cache.most / 1e9:g} is too little."
            why = f"A node's disk holds three times data.shuffle_block={self.block} shards, {need / 1e9:.3g} GB."
            fix = "Raise data.cache_gb, or lower data.shuffle_block."
            raise UserError(what, why=why, fix=fix, key="data.cache_gb")


def _generator(*parts: int) -> Any:
    import torch

    return torch.Generator().manual_seed(derive_seed(*parts))


def read_index(file: Path) -> list[Piece]:
    """The index of a data set, shard by shard. Raises UserError where it is damaged."""
    try:
        content, pieces = fileio.read_bytes(file, LONGEST_INDEX, follow=True), []
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
