"""The data sets that ship, by what they have in common and by what each has of its own."""

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torchvision

from tests.data.samples import build, choice, labels, sizes, write_images
from tests.recipes.tiny import NAMES, WNIDS
from trainkit.common.errors import UserError
from trainkit.config import plugins
from trainkit.data.base import normalize
from trainkit.data.datasets import cifar10, fashion_mnist, synthetic
from trainkit.data.image_files import ImageFiles
from trainkit.data.registry import build_data, check_data, train_size

SETS = plugins.available("trainkit.data.datasets")
NAMED = {"huggingface": {"dataset": "me/pets"}, "torchvision": {"dataset": "FashionMNIST"},
         "stream": {"url": "s3://me/pets"}}  # fmt: skip
"""Options without a default."""


# Each line: a data set, options, sizes of its splits, number of classes, and the shape of an augmented image.


@pytest.mark.parametrize(
    ("name", "options", "expected", "classes", "shape"),
    [
        ("cifar10", {"val_fraction": 0.2, "image_size": 64}, [80, 20, 20], 10, (3, 64, 64)),
        ("cinic10", {"image_size": 48}, [80, 80, 80], 10, (3, 48, 48)),
        ("digits", {"image_size": 32, "in_chans": 3}, [1259, 269, 269], 10, (3, 32, 32)),
        ("fashion_mnist", {"val_fraction": 0.25, "in_chans": 3, "image_size": 32}, [60, 20, 80], 10, (3, 32, 32)),
        ("imagenet", {"image_size": 64}, [48, 8, 8], 4, (3, 64, 64)),
        (
            "synthetic",
            {"num_classes": 3, "image_size": 12, "in_chans": 2, "train_size": 9, "val_size": 5, "test_size": 4},
            [9, 5, 4], 3, (2, 12, 12),
        ),
    ],
)  # fmt: skip
def test_splits_classes_and_images_are_as_asked(
    name: str, options: dict[str, Any], expected: list[int], classes: int, shape: tuple[int, ...], prepared: Path
) -> None:
    data = pickle.loads(pickle.dumps(build(name, prepared, **options)))  # what macOS does for each worker
    assert sizes(data) == expected
    assert (data.info.name, data.info.num_classes, len(data.info.class_names)) == (name, classes, classes)
    assert len(data.info.mean) == len(data.info.std) == data.info.in_chans == shape[0]
    for transform in (data.train_transform, data.eval_transform):
        image = transform(data.train[0][0])
        assert (tuple(image.shape), image.dtype) == (shape, torch.uint8)
        assert "in_chans" not in options or name == "synthetic" or torch.equal(image[0], image[2]), "gray is repeated"


@pytest.mark.parametrize(
    ("name", "options"),
    [(name, {"image_size": 3, **NAMED.get(name, {})}) for name in SETS]
    + [(name, {"in_chans": 2}) for name in ("digits", "fashion_mnist", "image_csv", "image_folder", "image_list")]
    + [(name, {"val_fraction": value}) for name in ("cifar10", "image_folder") for value in (0.0, 1.0, -0.5, 2.0)]
    + [(name, {"test_fraction": 1.0}) for name in ("image_csv", "image_folder", "image_list")]
    + [(name, {"shift": value}) for name, too_far in (("cifar10", 32), ("digits", 8)) for value in (too_far, -1)]
    + [("cifar10", {"padding_mode": "edge"})]
    + [("image_folder", {"val_fraction": 0.6, "test_fraction": 0.6})]
    + [("synthetic", {key: value}) for key, value in
       (("num_classes", 1), ("in_chans", 0), ("noise", 1.5), ("train_size", 0))],
)  # fmt: skip
def test_an_impossible_option_is_refused_by_name(name: str, options: dict[str, Any]) -> None:
    option, value = next(iter(options.items()))
    for refuse in (check_data, build_data):
        with pytest.raises(UserError, match=rf"data\.{option}={value}") as caught:
            refuse(choice(name, **options))
        assert caught.value.key == f"data.{option}"


@pytest.mark.parametrize("name", ["cifar10", "fashion_mnist"])
def test_the_files_are_those_that_torchvision_reads(name: str, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "_check_integrity", lambda self: True)
    monkeypatch.setattr("torchvision.datasets.cifar.check_integrity", lambda path, md5: True)
    kind = {"cifar10": torchvision.datasets.CIFAR10, "fashion_mnist": torchvision.datasets.FashionMNIST}[name]
    theirs, ours = kind(str(prepared), train=False), build(name, prepared)
    assert len(ours.test) == len(theirs)
    assert list(ours.info.class_names) == theirs.classes
    for (picture, label), (image, our_label) in zip(theirs, (ours.test[at] for at in range(len(theirs))), strict=True):
        assert label == our_label
        assert torch.equal(image, torch.from_numpy(numpy.atleast_3d(numpy.array(picture))).permute(2, 0, 1))


@pytest.mark.parametrize("name", SETS)
def test_made_up_images_have_the_shape_of_the_data(name: str) -> None:
    data = build(name, fake=True, **NAMED.get(name, {}))
    stated = plugins.stated("trainkit.data.datasets", name).get("SHAPE", {"num_classes": 10, "train_size": 100_000})
    assert data.info.num_classes == (10 if name == "synthetic" else stated["num_classes"])
    assert len(data.train) == train_size(choice(name, fake=True, **NAMED.get(name, {})))
    image, label = data.train[3]
    defaults = plugins.signature("trainkit.data.datasets", name).defaults
    side, channels = defaults["image_size"] or 224, defaults.get("in_chans", 3)
    assert tuple(data.train_transform(image).shape) == (channels, side, side)
    assert isinstance(label, int) != (name == "image_csv"), "several labels are a row of them"
    assert "made-up images" in data.info.name


def test_made_up_images_are_the_same_where_patterns_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    held = build("synthetic").train
    monkeypatch.setattr(synthetic, "MOST_PATTERN_BYTES", 0)
    made = build("synthetic").train
    for index in (0, 7, 19):
        assert torch.equal(held[index][0], made[index][0])


@pytest.mark.parametrize("name", ["cifar10", "cinic10", "fashion_mnist", "digits"])
def test_what_a_data_set_states_of_its_shape_is_so(name: str, prepared: Path) -> None:
    unknown: dict[str, Any] = {"name": "", "class_names": (), "mean": (), "std": ()}
    assert replace(build(name, prepared).info, **unknown) == replace(build(name, fake=True).info, **unknown)


# CIFAR-10: pickles


@pytest.mark.parametrize(
    "batch",
    [None, {}, {"data": 3, "labels": [1]}, {"data": b"x", "labels": []}, {"labels": [1]},
     {"data": numpy.zeros((1, 3072), numpy.uint8), "labels": [10]}],
)  # fmt: skip
def test_a_batch_that_is_missing_or_none_is_named(prepared: Path, tmp_path: Path, batch: object) -> None:
    shutil.copytree(prepared / cifar10.FOLDER, tmp_path / cifar10.FOLDER)
    (tmp_path / cifar10.FOLDER / "data_batch_3").unlink()
    if batch is not None:
        (tmp_path / cifar10.FOLDER / "data_batch_3").write_bytes(pickle.dumps(batch, protocol=2))
    says = "does not exist" if batch is None else "is not a batch of CIFAR-10"
    with pytest.raises(UserError, match=rf"data_batch_3 {says}[\s\S]*python -m jobs\.prepare cifar10"):
        build("cifar10", tmp_path)


def test_what_python_2_wrote_is_read(tmp_path: Path) -> None:
    # A str of Python 2 (opcode U), and numpy under its old module name: what the official files consist of.
    written = (
        b"\x80\x02}q\x01U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87R"
        b"q\x05(K\x01K\x02K\x02\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff"
        b"\xff\xffK\x00tb\x89U\x04\x01\x02\xfe\xfftbs."
    )
    (tmp_path / "batch").write_bytes(written)
    assert cifar10.load(tmp_path / "batch")["data"].tolist() == [[1, 2], [254, 255]]


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.mark),))


def test_code_in_a_file_does_not_run(tmp_path: Path) -> None:
    (tmp_path / "batch").write_bytes(pickle.dumps({"data": Evil(tmp_path / "done")}, protocol=2))
    with pytest.raises(UserError, match=r"It wants to run '(posix|os)\.mkdir'"):
        cifar10.load(tmp_path / "batch")
    assert not (tmp_path / "done").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"\x80\x02}", b"no pickle", pickle.dumps(numpy.arange(1000), protocol=2)[:900],
     pickle.dumps(numpy.array([object, 1], dtype=object), protocol=2), pickle.dumps(numpy.dtype("u1"), protocol=2),
     pickle.dumps(numpy.array(["text"]), protocol=2)],
)  # fmt: skip
def test_what_is_no_plain_array_is_refused(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(UserError, match="Cannot read"):
        cifar10.load(tmp_path / "batch")
    (tmp_path / "batch").write_bytes(content)
    with pytest.raises(UserError, match="is not a file of plain arrays"):
        cifar10.load(tmp_path / "batch")


# CINIC-10, ImageNet: folders


def test_cinic10_has_the_three_splits_of_its_folders(prepared: Path) -> None:
    data = build("cinic10", prepared)
    assert data.info.class_names == tuple(sorted(NAMES))
    for split, folder in ((data.train, "train"), (data.val, "valid"), (data.test, "test")):
        assert isinstance(split, ImageFiles)
        assert {split.files.path(position).split("/")[0] for position in split.positions} == {folder}


def test_imagenets_test_is_val_whose_labels_are_published(prepared: Path) -> None:
    data = build("imagenet", prepared)
    assert data.test is data.val
    assert data.info.class_names == WNIDS
    image, label = data.train[5]
    assert (tuple(image.shape), label) == ((3, 60, 80), 0)


# Fashion-MNIST: IDX files


@pytest.mark.parametrize(
    ("header", "body", "says"),
    [("", b"", "is not an IDX file"), ("000008", b"", "is not an IDX file"),
     ("00000d0100000000", b"", "is not an IDX file"),
     ("0000080100000009", b"abc", "is not an IDX file"), ("0000080100000003", b"abc", "do not belong together"),
     ("0000080100000050", bytes([10] * 80), "do not belong together")],
)  # fmt: skip
def test_cut_or_foreign_labels_are_refused(prepared: Path, tmp_path: Path, header: str, body: bytes, says: str) -> None:
    shutil.copytree(prepared / fashion_mnist.FOLDER, tmp_path / fashion_mnist.FOLDER)
    (tmp_path / fashion_mnist.FOLDER / "train-labels-idx1-ubyte").write_bytes(bytes.fromhex(header) + body)
    with pytest.raises(UserError, match=says):
        build("fashion_mnist", tmp_path)


# scikit-learn's digits


def test_digits_are_the_ones_that_scikit_learn_loads() -> None:
    from sklearn.datasets import load_digits

    theirs, data = load_digits(return_X_y=True), build("digits")
    ours = [data_of[at] for data_of in (data.train, data.val, data.test) for at in range(len(data_of))]
    expected = [(tuple((image * 255 / 16).round()), label) for image, label in zip(*theirs, strict=True)]
    assert sorted((tuple(image.flatten().tolist()), label) for image, label in ours) == sorted(expected)
    images = torch.stack([image for image, _ in ours])
    normal = normalize(images, data.info)
    assert abs(float(normal.mean())) < 0.01
    assert abs(float(normal.std()) - 1) < 0.01


def test_augmentation_moves_a_digit_by_one_pixel_at_most() -> None:
    data = build("digits")
    image = data.train[0][0]
    padded = torch.nn.functional.pad(image, (1, 1, 1, 1))
    windows = [padded[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
    moved = [data.train_transform(image) for _ in range(50)]
    assert all(any(torch.equal(one, window) for window in windows) for one in moved)
    assert any(not torch.equal(one, image) for one in moved)
    assert torch.equal(data.eval_transform(image), image)


# A folder of one's own


@pytest.fixture
def split_folders(tmp_path: Path) -> Path:
    for split, count in (("train", 10), ("val", 3), ("test", 2)):
        write_images(tmp_path / split, {"cat": count, "dog": count})
    return tmp_path


@pytest.mark.parametrize(
    ("without", "expected"), [((), [20, 6, 4]), (("test",), [20, 6, 6]), (("val",), [16, 4, 4]),
                              (("val", "test"), [16, 4, 4])]
)  # fmt: skip
def test_without_val_it_is_split_off_train_and_without_test_it_is_val(
    split_folders: Path, without: tuple[str, ...], expected: list[int]
) -> None:
    for split in without:
        shutil.rmtree(split_folders / split)
    assert sizes(build("image_folder", split_folders, val_fraction=0.2)) == expected


def test_a_single_folder_of_classes_is_split_by_class(tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 20, "dog": 40})
    data = build("image_folder", tmp_path)
    assert sizes(data) == [42, 9, 9]
    assert sum(labels(data.test)) == 6


def test_gray_photos_have_the_average_of_the_colours_statistics(split_folders: Path) -> None:
    data = build("image_folder", split_folders, image_size=64, in_chans=1)
    assert tuple(data.train_transform(data.train[0][0]).shape) == (1, 64, 64)
    assert (data.info.num_classes, data.info.class_names) == (2, ("cat", "dog"))
    assert [round(of[0], 3) for of in (data.info.mean, data.info.std)] == [0.449, 0.226]


@pytest.mark.parametrize(
    ("counts", "says"),
    [(None, r"There is no folder[\s\S]*train/CLASS/NAME\.jpg"),
     ({"cat": 3, "dog": 3, "bird": 0}, "bird holds no images"), ({"cat": 1, "dog": 1}, "has too few images to split"),
     ({"cat": 1}, "does not contain a folder per class")],
)  # fmt: skip
def test_a_folder_nobody_can_train_on_is_refused(tmp_path: Path, counts: dict[str, int] | None, says: str) -> None:
    write_images(tmp_path, counts or {})
    with pytest.raises(UserError, match=says):
        build("image_folder", tmp_path / "no" if counts is None else tmp_path)
