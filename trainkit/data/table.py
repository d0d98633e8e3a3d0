"""Images in a table: a CSV file with a row an image, which has its path, its labels and, if need be, its split."""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError
from trainkit.data import folders, losses
from trainkit.data.base import Splits
from trainkit.data.decoding import Part, read_image
from trainkit.data.download import Say
from trainkit.data.folders import HeldOut, evenly
from trainkit.data.losses import Counts, SplitCounts
from trainkit.data.order import stratified_split
from trainkit.data.photo_transforms import Photos, photo_splits

if TYPE_CHECKING:
    import numpy
    from torch import Tensor

LabelColumn = Literal["label", "labels"]
"""One label an image, or several with ";" between them."""
_LONGEST = 1 << 28
_LOOKED_UP = 50
"""Images of each split of which it is looked up whether they exist."""
EXAMPLES = {
    "label": 'For example "path,label", then "photos/1.jpg,cat" and so on; a third column, split, is optional.',
    "labels": 'For example "image,labels", then "photos/1.jpg,cat;dog" and so on; a third column, split, is optional.',
}
_OTHER = {
    "label": "image_csv is for images with several labels (task.name=multilabel)",
    "labels": "image_list is for images with one label (task.name=classification)",
}
"""Column -> which data set reads the other one."""


class TableRow(NamedTuple):
    """An image of a table."""

    image: str
    labels: tuple[str, ...]
    split: str
    """``train``, ``val`` or ``test``; empty without such a column."""
    line: int
    """Number of its line in the file."""


class TableSamples:
    """Some rows. Sample -> uint8 [in_chans, H, W], and its class; of several labels uint8 [classes], 1 for each class
    that the image shows."""

    def __init__(
        self,
        folder: Path,
        rows: Sequence[TableRow],
        classes: Sequence[str],
        in_chans: int,
        column: LabelColumn,
        exif: bool,
    ) -> None:
        import numpy

        number = {name: at for at, name in enumerate(classes)}
        self.folder = folder
        self.in_chans = in_chans
        self.exif = exif
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
        return self.read_part(index)

    def read_part(self, index: int, part: Part | None = None) -> tuple[Tensor, Any]:
        """Read the part of a sample that is wanted, and its label."""
        import torch

        file = self.folder / os.fsdecode(bytes(self._images[index]))
        image = read_image(file, self.in_chans, exif=self.exif, part=part)
        label = self.labels[index]
        return image, torch.from_numpy(label) if label.ndim else int(label)


@dataclass(frozen=True)
class TableData:
    """A data set of photos in a table: what its file defines beside ``build``: see `trainkit.data.registry.Dataset`."""

    name: str
    column: LabelColumn

    def read(
        self, root: Path, *, file: str, val_fraction: float, test_fraction: float, **others: Any
    ) -> tuple[list[str], list[list[TableRow]]]:
        """The classes, and the rows of train, val and test.

        Without val it is split off train, without test it is val; without the column ``split`` rows are split three
        ways, by the images' names only, and by class where they have one each.

        Raises UserError for a file that is none, and where a split has no row.
        """
        path = root / file
        stamp: tuple[int, ...] = ()
        with suppress(OSError):
            about = path.stat()
            stamp = (about.st_dev, about.st_ino, about.st_size, about.st_mtime_ns)
        return _classes_and_parts(path, self.column, (val_fraction, test_fraction), stamp)

    def locate(self, root: Path, **options: Any) -> None:
        """Check that the file says what it should."""
        self.read(root, **options)

    def look(self, root: Path, *, file: str, **options: Any) -> list[str]:
        """Refuse a table whose images do not exist, by some of each split; return sentences about images that it has
        several times."""
        _, parts = self.read(root, file=file, **options)
        rows: dict[int, TableRow] = {}  # by their lines, for test may be val
        some: dict[int, TableRow] = {}
        for part in parts:
            rows.update((row.line, row) for row in part)
            some.update((row.line, row) for row in evenly(part, _LOOKED_UP))
        _look_at_files(root / file, root, [some[line] for line in sorted(some)])
        return [*_repeated(list(rows.values()), root / file), *_shared(parts, root / file)]

    def train_size(self, root: Path, **options: Any) -> int:
        """Images to train on."""
        return len(self.read(root, **options)[1][0])

    def counts(self, root: Path, *, file: str, **options: Any) -> Counts:
        """Count what is read of each split; empty before the table is there."""
        if not (root / file).is_file():
            return {}
        _, (train, val, test) = self.read(root, file=file, **options)
        found = {"train": _counted(train), "val": _counted(val, "val"), "test": _counted(test, "test")}
        if test is val:
            found["test"] = SplitCounts(0, 0, {}, losses.NO_TEST)
        return found

    def some_images(self, root: Path, **options: Any) -> list[Path]:
        """List some of the images to train on."""
        return [root / row.image for row in evenly(self.read(root, **options)[1][0], folders.MEASURED)]

    def prepare(self, root: Path, archives: list[Path], say: Say) -> None:
        """Nothing to fetch: say where the images belong."""
        say(f"Put your images anywhere below {root}, and one row per image into {root}/labels.csv.")
        say(EXAMPLES[self.column])


def table_splits(
    data: TableData, root: Path, *, file: str = "labels.csv", photos: Photos, fractions: HeldOut
) -> Splits:
    """``root/labels.csv``: columns ``image`` or ``path`` (a path below root), and ``label``, with image_list, or
    ``labels``, with image_csv (names with ";" between them); and ``split``, if you like. Without val it is split off
    train, without test it is val; without the column rows are split three ways, by the images' names only, and by class
    where they have one label each.

    ``file``: the CSV file, in ``root``.
    """
    classes, parts = data.read(root, file=file, **asdict(fractions))
    _classes_and_parts.cache_clear()  # or training and its workers would keep all rows
    samples = [TableSamples(root, part, classes, photos.in_chans, data.column, photos.exif) for part in parts]
    return photo_splits(data.name, classes, samples, photos)


@lru_cache(maxsize=1)  # `submit` asks for them several times, and a million rows take seconds
def _classes_and_parts(
    path: Path, column: LabelColumn, fractions: tuple[float, float], stamp: tuple[int, ...]
) -> tuple[list[str], list[list[TableRow]]]:
    """Read a table for `TableData.read`. ``stamp`` identifies the file, so that a changed one is read anew."""
    by_class = column == "label"
    rows = _read(path, column)
    _repeated(rows, path)
    classes = sorted({name for row in rows for name in row.labels})
    if by_class and all(re.fullmatch(r"[0-9]{1,18}", name) for name in classes):
        classes.sort(key=int)  # a label 2 is output 2, and not 10
    if not classes:
        raise UserError(f"{path} has no labels.", why=f"Its column {column} is empty.", fix=EXAMPLES[column])
    parts = _split(rows, *fractions, by_class=by_class)
    if not all(parts):
        why = f"It has {len(rows)}; training, validation and test need at least one each."
        raise UserError(f"{path} has too few images to split.", why=why, fix="Add rows, or correct the column split.")
    absent = set(classes) - {label for row in parts[0] for label in row.labels}
    if by_class and absent:
        what = f"No image to train on has the label {min(absent)!r}."
        raise UserError(
            what, why=f"{path} has this label only in other splits.", fix="Correct that label or the column split."
        )
    return classes, parts


_split_named = lru_cache(folders.split_named)


def _read(file: Path, column: LabelColumn) -> list[TableRow]:
    """The rows of a table, in their order."""
    more = "data.root must be the folder of your images and of this file."
    fix = f"Correct data.root or data.file. {EXAMPLES[column]}"
    with fileio.disk_errors_as(f"There is no file {file}.", fix=fix, more=more, key="data.root"):
        content = fileio.read_bytes(file, _LONGEST, follow=True)
    rows: list[TableRow] = []
    words = set[str]()
    lines = csv.reader(io.StringIO(decoded(content, file), newline=""))
    try:
        header = next(lines, [])
        at = _columns(file, header, column)
        for cells in lines:
            if not cells:
                continue
            cells += [""] * (len(header) - len(cells))
            if any(map(str.strip, cells[len(header) :])):
                what = f"Line {lines.line_num} of {file} has more cells than the first line."
                why = f"After its columns it has {','.join(cells[len(header) :])[:100]!r}."
                raise UserError(what, why=why, fix='Put a cell that has a comma into quotes: "a,b".')
            split: str | None = ""
            if "split" in at:
                word = cells[at["split"]].strip().lower()
                words.add(word)
                split = _split_named(word)
            parts = [cells[at[column]]]
            if column == "labels":
                parts = parts[0].split(";")
            labels = tuple(filter(None, map(str.strip, parts)))
            if not cells[at["image"]] or split is None or not (labels or column == "labels"):
                what = f"Line {lines.line_num} of {file} is not a row of an image."
                fix = f"Give each line an image and its {column}; the column split takes one of: {folders.LISTED}."
                raise UserError(what, why=f"It is {','.join(cells)[:200]!r}.", fix=fix)
            rows.append(TableRow(cells[at["image"]], labels, split, lines.line_num))
    except csv.Error as error:
        raise UserError(f"{file} is not CSV.", why=f"{error}.", fix=EXAMPLES[column]) from None
    folders.by_split(words, file, kind="words")
    return rows


def decoded(content: bytes, file: Path) -> str:
    """Decode UTF-8, with or without a mark at its beginning: a byte that is replaced would make one class of two.

    Raises UserError, which names the line.
    """
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        why = f"Line {line} has the byte 0x{error.object[error.start]:02x}, which is not UTF-8."
        encoding = "WINDOWS-1252"
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            encoding = "UTF-16"
        fix = f'Save it as UTF-8, in Excel as "CSV UTF-8"; or perhaps: `iconv -f {encoding} -t UTF-8 OLD > NEW`.'
        raise UserError(f"{file} is not UTF-8.", why=why, fix=fix) from None


def _columns(file: Path, header: Sequence[str], column: LabelColumn) -> dict[str, int]:
    """Find the columns: ``image``, the labels' column and, where there is one, ``split``.

    Raises UserError where there are no such columns.
    """
    at = {name: number for number, name in enumerate(header)}
    for image in ("image", "path"):
        if image in at and column in at:
            return {**at, "image": at[image]}
    why = f"Its first line is {','.join(header)[:100]!r}."
    for mark in ";\t":
        if column in "".join(header).split(mark):
            fix = f"Replace each {mark!r} by a comma, or export with commas."
            raise UserError(f"{file} is not separated by commas.", why=why, fix=fix)
    fix = EXAMPLES[column]
    if {"label", "labels"} - {column} & set(header):
        fix = f"{_OTHER[column]}: use that; or rename the column."
    raise UserError(f"{file} has no columns image and {column}.", why=why, fix=fix)


def _repeated(rows: Sequence[TableRow], file: Path) -> list[str]:
    """Return sentences about images that are listed several times. Raises UserError where their labels differ."""
    first: dict[str, TableRow] = {}
    again: list[TableRow] = []
    for row in rows:
        known = first.setdefault(os.path.normpath(row.image), row)
        if known is row:
            continue
        again.append(row)
        if set(known.labels) != set(row.labels):
            what = f"{file} lists {row.image} twice, with different labels."
            one = ";".join(known.labels) or "no label"
            other = ";".join(row.labels) or "no label"
            why = f"Line {known.line} says {one}, line {row.line} says {other}."
            raise UserError(
                what, why=why, fix="Give each image one line; several labels (image_csv) are written cat;dog."
            )
    if not again:
        return []
    known = first[os.path.normpath(again[0].image)]
    example = f"{again[0].image} in lines {known.line} and {again[0].line}"
    count = terminal.plural(len(again), "line")
    return [f"{file} repeats images in {count}, such as {example}: each occurrence counts."]


def _counted(rows: Sequence[TableRow], split: str = "") -> SplitCounts:
    """Counts of some rows; says whether they were split off, as those of another ``split`` than theirs."""
    classes = {label for row in rows for label in row.labels}
    note = losses.SPLIT_OFF if split and rows[0].split != split else ""
    return SplitCounts(len(rows), len(classes), {}, note)


def _shared(parts: Sequence[Sequence[TableRow]], file: Path) -> list[str]:
    """Return sentences about images that are in two splits."""
    said: list[str] = []
    images = [{os.path.normpath(row.image) for row in part} for part in parts]
    pairs = [(0, 1)] if parts[1] is parts[2] else [(0, 1), (0, 2), (1, 2)]
    for at, other in pairs:
        both = images[at] & images[other]
        if both:
            count = terminal.plural(len(both), "image")
            splits = f"{folders.SPLITS[at]} and in {folders.SPLITS[other]}"
            said.append(f"{file} has {count} in {splits}, such as {min(both)}: results on them mean little.")
    return said


def _split(
    rows: Sequence[TableRow], val_fraction: float, test_fraction: float, *, by_class: bool
) -> list[list[TableRow]]:
    """Rows of train, val and test."""
    number = {labels: at for at, labels in enumerate(sorted({row.labels for row in rows}))}

    def by_name(rows: Sequence[TableRow], *fractions: float) -> list[list[TableRow]]:
        strata = [number[row.labels] * by_class for row in rows]
        parts = stratified_split(strata, fractions, keys=[row.image for row in rows])
        return [[rows[at] for at in part] for part in parts]

    by_split: dict[str, list[TableRow]] = {"": [], "train": [], "val": [], "test": []}
    for row in rows:
        by_split[row.split].append(row)
    if len(by_split[""]) == len(rows):
        return by_name(rows, val_fraction, test_fraction)
    train = by_split["train"]
    val = by_split["val"]
    if not val:
        train, val = by_name(train, val_fraction)
    return [train, val, by_split["test"] or val]


# Files that a table names


def _look_at_files(table: Path, root: Path, rows: Sequence[TableRow]) -> None:
    """Refuse a table that names an image which does not exist, by some of its rows.

    Raises UserError, which says what is wrong with the first of them.
    """
    absent = [row for row in rows if _trouble(root / row.image)]
    if not absent:
        return
    row = absent[0]
    fix = f"Correct the paths in the table: they are below data.root={root}."
    what = f"{table} names images that do not exist: {len(absent)} of {len(rows)} checked rows."
    raise UserError(what, why=f"Line {row.line} names {row.image!r}: {_trouble(root / row.image)}.", fix=fix)


def _trouble(path: Path) -> str:
    """Say what keeps a file from being read, as far as its name tells; empty where it is there."""
    try:
        return "" if stat.S_ISREG(os.stat(path).st_mode) else "it is no file"
    except OSError as error:
        return (error.strerror or "it cannot be read").lower()
    except ValueError:
        return "it has a zero byte"
