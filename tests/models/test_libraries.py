from __future__ import annotations

from typing import Any

import pytest
import torch

from trainkit.data.base import DataInfo, ModelInput
from trainkit.errors import UserError
from trainkit.models import libraries
from trainkit.models.libraries import timm_model, torchvision_model


def info(image_size: int = 32, in_chans: int = 3, num_classes: int = 7) -> DataInfo:
    names = tuple(map(str, range(num_classes)))
    return DataInfo("x", num_classes, in_chans, image_size, names, (0.5,) * in_chans, (0.5,) * in_chans)


def scores(model: torch.nn.Module, info: DataInfo) -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(model.eval()(torch.zeros(2, info.in_chans, info.image_size, info.image_size)).shape)


@pytest.mark.parametrize("in_chans", [1, 3])
def test_timm_gets_the_classes_and_channels_of_the_data(in_chans: int) -> None:
    assert scores(timm_model("resnet10t", info(in_chans=in_chans), {}), info(in_chans=in_chans)) == (2, 7)


def size_inside(model: torch.nn.Module, info: DataInfo) -> int:
    """Of the images that the first convolution sees."""
    seen: list[int] = []
    first = next(module for module in model.modules() if isinstance(module, torch.nn.Conv2d))
    first.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[-1]))
    assert scores(model, info) == (2, info.num_classes)
    return seen[0]


@pytest.mark.parametrize(
    ("create", "name", "image_size", "options", "inside"),
    [
        (timm_model, "vit_tiny_patch16_224", 8, {}, 224),  # small images are enlarged to a fixed input size
        (timm_model, "deit_tiny_patch16_224.fb_in1k", 8, {}, 224),
        (timm_model, "vit_tiny_patch16_224", 256, {}, 256),  # for larger ones the model is built
        (timm_model, "vit_tiny_patch16_224", 32, {"img_size": 32}, 32),
        (timm_model, "resnet10t", 48, {}, 48),  # takes any size
        (torchvision_model, "vit_b_32", 32, {}, 224),
        (torchvision_model, "vit_b_32", 224, {}, 224),
        (torchvision_model, "vit_b_32", 256, {}, 256),
        (torchvision_model, "mobilenet_v3_small", 32, {}, 32),
    ],
)
def test_a_model_sees_images_of_its_size_and_scores_the_classes_of_the_data(
    create: Any, name: str, image_size: int, options: dict[str, Any], inside: int
) -> None:
    assert size_inside(create(name, info(image_size), options), info(image_size)) == inside


def test_enlarging_leaves_the_names_in_checkpoints_alone() -> None:
    import timm

    ours = timm_model("vit_tiny_patch16_224", info(32), {})
    assert list(ours.state_dict()) == list(timm.create_model("vit_tiny_patch16_224").state_dict())


def test_options_reach_timm() -> None:
    model = timm_model("vit_tiny_patch16_224", info(), {"depth": 2})
    assert len(model.blocks) == 2  # type: ignore[arg-type]


@pytest.mark.parametrize(("create", "library"), [(timm_model, "timm"), (torchvision_model, "torchvision")])
def test_an_option_that_the_model_does_not_take_is_named(create: Any, library: str) -> None:
    with pytest.raises(UserError, match=rf"Unknown key 'model\.depht'[\s\S]*{library}'s resnet18 takes no 'depht'"):
        create("resnet18", info(), {"depht": 3})


def test_an_option_of_a_wrong_value_shows_the_librarys_words() -> None:
    with pytest.raises(UserError, match=r"timm cannot build resnet18 with model\.global_pool=nonsense"):
        timm_model("resnet18", info(), {"global_pool": "nonsense"})


def test_torchvisions_inception_gives_scores_in_training_too() -> None:
    model = torchvision_model("googlenet", info(64), {})
    assert isinstance(model.train()(torch.zeros(2, 3, 64, 64)), torch.Tensor)


def test_gray_images_are_refused_by_torchvision_with_the_option_that_helps() -> None:
    with pytest.raises(UserError, match=r"data\.in_chans=3"):
        torchvision_model("resnet18", info(in_chans=1), {})


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "vgg11", "vit_b_32"])
def test_pretrained_weights_get_a_new_head(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torchvision

    original = torchvision.models.get_model
    asked: list[Any] = []

    def get_model(name: str, weights: Any = None, **options: Any) -> torch.nn.Module:
        asked.append(weights)
        return original(name, **options)  # type: ignore[no-any-return]

    monkeypatch.setattr(torchvision.models, "get_model", get_model)
    big = info(224)
    assert scores(torchvision_model(name, big, {"pretrained": True}), big) == (2, 7)
    assert asked == ["DEFAULT"]


@pytest.mark.parametrize("create", [timm_model, torchvision_model])
def test_weights_that_cannot_be_downloaded_come_with_a_command_for_elsewhere(
    create: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    import timm
    import torchvision

    def no_internet(*args: Any, **options: Any) -> None:
        raise OSError("Name or service not known")

    monkeypatch.setattr(timm, "create_model", no_internet)
    monkeypatch.setattr(torchvision.models, "get_model", no_internet)
    with pytest.raises(UserError, match=r"could not be downloaded[\s\S]*On a machine that has, run: python") as caught:
        create("resnet18", info(), {"pretrained": True})
    assert ("model.pretrained_cfg_overlay='{file: " in caught.value.fix) == (create is timm_model)


def test_timm_says_how_its_weights_expect_the_images() -> None:
    model = timm_model("test_vit.r160_in1k", info(), {})
    wants = libraries.timm_input(model, info())
    assert wants == ModelInput("test_vit.r160_in1k", (0.5,) * 3, (0.5,) * 3, "bicubic", 0.95)


@pytest.mark.parametrize(
    ("weights", "crop"),
    [("IMAGENET1K_V1", 224 / 256), ("ResNet50_Weights.IMAGENET1K_V1", 224 / 256), (None, 224 / 232)],
)
def test_torchvision_says_how_its_weights_expect_the_images(weights: str | None, crop: float) -> None:
    wants = libraries.torchvision_input("resnet50", info(), {"weights": weights})
    assert wants.source == "ResNet50_Weights." + ("IMAGENET1K_V2" if weights is None else "IMAGENET1K_V1")
    assert (wants.mean, wants.std) == ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    assert (wants.interpolation, wants.crop) == ("bilinear", crop)


def test_gray_images_are_fed_to_colour_weights_as_the_mean_of_the_colours() -> None:
    wants = libraries.torchvision_input("resnet50", info(in_chans=1), {})
    assert [*wants.mean, *wants.std] == pytest.approx([0.449, 0.226])


def test_errors_behind_an_error_count_as_download_errors() -> None:
    error = RuntimeError()
    error.__cause__ = ConnectionError()
    assert libraries._is_download(error)
    assert not libraries._is_download(ValueError())
