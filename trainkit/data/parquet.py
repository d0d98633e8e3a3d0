"""Parquet files of images as the Hugging Face hub has them: a column of images, and one of their classes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError, require_package
from trainkit.data import decoding, losses
from trainkit.data.losses import LostSamples

_ROWS = 1
"""Rows that are read at once. In five kilobytes of a file one image can stand for each of a thousand rows; more at once
are no faster."""
_LOOKED_AT = 16
"""Rows whose content tells which column has the images."""
_LABELS = ("label", "labels", "class", "fine_label")
"""Names that columns of classes have."""
_LISTS = ("list<", "large_list<", "fixed_size_list<", "list_view<", "large_list_view<")


class Columns(NamedTuple):
    """Columns of a file that hold images and classes."""

    image: str
    label: str | None
    """None: its rows have none."""
    names: Sequence[str]
    """Names of the classes by their numbers; none: the values name them."""
    numbers: bool
    """The values are numbers, and nothing says what they mean."""

    def word(self, value: Any) -> str:
        """The class that a value of the labels means; empty for none."""
        if isinstance(value, float) and value.is_integer():  # as pandas has whole numbers where one is missing
            value = int(value)
        if isinstance(value, bytes):  # text that is not marked as such
            value = value.decode(errors="replace")
        if value is None or (isinstance(value, int) and value == -1) or value != value:
            return ""  # -1 is what the hub writes into a test split without labels
        if self.names and isinstance(value, int):
            return self.names[value] if 0 <= value < len(self.names) else ""
        return str(value).strip()


Rows = Iterator[tuple[bytes, Any]]
"""An image and its label, of each row that has both."""


def require_pyarrow() -> Any:
    """pyarrow's module for these files. Raises UserError without it."""
    require_package("pyarrow", "Parquet files need pyarrow.", extra="hf")
    from pyarrow import parquet

    return parquet


@contextmanager
def opened(
    file: Path | BinaryIO, name: str, image: str | None = None, label: str | None = None, *,
    lost: LostSamples | None = None, may_lack_labels: bool = False,
) -> Iterator[tuple[Columns, Rows]]:  # fmt: skip
    """The columns of a file, and its rows.

    Args:
        name: of the file, for errors.
        image, label: the columns; None: as the file says of itself.
        lost: rows that have no image or no label are counted here.
        may_lack_labels: a file without a column of labels is none that is refused.

    Raises:
        UserError: it is no parquet file, also where it is damaged further on; or it has no such columns.
    """
    parquet = require_pyarrow()
    import pyarrow

    try:
        with parquet.ParquetFile(file) as content:
            columns = _columns(name, content, image, label, may_lack_labels=may_lack_labels)
            yield columns, _rows(content, columns, LostSamples() if lost is None else lost)
    except (pyarrow.lib.ArrowException, KeyError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the disk; pyarrow's have no number
            raise
        words = terminal.one_line(error, 300).removesuffix(".")
        raise UserError(f"{name} is not a parquet file of images.", why=f"{words}.", fix="Fetch it again.") from None


def _rows(content: Any, columns: Columns, lost: LostSamples) -> Rows:
    wanted = [columns.image, *filter(None, [columns.label])]
    # Without threads of its own: a process that was forked has them not.
    batches = content.iter_batches(_ROWS, columns=wanted, use_threads=False)
    for number, row in enumerate(chain.from_iterable(batch.to_pylist() for batch in batches)):
        value = row.get(columns.label)
        image, path = _image_in(row[columns.image])
        if image is None and path:
            lost.note(losses.PATH_ONLY, f"row {number}: {path}")
        elif image is None:
            lost.note(losses.NO_IMAGE, f"row {number}")
        elif not columns.word(value):
            lost.note(losses.NO_LABEL, f"row {number}")
        elif not decoding.is_image(image):
            lost.note(losses.NOT_AN_IMAGE, f"row {number}")
        else:
            yield image, value


def _image_in(value: Any) -> tuple[bytes | None, str]:
    """The bytes of an image in a row, and the path that stands there."""
    path = None
    if isinstance(value, dict):
        path = value.get("path")
        value = value.get("bytes")
    if not isinstance(value, bytes):
        value = None
    return value or None, path if isinstance(path, str) else ""


def _columns(file: str, content: Any, image: str | None, label: str | None, *, may_lack_labels: bool) -> Columns:
    """The columns of the images and of the labels, as asked or by what the file says of itself."""
    schema = content.schema_arrow
    about = fileio.parse_object((schema.metadata or {}).get(b"huggingface", b"{}")) or {}
    features = _object(_object(about.get("info")).get("features"))
    declared: dict[str, dict[str, Any]] = {"Image": {}, "ClassLabel": {}}
    for name in schema.names:
        feature = _object(features.get(name))
        if feature.get("_type") in ("Image", "ClassLabel"):
            declared[feature["_type"]][name] = feature
    image = _image_column(file, content, image, list(declared["Image"]))
    label = _label_column(file, schema, label, list(declared["ClassLabel"]))
    if label is None:
        if not may_lack_labels:
            raise _not_in(file, "labels", f"It has: {_listed(schema.names)}")
        return Columns(image, None, [], numbers=False)
    names = declared["ClassLabel"].get(label, {}).get("names")
    known = list(map(str, names)) if isinstance(names, list) else []
    is_number = str(schema.field(label).type).lstrip("u").startswith(("int", "float", "double"))
    return Columns(image, label, known, is_number and not known)


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _image_column(file: str, content: Any, asked: str | None, declared: Sequence[str]) -> str:
    """The column of images: as asked, as the file declares, or the one whose content is images."""
    kinds: dict[str, str] = {field.name: str(field.type) for field in content.schema_arrow}
    if asked is not None and asked not in kinds:
        raise _not_in(file, "images", f"It has no {asked}, but {_listed(kinds)}")
    found = list(declared) if asked is None else [asked]
    if not found:
        holders = [name for name, kind in kinds.items() if _holds_bytes(kind)]
        found = [name for name in holders if _has_images(content, name)]
        # Of paths alone, or broken: their rows say what is wrong with them.
        found = found or [name for name in holders if kinds[name].startswith("struct<")]
    if len(found) > 1:
        what = f"{file} has several columns of images: {_listed(found)}."
        fix = f"Choose one: data.image={found[0]}."
        raise UserError(what, why="Each of them holds images.", fix=fix, key="data.image")
    lists = [name for name, kind in kinds.items() if kind.startswith(_LISTS) and "binary" in kind]
    for name in [*found, *lists][:1]:
        if name in lists:
            what = f"{file} has lists of images, in its column {name}."
            fix = "Write one row per image, or choose data.image=COLUMN."
            raise UserError(what, why="A row holds one image and its class.", fix=fix, key="data.image")
        if _holds_bytes(kinds[name]):
            return name
        if "string" in kinds[name]:
            raise _not_in(file, "images", f"Its column {name} is text; it has to hold the bytes of the image files")
    raise _not_in(file, "images", f"It has: {_listed(f'{column} ({kind})' for column, kind in kinds.items())}")


def _holds_bytes(kind: str) -> bool:
    """Return whether a column of this type can hold the bytes of image files, alone or with a path beside them."""
    if kind.startswith("struct<") and ("bytes: binary" in kind or "bytes: large_binary" in kind):
        return True
    return "binary" in kind.partition("<")[0].partition("[")[0]


def _has_images(content: Any, column: str) -> bool:
    batches = content.iter_batches(_ROWS, columns=[column], use_threads=False)
    for batch in islice(batches, _LOOKED_AT):
        for value in batch.column(column):
            image, _ = _image_in(value.as_py())
            if image is not None and decoding.is_image(image):
                return True
    return False


def _label_column(file: str, schema: Any, asked: str | None, declared: Sequence[str]) -> str | None:
    """The column of classes: as asked, the one that is declared, or one of a usual name; None without any."""
    if asked is not None and asked not in schema.names:
        raise _not_in(file, "labels", f"It has no {asked}, but {_listed(schema.names)}")
    label = asked
    if label is None and len(declared) == 1:
        label = declared[0]
    for usual in _LABELS:
        if label is None and usual in (declared or schema.names):
            label = usual
    if label is None and declared:
        fix = f"Choose one: data.label={declared[0]}."
        what = f"{file} has several columns of classes: {_listed(declared)}."
        raise UserError(what, why="None of them is called label.", fix=fix, key="data.label")
    if label is None:
        return None
    kind = str(schema.field(label).type)
    if kind.startswith((*_LISTS, "struct<", "map<")):
        what = f"{file} does not have one class per image."
        fix = "Choose a column with one class per row: data.label=COLUMN."
        raise UserError(what, why=f"Its column {label} holds {kind}.", fix=fix, key="data.label")
    return label


def _not_in(file: str, what: str, why: str) -> UserError:
    """The error for a file without a column of images or labels."""
    key = f"data.{what.removesuffix('s')}"
    return UserError(f"{file} has no column of {what}.", why=f"{why}.", fix=f"Choose one with {key}=COLUMN.", key=key)


def _listed(names: Any) -> str:
    return terminal.one_line(", ".join(map(str, names)), 300)
