from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torchvision

from trainkit.data.datasets import fashion_mnist
from trainkit.errors import UserError


def test_the_files_are_those_that_torchvision_reads(tmp_path: Path, write_fashion_mnist: Callable[..., None]) -> None:
    write_fashion_mnist(tmp_path)
    theirs = torchvision.datasets.FashionMNIST(str(tmp_path), train=False)
    ours = fashion_mnist.build(tmp_path)
    assert len(ours.test) == len(theirs) == 40
    assert all(torch.equal(ours.test[index][0][0], theirs.data[index]) for index in range(40))
    assert [ours.test[index][1] for index in range(40)] == theirs.targets.tolist()
    assert list(ours.info.class_names) == theirs.classes


def test_val_is_split_off_train(tmp_path: Path, write_fashion_mnist: Callable[..., None]) -> None:
    write_fashion_mnist(tmp_path)
    data = fashion_mnist.build(tmp_path, val_fraction=0.25)
    assert (len(data.train), len(data.val)) == (30, 10)


def test_gray_thrice_for_a_model_of_colour_photos(tmp_path: Path, write_fashion_mnist: Callable[..., None]) -> None:
    write_fashion_mnist(tmp_path)
    data = fashion_mnist.build(tmp_path, in_chans=3, image_size=32)
    image = data.train_transform(data.train[0][0])
    assert tuple(image.shape) == (3, 32, 32)
    assert torch.equal(image[0], image[2])


def test_missing_data_comes_with_the_command_that_fetches_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"python -m jobs\.prepare fashion_mnist --root "):
        fashion_mnist.build(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\x00\x00\x08", b"\x00\x00\x0d\x01\x00\x00\x00\x00", b"\x00\x00\x08\x01\x00\x00\x00\x09abc"]
)
def test_a_file_cut_short_is_named(tmp_path: Path, write_fashion_mnist: Callable[..., None], content: bytes) -> None:
    write_fashion_mnist(tmp_path)
    (tmp_path / fashion_mnist.FOLDER / "train-labels-idx1-ubyte").write_bytes(content)
    with pytest.raises(UserError, match="train-labels-idx1-ubyte is no IDX file"):
        fashion_mnist.build(tmp_path)


def test_labels_of_other_images_are_refused(tmp_path: Path, write_fashion_mnist: Callable[..., None]) -> None:
    write_fashion_mnist(tmp_path)
    write_fashion_mnist(tmp_path / "other", 10)
    other = tmp_path / "other" / fashion_mnist.FOLDER / "train-labels-idx1-ubyte"
    other.replace(tmp_path / fashion_mnist.FOLDER / "train-labels-idx1-ubyte")
    with pytest.raises(UserError, match="do not belong together"):
        fashion_mnist.build(tmp_path)
