from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.data.folders import ImageFiles, class_folders, image_files, read_split, require_classes, scan
from trainkit.errors import UserError


def test_classes_are_the_visible_folders_in_order(tmp_path: Path) -> None:
    for name in ("b", "a", ".ipynb_checkpoints"):
        (tmp_path / name).mkdir()
    (tmp_path / "notes.txt").touch()
    assert class_folders(tmp_path) == ["a", "b"]


def test_a_missing_folder_has_no_classes(tmp_path: Path) -> None:
    assert class_folders(tmp_path / "no") == []


def test_images_are_found_below_and_sorted(tmp_path: Path) -> None:
    for name in ("2.JPEG", "1.png", "deep/0.jpg", ".hidden.jpg", "notes.txt", ".trash/9.jpg"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    assert image_files(tmp_path) == ["1.png", "2.JPEG", "deep/0.jpg"]


def test_names_and_labels_survive_the_way_to_a_worker(tmp_path: Path) -> None:
    names = [f"Grüße/{number}.jpg" for number in range(100)]
    samples = pickle.loads(pickle.dumps(ImageFiles(tmp_path, names, range(100), 3)))
    assert len(samples) == 100
    assert [samples.path(index) for index in (0, 57, 99)] == [tmp_path / names[index] for index in (0, 57, 99)]


def test_a_sample_is_a_decoded_image_and_its_label(tmp_path: Path, write_images: Callable[..., None]) -> None:
    write_images(tmp_path, {"cat": 1, "dog": 2})
    files, labels = scan(tmp_path, ["cat", "dog"])
    image, label = ImageFiles(tmp_path, files, labels, 3)[2]
    assert (tuple(image.shape), label) == ((3, 16, 20), 1)


def test_a_class_that_training_does_not_know_is_refused(tmp_path: Path, write_images: Callable[..., None]) -> None:
    write_images(tmp_path, {"cat": 1, "dgo": 1})
    with pytest.raises(UserError, match=r"dgo is a class that the training data does not have[\s\S]*cat, dog"):
        read_split(tmp_path, ["cat", "dog"], 3)


def test_a_class_may_be_absent_from_a_held_out_split(tmp_path: Path, write_images: Callable[..., None]) -> None:
    write_images(tmp_path, {"dog": 2})
    assert list(read_split(tmp_path, ["cat", "dog"], 3).labels) == [1, 1]


def test_a_split_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    with pytest.raises(UserError, match="holds no images"):
        read_split(tmp_path, ["cat", "dog"], 3)


@pytest.mark.parametrize("names", [[], ["cat"]])
def test_one_class_is_too_few(tmp_path: Path, names: list[str]) -> None:
    for name in names:
        (tmp_path / name).mkdir()
    with pytest.raises(UserError, match="does not hold a folder for each class"):
        require_classes(tmp_path)
