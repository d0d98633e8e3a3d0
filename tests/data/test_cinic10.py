from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainkit.data import cinic10
from trainkit.errors import UserError


@pytest.fixture
def tiny(tmp_path: Path, write_images: Callable[..., None]) -> Path:
    for split, count in (("train", 3), ("valid", 2), ("test", 1)):
        folder = tmp_path / "cinic10" / split
        write_images(folder, {"airplane": count, "cat": count}, suffix="png", size=(32, 32))
    return tmp_path


def test_its_three_splits_are_train_val_and_test(tiny: Path) -> None:
    data = cinic10.build(tiny)
    assert [len(split) for split in (data.train, data.val, data.test)] == [6, 4, 2]
    assert data.info.class_names == ("airplane", "cat")


def test_images_are_augmented_and_resized_as_bytes(tiny: Path) -> None:
    data = cinic10.build(tiny, image_size=48)
    image = data.train_transform(data.train[0][0])
    assert (tuple(image.shape), image.dtype) == ((3, 48, 48), torch.uint8)


def test_the_root_may_be_the_data_sets_own_folder(tiny: Path) -> None:
    assert len(cinic10.build(tiny / "cinic10").train) == 6


def test_missing_data_comes_with_what_to_fetch_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"CINIC-10\.tar\.gz from https://[\s\S]*jobs\.prepare cinic10 --root "):
        cinic10.build(tmp_path)
