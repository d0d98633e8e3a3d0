"""Images in shards, tar files as webdataset's or parquet: in a bucket, on a web server, in the hub or in a folder."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

from trainkit import fileio
from trainkit.data import folders, shards
from trainkit.data.base import Splits, missing
from trainkit.data.cache import Cache
from trainkit.data.download import Say, complete_folder
from trainkit.data.folders import SPLIT_NAMES, split_of
from trainkit.data.shards import Piece, ShardImages
from trainkit.errors import UserError, require
from trainkit.store import Store, StoreError

_PLACE = re.compile(r"(?:s3|gs|https?|file)://[^@?#\s]+|hf://[^?#\s]+")
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_ENDS = (".tar", ".parquet")
_INDEX = "shards.index"
_MOST_SHARDS = 1_000_000


def build(
    root: Path,
    *,
    url: str,
    image: str | None = None,
    label: str | None = None,
    cache_gb: float = 50.0,
    shuffle_block: int = 16,
    patience: float = 300.0,
    image_size: int = 224,
    in_chans: Literal[1, 3] = 3,
    augment: bool = True,
    val_fraction: float = 0.15,
    exif: bool = False,
) -> Splits:
    """Shards named after their splits (train-000000.tar, val-000000.tar, or train/000000.tar). Without val some shards
    are split off train; without test it is val. The index of them is in ``root``.

    ``url``: their folder, s3://, gs://, https://, hf:// or a path; or train-{0000..0099}.tar in it. ``image``: column
    of parquet that has the images; null: as it says of itself. ``label``: the one that has the classes; null: likewise.
    ``cache_gb``: what shards take on a node's disk. ``shuffle_block``: shards whose samples are mixed. ``patience``:
    seconds without a byte of a shard after which training fails. ``image_size``: pixels of a side; a new run without it
    takes the median of the shorter sides, up to 224. ``exif``: turn photos upright, as their EXIF data says.
    """
    place, _ = _place(url)
    pieces = shards.read_index(_folder(root, url, image, label) / _INDEX)
    parts = _split(pieces, val_fraction, url)
    classes = folders.require_classes(Path(url), shards.classes_of({name for of in parts[0] for name in of.labels}))
    unpacks = any(piece.shard.columns for piece in pieces)
    cache = Cache(place, round(cache_gb * 1e9), patience, unpacks=unpacks)
    images = [ShardImages(cache, part, classes, in_chans=in_chans, block=shuffle_block, exif=exif) for part in parts]
    return folders.photo_splits("stream", classes, images, image_size, in_chans, augment=augment, exif=exif)


def locate(
    root: Path, *, url: str, image: str | None, label: str | None, shuffle_block: int, **options: Any
) -> None:  # fmt: skip
    """Check that the shards are indexed."""
    require(shuffle_block > 0, "data.shuffle_block", shuffle_block, "1 or more")
    folder = _folder(root, url, image, label)
    if not (folder / _INDEX).is_file():
        what, given = f"The shards of {url} are not indexed in {root}.", {"url": url, "image": image, "label": label}
        raise missing("stream", root, folder, what=what, key="url", given=given)


def train_size(
    root: Path, *, url: str, image: str | None, label: str | None, val_fraction: float, **options: Any
) -> int:
    """Images to train on."""
    pieces = shards.read_index(_folder(root, url, image, label) / _INDEX)
    return sum(len(piece.records) for piece in _split(pieces, val_fraction, url)[0])


def shorter_sides(root: Path, *, url: str, image: str | None, label: str | None, **options: Any) -> list[int]:
    """Of some of the images."""
    pieces = shards.read_index(_folder(root, url, image, label) / _INDEX)
    return [side for piece in pieces for side in piece.sides]


def prepare(
    root: Path, archives: list[Path], say: Say, *, url: str, image: str | None, label: str | None, **options: Any
) -> None:
    """Read each shard once, and keep where its images lie. A killed call goes on."""
    place, pattern = _place(url)
    final = _folder(root, url, image, label)
    if (final / _INDEX).is_file():
        say(f"{final} is already there.")
        return
    store = Store(place, key="data.url")
    try:
        with store.patiently():
            names = _expanded(pattern) if pattern else sorted(_listed(store))
            if not names:
                fix = "Name them after their splits: train-000000.tar, val-000000.tar."
                raise UserError(f"There are no shards to train on in {url}.", why="Compressed ones are none.", fix=fix)
            with complete_folder(final, keep=True) as partial:
                done = 0

                def indexed(name: str) -> Path:
                    nonlocal done
                    file = partial / f"{hashlib.sha256(name.encode()).hexdigest()[:32]}.piece"
                    if not file.exists():
                        blocks = store.blocks(name, min(store.size(name), shards.LARGEST_SHARD))
                        piece = shards.index(name, blocks, f"{place}/{name}", (image, label))
                        fileio.write(file, piece.to_bytes())
                    done += 1
                    say(f"Indexed {name} ({done} of {len(names)})")
                    return file

                with ThreadPoolExecutor(4) as pool:
                    files = list(pool.map(indexed, names))  # which cancels what is left where one fails
                shards.write_index(partial / _INDEX, [fileio.read_bytes(file, shards.LONGEST_INDEX) for file in files])
                for file in files:
                    file.unlink()
    except StoreError as error:
        fix = "Check the URL, the network and the credentials in the environment, and give the command again."
        raise UserError(f"{url} cannot be read.", why=f"{error}.", fix=fix, key="data.url") from None
    say(f"{final} is complete: {len(names)} shards.")


def _place(url: str) -> tuple[str, str]:
    """The URL of a folder, and the names in it as a pattern, if there is one. Raises UserError for no place."""
    folder, brace, more = url.partition("{")
    folder, _, start = folder.rpartition("/") if brace else (url, "", "")
    place = folder.rstrip("/") if "://" in url else f"file://{os.path.abspath(folder)}"
    if not _PLACE.fullmatch(place):
        why = "It is a folder, or a place without keys in it: configurations are kept."
        fix = "Use s3://, gs://, https://, hf://datasets/OWNER/NAME or a path; credentials are the environment's."
        raise UserError("data.url is no place of shards.", why=why, fix=fix, key="data.url")
    return place, f"{start}{brace}{more}"


def _folder(root: Path, url: str, image: str | None, label: str | None) -> Path:
    """Where the index of the shards is."""
    place, pattern = _place(url)
    name = re.sub(r"[^\w.-]", "-", place.rpartition("/")[2]).lstrip(".")[:60]
    asked = "\0".join(["", *(column or "" for column in (image, label))]) if image or label else ""
    return root / "stream" / f"{name}-{hashlib.sha256(f'{place}/{pattern}{asked}'.encode()).hexdigest()[:12]}"


def _expanded(pattern: str) -> list[str]:
    """The names that a pattern such as train-{000..146}.tar stands for."""
    if (found := _RANGE.search(pattern)) is None:
        return [pattern]
    first, last = int(found[1]), int(found[2])
    require(first <= last < first + _MOST_SHARDS, "data.url", pattern, "a pattern such as train-{000..146}.tar")
    names = (f"{pattern[: found.start()]}{at:0{len(found[1])}}" for at in range(first, last + 1))
    return [name + rest for name in names for rest in _expanded(pattern[found.end() :])]


def _listed(store: Store) -> Iterator[str]:
    """Names of the shards of all splits."""
    for name in store.names(""):
        if name in SPLIT_NAMES:
            yield from (f"{name}/{file}" for file in store.names(name) if file.endswith(_ENDS))
        elif name.endswith(_ENDS) and split_of(name):
            yield name


def _split(pieces: list[Piece], val_fraction: float, url: str) -> list[list[Piece]]:
    """Shards of train, val and test."""
    parts: dict[str, list[Piece]] = {"train": [], "val": [], "test": []}
    for piece in pieces:
        parts[split_of(piece.shard.name) or "train"].append(piece)
    train, val, test = parts.values()
    if not val and len(train) > 1:
        whole = sorted(train, key=lambda piece: piece.shard.sha256)
        val = whole[: min(max(round(val_fraction * len(train)), 1), len(train) - 1)]
        train = [piece for piece in train if all(piece is not of for of in val)]
    if not train or not val:
        why = f"Of {len(pieces)} shards {len(train)} are to train on, and {len(val)} to validate on."
        fix = "Give each split shards of its own: train-000000.tar, val-000000.tar."
        raise UserError(f"There are too few shards in {url}.", why=why, fix=fix, key="data.url")
    return [train, val, test or val]
