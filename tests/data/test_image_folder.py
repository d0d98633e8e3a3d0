from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from trainkit.data.base import Samples, Splits
from trainkit.data.datasets import image_folder
from trainkit.data.folders import ImageFiles
from trainkit.errors import UserError


def sizes(data: Splits) -> list[int]:
    return [len(split) for split in (data.train, data.val, data.test)]


def names(samples: Samples) -> list[str]:
    assert isinstance(samples, ImageFiles)
    return [samples.files.name(position) for position in samples.positions]


@pytest.fixture
def split_folders(tmp_path: Path, write_images: Callable[..., None]) -> Path:
    for split, count in (("train", 10), ("val", 3), ("test", 2)):
        write_images(tmp_path / split, {"cat": count, "dog": count})
    return tmp_path


def remove(folder: Path) -> None:
    for file in folder.rglob("*.jpg"):
        file.unlink()
    for below in folder.iterdir():
        below.rmdir()
    folder.rmdir()


def test_three_folders_are_three_splits(split_folders: Path) -> None:
    assert sizes(image_folder.build(split_folders)) == [20, 6, 4]


def test_without_a_test_folder_val_is_the_test(split_folders: Path) -> None:
    remove(split_folders / "test")
    assert sizes(image_folder.build(split_folders)) == [20, 6, 6]


def test_without_a_val_folder_val_is_split_off_train(split_folders: Path) -> None:
    remove(split_folders / "val")
    assert sizes(image_folder.build(split_folders, val_fraction=0.2)) == [16, 4, 4]


def test_a_single_folder_of_classes_is_split_the_same_way_each_time(
    tmp_path: Path, write_images: Callable[..., None]
) -> None:
    write_images(tmp_path, {"cat": 20, "dog": 40})
    first, again = (image_folder.build(tmp_path) for _ in range(2))
    assert sizes(first) == [42, 9, 9]
    assert names(first.val) == names(again.val)
    assert sum(first.test[index][1] for index in range(9)) == 6


def test_images_get_the_asked_size_and_channels(split_folders: Path) -> None:
    data = image_folder.build(split_folders, image_size=64, in_chans=1)
    assert tuple(data.train_transform(data.train[0][0]).shape) == (1, 64, 64)
    assert (data.info.num_classes, data.info.class_names, len(data.info.mean)) == (2, ("cat", "dog"), 1)


def test_no_folder_comes_with_the_layout(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"There is no folder[\s\S]*train/CLASS/NAME\.jpg"):
        image_folder.build(tmp_path / "no")


def test_a_class_without_images_is_named(split_folders: Path) -> None:
    (split_folders / "train" / "bird").mkdir()
    with pytest.raises(UserError, match="bird holds no images"):
        image_folder.build(split_folders)


def test_too_few_images_to_split_are_refused(tmp_path: Path, write_images: Callable[..., None]) -> None:
    write_images(tmp_path, {"cat": 1, "dog": 1})
    with pytest.raises(UserError, match="has too few images to split"):
        image_folder.build(tmp_path)


@pytest.mark.parametrize("options", [{"val_fraction": 0.0}, {"test_fraction": 1.0}, {"in_chans": 4}, {"image_size": 1}])
def test_an_impossible_option_is_refused_by_name(tmp_path: Path, options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UserError, match=f"data.{name}="):
        image_folder.build(tmp_path, **options)


def test_fractions_that_leave_nothing_to_train_on_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"data\.val_fraction=0\.6"):
        image_folder.build(tmp_path, val_fraction=0.6, test_fraction=0.6)
