"""Your own images with several labels each: a folder, and a CSV file with a row an image."""

from pathlib import Path
from typing import Literal

from trainkit.data.base import Splits
from trainkit.data.table import TableData

LABELS = "several"
_DATA = TableData("image_csv", "labels")
locate, train_size, some_images, prepare = _DATA.locate, _DATA.train_size, _DATA.some_images, _DATA.prepare


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
    """``root/labels.csv``: columns ``image`` (a path below root), ``labels`` (names with ";" between them) and, if you
    like, ``split``. Without val it is split off train, without test it is val; without the column rows are split three
    ways, by the images' names only.

    ``file``: the CSV file, in ``root``. ``image_size``: pixels of a side; a new run without it takes the median of
    the shorter sides, up to 224. ``exif``: turn photos upright, as their EXIF data says.
    """
    return _DATA.splits(
        root, file=file, image_size=image_size, in_chans=in_chans, augment=augment, val_fraction=val_fraction,
        test_fraction=test_fraction, exif=exif,
    )  # fmt: skip
