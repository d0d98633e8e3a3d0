from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.data.folders import ImageFiles, Listing, Tree, read_split, require_classes, scan
from trainkit.errors import UserError


def tree(folder: Path) -> Tree:
    return Tree(folder, Listing.walk(folder, ("",)))


def test_files_and_labels_survive_the_way_to_a_worker(tmp_path: Path, write_images: Callable[..., None]) -> None:
    write_images(tmp_path, {"cat": 1, "Grüße": 2})
    samples = pickle.loads(pickle.dumps(ImageFiles(tree(tmp_path), range(3), (1, 0, 0), 3)))
    assert [samples[index][1] for index in range(3)] == [1, 0, 0]


def test_a_sample_is_a_decoded_image_and_its_label(tmp_path: Path, write_images: Callable[..., None]) -> None:
    write_images(tmp_path, {"cat": 1, "dog": 2})
    files = tree(tmp_path)
    image, label = ImageFiles(files, *scan(files, "", ["cat", "dog"]), 3)[2]
    assert (tuple(image.shape), label) == ((3, 16, 20), 1)


def test_a_class_that_training_does_not_know_is_refused(tmp_path: Path, write_images: Callable[..., None]) -> None:
    write_images(tmp_path, {"cat": 1, "dgo": 1})
    with pytest.raises(UserError, match=r"dgo is a class that the training data does not have[\s\S]*cat, dog"):
        read_split(tree(tmp_path), "", ["cat", "dog"], 3)


def test_a_class_may_be_absent_from_a_held_out_split(tmp_path: Path, write_images: Callable[..., None]) -> None:
    write_images(tmp_path, {"dog": 2})
    assert list(read_split(tree(tmp_path), "", ["cat", "dog"], 3).labels) == [1, 1]


def test_a_split_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    with pytest.raises(UserError, match="holds no images"):
        read_split(tree(tmp_path), "", ["cat", "dog"], 3)


@pytest.mark.parametrize("names", [[], ["cat"]])
def test_one_class_is_too_few(tmp_path: Path, names: list[str]) -> None:
    with pytest.raises(UserError, match="does not hold a folder for each class"):
        require_classes(tmp_path, names)
