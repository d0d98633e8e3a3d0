from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainkit.config.schema import ModelConfig
from trainkit.data.base import DataInfo
from trainkit.errors import UserError
from trainkit.models import build_model, check_model, check_shapes, freeze, resolve

INFO_INIT = DataInfo("x", 7, 3, 32, tuple("abcdefg"), (0.5,) * 3, (0.5,) * 3)

OWN = """
import torch

def build(info, *, hidden: int = 4):
    pixels = info.in_chans * info.image_size ** 2
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(pixels, hidden), torch.nn.Linear(hidden, info.num_classes)
    )

def nothing(info):
    return None
"""


def choice(name: str = "fashion_cnn", options: dict[str, Any] | None = None) -> ModelConfig:
    return ModelConfig.model_validate({"name": name, **(options or {})})


@pytest.mark.parametrize(
    ("name", "home", "there"),
    [
        ("fashion_cnn", "trainkit", "fashion_cnn"),
        ("resnet18", "timm", "resnet18"),
        ("timm/resnet18", "timm", "resnet18"),
        ("torchvision/resnet18", "torchvision", "resnet18"),
        ("swin_v2_t", "torchvision", "swin_v2_t"),
        ("resnet18.a1_in1k", "timm", "resnet18.a1_in1k"),
        ("hf-hub:timm/resnet18.a1_in1k", "timm", "hf-hub:timm/resnet18.a1_in1k"),
        ("mine.nets:build", "user", "mine.nets:build"),
    ],
)
def test_a_name_has_one_home(name: str, home: str, there: str) -> None:
    assert resolve(name) == (home, there)


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("resnt18", "Did you mean 'resnet18'"),
        ("fashion_cn", "Did you mean 'fashion_cnn'"),
        ("vit_base_patch32_242", "Did you mean 'vit_base_patch32_224'"),
        ("timm/resnt18", "Did you mean 'timm/resnet18'"),
        ("torchvision/resnt50", "Did you mean 'torchvision/resnet50'"),
        ("qqqqqqqq", r"package\.module:function"),
        ("resnet18.a1_in2k", r"a1_in1k, [\s\S]*Use model\.name=resnet18\.a1_in1k"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, answer: str) -> None:
    with pytest.raises(UserError, match=rf"(Unknown model '{name}'|no pretrained weights)[\s\S]*{answer}"):
        check_model(choice(name))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fashion_cnn", {"widht": 8}, r"Unknown key 'model\.widht'[\s\S]*'model\.width'"),
        ("fashion_cnn", {"width": "wide"}, r"model\.width is a whole number"),
        ("fashion_cnn", {"width": 12}, r"model\.width=12"),
        ("fashion_cnn", {"norm": "layer"}, r"model\.norm is one of: group, batch"),
        ("resnet18", {"num_classes": 10}, r"model\.num_classes cannot be set"),
        ("resnet18", {"in_chans": 1}, r"use data\.in_chans"),
        ("resnet18", {"pretrained": "a1_in1k"}, r"model\.pretrained=a1_in1k"),
        ("no_such_module:build", {}, r"No module 'no_such_module'"),
    ],
)
def test_options_are_refused_before_the_run(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_model(choice(name, options))


@pytest.mark.parametrize("name", ["fashion_cnn", "resnet10t", "torchvision/mobilenet_v3_small"])
def test_weights_are_a_function_of_the_seed(name: str) -> None:
    def weights(seed: int) -> torch.Tensor:
        return torch.cat(
            [value.detach().flatten() for value in build_model(choice(name), INFO_INIT, seed).parameters()]
        )

    torch.manual_seed(1)
    first = weights(seed=5)
    torch.manual_seed(2)
    assert torch.equal(first, weights(seed=5))
    assert not torch.equal(first, weights(seed=6))


def test_building_leaves_the_global_random_numbers_alone() -> None:
    before = torch.get_rng_state()
    build_model(choice(), INFO_INIT, seed=3)
    assert torch.equal(before, torch.get_rng_state())


def test_a_model_that_cannot_take_the_images_is_refused_before_training() -> None:
    with pytest.raises(UserError, match=r"'vgg11' cannot take images of 3 x 8 x 8[\s\S]*data\.image_size=224"):
        build_model(choice("vgg11"), DataInfo("x", 7, 3, 8, tuple("abcdefg"), (0.5,) * 3, (0.5,) * 3), seed=0)


def test_a_function_of_the_users_own_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_nets.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = choice("own_nets:build", {"hidden": 3})
    check_model(own)
    assert build_model(own, INFO_INIT, seed=0)[1].out_features == 3  # type: ignore[index]
    with pytest.raises(UserError, match=r"Unknown key 'model\.hiden'"):
        check_model(choice("own_nets:build", {"hiden": 3}))
    with pytest.raises(UserError, match=r"own_nets:nothing returned no model[\s\S]*NoneType"):
        build_model(choice("own_nets:nothing"), INFO_INIT, seed=0)


def test_checking_never_imports_torch_and_is_quick() -> None:
    script = """
import sys, time
from trainkit.config.schema import ModelConfig
started = time.process_time()
from trainkit.models import check_model
for name in ("fashion_cnn", "vit_base_patch32_224", "torchvision/resnet50"):
    check_model(ModelConfig(name=name))
print(time.process_time() - started, [name for name in ("torch", "timm", "torchvision") if name in sys.modules])
"""
    seconds, loaded = subprocess.check_output([sys.executable, "-c", script], text=True).split(" ", 1)
    assert loaded.strip() == "[]"
    assert float(seconds) < 0.4  # 0.07 on an idle machine


INFO_SHAPES = DataInfo("x", 5, 3, 16, tuple("abcde"), (0.5,) * 3, (0.5,) * 3)


def test_a_model_that_fits_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 16 * 16, 5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_shapes(model, INFO_SHAPES, "mine")
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class Pair(nn.Module):
    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return images, images


def norms() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    ("patterns", "frozen"),
    [(["0.*", "3.bias"], {"0.weight", "0.bias", "3.bias"}), ([], set())],
)
def test_what_fits_a_pattern_is_not_trained(patterns: list[str], frozen: set[str]) -> None:
    model = norms()
    freeze(model, patterns)
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == frozen


@pytest.mark.parametrize(("patterns", "kept"), [(["[01].*"], {1}), (["1.bias"], set())])
def test_a_norm_keeps_its_statistics_where_all_of_it_is_frozen(patterns: list[str], kept: set[int]) -> None:
    model = norms()
    freeze(model, patterns)
    model.train()
    means = {place: model[place].get_buffer("running_mean") for place in (1, 4)}
    before = {place: mean.clone() for place, mean in means.items()}
    model(torch.randn(4, 1, 3, 3) + 5)
    assert {place for place, mean in means.items() if torch.equal(mean, before[place])} == kept


@pytest.mark.parametrize(
    ("patterns", "what"), [(["conv*"], "no parameter fits 'conv\\*'"), (["*"], "nothing to train")]
)
def test_patterns_that_make_no_sense_are_refused(patterns: list[str], what: str) -> None:
    with pytest.raises(UserError, match=what):
        freeze(norms(), patterns)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5)), r"'mine' cannot take images of 3 x 16 x 16"),
        (nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10)), r"shape \(2, 10\)[\s\S]*shape \(2, 5\)"),
        (Pair(), "it returned tuple, not a tensor"),
    ],
    ids=["another image size", "other classes", "no tensor"],
)
def test_a_model_that_does_not_fit_the_data_is_refused(model: nn.Module, told: str) -> None:
    with pytest.raises(UserError, match=told):
        check_shapes(model, INFO_SHAPES, "mine")
