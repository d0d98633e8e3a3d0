"""Your own images with several labels each: a folder, and a CSV file with a row an image."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trainkit import fileio
from trainkit.data.base import Splits, stratified_split
from trainkit.data.download import Say
from trainkit.data.folders import photo_splits, read_image
from trainkit.errors import UserError

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

LABELS = "several"
_LONGEST = 1 << 28
_SPLITS = ("train", "val", "test")
_EXAMPLE = 'For example "image,labels", then "photos/1.jpg,cat;dog" and so on; a third column, split, is optional.'


class _Row(NamedTuple):
    image: str
    labels: tuple[str, ...]
    split: str
    """``train``, ``val`` or ``test``; empty without such a column."""


class TableSamples:
    """Some rows. Sample -> uint8 [in_chans, H, W], and uint8 [classes]: 1 for each class that the image shows."""

    def __init__(self, folder: Path, rows: Sequence[_Row], classes: Sequence[str], in_chans: int) -> None:
        import numpy

        number = {name: at for at, name in enumerate(classes)}
        self.folder, self.in_chans = folder, in_chans
        # One block of bytes: a list of strings would be copied into every worker.
        self._images = numpy.array([os.fsencode(row.image) for row in rows])
        self.labels: numpy.ndarray[tuple[int, int], numpy.dtype[numpy.uint8]]
        self.labels = numpy.zeros((len(rows), len(number)), numpy.uint8)
        for at, row in enumerate(rows):
            self.labels[at, [number[name] for name in row.labels]] = 1

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Tensor]:
        import torch

        file = self.folder / os.fsdecode(bytes(self._images[index]))
        return read_image(file, self.in_chans), torch.from_numpy(self.labels[index])


def build(
    root: Path,
    *,
    file: str = "labels.csv",
    image_size: int = 224,
    in_chans: Literal[1, 3] = 3,
    augment: bool = True,
    val_fraction: float = 0.15,
    test_fraction: float = 0.15,
) -> Splits:
    """``root/labels.csv``: columns ``image`` (a path below root), ``labels`` (names with ";" between them) and, if you
    like, ``split``. Without val it is split off train, without test it is val; without the column rows are split three
    ways, by the images' names only.

    ``file``: the CSV file, in ``root``.
    """
    classes, rows = _parts(root / file, val_fraction, test_fraction)
    parts = [TableSamples(root, part, classes, in_chans) for part in rows]
    return photo_splits("image_csv", classes, parts, image_size, in_chans, augment=augment)


def locate(root: Path, **options: Any) -> None:
    """Check that the file says what it should."""
    train_size(root, **options)


def train_size(root: Path, *, file: str, val_fraction: float, test_fraction: float, **others: Any) -> int:
    """Images to train on."""
    return len(_parts(root / file, val_fraction, test_fraction)[1][0])


def _parts(file: Path, val_fraction: float, test_fraction: float) -> tuple[list[str], list[list[_Row]]]:
    """The classes; and the rows of train, val and test. Raises UserError where one of these has none."""
    rows = _read(file)
    classes = sorted({name for row in rows for name in row.labels})
    if not classes:
        raise UserError(f"{file} has no labels.", why="Its column labels is empty.", fix=_EXAMPLE)
    parts = _split(rows, val_fraction, test_fraction)
    if not all(parts):
        raise UserError(
            f"{file} has too few images to split.",
            why=f"It has {len(rows)}; training, validation and test need one or more each.",
            fix="Add rows, or correct the column split.",
        )
    return classes, parts


def prepare(root: Path, archives: list[Path], say: Say) -> None:
    """Nothing to fetch: say where the images belong."""
    say(f"Put your images anywhere below {root}, and a row for each into {root}/labels.csv.")
    say(_EXAMPLE)


def _read(file: Path) -> list[_Row]:
    try:
        rows = csv.DictReader(io.StringIO(fileio.read_text(file, _LONGEST, follow=True).removeprefix("\ufeff")))
        columns = rows.fieldnames or ()
        if not {"image", "labels"} <= set(columns):
            raise UserError(
                f"{file} has no columns image and labels.",
                why=f"Its first line is {','.join(columns)[:100]!r}.",
                fix=_EXAMPLE,
            )
        found: list[_Row] = []
        for number, row in enumerate(rows, start=2):
            name, split = row["image"], (row.get("split") or "").strip()
            if not name or ("split" in columns and split not in _SPLITS):
                raise UserError(
                    f"Line {number} of {file} is not a row of an image.",
                    why=f"Its image is {name!r}" + (f", its split {split!r}." if "split" in columns else "."),
                    fix=f"Give each line an image; the column split, if there is one, holds {', '.join(_SPLITS)}.",
                )
            labels = (part.strip() for part in (row["labels"] or "").split(";"))
            found.append(_Row(name, tuple(filter(None, labels)), split))
    except csv.Error as error:
        raise UserError(f"{file} is not CSV.", why=f"{error}.", fix=_EXAMPLE) from None
    except OSError as error:
        raise UserError(
            f"There is no file {file}.",
            why=f"{error.strerror or error}. data.root of image_csv is the folder of your images and of that file.",
            fix=f"Correct data.root or data.file. {_EXAMPLE}",
            key="data.root",
        ) from None
    return found


def _split(rows: Sequence[_Row], val_fraction: float, test_fraction: float) -> list[list[_Row]]:
    """Rows of train, val and test."""

    def by_name(rows: Sequence[_Row], *fractions: float) -> list[list[_Row]]:
        parts = stratified_split([0] * len(rows), fractions, keys=[row.image for row in rows])
        return [[rows[at] for at in part] for part in parts]

    if not any(row.split for row in rows):
        return by_name(rows, val_fraction, test_fraction)
    train, val, test = ([row for row in rows if row.split == split] for split in _SPLITS)
    if not val:
        train, val = by_name(train, val_fraction)
    return [train, val, test or val]
