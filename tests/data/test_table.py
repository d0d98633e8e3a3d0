"""Tables of images: what is read of them, and the faults that are found before a run is queued."""

import codecs
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.data.samples import build, choice, counted, fill, labels, looked_at, sizes, trained, write_images
from tests.shell import python
from trainkit.common.errors import UserError
from trainkit.data.folders import HeldOut
from trainkit.data.photo_transforms import Photos
from trainkit.data.registry import build_data, check_data
from trainkit.data.table import TableData, decoded, table_splits

ROWS = [f"im/{name}{at:02}.jpg,{name}" for name in ("cat", "dog") for at in range(30)]
TEXT = "path,label\na.jpg,Käse\nb.jpg,Kése\n"


@pytest.mark.parametrize("content", [TEXT.encode(), codecs.BOM_UTF8 + TEXT.encode(), b"", b"\0a" + b"bcdefgh"])
def test_utf_8_is_read_with_and_without_its_mark(content: bytes) -> None:
    assert decoded(content, Path("labels.csv")) == content.removeprefix(codecs.BOM_UTF8).decode()


@pytest.mark.parametrize(
    ("content", "says"),
    [(TEXT.encode("latin-1"), r"is not UTF-8[\s\S]*Line 2 has the byte 0xe4[\s\S]*WINDOWS-1252"),
     (TEXT.encode() + "c.jpg,Größe\r\nd".encode("cp1252"), "Line 4 has the byte 0xf6"),
     (codecs.BOM_UTF8 + b"a\n\xe9t\xe9", "Line 2 has the byte 0xe9"), ("a\nKä".encode()[:-1], "Line 2 has the"),
     (TEXT.encode("utf-16"), r"is not UTF-8[\s\S]*iconv -f UTF-16"), (TEXT.encode("utf-16-be"), "is not UTF-8")],
)  # fmt: skip
def test_bytes_that_decide_a_label_are_never_replaced(content: bytes, says: str) -> None:
    with pytest.raises(UserError, match=says):
        decoded(content, Path("labels.csv"))


@pytest.mark.parametrize("split", [None, "train val test", "train val", "train test", "train"])
def test_as_many_rows_of_a_table_are_counted_as_training_reads(split: str | None, tmp_path: Path) -> None:
    rows = [f"{name}-{at}.jpg,{name}" for name in ("cat", "dog") for at in range(12)]
    if split is None:
        lines = ["image,label", *rows]
    else:
        words = split.split()
        lines = ["image,label,split", *(f"{row},{words[at % len(words)]}" for at, row in enumerate(rows))]
    (tmp_path / "labels.csv").write_text("\n".join(lines))
    config = choice("image_list", tmp_path)
    built = table_splits(TableData("image_list", "label"), tmp_path, photos=Photos(), fractions=HeldOut())
    assert counted(config) == trained(config, built)


def table(folder: Path, rows: Sequence[str], first: str = "path,label") -> None:
    folder.mkdir(exist_ok=True)
    (folder / "labels.csv").write_text("\n".join([first, *rows]) + "\n")
    fill(folder, *(row.partition(",")[0] for row in ROWS))


def test_images_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    table(tmp_path / "photos", [row.replace("im/", "away/") for row in ROWS])
    for refuse in (looked_at, lambda name, root: build_data(choice(name, root))):
        with pytest.raises(UserError) as caught:
            refuse("image_list", tmp_path / "photos")
        assert caught.value.what.endswith("names images that do not exist: 60 of 60 checked rows.")
        assert caught.value.why.startswith("Line 2 names '")
        assert "they are below data.root=" in caught.value.fix


@pytest.mark.parametrize("line", ["im,cat", "im/\0.jpg,cat", "im/cat00.jpg/x,cat", f"{'x' * 300},cat"])
def test_one_image_of_many_that_is_no_file_is_found(line: str, tmp_path: Path) -> None:
    table(tmp_path, [*ROWS, line])
    with pytest.raises(UserError, match=r"1 of 61 checked rows[\s\S]*Line 62 names"):
        looked_at("image_list", tmp_path)


def test_images_of_every_split_are_looked_up(tmp_path: Path) -> None:
    rows = [f"{row},train" for row in ROWS] + ["im/cat00.jpg.bak,cat,test", "im/dog00.jpg,dog,val"]
    table(tmp_path, rows, "path,label,split")
    with pytest.raises(UserError, match=r"im/cat00\.jpg\.bak"):
        looked_at("image_list", tmp_path)


@pytest.mark.parametrize("name", ["image_list", "image_csv"])
def test_an_image_that_is_listed_twice_has_one_label(name: str, tmp_path: Path) -> None:
    first = "path,label" if name == "image_list" else "path,labels"
    table(tmp_path, [*ROWS, "./im/cat03.jpg,dog"], first)
    for refuse in (check_data, build_data):
        with pytest.raises(
            UserError, match=r"twice, with different labels\.\n  why: Line 5 says cat, line 62 says dog"
        ):
            refuse(choice(name, tmp_path))


def test_several_labels_in_another_order_are_the_same(tmp_path: Path) -> None:
    table(tmp_path, [*ROWS, "im/more.jpg,cat;dog", "im/more.jpg,dog;cat"], "path,labels")
    fill(tmp_path, "im/more.jpg")
    (said,) = looked_at("image_csv", tmp_path)
    assert "labels.csv repeats images in 1 line, such as im/more.jpg in lines 62 and 63: each occurrence counts" in said


def test_images_that_are_in_two_splits_are_said(tmp_path: Path) -> None:
    rows = [f"{row},{'val' if at % 3 else 'train'}" for at, row in enumerate(ROWS)]
    table(tmp_path, rows, "path,label,split")
    assert looked_at("image_list", tmp_path) == []
    table(tmp_path, [*rows, "im/cat00.jpg,cat,val", "im/cat03.jpg,cat,val"], "path,label,split")
    _, said = looked_at("image_list", tmp_path)
    assert "labels.csv has 2 images in train and in val, such as im/cat00.jpg: results on them mean little." in said


@pytest.mark.parametrize(
    ("rows", "first", "says"),
    [([row.replace(",", ";") for row in ROWS], "path;label", r"not separated by commas[\s\S]*each ';'"),
     ([row.replace(",", "\t") for row in ROWS], "path\tlabel", r"not separated by commas[\s\S]*each '\\t'"),
     ([*ROWS, "im/cat00.jpg,cat, tabby"], "path,label", r"Line 62 [\s\S]*more cells[\s\S]*' tabby'[\s\S]*quotes"),
     ([*ROWS[:3], "", "im/x.jpg,"], "path,label", "Line 6 of .* is not a row")],
)  # fmt: skip
def test_a_table_that_would_be_read_wrongly_is_refused(rows: list[str], first: str, says: str, tmp_path: Path) -> None:
    table(tmp_path, rows, first)
    with pytest.raises(UserError, match=says):
        check_data(choice("image_list", tmp_path))


def test_a_table_that_has_changed_is_read_anew(tmp_path: Path) -> None:
    table(tmp_path, ROWS)
    assert looked_at("image_list", tmp_path) == []
    table(tmp_path, [*ROWS, "im/away.jpg,cat"])
    with pytest.raises(UserError, match=r"im/away\.jpg"):
        looked_at("image_list", tmp_path)


@pytest.mark.nightly
def test_submit_refuses_without_torch_and_writes_nothing(tmp_path: Path) -> None:
    table(tmp_path / "photos", [row.replace("/", "\\") for row in ROWS])
    code = "import sys; from trainkit.__main__ import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    for flag in ("--dry-run", "--executor=local", "--executor=slurm"):
        settings = ("data.name=image_list", "data.root=photos", "train.global_batch_size=16")
        words = ("submit", "single", *settings, "--run-dir", "run", flag)
        done = python("-c", code, *words, cwd=tmp_path)
        assert (done.returncode, done.stdout.split()[-1]) == (2, "False"), done.stderr
        assert "photos/labels.csv names images that do not exist: 60 of 60" in done.stderr
        assert sorted(path.name for path in tmp_path.iterdir()) == ["photos"]


def write_table(folder: Path, first: str, rows: list[str]) -> None:
    write_images(folder, {"a": 24}, size=(40, 30))
    (folder / "labels.csv").write_text("\n".join([first, *rows]))


def test_an_image_of_a_list_has_one_label(tmp_path: Path) -> None:
    rows = [f"a/{number:03}.jpg,{('cat', 'a;b')[number % 2]}" for number in range(24)]
    for first in ("path,label", "image,label"):
        write_table(tmp_path, first, rows)
        data = build("image_list", tmp_path, image_size=8)
        assert (sizes(data), data.info.class_names) == ([16, 4, 4], ("a;b", "cat"))
        assert [sorted(labels(part)) for part in (data.val, data.test)] == [[0, 0, 1, 1]] * 2, "as many of each class"
    write_table(tmp_path, "path,label,split", [f"{row},{('train', 'test')[at > 17]}" for at, row in enumerate(rows)])
    assert sizes(build("image_list", tmp_path)) == [16, 2, 6]


def test_labels_that_are_numbers_are_in_their_order(tmp_path: Path) -> None:
    write_table(tmp_path, "path,label", [f"a/{number:03}.jpg,{(2, 10, 9)[number % 3]}" for number in range(24)])
    assert build("image_list", tmp_path).info.class_names == ("2", "9", "10")


@pytest.mark.parametrize(
    ("name", "first", "rows", "says"),
    [("image_csv", "path,label", ["a/000.jpg,cat"], r"no columns image and labels[\s\S]*image_list is for images"),
     ("image_list", "image,labels", ["a/000.jpg,cat"], r"no columns image and label\.[\s\S]*image_csv is for images"),
     ("image_list", "path,label", ["a/000.jpg,"], r"Line 2 of .* is not a row[\s\S]*a/000.jpg,"),
     ("image_list", "path,label", [",cat"], r"Line 2 of .* is not a row[\s\S]*',cat'"),
     ("image_list", "path,label,split", ["a,cat,train", "b,cat,tran"], r"Line 3 [\s\S]*'b,cat,tran'"),
     ("image_list", "path,label,split", ["a,cat,train", "b,dog,val"], "No image to train on has the label 'dog'"),
     ("image_list", "path,label", ["a/000.jpg,cat"], "too few images to split")],
)  # fmt: skip
def test_a_table_that_nobody_can_train_on_is_refused(
    name: str, first: str, rows: list[str], says: str, tmp_path: Path
) -> None:
    write_table(tmp_path, first, rows)
    for refuse in (check_data, build_data):
        with pytest.raises(UserError, match=says):
            refuse(choice(name, tmp_path))


def test_an_image_of_a_table_has_several_labels(tmp_path: Path) -> None:
    write_images(tmp_path, {"a": 12})
    rows = [f"a/{number:03}.jpg,{'cat;dog' if number % 2 else 'cat'}" for number in range(12)]
    (tmp_path / "labels.csv").write_text("\n".join(["image,labels", *rows]))
    data = build("image_csv", tmp_path, image_size=8)
    assert sizes(data) == [8, 2, 2]
    assert data.info.class_names == ("cat", "dog")
    assert {tuple(data.train[index][1].tolist()) for index in range(8)} == {(1, 0), (1, 1)}
    rows = [f"{row},{('train', 'val')[at > 8]}" for at, row in enumerate(rows)]
    (tmp_path / "labels.csv").write_text("\n".join(["image,labels,split", *rows]))
    assert sizes(build("image_csv", tmp_path, image_size=8)) == [9, 3, 3]


def test_a_table_names_its_splits_in_any_of_these_words(tmp_path: Path) -> None:
    write_images(tmp_path, {"a": 12})
    words = ["Training", "training", " TRAINING ", "dev", "Testing", "testing"] * 2
    rows = [f"a/{at:03}.jpg,{('cat', 'dog')[at > 5]},{word}" for at, word in enumerate(words)]
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(["path,label,split", *rows]))
    data = build("image_list", tmp_path)
    assert [len(part) for part in (data.train, data.val, data.test)] == [6, 2, 4]
    table.write_text(table.read_text() + "\na/000.jpg,cat,valid")
    for refuse in (check_data, build_data):
        with pytest.raises(UserError, match="two words for the split val: dev and valid"):
            refuse(choice("image_list", tmp_path))
