"""Parquet files: the columns that are taken, the rows that are counted as lost, and the files that are refused."""

import hashlib
import importlib
import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from jobs import prepare
from tests.data.samples import choice
from tests.data.shards import picture
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.data import parquet as reader
from trainkit.data.losses import NO_IMAGE, NO_LABEL, NOT_AN_IMAGE, PATH_ONLY, LostSamples
from trainkit.data.registry import build_data, counts_of, prepare_data
from trainkit.launch.preparation import settled

pyarrow = pytest.importorskip("pyarrow", reason="the extra hf")
PICTURES = [picture(number) for number in range(4)]
AS_STRUCT = [{"bytes": content, "path": None} for content in PICTURES]
HASHES = [hashlib.sha256(content).digest() for content in PICTURES]
LABELS = [0, 1, 0, 1]
IMAGE, NAMES = {"_type": "Image"}, {"_type": "ClassLabel", "names": ["cat", "dog"]}


def written(columns: dict[str, list[Any]], **features: Any) -> io.BytesIO:
    table = pyarrow.table(columns)
    if features:
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    out = io.BytesIO()
    importlib.import_module("pyarrow.parquet").write_table(table, out)
    out.seek(0)
    return out


def read(file: io.BytesIO, image: str | None = None, label: str | None = None) -> tuple[Any, list[Any], LostSamples]:
    lost = LostSamples()
    with reader.opened(file, "x.parquet", image, label, lost=lost) as (columns, rows):
        return columns, [(data, columns.word(value)) for data, value in rows], lost


@pytest.mark.parametrize(
    ("labels", "words", "numbers"),
    [([1.0, None, 10.0, -1.0], ["1", "10"], True), ([b"cat", b"dog", b"", None], ["cat", "dog"], False)],
)
def test_classes_are_named_alike_whatever_the_column_holds_them_as(
    labels: list[Any], words: list[str], numbers: bool
) -> None:
    """pandas 3.1.1 writes whole numbers as doubles where one is missing, so another split may have them as int64."""
    known, rows, lost = read(written({"image": PICTURES, "label": labels}))
    assert known.numbers == numbers
    assert [word for _, word in rows] == words
    assert sum(count for count, _ in lost.values()) == 2


@pytest.mark.parametrize(
    ("columns", "features", "image"),
    [({"sha256": HASHES, "image": AS_STRUCT, "label": LABELS}, {}, "image"),
     ({"sha256": HASHES, "photo": PICTURES, "label": LABELS}, {}, "photo"),
     ({"mask": PICTURES, "photo": AS_STRUCT, "label": LABELS}, {"photo": IMAGE}, "photo")],
)  # fmt: skip
def test_the_column_of_images_is_declared_or_has_images_in_it(
    columns: dict[str, list[Any]], features: dict[str, Any], image: str
) -> None:
    known, rows, lost = read(written(columns, **features))
    assert (known.image, known.label, known.numbers, lost) == (image, "label", True, {})
    assert rows == [(content, str(label)) for content, label in zip(PICTURES, LABELS, strict=True)]


@pytest.mark.parametrize(
    ("columns", "features", "says"),
    [
        ({"images": [[one] for one in AS_STRUCT], "label": LABELS}, {"images": {"_type": "List", "feature": IMAGE}},
         "has lists of images, in its column images"),
        ({"left": PICTURES, "right": AS_STRUCT, "label": LABELS}, {}, "several columns of images: left, right"),
        ({"left": AS_STRUCT, "mask": AS_STRUCT, "label": LABELS}, {"left": IMAGE, "mask": IMAGE}, "left, mask"),
        ({"image": ["a.png", "b.png", "c.png", "d.png"], "label": LABELS}, {}, "has no column of images"),
        ({"image": ["a.png", "b.png", "c.png", "d.png"], "label": LABELS}, {"image": IMAGE}, "image is text"),
        ({"sha256": HASHES, "label": LABELS}, {}, r"It has: sha256 \(binary\), label \(int64\)"),
        ({"image": AS_STRUCT, "labels": [[at] for at in LABELS]}, {}, "does not have one class per image"),
        ({"image": AS_STRUCT, "x": LABELS, "y": LABELS}, {"x": NAMES, "y": NAMES}, "several columns of classes: x, y"),
        ({"image": AS_STRUCT}, {}, "has no column of labels"),
    ],
)  # fmt: skip
def test_what_is_no_image_and_class_in_a_row_is_refused_in_a_sentence(
    columns: dict[str, list[Any]], features: dict[str, Any], says: str
) -> None:
    with pytest.raises(UserError, match=says):
        read(written(columns, **features))


def test_rows_that_cannot_be_trained_on_are_counted_with_an_example() -> None:
    images = [*AS_STRUCT, {"bytes": None, "path": "/home/me/a.png"}, {"bytes": b"<html>", "path": None}, None]
    labels = [0, None, -1, 7, 0, 0, 0]
    _, rows, lost = read(written({"image": images, "label": labels}, image=IMAGE, label=NAMES))
    assert rows == [(PICTURES[0], "cat")]
    assert lost == {NO_LABEL: (3, "row 1"), PATH_ONLY: (1, "row 4: /home/me/a.png"), NOT_AN_IMAGE: (1, "row 5"),
                    NO_IMAGE: (1, "row 6")}  # fmt: skip


def test_all_archives_count_also_two_of_one_name(tmp_path: Path) -> None:
    files = []
    for split, labels in (("train", LABELS), ("test", [1, 0, 0, 0])):
        (tmp_path / split).mkdir()
        file = tmp_path / split / "0000.parquet"
        file.write_bytes(written({"image": AS_STRUCT, "label": labels}, image=IMAGE, label=NAMES).getvalue())
        files.append(file)
    given = {"dataset": "me/pets"}
    prepare_data("huggingface", tmp_path / "data", [*files, files[0]], lambda line: None, given)
    config = choice("huggingface", tmp_path / "data", **given, val_fraction=0.5)
    counts = counts_of(config)
    assert {split: of.images for split, of in counts.items()} == {"train": 2, "val": 2, "test": 4}
    data = build_data(config)
    assert [len(part) for part in (data.train, data.val, data.test)] == [2, 2, 4]
    shutil.copy(files[0], tmp_path / "more.parquet")
    with pytest.raises(UserError, match=r"more\.parquet belongs to no split"):
        prepare_data("huggingface", tmp_path / "other", [tmp_path / "more.parquet"], lambda line: None, given)


def test_a_stream_whose_test_has_no_labels_is_trained_without_it_and_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for split in ("train", "val"):
        (folder / f"{split}-0.parquet").write_bytes(written({"image": AS_STRUCT, "label": LABELS}).getvalue())
    (folder / "test-0.parquet").write_bytes(written({"image": AS_STRUCT}).getvalue())
    prepare_data("stream", tmp_path, [], lambda line: None, {"url": str(folder)})
    settled([load("single", ["data.name=stream", f"data.url={folder}", f"data.root={tmp_path}"])])
    said = capsys.readouterr().err
    assert "Data: train: 4 images of 2 classes; 1 shard, images: image." in said
    assert "Data: test: none; val is used instead; left out: 4 without a label (test-0.parquet)." in said
    data = build_data(choice("stream", tmp_path, url=str(folder)))
    assert len(data.test) == len(data.val) == 4


def test_archives_may_be_given_by_one_flag_or_by_several() -> None:
    for words in (["--archive", "a", "b"], ["--archive", "a", "--archive", "b"]):
        assert prepare.parser().parse_args(["huggingface", *words]).archive == ["a", "b"]
