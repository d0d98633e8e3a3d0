"""Image files in folders: listed once by one rank, whatever their number, then read and decoded."""

from __future__ import annotations

import json
import os
import re
from array import array
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit.common import fileio
from trainkit.data.decoding import Part, read_image
from trainkit.data.image_kinds import Chooser, LeftOut

if TYPE_CHECKING:
    from torch import Tensor


class Files:
    """Image files by position: those of a class lie side by side, in the same order on every machine.

    Their names are one block of bytes: a list of a million strings would be copied into every worker, page by page, as
    soon as Python counts the references to them.
    """

    exif = False
    """Images are turned upright, as their EXIF data says."""

    def __init__(self, folder: Path, counts: Mapping[str, Mapping[str, int]], names: bytes) -> None:
        """Split -> class -> number of files, and the files' names, each with a zero byte behind it."""
        import numpy

        self.folder = folder
        self.left_out: dict[str, LeftOut] = {}
        """Split -> files that are no images, where this process has listed them."""
        self.splits: dict[str, dict[str, range]] = {}
        """Split -> class -> positions; both as their folders are called."""
        self._classes: list[tuple[int, str, str]] = []
        """First position, split and class of each class with files."""
        start = 0
        for split, classes in counts.items():
            self.splits[split] = {}
            for name, count in classes.items():
                self.splits[split][name] = range(start, start + count)
                if count:
                    self._classes.append((start, split, name))
                start += count
        self._names = names
        ends = numpy.flatnonzero(numpy.frombuffer(names, numpy.uint8) == 0)
        self._starts = numpy.concatenate([[0], ends + 1])
        if len(ends) != start:
            raise ValueError(f"{len(ends)} names for {start} files")
        if re.search(rb"(?:^|[\0/])\.\.(?:[\0/])|(?:^|\0)/", names):  # it may have come from elsewhere
            raise ValueError("a name leads out of its folder")

    @classmethod
    def walk(cls, folder: Path, splits: Sequence[str], *, all_kinds: bool = True) -> Files:
        """List what is on the disk.

        Args:
            all_kinds: take every kind of image that is known; False: what runs took that began earlier.
        """
        chooser = Chooser(all_kinds=all_kinds)
        counts: dict[str, dict[str, int]] = {}
        left_out: dict[str, LeftOut] = {}
        names: list[bytes] = []
        for split in splits:
            counts[split] = {}
            for name in class_folders(folder / split):
                found = list_images(folder / split / name, chooser)
                counts[split][name] = len(found)
                names += map(os.fsencode, found)
            left_out[split] = chooser.take_left_out(folder)
        files = cls(folder, counts, b"".join(name + b"\0" for name in names))
        files.left_out = left_out
        return files

    def to_bytes(self) -> bytes:
        """The list, for other ranks and for a pack."""
        counts = {split: {name: len(found) for name, found in of.items()} for split, of in self.splits.items()}
        return json.dumps(counts).encode() + b"\n" + self._names

    @classmethod
    def from_bytes(cls, folder: Path, content: bytes) -> Files:
        """Read what `to_bytes` gave."""
        return cls(folder, *parse_list(content))

    def __len__(self) -> int:
        return len(self._starts) - 1

    def name(self, position: int) -> str:
        """The file's path below its class's folder."""
        return os.fsdecode(self._names[self._starts[position] : self._starts[position + 1] - 1])

    def path(self, position: int) -> str:
        """SPLIT/CLASS/NAME."""
        _, split, name = self._classes[bisect_right(self._classes, position, key=lambda known: known[0]) - 1]
        return os.path.join(split, name, self.name(position))

    def read(self, position: int, in_chans: int, part: Part | None = None) -> Tensor:
        """The image, or a part of it, as `read_image` gives it."""
        return read_image(self.folder / self.path(position), in_chans, exif=self.exif, part=part)


def parse_list(content: bytes) -> tuple[Any, bytes]:
    """Counts and names out of `Files.to_bytes`."""
    head, _, names = content.partition(b"\n")
    return fileio.parse(head), names


FOREIGN = ("__MACOSX", "@eaDir", "lost+found")
"""Folders that archives of macOS, storage by Synology and file systems add to what a user has."""


def class_folders(folder: Path) -> list[str]:
    """Names of the subfolders, sorted. Hidden ones, such as .ipynb_checkpoints, are no classes; nor are packs."""
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if is_of_user(entry.name) and entry.is_dir())
    return []


def is_of_user(folder: str) -> bool:
    """Tell a folder that may hold images from hidden ones, packs, and what systems make for themselves."""
    return not folder.startswith(".") and folder not in FOREIGN and not folder.endswith((".pack", ".pack.partial"))


COUNTED = 20_000
"""This many files are counted within a moment, also on a file system that is far away."""


def counted(folder: Path, most: int = COUNTED, chooser: Chooser | None = None) -> list[int] | None:
    """The number of images of each class in ``folder``; None where there are more than ``most`` files."""
    counts: list[int] = []
    chooser = chooser or Chooser()
    for name in class_folders(folder):
        counts.append(0)
        for parent, files in _walk(folder / name):
            most -= len(files)
            if most < 0:
                return None
            counts[-1] += sum(chooser.takes(parent, file) for file in files)
    return counts


def list_images(folder: Path, chooser: Chooser | None = None) -> list[str]:
    """Images in ``folder`` and below, as paths relative to it, sorted: the same order on every machine."""
    found: list[str] = []
    chooser = chooser or Chooser()
    for parent, files in _walk(folder, all_kinds=chooser.all_kinds):
        below = f"{os.path.relpath(parent, folder)}/".removeprefix("./")
        found += [below + file for file in files if chooser.takes(parent, file)]
    return sorted(found)


def _walk(folder: Path, *, all_kinds: bool = True) -> Iterator[tuple[str, list[str]]]:
    """A folder and those below it that are not hidden, each with its files, by name. A link back up leads nowhere.

    Args:
        all_kinds: False is a run of before, which took what Synology adds for images of the user's.
    """
    for parent, folders, files in os.walk(folder, followlinks=True):
        known = [name for name in sorted(folders) if is_of_user(name) or (not all_kinds and name in FOREIGN)]
        folders[:] = [name for name in known if not _leads_up(parent, name)]
        yield parent, sorted(files)


def _leads_up(parent: str, name: str) -> bool:
    """Return whether a folder is a link to one above it: following it would never end."""
    path = os.path.join(parent, name)
    return os.path.islink(path) and f"{os.path.realpath(parent)}/".startswith(f"{os.path.realpath(path)}/")


class ImageFiles:
    """Some image files, and their labels. Sample -> uint8 [in_chans, H, W], label."""

    def __init__(self, files: Files, positions: Iterable[int], labels: Iterable[int], in_chans: int) -> None:
        self.files = files
        self.in_chans = in_chans
        self.positions = array("q", positions)
        self.labels = array("i", labels)
        assert len(self.labels) == len(self.positions)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        return self.read_part(index)

    def read_part(self, index: int, part: Part | None = None) -> tuple[Tensor, int]:
        """Read the part of a sample that is wanted, and its label."""
        return self.files.read(self.positions[index], self.in_chans, part), self.labels[index]

    def part(self, indices: Sequence[int]) -> ImageFiles:
        """Select some of them."""
        positions = map(self.positions.__getitem__, indices)
        labels = map(self.labels.__getitem__, indices)
        return ImageFiles(self.files, positions, labels, self.in_chans)


def images_of(files: Files, split: str, classes: Sequence[str], in_chans: int) -> ImageFiles:
    """All images of ``classes`` in a split; a class may have none."""
    positions = array("q")
    labels = array("i")
    for label, name in enumerate(classes):
        found = files.splits.get(split, {}).get(name, range(0))
        positions.extend(found)
        labels.extend([label] * len(found))
    return ImageFiles(files, positions, labels, in_chans)
