"""Splits of image files: one folder, or part of a pack, for each class."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit.data.images import SUFFIXES
from trainkit.data.tree import Files
from trainkit.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


class ImageFiles:
    """Some image files, and their labels. Sample -> uint8 [in_chans, H, W], label."""

    def __init__(self, files: Files, positions: Iterable[int], labels: Iterable[int], in_chans: int) -> None:
        self.files, self.in_chans = files, in_chans
        self.positions, self.labels = array("q", positions), array("i", labels)
        assert len(self.labels) == len(self.positions)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        return self.files.read(self.positions[index], self.in_chans), self.labels[index]


def scan(files: Files, split: str, classes: Sequence[str]) -> tuple[list[int], list[int]]:
    """Positions and labels of all images of ``classes``; a class may have none here."""
    positions: list[int] = []
    labels: list[int] = []
    of_class = files.splits.get(split, {})
    for label, name in enumerate(classes):
        found = of_class.get(name, range(0))
        positions += found
        labels += [label] * len(found)
    return positions, labels


def read_split(files: Files, split: str, classes: Sequence[str], in_chans: int) -> ImageFiles:
    """All images of a split. Raises UserError for a class that training does not have, and where there are none."""
    folder = files.folder / split
    unknown = sorted(set(files.splits.get(split, {})) - set(classes))
    if unknown:
        raise UserError(
            f"{folder / unknown[0]} is a class that the training data does not have.",
            why=f"The training data has: {_some(classes)}.",
            fix="Rename or remove that folder, or add training images of its class.",
        )
    positions, labels = scan(files, split, classes)
    if not positions:
        raise no_images(folder)
    return ImageFiles(files, positions, labels, in_chans)


def require_classes(folder: Path, classes: Iterable[str]) -> list[str]:
    """The classes of a folder to train on. Raises UserError where these are less than two."""
    classes = list(classes)
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
