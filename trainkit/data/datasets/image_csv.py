"""Your own images with several labels each: a folder, and a CSV file with a row an image."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainkit import fileio
from trainkit.data.base import Splits, require_options, stratified_split
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


@dataclass
class _Table:
    """The rows of the file."""

    images: list[str] = field(default_factory=list)
    labels: list[tuple[str, ...]] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)
    """``train``, ``val`` or ``test`` for each row; empty without such a column."""

    @property
    def classes(self) -> list[str]:
        return sorted({name for names in self.labels for name in names})


class TableSamples:
    """Some rows. Sample -> uint8 [in_chans, H, W], and uint8 [classes]: 1 for each class that the image shows."""

    def __init__(self, folder: Path, table: _Table, rows: Sequence[int], in_chans: int) -> None:
        import numpy

        number = {name: at for at, name in enumerate(table.classes)}
        self.folder, self.in_chans = folder, in_chans
        # One block of bytes: a list of strings would be copied into every worker.
        self._images = numpy.array([os.fsencode(table.images[row]) for row in rows])
        self.labels: numpy.ndarray[tuple[int, int], numpy.dtype[numpy.uint8]]
        self.labels = numpy.zeros((len(rows), len(number)), numpy.uint8)
        for at, row in enumerate(rows):
            self.labels[at, [number[name] for name in table.labels[row]]] = 1

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
    in_chans: int = 3,
    augment: bool = True,
    val_fraction: float = 0.15,
    test_fraction: float = 0.15,
) -> Splits:
    """``root/labels.csv``: columns ``image`` (a path below root), ``labels`` (names with ";" between them) and, if you
    like, ``split``. Without val it is split off train, without test it is val; without the column rows are split three
    ways, by the images' names only.

    ``file``: the CSV file, in ``root``.
    """
    locate(root, file=file, image_size=image_size, in_chans=in_chans, val_fraction=val_fraction,
           test_fraction=test_fraction)  # fmt: skip
    table = _read(root / file)
    parts = [TableSamples(root, table, rows, in_chans) for rows in _split(table, val_fraction, test_fraction)]
    return photo_splits("image_csv", table.classes, parts, image_size, in_chans, augment=augment)


def locate(root: Path, *, file: str, val_fraction: float, test_fraction: float, **others: Any) -> None:
    """Check the options, and that the file says what it should."""
    require_options({**others, "val_fraction": val_fraction, "test_fraction": test_fraction})
    table = _read(root / file)
    if not table.classes:
        raise UserError(f"{root / file} has no labels.", why="Its column labels is empty.", fix=_EXAMPLE)
    if not all(_split(table, val_fraction, test_fraction)):
        raise UserError(
            f"{root / file} has too few images to split.",
            why=f"It has {len(table.images)}; training, validation and test need one or more each.",
            fix="Add rows, or correct the column split.",
        )


def train_size(root: Path, *, file: str, val_fraction: float, test_fraction: float, **others: Any) -> int:
    """Images to train on."""
    return len(_split(_read(root / file), val_fraction, test_fraction)[0])


def prepare(root: Path, archives: list[Path], say: Say) -> None:
    """Nothing to fetch: say where the images belong."""
    say(f"Put your images anywhere below {root}, and a row for each into {root}/labels.csv.")
    say(_EXAMPLE)


def _read(file: Path) -> _Table:
    try:
        rows = csv.DictReader(io.StringIO(fileio.read_text(file, _LONGEST, follow=True).removeprefix("\ufeff")))
        columns = rows.fieldnames or ()
        if not {"image", "labels"} <= set(columns):
            raise UserError(
                f"{file} has no columns image and labels.",
                why=f"Its first line is {','.join(columns)[:100]!r}.",
                fix=_EXAMPLE,
            )
        table = _Table()
        for number, row in enumerate(rows, start=2):
            name, split = row["image"], (row.get("split") or "").strip()
            if not name or ("split" in columns and split not in _SPLITS):
                raise UserError(
                    f"Line {number} of {file} is not a row of an image.",
                    why=f"Its image is {name!r}" + (f", its split {split!r}." if "split" in columns else "."),
                    fix=f"Give each line an image; the column split, if there is one, holds {', '.join(_SPLITS)}.",
                )
            table.images.append(name)
            table.labels.append(tuple(filter(None, (part.strip() for part in (row["labels"] or "").split(";")))))
            if "split" in columns:
                table.splits.append(split)
    except csv.Error as error:
        raise UserError(f"{file} is not CSV.", why=f"{error}.", fix=_EXAMPLE) from None
    except OSError as error:
        raise UserError(
            f"There is no file {file}.",
            why=f"{error.strerror or error}. data.root of image_csv is the folder of your images and of that file.",
            fix=f"Correct data.root or data.file. {_EXAMPLE}",
            key="data.root",
        ) from None
    return table


def _split(table: _Table, val_fraction: float, test_fraction: float) -> list[list[int]]:
    """Rows of train, val and test."""
    if not table.splits:
        return stratified_split([0] * len(table.images), (val_fraction, test_fraction), keys=table.images)
    train, val, test = ([at for at, name in enumerate(table.splits) if name == split] for split in _SPLITS)
    if not val:
        names = [table.images[at] for at in train]
        kept, held_out = stratified_split([0] * len(train), (val_fraction,), keys=names)
        train, val = [train[at] for at in kept], [train[at] for at in held_out]
    return [train, val, test or val]
