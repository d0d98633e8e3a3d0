"""Data sets of image files in folders: splits by name, layouts, classes, and a first look before a run is queued.

The look has to be quick for a million files far away: of a folder it reads entries until it has seen an image.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from itertools import islice
from pathlib import Path
from statistics import median_low
from typing import TypeVar

from trainkit.common import terminal
from trainkit.common.errors import UserError
from trainkit.data import base, image_files, losses
from trainkit.data.base import Splits
from trainkit.data.image_files import Files, ImageFiles, class_folders, counted, images_of, list_images
from trainkit.data.image_kinds import Chooser, LeftOut, why_not
from trainkit.data.losses import Counts, SplitCounts
from trainkit.data.order import size_left, sizes, stratified_split
from trainkit.data.photo_transforms import Photos, photo_splits

# Names of splits, as people write them


SPLITS = ("train", "val", "test")
WORDS: Mapping[str, Sequence[str]] = {
    "train": ("train", "training"),
    "val": ("val", "valid", "validation", "dev", "eval"),
    "test": ("test", "testing"),
}
"""Split -> the words that mean it, in any case."""
LISTED = "; ".join(", ".join(words) for words in WORDS.values())
"""All words, for messages."""
_SPLIT_OF = {word: split for split, words in WORDS.items() for word in words}
_ANY = "|".join(sorted(_SPLIT_OF, key=len, reverse=True))
_WHOLE = re.compile(rf"({_ANY})(?:[ _-]?set)?", re.IGNORECASE)
_IN_PATH = re.compile(rf"(?:^|[/_. -])({_ANY})(?:[ _-]?set)?(?=[/_. \d-]|$)", re.IGNORECASE)


def split_named(name: str) -> str | None:
    """Return the split that a folder, or a value in a table, is named after: ``valid``, ``Training``, ``test_set``.

    The whole name counts: a folder ``train_old`` is no split.
    """
    found = _WHOLE.fullmatch(name.strip())
    return _SPLIT_OF[found[1].lower()] if found else None


def _word_in(path: str) -> str:
    """Return the word in a file's path that names its split, in lower case; the last one where there are several."""
    found = _IN_PATH.findall(path)
    return str(found[-1]).lower() if found else ""


def split_of(path: str) -> str | None:
    """Return the split that a file of several images belongs to: ``data/train-00000-of-00002.parquet``, ``dev.tar``,
    ``eval_set/000000.tar``."""
    return _SPLIT_OF.get(_word_in(path))


def by_split(names: Iterable[str], where: object, kind: str = "folders") -> dict[str, str]:
    """Return split -> its name, of the names that are splits, in the order train, val, test.

    Args:
        where: has these names, for the error.
        kind: of thing that has them, in plural.

    Raises UserError where two names mean one split.
    """
    found: dict[str, str] = {}
    for name in sorted(set(names)):
        split = split_named(name)
        if split in found:
            what = f"{where} has two {kind} for the split {split}: {found[split]} and {name}."
            raise UserError(what, why=f"Each of these words names a split: {LISTED}.", fix="Rename one of the two.")
        if split is not None:
            found[split] = name
    return {split: found[split] for split in SPLITS if split in found}


def require_one_word(paths: Iterable[str], where: object) -> None:
    """Refuse files that call one split by two words, such as ``val-0.tar`` beside ``dev-0.tar``. Raises UserError."""
    by_split(map(_word_in, paths), where, kind="names")


def folders_of_splits(names: Sequence[str], inside: Callable[[str], Sequence[str]], where: object) -> dict[str, str]:
    """Decide which folders of a data set are splits; return split -> folder, empty where all folders are classes.

    ``train`` beside ``val`` or ``test`` is a split. Beside other folders alone it is one only if it holds folders
    itself: ``train``, ``car`` and ``bus`` may be three classes.

    Args:
        names: of the folders.
        inside: gives the names of the folders in one of them. It is asked for few: listing a class may take long.
        where: the folder that has them, for errors.

    Raises UserError where two folders mean one split, and for splits beside classes or without one to train on.
    """
    named = list(filter(split_named, names))
    others = set(names) - set(named)
    trained = [name for name in named if split_named(name) == "train"]
    nested: dict[str, Sequence[str]] = {}
    if others:
        nested = {name: inside(name) for name in named}
    if trained and (len(named) > len(trained) or not others or any(map(nested.get, trained))):
        return by_split(named, where)
    for split in named:
        if not others or others & set(nested[split]):
            why = f"{split} is the name of a split."
            fix = f"Move the training images to {where}/train/CLASS; or rename {split} if it is a class."
            raise UserError(f"{where} has no folder train beside {split}.", why=why, fix=fix)
    return {}


# Layouts and classes


Layout = tuple[Path, tuple[str, ...]]
"""A data set's folder, and its splits: folders in it that hold one folder for each class."""
MEASURED = 200
"""Images whose size is looked at, to guess a size to train at."""
LARGEST_GUESS = 224
ItemT = TypeVar("ItemT")


def usual_size(sides: Sequence[int]) -> int | None:
    """A size to train at, for images whose shorter sides are ``sides``: that of all, else the median to the next
    multiple of 8; 4 to `LARGEST_GUESS`. None without any."""
    if not sides:
        return None
    size = median_low(sides)
    if len(set(sides)) > 1:
        size = (size + 4) // 8 * 8
    return min(max(size, 4), LARGEST_GUESS)


def some_of(folder: Path) -> list[Path]:
    """At most `MEASURED` images of the class folders in ``folder``, from all over it, the same on every machine."""
    names = evenly(class_folders(folder), 20)  # a million files are not listed
    share = -(-MEASURED // max(len(names), 1))
    return [folder / name / file for name in names for file in evenly(list_images(folder / name), share)][:MEASURED]


def evenly(items: Sequence[ItemT], most: int) -> Sequence[ItemT]:
    """At most ``most`` of the items, the same distance apart."""
    return items[:: max(-(-len(items) // most), 1)]


def splits_of(folder: Path) -> dict[str, str]:
    """Split -> its folder's name; none where all folders are classes. Raises UserError where names contradict."""
    return folders_of_splits(class_folders(folder), lambda name: class_folders(folder / name), where=folder)


def require_splits(name: str, root: Path, layout: Layout, of_class: str, fix: str) -> None:
    """Refuse a data set whose splits have no folder of a class.

    Args:
        of_class: stands in the message for the name of such a folder.
        fix: what to fetch; the command that unpacks it is added.

    Raises UserError.
    """
    folder, splits = layout
    for split in splits:
        if not class_folders(folder / split):
            raise base.missing(name, root, folder / split / of_class, fix=fix)


def train_size(folder: Path, val_fraction: float) -> int | None:
    """Images to train on of those in the train folder, from which val is split off unless it has a folder; None where
    counting them would take long."""
    splits = splits_of(folder)
    counts = counted(folder / splits.get("train", "train"))
    if counts is None:
        return None
    if class_folders(folder / splits.get("val", "val")):
        return sum(counts)
    return size_left(counts, (val_fraction,))


def read_split(files: Files, split: str, classes: Sequence[str], in_chans: int) -> ImageFiles:
    """All images of a split. Raises UserError for a class that training does not have, and where there are none."""
    folder = files.folder / split
    require_known(folder, files.splits.get(split, {}), classes)
    images = images_of(files, split, classes, in_chans)
    if not len(images):
        raise no_images(folder)
    return images


def require_known(folder: Path, found: Iterable[str], classes: Sequence[str]) -> None:
    """Refuse a split that has a class which the training data does not have. Raises UserError."""
    unknown = sorted(set(found) - set(classes))
    if unknown:
        what = f"{folder / unknown[0]} is a class that the training data does not have."
        fix = "Rename or remove that folder, or add training images of its class."
        raise UserError(what, why=f"The training data has: {_named(classes, 8)}.", fix=fix)


def read_splits(files: Files, splits: Sequence[str]) -> tuple[list[str], list[ImageFiles]]:
    """The classes of the first split, which is trained on; and all images of each split, in colours."""
    classes = require_classes(files.folder / splits[0], files.splits[splits[0]])
    return classes, [read_split(files, split, classes, in_chans=3) for split in splits]


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Options of data sets that hold out images where there is no folder for them."""

    val_fraction: float = 0.15
    test_fraction: float = 0.15


def folder_splits(name: str, files: Files, photos: Photos, fractions: HeldOut) -> Splits:
    """The data set ``name`` of photos in folders: those of train, val and test by their names, or none of these.

    Without val it is split off train, without test it is val; of no such folders all is split three ways.
    """
    named = by_split(files.splits, files.folder)
    first = named.get("train", "")
    folder = files.folder / first
    classes = require_classes(folder, files.splits[first])
    held_out: dict[str, ImageFiles] = {}
    for split, split_folder in named.items():
        if split != "train" and files.splits[split_folder]:
            held_out[split] = read_split(files, split_folder, classes, photos.in_chans)
    train = images_of(files, first, classes, photos.in_chans)
    for label in sorted(set(range(len(classes))) - set(train.labels)):
        raise no_images(folder / classes[label])
    if not first:
        train, held_out["val"], held_out["test"] = _split(train, folder, classes, astuple(fractions))
    elif "val" not in held_out:
        train, held_out["val"] = _split(train, folder, classes, (fractions.val_fraction,))
    parts = (train, held_out["val"], held_out.get("test", held_out["val"]))
    return photo_splits(name, classes, parts, photos)


def _split(images: ImageFiles, folder: Path, classes: list[str], fractions: tuple[float, ...]) -> list[ImageFiles]:
    names = map(images.files.name, images.positions)
    keys = [f"{classes[label]}/{name}" for label, name in zip(images.labels, names, strict=True)]
    parts = stratified_split(images.labels, fractions, keys=keys)
    if not all(parts):
        why = f"It has {len(images)} images of {len(classes)} classes; a class needs {len(fractions) + 1} or more."
        fix = "Add images, or create the folders train and val yourself."
        raise UserError(f"{folder} has too few images to split.", why=why, fix=fix)
    return list(map(images.part, parts))


def require_classes(folder: Path, classes: Iterable[str]) -> list[str]:
    """The classes of a folder to train on. Raises UserError where these are less than two."""
    classes = list(classes)
    if len(classes) < 2:
        why = f"It has {terminal.plural(len(classes), 'folder')} of a class, but training needs two or more."
        fix = f"Put the images into {folder}/CLASS/NAME.jpg."
        raise UserError(f"{folder} does not contain a folder per class.", why=why, fix=fix)
    return classes


def no_images(folder: Path) -> UserError:
    """The error for a folder that should hold images."""
    why = "Image files end in .jpg, .png, .webp, .tif, .avif, ..., or have the first bytes of such a file."
    fix = f"Put the images into {folder}/CLASS/NAME.jpg, or remove the empty folder."
    return UserError(f"{folder} holds no images.", why=why, fix=fix)


# A first look


_MOST_ENTRIES = 50_000
"""Entries of a folder that are looked at; one that has no image among so many is left to those that read it."""
_MOST_FOLDERS = 1_000
"""Folders below that of a class that are looked into: links may lead in circles."""
_MOST_CLASSES = 2_000
"""Classes of a split that are looked into."""


def look_at_folders(layout: Layout) -> list[str]:
    """Refuse folders that nobody can train on; return sentences about a test split that is left out.

    Raises UserError for a class without images, for one that only val or test has, and for a val without classes.
    """
    folder, (first, *held_out) = layout
    classes = class_folders(folder / first)
    chooser = Chooser()
    _require_images(folder / first, classes, chooser)
    said: list[str] = []
    for split in held_out:
        place = folder / split
        names = class_folders(place)
        if names:
            require_known(place, names, classes)
            if not any(_has_image(place / name, chooser) for name in names[:_MOST_CLASSES]):
                raise no_images(place)
        elif split_named(split) == "test" and place.is_dir():
            said.append(f"{place} has no class folders and is left out: the validation images serve as test images.")
        elif place.is_dir():
            why = "Validation needs images whose classes are known."
            fix = f"Put the images into {place}/CLASS/NAME.jpg; or remove that folder."
            raise UserError(f"{place} does not contain a folder per class.", why=why, fix=fix)
    return said


def not_read(layout: Layout) -> list[str]:
    """Return sentences about folders that are no split, and images that are in no folder of a class."""
    folder, splits = layout
    said: list[str] = []
    others = sorted(set(class_folders(folder)) - set(splits))
    if others and splits[0]:
        said.append(f"{folder} has folders that are not splits; they are left out: {_named(others)}.")
    for split in splits:
        place = folder / split
        loose = sorted(name for name in entries(place) if why_not(name) == "")
        if loose and class_folders(place):
            count = terminal.plural(len(loose), "image")
            said.append(f"{place} has {count} outside of class folders, left out: {_named(loose)}.")
    return said


def counts(layout: Layout, fractions: tuple[float, float] = (0.0, 0.0)) -> Counts:
    """Count what is read of each split, and what is no image; empty where that would take long.

    Args:
        fractions: of val and test, as far as they are split off train.
    """
    folder, splits = layout
    chooser = Chooser()
    classes: dict[str, list[int]] = {}
    others: dict[str, LeftOut] = {}
    for split in splits:
        of_class = counted(folder / split, image_files.COUNTED // len(splits), chooser)
        if of_class is None:
            return {}
        classes[split] = of_class
        others[split] = chooser.take_left_out(folder)
    named = by_split(splits, folder)
    first = named.get("train", "")
    if not classes[first] or 0 in classes[first]:
        return {}  # no data set to train on, as others say
    found: dict[str, SplitCounts] = {}
    for split, name in named.items():
        if classes[name]:
            found[split] = _split_counts(classes[name], others[name])
    if "val" not in found:
        cut = fractions[:1] if first else fractions
        *held_out, train = zip(*(sizes(count, cut) for count in classes[first]), strict=True)
        found["train"] = _split_counts(train, others[first])
        for split, part in zip(("val", "test"), held_out, strict=False):
            found.setdefault(split, _split_counts(part, {}, losses.SPLIT_OFF))
    found.setdefault("test", SplitCounts(0, 0, {}, losses.NO_TEST))
    return {split: found[split] for split in SPLITS}


def _split_counts(of_class: Sequence[int], left_out: LeftOut, note: str = "") -> SplitCounts:
    """Counts of a split, by those of its classes."""
    return SplitCounts(sum(of_class), sum(count > 0 for count in of_class), left_out, note)


def _require_images(folder: Path, classes: Sequence[str], chooser: Chooser) -> None:
    """Refuse folders of classes that hold no image."""
    looked_at = evenly(classes, _MOST_CLASSES)
    empty = [name for name in looked_at if not _has_image(folder / name, chooser)]
    if not empty:
        return
    if len(empty) == len(looked_at):
        raise no_images(folder)
    why = "It has no files"
    for _, other in islice(_files(folder / empty[0]), 1):
        why = f"It has other files, such as {other}"
    if len(empty) > 1:
        why += f"; the same is true of {_named(empty[1:])}"
    fix = f"Put images of that class there; or move the folder out of {folder} if it is not a class."
    raise UserError(f"{folder / empty[0]} holds no images.", why=f"{why}.", fix=fix)


def _named(names: Sequence[str], most: int = 3) -> str:
    """The first of some names, and how many there are beyond."""
    words = ", ".join(names[:most])
    if len(names) > most:
        words += f" and {len(names) - most} more"
    return words


def _has_image(folder: Path, chooser: Chooser) -> bool:
    """Look for an image in a folder and below. True also where too much lies there to know it soon."""
    for number, (place, name) in enumerate(_files(folder), start=1):
        if chooser.takes(str(place), name) or number >= _MOST_ENTRIES:
            return True
    return False


def _files(folder: Path) -> Iterator[tuple[Path, str]]:
    """Folder and name of the files in a folder, then of those below; read entry by entry."""
    todo = [folder]
    for place in todo:
        with suppress(OSError), os.scandir(place) as found:
            for entry in found:
                if not entry.is_dir():
                    yield place, entry.name
                elif image_files.is_of_user(entry.name) and len(todo) < _MOST_FOLDERS:
                    todo.append(place / entry.name)


def entries(folder: Path) -> list[str]:
    """Names of what is in a folder, of so many at most; none of one that cannot be read."""
    with suppress(OSError), os.scandir(folder) as found:
        return [entry.name for entry in islice(found, _MOST_ENTRIES)]
    return []
