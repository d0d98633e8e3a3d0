"""Your own images with one label each: a folder, and a CSV file with a row an image."""

from pathlib import Path
from typing import Any, Literal

from trainkit.data import table
from trainkit.data.base import Splits
from trainkit.data.download import Say


def build(
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
    """``root/labels.csv``: columns ``path`` (a path below root), ``label`` and, if you
    like, ``split``. Without val it is split off train, without test it is val; without the column rows are split three
    ways, by class and by the images' names only.

    ``file``: the CSV file, in ``root``. ``image_size``: pixels of a side; a new run without it takes the median of
    the shorter sides, up to 224. ``exif``: turn photos upright, as their EXIF data says.
    """
    found = table.read_table(root / file, "label", val_fraction, test_fraction)
    return found.splits("image_list", root, "label", image_size, in_chans, augment=augment, exif=exif)


def _table(root: Path, *, file: str, val_fraction: float, test_fraction: float, **others: Any) -> table.Table:
    return table.read_table(root / file, "label", val_fraction, test_fraction)


def locate(root: Path, **options: Any) -> None:
    """Check that the file says what it should."""
    _table(root, **options)


def train_size(root: Path, **options: Any) -> int:
    """Images to train on."""
    return len(_table(root, **options).parts[0])


def some_images(root: Path, **options: Any) -> list[Path]:
    """Of those to train on."""
    return _table(root, **options).some_images(root)


def prepare(root: Path, archives: list[Path], say: Say) -> None:
    """Nothing to fetch: say where the images belong."""
    say(f"Put your images anywhere below {root}, and a row for each into {root}/labels.csv.")
    say(table.EXAMPLES["label"])
