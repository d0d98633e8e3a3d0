from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainkit import plugins
from trainkit.data import build_data, check_data, train_size
from trainkit.data.folders import counted
from trainkit.errors import UserError


@dataclass(frozen=True)
class Choice:
    name: str = "digits"
    root: str = "nowhere"
    options: dict[str, Any] = field(default_factory=dict)
    pack: int | None = None
    stage: bool = False


OWN = """
import torch
from trainkit.data.datasets import synthetic

def make(root, *, size: int = 10):
    return synthetic.build(root, train_size=size)
"""


def test_there_are_eight_data_sets() -> None:
    assert plugins.available("trainkit.data.datasets") == [
        "cifar10",
        "cinic10",
        "digits",
        "fashion_mnist",
        "image_csv",
        "image_folder",
        "imagenet",
        "synthetic",
    ]


def test_an_unknown_name_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"Unknown data set 'cifr10'[\s\S]*Did you mean 'cifar10'\?"):
        check_data(Choice("cifr10"))


def test_an_unknown_option_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"Unknown key 'data\.image_sise'[\s\S]*Did you mean 'data\.image_size'\?"):
        check_data(Choice(options={"image_sise": 8}))


@pytest.mark.parametrize("value", ["big", 8.5, True, None])
def test_an_option_of_the_wrong_type_is_refused_before_the_run(value: object) -> None:
    with pytest.raises(UserError, match=r"data\.image_size is a whole number"):
        check_data(Choice(options={"image_size": value}))


@pytest.mark.parametrize("name", ["cifar10", "fashion_mnist", "cinic10", "imagenet", "image_folder"])
def test_data_that_is_not_there_is_refused_before_the_run(name: str, tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        check_data(Choice(name, root=str(tmp_path / "no")))
    assert caught.value.why
    assert str(tmp_path / "no") in caught.value.fix


@pytest.mark.parametrize("folders", ["train and val", "train alone", "classes"])
def test_as_many_images_are_counted_as_are_trained_on(
    folders: str, tmp_path: Path, write_images: Callable[..., None]
) -> None:
    counts = {"cat": 11, "dog": 7}
    write_images(tmp_path / "train" if "train" in folders else tmp_path, counts)
    (tmp_path / ("train/cat" if "train" in folders else "cat") / "notes.txt").write_text("no image")
    if "val" in folders:
        write_images(tmp_path / "val", {"cat": 2, "dog": 2})
    choice = Choice("image_folder", str(tmp_path))
    assert train_size(choice) == len(build_data(choice).train)


@pytest.mark.parametrize("choice", [Choice(), Choice("synthetic", options={"train_size": 33})], ids=["digits", "made"])
def test_data_that_is_built_in_says_its_size(choice: Choice) -> None:
    assert train_size(choice) == len(build_data(choice).train)


def test_the_labels_of_fashion_mnist_say_its_size(
    tmp_path: Path, write_fashion_mnist: Callable[[Path, int], None]
) -> None:
    write_fashion_mnist(tmp_path, 47)
    choice = Choice("fashion_mnist", str(tmp_path))
    assert train_size(choice) == len(build_data(choice).train)


def test_files_of_another_size_than_the_official_ones_are_not_guessed_at(
    tmp_path: Path, write_cifar10: Callable[[Path, int], None]
) -> None:
    write_cifar10(tmp_path, 20)
    choice = Choice("cifar10", str(tmp_path))
    assert train_size(choice) is None
    for file in (tmp_path / "cifar-10-batches-py").glob("data_batch_*"):
        os.truncate(file, 31_035_704)  # as large as an official one is
    assert train_size(choice) == 45_000


def test_a_million_files_are_not_counted(tmp_path: Path, write_images: Callable[..., None]) -> None:
    write_images(tmp_path, {"cat": 4, "dog": 3})
    assert counted(tmp_path) == [4, 3]
    assert counted(tmp_path, most=6) is None


def test_options_reach_the_data_set() -> None:
    data = build_data(Choice("synthetic", options={"train_size": 12, "image_size": 16.0}))
    assert (len(data.train), data.info.image_size) == (12, 16)


def test_a_function_of_the_users_own_is_a_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_images.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    choice = Choice("own_images:make", options={"size": 5})
    check_data(choice)
    assert len(build_data(choice).train) == 5
    with pytest.raises(UserError, match=r"Unknown key 'data\.sise'"):
        check_data(Choice("own_images:make", options={"sise": 5}))


@pytest.mark.parametrize(("gives", "kind"), [("(1, 2)", "tuple"), ("None", "NoneType"), ("{'train': []}", "dict")])
def test_a_function_that_returns_something_else_is_told_what_to_return(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gives: str, kind: str
) -> None:
    name = f"odd_{kind.lower()}"
    (tmp_path / f"{name}.py").write_text(f"def make(root):\n    return {gives}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=rf"make returned no Splits\.[\s\S]*It returned {kind};") as caught:
        build_data(Choice(f"{name}:make"))
    assert caught.value.key == "data.name"


def test_checking_never_imports_torch() -> None:
    script = """
import sys
from trainkit.config.schema import DataConfig
from trainkit.data import check_data
from trainkit.errors import UserError
for name in ("digits", "synthetic", "cifar10", "fashion_mnist", "cinic10", "imagenet", "image_folder"):
    try:
        check_data(DataConfig(name=name, root="nowhere"))
    except UserError:
        pass
print([name for name in ("torch", "torchvision", "sklearn", "PIL", "numpy", "scipy") if name in sys.modules])
"""
    assert subprocess.check_output([sys.executable, "-c", script], text=True).strip() == "[]"


@pytest.mark.parametrize("name", ["digits", "synthetic"])
def test_a_data_set_can_be_sent_to_a_process_that_is_started_anew(name: str) -> None:
    data = build_data(Choice(name))
    again = pickle.loads(pickle.dumps(data))  # what macOS does for each worker
    assert again.info == data.info
    assert len(again.train) == len(data.train)


def test_data_that_cannot_be_looked_at_has_no_known_size(tmp_path: Path) -> None:
    assert train_size(Choice("cifar10", str(tmp_path))) is None
    assert train_size(Choice("fashion_mnist", str(tmp_path))) is None
