from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
import torchvision

from trainkit.data.datasets import cifar10
from trainkit.errors import UserError


def test_the_files_are_those_that_torchvision_reads(
    tmp_path: Path, write_cifar10: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_cifar10(tmp_path)
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: True)
    theirs = torchvision.datasets.CIFAR10(str(tmp_path), train=False)
    ours = cifar10.build(tmp_path)
    assert len(ours.test) == len(theirs) == 20
    for index in range(20):
        picture, label = theirs[index]
        image, our_label = ours.test[index]
        assert label == our_label
        assert torch.equal(image, torch.from_numpy(numpy.array(picture)).permute(2, 0, 1))
    assert list(ours.info.class_names) == theirs.classes


def test_val_is_split_off_train_stratified(tmp_path: Path, write_cifar10: Callable[..., None]) -> None:
    write_cifar10(tmp_path)
    data = cifar10.build(tmp_path, val_fraction=0.2)
    assert (len(data.train), len(data.val)) == (80, 20)
    assert sorted(data.val[index][1] for index in range(20)) == sorted([*range(10), *range(10)])


def test_images_are_enlarged_for_a_vision_transformer(tmp_path: Path, write_cifar10: Callable[..., None]) -> None:
    write_cifar10(tmp_path)
    data = cifar10.build(tmp_path, image_size=64)
    image = data.train_transform(data.train[0][0])
    assert (tuple(image.shape), image.dtype, data.info.image_size) == ((3, 64, 64), torch.uint8, 64)


def test_missing_data_comes_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"python -m jobs\.prepare cifar10 --root "):
        cifar10.build(tmp_path)


def test_one_missing_file_is_named(tmp_path: Path, write_cifar10: Callable[..., None]) -> None:
    write_cifar10(tmp_path)
    (tmp_path / cifar10.FOLDER / "data_batch_3").unlink()
    with pytest.raises(UserError, match="data_batch_3 does not exist"):
        cifar10.build(tmp_path)


@pytest.mark.parametrize("batch", [{}, {"data": 3, "labels": [1]}, {"data": b"x", "labels": []}, {"labels": [1]}])
def test_a_batch_that_is_none_is_named(tmp_path: Path, write_cifar10: Callable[..., None], batch: object) -> None:
    write_cifar10(tmp_path)
    (tmp_path / cifar10.FOLDER / "data_batch_3").write_bytes(pickle.dumps(batch, protocol=2))
    with pytest.raises(UserError, match="data_batch_3 is no batch of CIFAR-10"):
        cifar10.build(tmp_path)


@pytest.mark.parametrize("fraction", [0.0, 1.0, -0.5, 2.0])
def test_an_impossible_val_fraction_is_refused(tmp_path: Path, fraction: float) -> None:
    with pytest.raises(UserError, match=r"data\.val_fraction="):
        cifar10.build(tmp_path, val_fraction=fraction)
