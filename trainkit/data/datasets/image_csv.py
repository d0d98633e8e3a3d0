"""Your own images with several labels each: a folder, and a CSV file with a row an image."""

from functools import wraps
from pathlib import Path
from typing import Any

from trainkit.data.base import Splits
from trainkit.data.table import TableData, table_splits

LABELS = "several"
_DATA = TableData("image_csv", "labels")
locate = _DATA.locate
look = _DATA.look
prepare = _DATA.prepare
train_size = _DATA.train_size
some_images = _DATA.some_images
counts = _DATA.counts


@wraps(table_splits)
def build(root: Path, **options: Any) -> Splits:
    return table_splits(_DATA, root, **options)
