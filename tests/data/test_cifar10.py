from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

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


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["uint8", ">i4", "<f8", "bool"])
def test_arrays_come_back_as_they_were(tmp_path: Path, protocol: int, kind: str) -> None:
    array = numpy.arange(12).reshape(3, 4).astype(kind)
    file = tmp_path / "batch"
    file.write_bytes(pickle.dumps({b"data": array, "labels": [1, 2]}, protocol=protocol))
    value = cifar10.load(file)
    assert value["labels"] == [1, 2]
    assert value["data"].dtype == array.dtype
    assert numpy.array_equal(value["data"], array)


def test_what_python_2_wrote_is_read(tmp_path: Path) -> None:
    # A str of Python 2 (opcode U), and numpy under its old module name: what the official files consist of.
    written = (
        b"\x80\x02}q\x01U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87R"
        b"q\x05(K\x01K\x02K\x02\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff"
        b"\xff\xffK\x00tb\x89U\x04\x01\x02\xfe\xfftbs."
    )
    (tmp_path / "batch").write_bytes(written)
    assert cifar10.load(tmp_path / "batch")["data"].tolist() == [[1, 2], [254, 255]]


def test_code_in_a_file_does_not_run(tmp_path: Path) -> None:
    file = tmp_path / "batch"
    file.write_bytes(pickle.dumps({"data": Evil(tmp_path / "done")}, protocol=2))
    with pytest.raises(UserError, match=r"It wants to run '(posix|os)\.mkdir'"):
        cifar10.load(file)
    assert not (tmp_path / "done").exists()


def test_an_array_of_objects_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "batch"
    file.write_bytes(pickle.dumps(numpy.array([object, 1], dtype=object), protocol=2))
    with pytest.raises(UserError, match="is no file of plain arrays"):
        cifar10.load(file)


@pytest.mark.parametrize(
    "content", [b"", b"\x80\x02}", b"no pickle", pickle.dumps(numpy.arange(1000), protocol=2)[:900]]
)
def test_a_damaged_file_is_an_error_for_the_user(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(UserError, match="is no file of plain arrays"):
        cifar10.load(tmp_path / "batch")


def test_a_missing_file_is_an_error_for_the_user(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="Cannot read"):
        cifar10.load(tmp_path / "batch")
