"""Images in a table: a CSV file with a row an image, which has its path, its labels and, if need be, its split."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trainkit import fileio
from trainkit.data.base import Splits, stratified_split
from trainkit.data.download import Say
from trainkit.data.folders import MEASURED, evenly, photo_splits, read_image
from trainkit.errors import UserError

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

LabelColumn = Literal["label", "labels"]
"""One label an image, or several with ";" between them."""
_LONGEST = 1 << 28
_SPLITS = ("train", "val", "test")
_IMAGE_COLUMNS = ("image", "path")
EXAMPLES = {
    "label": 'For example "path,label", then "photos/1.jpg,cat" and so on; a third column, split, is optional.',
    "labels": 'For example "image,labels", then "photos/1.jpg,cat;dog" and so on; a third column, split, is optional.',
}
_OTHER = {
    "label": "image_csv is for images with several labels (task.name=multilabel)",
    "labels": "image_list is for images with one label (task.name=classification)",
}
"""Column -> which data set reads the other one."""


class Row(NamedTuple):
    """An image of a table."""

    image: str
    labels: tuple[str, ...]
    split: str
    """``train``, ``val`` or ``test``; empty without such a column."""


class TableSamples:
    """Some rows. Sample -> uint8 [in_chans, H, W], and its class; of several labels uint8 [classes], 1 for each class
    that the image shows."""

    def __init__(
        self, folder: Path, rows: Sequence[Row], classes: Sequence[str], in_chans: int, column: LabelColumn, exif: bool
    ) -> None:
        import numpy

        number = {name: at for at, name in enumerate(classes)}
        self.folder, self.in_chans, self.exif = folder, in_chans, exif
        # One block of bytes: a list of strings would be copied into every worker.
        self._images = numpy.array([os.fsencode(row.image) for row in rows])
        self.labels: numpy.ndarray[Any, numpy.dtype[Any]]
        if column == "label":
            self.labels = numpy.array([number[row.labels[0]] for row in rows], numpy.int32)
            return
        self.labels = numpy.zeros((len(rows), len(number)), numpy.uint8)
        for at, row in enumerate(rows):
            self.labels[at, [number[name] for name in row.labels]] = 1

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Any]:
        import torch

        file, label = self.folder / os.fsdecode(bytes(self._images[index])), self.labels[index]
        image = read_image(file, self.in_chans, exif=self.exif)
        return image, torch.from_numpy(label) if label.ndim else int(label)


@dataclass(frozen=True)
class TableData:
    """A data set of photos in a table: what its file defines beside ``build``, as `trainkit.data.Dataset` says."""

    name: str
    column: LabelColumn

    def read(
        self, root: Path, *, file: str, val_fraction: float, test_fraction: float, **others: Any
    ) -> tuple[list[str], list[list[Row]]]:
        """The classes, and the rows of train, val and test.

        Without val it is split off train, without test it is val; without the column ``split`` rows are split three
        ways, by the images' names only, and by class where they have one each.

        Raises UserError for a file that is none, and where a split has no row.
        """
        path, by_class = root / file, self.column == "label"
        rows = _read(path, self.column)
        if not (classes := sorted({name for row in rows for name in row.labels})):
            fix = EXAMPLES[self.column]
            raise UserError(f"{path} has no labels.", why=f"Its column {self.column} is empty.", fix=fix)
        if not all(parts := _split(rows, val_fraction, test_fraction, by_class=by_class)):
            why = f"It has {len(rows)}; training, validation and test need one or more each."
            fix = "Add rows, or correct the column split."
            raise UserError(f"{path} has too few images to split.", why=why, fix=fix)
        if by_class and (absent := sorted(set(classes) - {row.labels[0] for row in parts[0]})):
            what = f"No image to train on has the label {absent[0]!r}."
            raise UserError(what, why=f"{path} has it in other splits.", fix="Correct that label or the column split.")
        return classes, parts

    def locate(self, root: Path, **options: Any) -> None:
        """Check that the file says what it should."""
        self.read(root, **options)

    def train_size(self, root: Path, **options: Any) -> int:
        """Images to train on."""
        return len(self.read(root, **options)[1][0])

    def some_images(self, root: Path, **options: Any) -> list[Path]:
        """Of those to train on."""
        return [root / row.image for row in evenly(self.read(root, **options)[1][0], MEASURED)]

    def prepare(self, root: Path, archives: list[Path], say: Say) -> None:
        """Nothing to fetch: say where the images belong."""
        say(f"Put your images anywhere below {root}, and a row for each into {root}/labels.csv.")
        say(EXAMPLES[self.column])


def table_splits(
    data: TableData,
    root: Path,
    *,
    file: str = "labels.csv",
    image_size: int = 224,
    in_chans: Literal[1, 3] = 3,
    augment: bool = True,
    val_fraction: float = 0.15,
    test_fraction: float = 0.15,
    exif: bool = False,
) -> Splits:
    """``root/labels.csv``: columns ``image`` or ``path`` (a path below root), and ``label``, with image_list, or
    ``labels``, with image_csv (names with ";" between them); and ``split``, if you like. Without val it is split off
    train, without test it is val; without the column rows are split three ways, by the images' names only, and by class
    where they have one label each.

    ``file``: the CSV file, in ``root``. ``image_size``: pixels of a side; a new run without it takes the median of
    the shorter sides, up to 224. ``exif``: turn photos upright, as their EXIF data says.
    """
    classes, parts = data.read(root, file=file, val_fraction=val_fraction, test_fraction=test_fraction)
    samples = [TableSamples(root, part, classes, in_chans, data.column, exif) for part in parts]
    return photo_splits(data.name, classes, samples, image_size, in_chans, augment=augment, exif=exif)


def _read(file: Path, column: LabelColumn) -> list[Row]:
    example, more = EXAMPLES[column], "data.root is the folder of your images and of that file."
    fix = f"Correct data.root or data.file. {example}"
    with fileio.disk_errors_as(f"There is no file {file}.", fix=fix, more=more, key="data.root"):
        text = fileio.read_text(file, _LONGEST, follow=True)
    try:
        rows = csv.DictReader(io.StringIO(text.removeprefix("\ufeff")))
        columns = rows.fieldnames or ()
        image_column = next((name for name in _IMAGE_COLUMNS if name in columns), None)
        if image_column is None or column not in columns:
            is_other = {"label", "labels"} - {column} & set(columns)
            why = f"Its first line is {','.join(columns)[:100]!r}."
            fix = f"{_OTHER[column]}: use that; or rename the column." if is_other else example
            raise UserError(f"{file} has no columns image and {column}.", why=why, fix=fix)
        found: list[Row] = []
        for number, row in enumerate(rows, start=2):
            name, split = row[image_column], (row.get("split") or "").strip()
            words = [row[column] or ""] if column == "label" else (row[column] or "").split(";")
            labels = tuple(filter(None, (part.strip() for part in words)))
            is_bad = not name or ("split" in columns and split not in _SPLITS)
            if is_bad or (column == "label" and not labels):
                has = "".join(f", its {key} {row[key]!r}" for key in (column, "split") if key in columns)
                raise UserError(
                    f"Line {number} of {file} is not a row of an image.",
                    why=f"Its image is {name!r}{has}.",
                    fix=f"Give each line an image{' and a label' * (column == 'label')}; the column split, if there is "
                    f"one, holds {', '.join(_SPLITS)}.",
                )
            found.append(Row(name, labels, split))
    except csv.Error as error:
        raise UserError(f"{file} is not CSV.", why=f"{error}.", fix=example) from None
    return found


def _split(rows: Sequence[Row], val_fraction: float, test_fraction: float, *, by_class: bool) -> list[list[Row]]:
    """Rows of train, val and test."""
    number = {labels: at for at, labels in enumerate(sorted({row.labels for row in rows}))}

    def by_name(rows: Sequence[Row], *fractions: float) -> list[list[Row]]:
        strata = [number[row.labels] if by_class else 0 for row in rows]
        parts = stratified_split(strata, fractions, keys=[row.image for row in rows])
        return [[rows[at] for at in part] for part in parts]

    if not any(row.split for row in rows):
        return by_name(rows, val_fraction, test_fraction)
    train, val, test = ([row for row in rows if row.split == split] for split in _SPLITS)
    if not val:
        train, val = by_name(train, val_fraction)
    return [train, val, test or val]
