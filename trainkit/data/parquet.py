"""Parquet files of images as the Hugging Face hub has them: a column of images, and one of their classes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainkit import fileio, terminal
from trainkit.errors import UserError, require_package

_ROWS = 64
"""Read at once."""


class Columns(NamedTuple):
    """Which columns of a file are meant."""

    image: str
    label: str
    names: Sequence[str]
    """Of the classes by their numbers; none: the values name them."""

    def word(self, value: Any) -> str:
        """The class that a value of the labels means."""
        return self.names[value] if isinstance(value, int) and 0 <= value < len(self.names) else str(value).strip()


Rows = Iterator[tuple[bytes, Any]]
"""An image and its label, of each row that has both."""


def require_pyarrow() -> Any:
    """pyarrow's module for these files. Raises UserError without it."""
    require_package("pyarrow", "Parquet files need pyarrow.", extra="hf")
    from pyarrow import parquet

    return parquet


@contextmanager
def opened(
    file: Path | BinaryIO, name: str, image: str | None = None, label: str | None = None
) -> Iterator[tuple[Columns, Rows]]:
    """The columns of a file, and its rows.

    Args:
        name: of the file, for errors.
        image, label: the columns; None: as the file says of itself.

    Raises:
        UserError: it is no parquet file, also where it is damaged further on; or it has no such columns.
    """
    parquet = require_pyarrow()
    import pyarrow

    try:
        with parquet.ParquetFile(file) as content:
            columns = _columns(name, content.schema_arrow, image, label)
            yield columns, _rows(content, columns)
    except (pyarrow.lib.ArrowException, KeyError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk; pyarrow's have no number
            raise
        why = f"{terminal.one_line(error, 300)}."
        raise UserError(f"{name} is no parquet file of images.", why=why, fix="Fetch it again.") from None


def _rows(content: Any, columns: Columns) -> Rows:
    # Without threads of its own: a process that was forked has them not.
    for batch in content.iter_batches(_ROWS, columns=[columns.image, columns.label], use_threads=False):
        for data, value in zip(batch.column(columns.image), batch.column(columns.label), strict=True):
            picture, label = data.as_py(), value.as_py()
            image = picture.get("bytes") if isinstance(picture, dict) else picture
            if image and label is not None and label != -1:  # -1: a test split without labels
                yield image, label


def _columns(file: str, schema: Any, image: str | None, label: str | None) -> Columns:
    """The columns of the images and of the labels, as asked or by what the file says of itself."""
    about = fileio.parse_object((schema.metadata or {}).get(b"huggingface", b"{}")) or {}
    info = about.get("info")
    told = info.get("features") if isinstance(info, dict) else None
    features: Mapping[str, Any] = {} if not isinstance(told, dict) else told
    kinds = {name: of.get("_type") for name, of in features.items() if isinstance(of, dict)}
    has_bytes = [field.name for field in schema if "bytes" in str(field.type) or "binary" in str(field.type)]
    image = image or next((name for name in schema.names if kinds.get(name) == "Image"), next(iter(has_bytes), None))
    known = ("label", "labels", "class", "fine_label")
    label = label or next((name for name in schema.names if kinds.get(name) == "ClassLabel"), None)
    label = label or next((name for name in known if name in schema.names), None)
    if image is None or label is None or not {image, label} <= set(schema.names):
        lacks = "images" if image not in schema.names else "labels"
        fix = "Choose them with data.image=COLUMN and data.label=COLUMN."
        raise UserError(f"{file} has no column of {lacks}.", why=f"It has: {', '.join(schema.names)}.", fix=fix)
    names = features[label].get("names") if kinds.get(label) == "ClassLabel" else None
    return Columns(image, label, [str(name) for name in names] if isinstance(names, list) else [])
