"""Faults that a look at names finds before a run is queued."""

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.data.samples import choice, counted, fill, looked_at, trained
from trainkit.common.errors import UserError
from trainkit.data import image_files
from trainkit.data.registry import build_data, counts_of, look_at_data

FOUR = ("train/cat/0.jpg", "train/cat/1.jpg", "train/dog/0.jpg", "train/dog/1.jpg")


@pytest.mark.parametrize(
    ("files", "says"),
    [(("train/bird/",), r"train/bird holds no images\.\n  why: It has no files\."),
     (("train/xml/a.xml", "train/bird/"), r"bird holds no images[\s\S]*no files; the same is true of xml\."),
     (("train/xml/a.xml",), r"xml holds no images[\s\S]*It has other files, such as a\.xml"),
     (("train/bird/.hidden.jpg",), "bird holds no images"),
     (("val/cat/0.jpg", "val/dgo/0.jpg"), r"val/dgo is a class that the training data does not have"),
     (("Test/dgo/0.jpg",), r"Test/dgo is a class that the training data does not have"),
     (("valid/0.jpg",), r"valid does not contain a folder per class"),
     (("dev/",), r"dev does not contain a folder per class"), (("val/cat/", "val/dog/"), r"val holds no images")],
)  # fmt: skip
def test_folders_that_nobody_can_train_on_are_refused_by_name(files: Sequence[str], says: str, tmp_path: Path) -> None:
    fill(tmp_path, *FOUR, *files)
    with pytest.raises(UserError, match=says):
        looked_at("image_folder", tmp_path)
    with pytest.raises(UserError, match=says):
        build_data(choice("image_folder", tmp_path, all_kinds=True))


def test_a_run_of_before_goes_on_beside_what_it_did_not_read(tmp_path: Path) -> None:
    fill(tmp_path, *FOUR, "val/0.jpg")
    assert len(build_data(choice("image_folder", tmp_path)).train) == 2


def test_no_images_at_all_are_refused(tmp_path: Path) -> None:
    fill(tmp_path, "cat/a.txt", "dog/")
    with pytest.raises(UserError, match=f"^{tmp_path} holds no images"):
        looked_at("image_folder", tmp_path)


def test_what_is_left_out_of_folders_is_said(tmp_path: Path) -> None:
    fill(tmp_path, *FOUR, "val/cat/deep/deeper/0.png")
    assert looked_at("image_folder", tmp_path) == []
    fill(tmp_path, "test/0.jpg", "extra/cat/0.jpg", "train/loose.jpg", "train/notes.txt")
    assert looked_at("image_folder", tmp_path) == [
        f"{tmp_path}/test has no class folders and is left out: the validation images serve as test images.",
        f"{tmp_path} has folders that are not splits; they are left out: extra.",
        f"{tmp_path}/train has 1 image outside of class folders, left out: loose.jpg.",
    ]


@pytest.mark.parametrize(
    "files",
    [("train/cat/notes.txt",), ("valid/cat/0.jpg", "valid/cat/a.md"),
     ("Test/dog/0.jpg", "train/dog/9.jpg", "val/dog/3.jpg", "val/cat/3.jpg"), ("test/dog/0.jpg", "train/dog/9.jpg"),
     ("test/loose.jpg",)],
)  # fmt: skip
def test_as_many_images_are_counted_as_training_reads(files: Sequence[str], tmp_path: Path) -> None:
    fill(tmp_path, *FOUR, *files)
    config = choice("image_folder", tmp_path, all_kinds=True)
    assert counted(config) == trained(config)
    for place in (tmp_path / "train").rglob("*.jpg"):
        fill(tmp_path / "flat", f"{place.parent.name}/{place.name}", f"{place.parent.name}/more-{place.name}")
    config = choice("image_folder", tmp_path / "flat", all_kinds=True)
    assert counted(config) == trained(config)
    (tmp_path / "huggingface").mkdir()
    if not any(file.startswith(("valid", "Test")) for file in files):  # there splits have one name
        shutil.copytree(tmp_path, tmp_path / "hub" / "huggingface" / "me--set", ignore=shutil.ignore_patterns("hub"))
        config = choice("huggingface", tmp_path / "hub", dataset="me/set", all_kinds=True)
        assert counted(config) == trained(config)


@pytest.mark.parametrize("kept", ["", "[]", '{"train": []}', '{"train": {"classes": 3, "left_out": {}}}', "{"])
def test_of_a_hub_data_set_of_before_the_files_are_counted(kept: str, tmp_path: Path) -> None:
    folder = tmp_path / "huggingface" / "me--set"
    fill(folder, *FOUR)
    if kept:
        (folder / "counts.json").write_text(kept)
    config = choice("huggingface", tmp_path, dataset="me/set", all_kinds=True)
    assert counted(config) == trained(config)


def test_what_would_take_long_is_not_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, *FOUR)
    assert counts_of(choice("image_folder", tmp_path))
    monkeypatch.setattr(image_files, "COUNTED", 3)
    assert counts_of(choice("image_folder", tmp_path)) == {}


def test_links_that_lead_in_circles_end_a_look(tmp_path: Path) -> None:
    fill(tmp_path, "cat/0.jpg", "dog/x/")
    for name in ("a", "b", "c"):
        os.symlink(".", tmp_path / "dog" / "x" / name)
    with pytest.raises(UserError, match="dog holds no images"):
        looked_at("image_folder", tmp_path)


def test_of_a_class_one_image_is_read_and_not_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(tmp_path, *(f"{name}/{at}.jpg" for name in ("cat", "dog") for at in range(300)))
    read: list[str] = []
    scandir = os.scandir

    class Counting:
        def __init__(self, path: Path) -> None:
            self._entries = scandir(path)

        def __enter__(self) -> "Counting":
            return self

        def __exit__(self, *error: object) -> None:
            self._entries.close()

        def __iter__(self) -> "Counting":
            return self

        def __next__(self) -> os.DirEntry[str]:
            entry = next(self._entries)
            read.append(entry.name)
            return entry

    monkeypatch.setattr(os, "scandir", Counting)
    look_at_data(choice("image_folder", tmp_path))
    assert sum(path.endswith(".jpg") for path in read) == 2
