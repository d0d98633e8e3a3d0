"""The image files of a data set: listed once by one rank, whatever their number, and read from folders."""

from __future__ import annotations

import json
import os
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainkit import reading
from trainkit.data.images import SUFFIXES, read_image
from trainkit.errors import RunFailedError

if TYPE_CHECKING:
    from torch import Tensor


Place = tuple[Path, tuple[str, ...]]
"""A data set's folder, and the folders in it that hold one for each class."""


class Files(Protocol):
    """Image files by position: those of a class lie side by side, in the same order on every machine."""

    @property
    def folder(self) -> Path:
        """For messages."""
        ...

    @property
    def splits(self) -> Mapping[str, Mapping[str, range]]:
        """Split -> class -> positions; both as their folders are called."""
        ...

    def name(self, position: int) -> str:
        """Below its class's folder."""
        ...

    def read(self, position: int, in_chans: int) -> Tensor:
        """As `trainkit.data.images.read_image` gives it."""
        ...


class Listing:
    """Names of image files by split and class.

    They lie in one block of bytes: a list of a million strings would be copied into every worker, page by page, as soon
    as Python counts the references to them.
    """

    def __init__(self, counts: Mapping[str, Mapping[str, int]], names: bytes) -> None:
        import numpy

        self.splits: dict[str, dict[str, range]] = {}
        start = 0
        for split, classes in counts.items():
            self.splits[split] = {}
            for name, count in classes.items():
                self.splits[split][name] = range(start, start + count)
                start += count
        self._names = names  # each ends with a zero byte, which no name has
        ends = numpy.flatnonzero(numpy.frombuffer(names, numpy.uint8) == 0)
        self._starts = numpy.concatenate([[0], ends + 1])
        if len(ends) != start:
            raise ValueError(f"{len(ends)} names for {start} files")
        if re.search(rb"(?:^|[\0/])\.\.(?:[\0/])|(?:^|\0)/", names):  # it may have come from elsewhere
            raise ValueError("a name leads out of its folder")
        self._classes = [(found, split, name) for split, of in self.splits.items() for name, found in of.items()]
        self._firsts = [found.start for found, _, _ in self._classes]

    @classmethod
    def walk(cls, folder: Path, splits: Sequence[str]) -> Listing:
        """Of what is on the disk."""
        found = {
            split: {name: image_files(folder / split / name) for name in class_folders(folder / split)}
            for split in splits
        }
        counts = {split: {name: len(files) for name, files in classes.items()} for split, classes in found.items()}
        names = [os.fsencode(file) for classes in found.values() for files in classes.values() for file in files]
        return cls(counts, b"".join(name + b"\0" for name in names))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def name(self, position: int) -> str:
        """Below its class's folder."""
        return os.fsdecode(self._names[self._starts[position] : self._starts[position + 1] - 1])

    def path(self, position: int) -> str:
        """SPLIT/CLASS/NAME."""
        place = bisect_right(self._firsts, position) - 1
        while not self._classes[place][0]:  # a class without images begins where the one before it does
            place -= 1
        _, split, name = self._classes[place]
        return os.path.join(split, name, self.name(position))

    def to_bytes(self) -> bytes:
        """For other ranks, and for a file."""
        counts = {split: {name: len(found) for name, found in of.items()} for split, of in self.splits.items()}
        return json.dumps(counts).encode() + b"\n" + self._names

    @classmethod
    def from_bytes(cls, content: bytes) -> Listing:
        """What `to_bytes` gave. Raises RunFailedError for anything else."""
        head, _, names = content.partition(b"\n")
        try:
            counts: Any = reading.parse(head)
            return cls(counts, names)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise RunFailedError(
                "The list of the data's files is damaged.",
                why=f"{type(error).__name__}: {error}.",
                fix="Start again; if it was read from a pack, prepare that anew.",
            ) from None


class Tree:
    """The files of a listing, below a folder on this machine."""

    def __init__(self, folder: Path, listing: Listing) -> None:
        self.folder, self._listing = folder, listing
        self.splits = listing.splits

    def name(self, position: int) -> str:
        """Below its class's folder."""
        return self._listing.name(position)

    def path(self, position: int) -> Path:
        """The file."""
        return self.folder / self._listing.path(position)

    def read(self, position: int, in_chans: int) -> Tensor:
        """As `read_image`."""
        return read_image(self.path(position), in_chans)


def listed(root: Path, where: Callable[[Path], Place]) -> Tree:
    """The files that lie below ``root``."""
    folder, splits = where(root)
    return Tree(folder, Listing.walk(folder, splits))


def class_folders(folder: Path) -> list[str]:
    """Names of the subfolders, sorted. Hidden ones, such as .ipynb_checkpoints, are no classes; nor are packs."""
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.is_dir()]
    except OSError:
        return []
    return sorted(name for name in names if not name.startswith(".") and not name.endswith((".pack", ".pack.partial")))


COUNTED = 20_000
"""So many files are counted within a moment, also on a file system that is far away."""


def counted(folder: Path, most: int = COUNTED) -> list[int] | None:
    """How many images each class has that lies in ``folder``; None where there are more than ``most`` files."""
    counts: list[int] = []
    for name in class_folders(folder):
        counts.append(0)
        for _, _, files in _below(folder / name):
            most -= len(files)
            if most < 0:
                return None
            counts[-1] += sum(map(_is_image, files))
    return counts


def image_files(folder: Path) -> list[str]:
    """Images in ``folder`` and below, as paths relative to it, sorted: the same order on every machine."""
    found: list[str] = []
    for parent, _, files in _below(folder):
        below = os.path.relpath(parent, folder)
        found += [file if below == "." else os.path.join(below, file) for file in files if _is_image(file)]
    return sorted(found)


def _below(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """A folder and those below it, but for hidden ones, as `os.walk` gives them."""
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        yield parent, folders, files


def _is_image(name: str) -> bool:
    return name.lower().endswith(SUFFIXES) and not name.startswith(".")
