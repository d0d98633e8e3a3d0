"""Folders with one subfolder of images for each class."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.data.images import SUFFIXES, read_image
from trainkit.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class ImageFiles:
    """Image files and labels. Sample -> uint8 [in_chans, H, W], label.

    The names lie in one block of bytes: a list of a million strings would be copied into every worker, page by page, as
    soon as Python counts the references to them.
    """

    def __init__(self, folder: Path, files: Sequence[str], labels: Iterable[int], in_chans: int) -> None:
        self.folder, self.in_chans = folder, in_chans
        self.labels = array("i", labels)
        encoded = [os.fsencode(file) for file in files]
        self._names = b"".join(encoded)
        self._ends = array("q", [0])
        for name in encoded:
            self._ends.append(self._ends[-1] + len(name))
        assert len(self.labels) == len(files)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        return read_image(self.path(index), self.in_chans), self.labels[index]

    def path(self, index: int) -> Path:
        """The file of a sample."""
        return self.folder / os.fsdecode(self._names[self._ends[index] : self._ends[index + 1]])


def class_folders(folder: Path) -> list[str]:
    """Names of the subfolders, sorted. Hidden ones, such as .ipynb_checkpoints, are no classes."""
    try:
        with os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []


def image_files(folder: Path) -> list[str]:
    """Images in ``folder`` and below, as paths relative to it, sorted: the same order on every machine."""
    found: list[str] = []
    for parent, folders, files in os.walk(folder, followlinks=True):
        folders[:] = [name for name in folders if not name.startswith(".")]
        below = os.path.relpath(parent, folder)
        for file in files:
            if file.lower().endswith(SUFFIXES) and not file.startswith("."):
                found.append(file if below == "." else os.path.join(below, file))
    return sorted(found)


def scan(folder: Path, classes: Sequence[str]) -> tuple[list[str], list[int]]:
    """Files (relative to ``folder``) and labels of all images of ``classes``; a class may have none here."""
    files: list[str] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        of_class = [os.path.join(name, file) for file in image_files(folder / name)]
        files += of_class
        labels += [label] * len(of_class)
    return files, labels


def read_split(folder: Path, classes: Sequence[str], in_chans: int) -> ImageFiles:
    """All images of a split. Raises UserError for a class that training does not have, and where there are none."""
    unknown = sorted(set(class_folders(folder)) - set(classes))
    if unknown:
        raise UserError(
            f"{folder / unknown[0]} is a class that the training data does not have.",
            why=f"The training data has: {_some(classes)}.",
            fix="Rename or remove that folder, or add training images of its class.",
        )
    files, labels = scan(folder, classes)
    if not files:
        raise no_images(folder)
    return ImageFiles(folder, files, labels, in_chans)


def require_classes(folder: Path) -> list[str]:
    """The classes of a training folder; each has at least one image. Raises UserError otherwise."""
    classes = class_folders(folder)
    if len(classes) < 2:
        raise UserError(
            f"{folder} does not hold a folder for each class.",
            why=f"It has {'no folder' if not classes else f'one folder, {classes[0]}'}; two or more are needed.",
            fix=f"Put the images into {folder}/CLASS/NAME.jpg.",
        )
    return classes


def no_images(folder: Path) -> UserError:
    """The error for a folder that should hold images."""
    return UserError(
        f"{folder} holds no images.",
        why=f"Image files end in {', '.join(SUFFIXES[:6])}, ...",
        fix=f"Put the images into {folder}/CLASS/NAME.jpg, or remove the empty folder.",
    )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
