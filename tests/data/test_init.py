from __future__ import annotations

import pickle
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainkit import plugins
from trainkit.data import build_data, check_data
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
from trainkit.data import synthetic

def make(root, *, size: int = 10):
    return synthetic.build(root, train_size=size)
"""


def test_there_are_seven_data_sets() -> None:
    assert plugins.available("trainkit.data") == [
        "cifar10",
        "cinic10",
        "digits",
        "fashion_mnist",
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
