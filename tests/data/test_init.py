"""Choosing, checking and building a data set by its configuration."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.data.samples import choice, write_images
from trainkit.common.errors import UserError
from trainkit.config.schema import DataConfig
from trainkit.data.datasets import cifar10
from trainkit.data.registry import build_data, check_data, guessed, train_size

OWN = """
import torch
from trainkit.data.datasets import synthetic

def make(root, *, size: int = 10):
    return synthetic.build(root, sizes=synthetic.Sizes(train_size=size))

def odd(root):
    return {"train": []}
"""


@pytest.mark.parametrize(
    ("config", "says"),
    [(choice("cifr10"), r"Unknown data set 'cifr10'[\s\S]*Did you mean 'cifar10'\?"),
     (choice(image_sise=8), r"Unknown key 'data\.image_sise'[\s\S]*Did you mean 'data\.image_size'\?"),
     *((choice(image_size=value), r"data\.image_size is a whole number") for value in ("big", 8.5, True, None))],
)  # fmt: skip
def test_an_unknown_name_or_option_is_refused_before_the_run(config: DataConfig, says: str) -> None:
    with pytest.raises(UserError, match=says):
        check_data(config)


@pytest.mark.parametrize(
    "name", ["cifar10", "fashion_mnist", "cinic10", "imagenet", "image_folder", "image_csv", "image_list"]
)
def test_data_that_is_not_there_is_refused_before_the_run(name: str, tmp_path: Path) -> None:
    for refuse in (check_data, build_data):
        with pytest.raises(UserError) as caught:
            refuse(choice(name, tmp_path / "no"))
        assert caught.value.why
        assert name in ("image_csv", "image_list") or str(tmp_path / "no") in caught.value.fix
        assert name.startswith("image_") or f"python -m jobs.prepare {name} --root " in caught.value.fix


@pytest.mark.parametrize("folders", ["train and val", "train alone", "classes"])
def test_as_many_images_are_counted_as_are_trained_on(folders: str, tmp_path: Path) -> None:
    train = tmp_path / "train" if "train" in folders else tmp_path
    write_images(train, {"cat": 11, "dog": 7})
    (train / "cat" / "notes.txt").write_text("no image")
    if "val" in folders:
        write_images(tmp_path / "val", {"cat": 2, "dog": 2})
    config = choice("image_folder", tmp_path)
    assert train_size(config) == len(build_data(config).train)


@pytest.mark.parametrize(
    ("name", "options"), [("digits", {}), ("synthetic", {"train_size": 33, "image_size": 16.0}), ("fashion_mnist", {})]
)
def test_a_data_set_says_its_size(name: str, options: dict[str, Any], prepared: Path) -> None:
    config = choice(name, prepared, **options)
    data = build_data(config)
    assert train_size(config) == len(data.train) == options.get("train_size", len(data.train))
    assert data.info.image_size == options.get("image_size", data.info.image_size)


def test_of_files_of_another_size_than_the_official_none_is_guessed(prepared: Path, tmp_path: Path) -> None:
    assert [train_size(choice(name, tmp_path)) for name in ("cifar10", "fashion_mnist")] == [None, None], "none there"
    shutil.copytree(prepared / cifar10.FOLDER, tmp_path / cifar10.FOLDER)
    assert train_size(choice("cifar10", tmp_path)) is None
    for file in (tmp_path / cifar10.FOLDER).glob("data_batch_*"):
        os.truncate(file, 31_035_704)  # as large as an official one is
    assert train_size(choice("cifar10", tmp_path)) == 45_000


@pytest.mark.parametrize("name", ["image_folder", "image_list", "image_csv"])
def test_a_size_is_guessed_by_the_images_to_train_on(name: str, tmp_path: Path) -> None:
    write_images(tmp_path, {"cat": 9, "dog": 9}, size=(100, 70), suffix="png")
    (tmp_path / "cat" / "0broken.png").write_text("no image")
    column = "labels" if name == "image_csv" else "label"
    rows = [f"{path.parent.name}/{path.name},{path.parent.name}" for path in tmp_path.glob("*/0*.png")]
    (tmp_path / "labels.csv").write_text("\n".join([f"image,{column}", *rows]))
    size, why = guessed(choice(name, tmp_path))["image_size"]
    assert (size, why.partition(" of ")[0], why.partition("images ")[2]) == (70, "the shorter sides", "are 70 pixels")
    assert guessed(choice(name, tmp_path, image_size=64)) == {}, "somebody has said it"
    assert build_data(choice(name, tmp_path)).info.image_size == 224, "a run of before goes on at the size it had"


def test_what_has_no_image_files_or_none_to_read_guesses_nothing(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    os.mkfifo(tmp_path / "cat" / "pipe.jpg")
    assert [guessed(choice(name, tmp_path)) for name in ("digits", "image_folder", "mine:data")] == [{}] * 3


def test_a_function_of_the_users_own_is_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_images.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    config = choice("own_images:make", size=5)
    check_data(config)
    assert len(build_data(config).train) == 5
    with pytest.raises(UserError, match=r"Unknown key 'data\.sise'"):
        check_data(choice("own_images:make", sise=5))
    with pytest.raises(UserError, match=r"odd returned no Splits\.[\s\S]*It returned dict;") as caught:
        build_data(choice("own_images:odd"))
    assert caught.value.key == "data.name"
