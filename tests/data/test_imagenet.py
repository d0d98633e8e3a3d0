from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from trainkit.data.datasets import imagenet
from trainkit.errors import UserError


@pytest.fixture
def tiny(tmp_path: Path, write_images: Callable[..., None]) -> Path:
    for split, count in (("train", 3), ("val", 2)):
        folder = tmp_path / "imagenet" / split
        write_images(folder, {"n01440764": count, "n01443537": count}, suffix="JPEG", size=(500, 375))
    return tmp_path


def test_the_published_labels_are_train_and_val_and_val_is_the_test(tiny: Path) -> None:
    data = imagenet.build(tiny)
    assert [len(split) for split in (data.train, data.val, data.test)] == [6, 4, 4]
    assert data.info.class_names == ("n01440764", "n01443537")


@pytest.mark.parametrize("size", [224, 64])
def test_photos_become_bytes_of_the_asked_size(tiny: Path, size: int) -> None:
    data = imagenet.build(tiny, image_size=size)
    image, label = data.train[5]
    assert (tuple(image.shape), label) == ((3, 375, 500), 1)
    for transform in (data.train_transform, data.eval_transform):
        assert (tuple(transform(image).shape), transform(image).dtype) == ((3, size, size), torch.uint8)


def test_the_root_may_be_the_data_sets_own_folder(tiny: Path) -> None:
    assert len(imagenet.build(tiny / "imagenet").train) == 6


def test_missing_data_comes_with_the_layout_and_the_command(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"train/WNID does not exist[\s\S]*jobs\.prepare imagenet --root "):
        imagenet.build(tmp_path)
