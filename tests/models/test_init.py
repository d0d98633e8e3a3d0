import copy
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainkit.common.errors import UserError
from trainkit.common.image_input import DataInfo, ModelInput
from trainkit.config.schema import ModelConfig
from trainkit.models import library as registry
from trainkit.models.library import (
    build_model,
    check_model,
    check_shapes,
    freeze,
    resolve,
    timm_model,
    torchvision_model,
)

OWN = """
from torch import nn

def build(info, *, hidden: int = 4):
    pixels = info.in_chans * info.image_size ** 2
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, hidden), nn.Linear(hidden, info.num_classes))

def nothing(info):
    return None
"""


def info(image_size: int = 32, in_chans: int = 3, num_classes: int = 7) -> DataInfo:
    names = tuple(map(str, range(num_classes)))
    return DataInfo("x", num_classes, in_chans, image_size, names, (0.5,) * in_chans, (0.5,) * in_chans)


def choice(name: str = "fashion_cnn", options: dict[str, Any] | None = None) -> ModelConfig:
    return ModelConfig.model_validate({"name": name, **(options or {})})


@pytest.mark.parametrize(
    ("name", "home", "there"),
    [
        ("fashion_cnn", "trainkit", "fashion_cnn"),
        ("resnet18", "timm", "resnet18"),
        ("timm/resnet18", "timm", "resnet18"),
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
        ("torchvision/resnt50", "Did you mean 'torchvision/resnet50'"),
        ("qqqqqqqq", r"package\.module:function"),
        ("resnet18.a1_in2k", r"resnet18\.a1_in1k, [\s\S]*Did you mean 'resnet18\.a1_in1k'"),
    ],
)
def test_an_unknown_name_is_answered_with_the_nearest(name: str, answer: str) -> None:
    with pytest.raises(UserError, match=rf"Unknown model '{name}'[\s\S]*{answer}"):
        check_model(choice(name))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("fashion_cnn", {"widht": 8}, r"Unknown key 'model\.widht'[\s\S]*'model\.width'"),
        ("fashion_cnn", {"width": "wide"}, r"model\.width is a whole number"),
        ("fashion_cnn", {"width": 12}, r"model\.width=12"),
        ("resnet18", {"in_chans": 1}, r"data\.in_chans"),
        ("resnet18", {"pretrained": "a1_in1k"}, r"model\.pretrained=a1_in1k"),
        ("no_such_module:build", {}, r"No module 'no_such_module'"),
    ],
)
def test_options_are_refused_before_the_run(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_model(choice(name, options))


@pytest.mark.parametrize("name", ["fashion_cnn", "torchvision/mobilenet_v3_small"])
def test_weights_are_a_function_of_the_seed(name: str) -> None:
    def weights(seed: int) -> torch.Tensor:
        return torch.cat([value.detach().flatten() for value in build_model(choice(name), info(), seed).parameters()])

    torch.manual_seed(1)
    first = weights(seed=5)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(first, weights(seed=5))
    assert not torch.equal(first, weights(seed=6))
    assert torch.equal(before, torch.get_rng_state()), "global random numbers are left alone"


def test_a_function_of_the_users_own_is_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_nets.py").write_text(OWN)
    monkeypatch.syspath_prepend(str(tmp_path))
    own = choice("own_nets:build", {"hidden": 3})
    check_model(own)
    assert build_model(own, info(), seed=0)[1].out_features == 3  # type: ignore[index]
    with pytest.raises(UserError, match=r"Unknown key 'model\.hiden'"):
        check_model(choice("own_nets:build", {"hiden": 3}))
    with pytest.raises(UserError, match=r"own_nets:nothing returned no model[\s\S]*NoneType"):
        build_model(choice("own_nets:nothing"), info(), seed=0)
    with pytest.raises(UserError, match=r"'squeezenet1_1' cannot take images of 3 x 8 x 8[\s\S]*data\.image_size=224"):
        build_model(choice("squeezenet1_1"), info(8), seed=0)


@pytest.mark.parametrize(
    ("inputs", "outputs", "told"),
    [
        (3 * 16 * 16, 5, None),
        (3 * 8 * 8, 5, r"'mine' cannot take images of 3 x 16 x 16"),
        (3 * 16 * 16, 10, r"returned \(2, 10\)[\s\S]*shape \(2, 5\)"),
    ],
    ids=["as it should be", "another image size", "other classes"],
)
def test_a_model_that_does_not_fit_is_refused_and_left_as_it_was(inputs: int, outputs: int, told: str | None) -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(inputs, outputs))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(UserError, match=told) if told else nullcontext():
        check_shapes(model, info(16, num_classes=5), "mine")
    assert model.training
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


def norms() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(2, 2), nn.BatchNorm1d(2))


@pytest.mark.parametrize(
    ("patterns", "frozen", "kept"),
    [
        (["0.*", "3.bias"], {"0.weight", "0.bias", "3.bias"}, set()),
        (["[01].*"], {"0.weight", "0.bias", "1.weight", "1.bias"}, {1}),
        (["1.bias"], {"1.bias"}, set()),
    ],
)
def test_what_fits_is_not_trained_and_a_frozen_norm_keeps_its_statistics(
    patterns: list[str], frozen: set[str], kept: set[int]
) -> None:
    model = norms()
    for wrong, what in ((["conv*"], "no parameter matches 'conv\\*'"), (["*"], "nothing to train")):
        with pytest.raises(UserError, match=what):
            freeze(norms(), wrong)
    freeze(model, patterns)
    assert {name for name, parameter in model.named_parameters() if not parameter.requires_grad} == frozen
    model.train()
    before = copy.deepcopy(model)
    model(torch.randn(4, 1, 3, 3) + 5)
    for place in (1, 4):
        is_kept = torch.equal(model[place].get_buffer("running_mean"), before[place].get_buffer("running_mean"))
        assert is_kept == (place in kept)


def scores(model: torch.nn.Module, info: DataInfo) -> tuple[int, ...]:
    with torch.no_grad():
        return tuple(model.eval()(torch.zeros(2, info.in_chans, info.image_size, info.image_size)).shape)


def size_inside(model: torch.nn.Module, info: DataInfo) -> int:
    """Size of the images that the first convolution sees."""
    seen: list[int] = []
    first = next(module for module in model.modules() if isinstance(module, torch.nn.Conv2d))
    first.register_forward_pre_hook(lambda module, args: seen.append(args[0].shape[-1]))
    assert scores(model, info) == (2, info.num_classes)
    return seen[0]


@pytest.mark.parametrize(
    ("create", "name", "image_size", "options", "inside"),
    [
        (timm_model, "vit_tiny_patch16_224", 8, {}, 224),  # small images are enlarged to a fixed input size
        (timm_model, "vit_tiny_patch16_224", 256, {}, 256),  # for larger ones the model is built
        (timm_model, "vit_tiny_patch16_224", 32, {"img_size": 32}, 32),
        (timm_model, "resnet10t", 48, {}, 48),  # takes any size
        (torchvision_model, "vit_b_32", 32, {}, 224),
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

    ours = timm_model("vit_tiny_patch16_224", info(32), {"depth": 2})  # options reach timm
    assert list(ours.state_dict()) == list(timm.create_model("vit_tiny_patch16_224", depth=2).state_dict())


def test_what_a_library_cannot_build_is_refused_with_what_helps() -> None:
    for create, library in ((timm_model, "timm"), (torchvision_model, "torchvision")):
        taken = rf"Unknown key 'model\.depht'[\s\S]*{library}'s resnet18 takes no 'depht'"
        with pytest.raises(UserError, match=taken):
            create("resnet18", info(), {"depht": 3})
    with pytest.raises(UserError, match=r"timm cannot build resnet18 with model\.global_pool=nonsense"):
        timm_model("resnet18", info(), {"global_pool": "nonsense"})
    with pytest.raises(UserError, match=r"data\.in_chans must be 3"):
        torchvision_model("resnet18", info(in_chans=1), {})
    assert scores(timm_model("resnet10t", info(in_chans=1), {}), info(in_chans=1)) == (2, 7)
    model = torchvision_model("googlenet", info(64), {})  # with auxiliary heads it would give a tuple
    assert isinstance(model.train()(torch.zeros(2, 3, 64, 64)), torch.Tensor)


@pytest.mark.parametrize("name", ["resnet18", "squeezenet1_1", "vit_b_32"])
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


@pytest.mark.parametrize("name", ["googlenet", "inception_v3"])
def test_weights_with_auxiliary_heads_make_a_model_without(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torchvision 0.29.2 raises ValueError for weights with ``aux_logits=False``."""
    from torchvision.models import get_model

    saved = get_model(name, aux_logits=True, init_weights=False).state_dict()
    monkeypatch.setattr("torchvision.models.WeightsEnum.get_state_dict", lambda weights, **options: saved)
    model = torchvision_model(name, info(75), {"pretrained": True})
    assert model.train()(torch.zeros(2, 3, 75, 75)).shape == (2, 7)
    again = torchvision_model(name, info(75), {"pretrained": True}, pretrained=False)
    assert again.state_dict().keys() == model.state_dict().keys()


@pytest.mark.parametrize(
    ("name", "size", "options", "enlarged"),
    [
        ("timm/test_vit.r160_in1k", 160, {"pretrained": True}, None),
        ("timm/test_vit.r160_in1k", 32, {"pretrained": True}, {"size": 160, "interpolation": "bicubic"}),
        ("timm/vit_tiny_patch16_224", 256, {"depth": 1}, None),
        ("timm/resnet10t", 40, {"drop_rate": 0.1}, None),
        ("torchvision/squeezenet1_1", 64, {"weights": "IMAGENET1K_V1"}, None),
        ("torchvision/inception_v3", 96, {"pretrained": True}, None),
        pytest.param(
            *("torchvision/vit_b_16", 32, {"weights": "IMAGENET1K_SWAG_E2E_V1"}),
            {"size": 384, "interpolation": "bilinear"},
            marks=pytest.mark.nightly,
        ),
    ],
)
def test_a_network_is_built_again_without_the_weights_it_began_with(
    name: str, size: int, options: dict[str, Any], enlarged: dict[str, Any] | None
) -> None:
    """For others come into it; nothing is downloaded, and it is the network that it was."""
    import timm
    import torchvision

    config = ModelConfig(name=name, **options)
    ours = registry.build_model(config, info(size), 0, pretrained=False).eval()
    told = registry.told_model(config, info(size), ours)
    assert told["enlarged"] == enlarged
    create = {"timm": timm.create_model, "torchvision": torchvision.models.get_model}[told["library"]]
    theirs = create(told["name"], **json.loads(json.dumps(told["arguments"]))).eval()
    theirs.load_state_dict(ours.state_dict())
    images = torch.rand(2, 3, size, size)
    inside = images
    if enlarged is not None:
        inside = torch.nn.functional.interpolate(images, enlarged["size"], mode=enlarged["interpolation"])
    with torch.no_grad():
        torch.testing.assert_close(theirs(inside), ours(images))


@pytest.mark.parametrize("create", [timm_model, torchvision_model])
def test_weights_out_of_reach_come_with_a_command_for_elsewhere(create: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import timm
    import torchvision

    def no_internet(*args: Any, **options: Any) -> None:
        raise RuntimeError("Name or service not known") from ConnectionError()

    monkeypatch.setattr(timm, "create_model", no_internet)
    monkeypatch.setattr(torchvision.models, "get_model", no_internet)
    with pytest.raises(UserError, match=r"could not be downloaded[\s\S]*On a machine that has, run: python") as caught:
        create("resnet18", info(), {"pretrained": True})
    assert ("model.pretrained_cfg_overlay='{file: " in caught.value.fix) == (create is timm_model)


def test_a_model_neither_here_nor_on_the_hub_has_its_advice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As HF_HUB_OFFLINE=1 does where the library is not imported yet: else it asks for a host four times.
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"timm cannot build local-dir:") as caught:
        timm_model(f"local-dir:{tmp_path}", info(), {})
    assert "internet" not in caught.value.why
    with pytest.raises(UserError, match=r"could not be downloaded") as caught:
        timm_model("hf-hub:timm/no_such_model_here", info(), {})
    assert "pretrained_cfg_overlay" not in caught.value.fix, "without its configuration it cannot be made at all"


def test_the_libraries_say_how_their_weights_expect_the_images() -> None:
    wants = registry.timm_input(timm_model("test_vit.r160_in1k", info(), {}), info())
    assert wants == ModelInput("test_vit.r160_in1k", (0.5,) * 3, (0.5,) * 3, "bicubic", 0.95)
    for weights, name, crop in (("IMAGENET1K_V1", "IMAGENET1K_V1", 224 / 256), (None, "IMAGENET1K_V2", 224 / 232)):
        wants = registry.torchvision_input("resnet50", info(), {"weights": weights})
        of_imagenet = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
        assert wants == ModelInput(f"ResNet50_Weights.{name}", *of_imagenet, "bilinear", crop)
    gray = registry.torchvision_input("resnet50", info(in_chans=1), {})
    assert [*gray.mean, *gray.std] == pytest.approx([0.449, 0.226]), "the mean of the colours"
