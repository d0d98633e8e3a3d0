"""Images in shards, tar files as webdataset's or parquet: in a bucket, on a web server, in the hub or in a folder."""

from __future__ import annotations

import hashlib
import os
import re
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError, require
from trainkit.common.object_store import Store, StoreError
from trainkit.data import folders, image_kinds, losses, shards
from trainkit.data.base import Splits, missing
from trainkit.data.cache import LARGEST_SHARD, Cache
from trainkit.data.download import Say, complete_folder
from trainkit.data.folders import split_named, split_of
from trainkit.data.losses import Counts, LostSamples, SplitCounts
from trainkit.data.photo_transforms import Photos, photo_splits
from trainkit.data.shards import Classes, Piece, ShardImages

_PLACE = re.compile(r"(?:s3|gs|https?|file)://[^@?#\s]+|hf://[^?#\s]+")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_ENDS = (".tar", ".parquet")
_COMPRESSED = (".tar.gz", ".tgz", ".tar.bz2", ".tar.xz", ".tar.zst", ".parquet.gz")
_MOST_SHARDS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Options of reading shards that are elsewhere."""

    cache_gb: float = 50.0
    """Space for shards on a node's disk."""
    shuffle_block: int = 16
    """Number of shards whose samples are mixed at a time."""
    patience: float = 300.0
    """Seconds without a byte of a shard after which training fails."""


def build(
    root: Path, *, url: str, image: str | None = None, label: str | None = None, val_fraction: float = 0.15,
    reading: Reading, photos: Photos,
) -> Splits:  # fmt: skip
    """Shards named after their splits (train-000000.tar, val-000000.tar, or train/000000.tar). Without val, some shards
    are held out; without test, val is also the test split. Their index is in ``root``.

    ``url``: folder of the shards: s3://, gs://, https://, hf:// or a path; or train-{0000..0099}.tar in it. ``image``:
    parquet column with the images, or extension of the images in tar files (jpg, or jpg;png); null: as the files
    declare. ``label``: parquet column with the classes; null: as the files declare.
    """
    source = _Source(root, url, image, label, val_fraction)
    pieces = source.pieces()
    train, val, test = source.split(pieces)
    classes = Classes.of(train)
    folders.require_classes(Path(url), classes.names)
    unpacks = any(piece.shard.columns for piece in pieces)
    cache = Cache(source.place, round(reading.cache_gb * 1e9), reading.patience, unpacks=unpacks)
    parts: list[ShardImages] = []
    for part in (train, val, test or val):
        images = ShardImages(
            cache, part, classes, in_chans=photos.in_chans, block=reading.shuffle_block, exif=photos.exif
        )
        parts.append(images)
    return photo_splits("stream", classes.names, parts, photos)


class _Source:
    """Shards below a URL, and the folder of their index. Raises UserError for no place of shards."""

    def __init__(
        self, root: Path, url: str, image: str | None, label: str | None, val_fraction: float, **others: Any
    ) -> None:
        self.url = url
        self.columns = (image, label)
        self.val_fraction = val_fraction
        above, brace, more = url.partition("{")
        start = ""
        if brace:
            above, _, start = above.rpartition("/")
        self.place = above.rstrip("/") if "://" in url else f"file://{os.path.abspath(above)}"
        # A question mark begins the signature of a URL, in the names of shards too.
        if not _PLACE.fullmatch(self.place) or re.search(r"[?#\s]", brace + more):
            why = "It must be a folder or an address without keys, because configurations are stored."
            fix = (
                "Use s3://, gs://, https://, hf://datasets/OWNER/NAME or a path; credentials come from the environment."
            )
            raise UserError("data.url is not an address of shards.", why=why, fix=fix, key="data.url")
        self.pattern = f"{start}{brace}{more}"
        """Names in the place, if there is a pattern of them."""
        name = re.sub(r"[^\w.-]", "-", self.place.rpartition("/")[2]).lstrip(".")[:60]
        asked = f"\0{image or ''}\0{label or ''}" if image or label else ""
        digest = hashlib.sha256(f"{self.place}/{self.pattern}{asked}".encode()).hexdigest()
        self.folder = root / "stream" / f"{name}-{digest[:12]}"

    @property
    def index(self) -> Path:
        return self.folder / "shards.index"

    def pieces(self) -> list[Piece]:
        """Read the index."""
        return shards.read_index(self.index)

    def split(self, pieces: list[Piece]) -> list[list[Piece]]:
        """Shards of train, val and test; none of test where it has no labels."""
        parts: dict[str, list[Piece]] = {"train": [], "val": [], "test": []}
        for piece in pieces:
            split = split_of(piece.shard.name) or "train"
            if len(piece.records) or split == "test":
                parts[split].append(piece)
        train, val, test = parts.values()
        if not val and len(train) > 1:
            whole = sorted(train, key=lambda piece: piece.shard.sha256)
            val = whole[: min(max(round(self.val_fraction * len(train)), 1), len(train) - 1)]
            held_out = set(map(id, val))
            train = [piece for piece in train if id(piece) not in held_out]
        if not train or not val:
            why = f"Of {len(pieces)} shards, {len(train)} are for training and {len(val)} for validation."
            fix = "Give each split its own shards: train-000000.tar, val-000000.tar."
            raise UserError(f"There are too few shards in {self.url}.", why=why, fix=fix, key="data.url")
        if test and shards.without_labels(test, train, Classes.of(train)):
            test = []
        return [train, val, test]


def locate(root: Path, *, shuffle_block: int, **options: Any) -> None:
    """Check that the shards are indexed."""
    require(shuffle_block > 0, "data.shuffle_block", shuffle_block, "1 or more")
    source = _Source(root, **options)
    if not source.index.is_file():
        what = f"The shards of {source.url} are not indexed in {root}."
        given = {name: options[name] for name in ("url", "image", "label")}
        raise missing("stream", root, source.folder, what=what, key="url", given=given)


def train_size(root: Path, **options: Any) -> int:
    """Images to train on."""
    source = _Source(root, **options)
    return sum(len(piece.records) for piece in source.split(source.pieces())[0])


def shorter_sides(root: Path, **options: Any) -> list[int]:
    """Shorter sides of some of the images."""
    return [side for piece in _Source(root, **options).pieces() for side in piece.sides]


def counts(root: Path, **options: Any) -> Counts:
    """Count what is read of each split, and what is not."""
    source = _Source(root, **options)
    pieces = source.pieces()
    train, val, test = source.split(pieces)
    found = {}
    for split, part in (("train", train), ("val", val), ("test", test)):
        left = LostSamples()
        taken: set[str] = set()
        for piece in part:
            left.add(piece.about.lost, f"{piece.shard.name}: ")
            left.add(piece.about.unread, f"{piece.shard.name}: ")
            taken.add(piece.about.taken)
        note = terminal.plural(len(part), "shard")
        if taken - {""}:
            note += f", images: {', '.join(sorted(taken - {''})[:3])}"
        images = sum(len(piece.records) for piece in part)
        found[split] = SplitCounts(images, len(shards.labels_of(part)), left, note)
    if not test:
        unlabelled = LostSamples()
        without = [piece for piece in pieces if split_of(piece.shard.name) == "test"]
        reason = shards.without_labels(without, train, Classes.of(train)) if without else ""
        if reason:
            images = sum(losses.total(piece.about.lost) + len(piece.records) for piece in without)
            unlabelled.note(reason, without[0].shard.name, images)
        found["test"] = SplitCounts(0, 0, unlabelled, losses.NO_TEST)
    return found


def prepare(root: Path, archives: list[Path], say: Say, *, max_broken: int, **options: Any) -> None:
    """Read each shard once, and keep where its images lie. A killed call goes on."""
    source = _Source(root, **options)
    if source.index.is_file():
        say(f"{source.folder} already exists.")
        return
    store = Store(source.place, key="data.url")
    try:
        with store.patiently():
            names = _names(store, source, say)
            with complete_folder(source.folder, keep=True) as partial:
                done = count()

                def indexed(name: str) -> Path:
                    file = _index(store, source, name, partial)
                    say(f"Indexed {name} ({next(done) + 1} of {len(names)})")
                    return file

                with ThreadPoolExecutor(4) as pool:
                    files = list(pool.map(indexed, names))  # which cancels what is left where one fails
                contents = [fileio.read_bytes(file, shards.LONGEST_INDEX) for file in files]
                _require_whole(source, list(map(Piece.from_bytes, contents)), max_broken)
                shards.write_index(partial / source.index.name, contents)
                for file in partial.glob("*.piece"):
                    file.unlink()
    except StoreError as error:
        fix = "Check the URL, the network and the credentials in the environment, and give the command again."
        raise UserError(f"{source.url} cannot be read.", why=f"{error}.", fix=fix, key="data.url") from None
    say(f"{source.folder} is complete: {len(names)} shards.")


def _index(store: Store, source: _Source, name: str, folder: Path) -> Path:
    """Write the index of one shard to ``folder``, unless it is there. One that was mended since is read again."""
    mark = hashlib.sha256(f"{name}\0{store.version(name)}".encode()).hexdigest()[:32]
    file = folder / f"{mark}.piece"
    if not file.exists():
        blocks = store.blocks(name, min(store.size(name), LARGEST_SHARD))
        is_test = split_of(name) == "test"
        piece = shards.index(name, blocks, f"{source.place}/{name}", source.columns, may_lack_labels=is_test)
        fileio.write(file, piece.to_bytes())
    return file


def _require_whole(source: _Source, pieces: list[Piece], max_broken: int) -> None:
    """Refuse shards that training would refuse, and those that lose more than ``max_broken`` samples."""
    train, val, test = source.split(pieces)
    read = [*train, *val, *test]
    by = {piece.about.labels_by: piece.shard.name for piece in read}
    if {"cls", "folder"} <= by.keys():
        what = f"The shards of {source.url} name their classes in two ways."
        why = f"{by['cls']} has .cls members, {by['folder']} has none, so its folders would be the classes."
        raise UserError(what, why=why, fix="Give a .cls member to all images, or to none.", key="data.url")
    classes = Classes.of(train)
    folders.require_classes(Path(source.url), classes.names)
    lost = LostSamples()
    for piece in read:
        shards.require_known(piece, classes, source.url)
        lost.add(piece.about.lost, f"{piece.shard.name}: ")
    losses.refuse(lost, max_broken, source.url)


def _names(store: Store, source: _Source, say: Say) -> list[str]:
    """Names of the shards of all splits. Raises UserError where there are none, and for compressed ones."""
    if source.pattern:
        found = _expanded(source.pattern)
        others = LostSamples()
    else:
        found, others = _listed(store)
    if not found:
        why = f"There is no .tar and no .parquet file; left out: {image_kinds.left_out_in_words(others) or 'nothing'}."
        fix = "Name them after their splits: train-000000.tar, val-000000.tar."
        raise UserError(f"There are no training shards in {source.url}.", why=why, fix=fix)
    folders.require_one_word(found, source.url)
    if others:
        say(f"Left out: {image_kinds.left_out_in_words(others)}.")
    return found


def _expanded(pattern: str) -> list[str]:
    """The names that a pattern such as train-{000..146}.tar stands for. Raises UserError."""
    found = _RANGE.search(pattern)
    if found is None:
        return [pattern]
    first = int(found[1])
    last = int(found[2])
    require(first <= last < first + _MOST_SHARDS, "data.url", pattern, "a pattern such as train-{000..146}.tar")
    start = pattern[: found.start()]
    rests = _expanded(pattern[found.end() :])
    numbers = [f"{number:0{len(found[1])}}" for number in range(first, last + 1)]
    return [f"{start}{number}{rest}" for number in numbers for rest in rests]


def _listed(store: Store) -> tuple[list[str], LostSamples]:
    """Names of the shards in a store, and its other files by why they are left out."""
    found: list[str] = []
    others = LostSamples()
    for name in store.names(""):
        inside = [name]
        if split_named(name):
            inside = [f"{name}/{file}" for file in store.names(name)]
        for path in inside:
            if path.endswith(_ENDS) and split_of(path):
                found.append(path)
            elif split_of(path) and path.endswith(_COMPRESSED):
                why = "Single images cannot be read from a compressed file."
                fix = "Unpack it: gunzip, zstd -d, xz -d or bunzip2."
                raise UserError(f"{path} is compressed.", why=why, fix=fix, key="data.url")
            elif path.endswith(_ENDS):
                others.note("without the name of a split", path)
            elif split_of(path) or split_named(name):
                others.note("that are not shards", path)
    return sorted(found), others
