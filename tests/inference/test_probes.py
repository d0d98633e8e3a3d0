"""What a model's last layer is given, and two ways to tell the classes by it, against scikit-learn's."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from tests.training.parts import parts_of
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.config.schema import ModelConfig
from trainkit.data.base import Samples
from trainkit.data.datasets.digits import build
from trainkit.inference import probes
from trainkit.inference.probes import Labelled, linear, nearest, probed
from trainkit.models.library import build_model
from trainkit.training.train_state import TrainState

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> tuple[Labelled, Labelled]:
    """Pixels as features, of which some are always 0, half of them noise: neither way tells all digits."""

    def flat(samples: list[tuple[Tensor, int]]) -> Labelled:
        pixels = torch.stack([image.flatten().float() for image, _ in samples])
        noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(len(samples)))
        return pixels + 90 * noise * (pixels > 0), torch.tensor([label for _, label in samples])

    splits = build(tmp_path_factory.mktemp("digits"))
    train, test = ([part[index] for index in range(len(part))] for part in (splits.train, splits.test))
    return flat(train), flat(test)


@pytest.mark.parametrize(("queries", "part"), [(2048, 32768), (50, 7), (1, 100)])
def test_neighbours_vote_as_those_of_scikit_learn(
    digits: tuple[Labelled, Labelled], queries: int, part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts of any size, also of fewer images than vote."""
    from sklearn.neighbors import KNeighborsClassifier

    monkeypatch.setattr(probes, "_QUERIES", queries)
    monkeypatch.setattr(probes, "_PART", part)
    train, test = digits

    def votes(distances: Any) -> Any:
        return numpy.exp((1 - distances) / 0.07)

    theirs = KNeighborsClassifier(20, metric="cosine", weights=votes).fit(*map(Tensor.numpy, train))
    expected = theirs.score(*map(Tensor.numpy, test))
    assert 0.5 < expected < 1
    assert nearest(train, test, 10, CPU) == expected


def test_fewer_training_images_than_vote_are_all_asked(digits: tuple[Labelled, Labelled]) -> None:
    (train, labels), _ = digits
    assert nearest((train[:5], labels[:5]), (train[:5], labels[:5]), 10, CPU) == 1


@pytest.mark.filterwarnings("ignore:scipy.optimize.*L-BFGS-B:DeprecationWarning")  # scikit-learn 1.6, newest SciPy
@pytest.mark.parametrize("part", [32768, 100])
def test_the_probe_is_the_logistic_regression_of_scikit_learn(
    digits: tuple[Labelled, Labelled], part: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    monkeypatch.setattr(probes, "_PART", part)
    train, test = digits
    theirs = make_pipeline(StandardScaler(), LogisticRegression(tol=1e-6, max_iter=1000))
    expected = theirs.fit(*map(Tensor.numpy, train)).score(*map(Tensor.numpy, test))
    assert 0.5 < expected < 1
    assert linear(train, test, 10, CPU) == expected


def of_library(name: str) -> tuple[TrainState, nn.Module]:
    """A training of a library's model, and the model."""
    settings = ("data.image_size=32", f"model.name={name}")
    info = parts_of(*settings[:1]).splits.info
    model = build_model(ModelConfig(name=name), info, 0)
    return parts_of(*settings, model=model), model


def given_to_the_last(layer: str) -> Callable[[nn.Module, Tensor], Tensor]:
    def given(model: nn.Module, images: Tensor) -> Tensor:
        found: list[Tensor] = []
        hook = model.get_submodule(layer).register_forward_pre_hook(lambda _, args: found.append(args[0]))
        model(images)
        hook.remove()
        return found[0]

    return given


@pytest.mark.parametrize(
    ("name", "layer"),
    [("timm/test_resnet", "fc"), ("timm/test_vit", "head"), ("timm/vit_tiny_patch16_224", "head"),
     ("torchvision/resnet18", "fc"), ("torchvision/mobilenet_v3_small", "classifier.3"), ("fashion_cnn", "")],
)  # fmt: skip
def test_features_are_what_the_last_layer_is_given(name: str, layer: str) -> None:
    """Of a ViT, too, whose images are enlarged on the device; and the model is afterwards as it was."""
    parts, model = of_library(name)
    test = parts.splits.test
    images = parts.normalized(torch.stack([test[index][0] for index in range(len(test))]))
    with torch.no_grad():
        scores = model.eval()(images)
        expected = given_to_the_last(layer or str(len(list(model.children())) - 1))(model, images)
        found, labels = probes.features(parts, test, len(test))
        assert torch.equal(found, expected)
        assert labels.tolist() == [test[index][1] for index in range(len(test))]
        assert torch.equal(model(images), scores)


def test_the_last_batch_counts_each_image_once() -> None:
    parts, _ = of_library("timm/test_resnet")
    (found, labels), (whole, same) = (probes.features(parts, parts.splits.test, size) for size in (4, 6))
    assert torch.allclose(found, whole, atol=1e-5)
    assert torch.equal(labels, same)


def test_features_of_two_heads_are_averaged() -> None:
    """timm's distilled models have one for the labels and one for the teacher."""
    parts, model = of_library("timm/deit_tiny_distilled_patch16_224")
    found, _ = probes.features(parts, parts.splits.test, 6)
    assert found.shape == (6, model.get_submodule("head").in_features)


def refusal(parts: TrainState, samples: Samples | None = None) -> str:
    with pytest.raises(UserError, match="cannot be probed") as refused:
        probed(parts, parts.splits.test if samples is None else samples, ["linear_acc1"], 4)
    return refused.value.why


class OfMaps(nn.Module):
    """As timm's models are called; before its last layer it has maps, not numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Conv2d(3, 7, 4)

    def forward_head(self, maps: Tensor, pre_logits: bool = False) -> Tensor:
        found: Tensor = maps if pre_logits else self.last(maps).flatten(1)
        return found

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(images)


@pytest.mark.parametrize(
    "model",
    [
        OfMaps(),
        nn.Sequential(nn.Conv2d(3, 7, 4), nn.Flatten()),
        nn.Sequential(nn.Flatten(), nn.Linear(48, 7), nn.Softmax(1)),
        nn.Sequential(nn.Flatten(), nn.Linear(48, 21), nn.AvgPool1d(3)),
        nn.Sequential(nn.Conv2d(3, 7, 4), nn.Flatten(2), nn.Linear(1, 1), nn.Flatten()),
    ],
)
def test_a_model_without_a_linear_last_layer_is_refused(model: nn.Module) -> None:
    assert refusal(parts_of(model=model)).startswith("The last layer of ")


def test_a_task_that_takes_an_image_for_several_classes_is_refused() -> None:
    several = load("single", ("task.name=multilabel", "data.name=image_csv")).config
    assert refusal(replace(parts_of(), config=several)).startswith(
        "The task multilabel does not assign one class per image"
    )


@pytest.mark.timeout(30)
@pytest.mark.parametrize(("weight", "most"), [(float("nan"), 6), (1.0, 0)])
def test_a_model_that_has_diverged_and_no_images_are_refused(weight: float, most: int) -> None:
    model = nn.Sequential(nn.Flatten(), middle := nn.Linear(48, 48), nn.Linear(48, 7))
    nn.init.constant_(middle.weight, weight)
    parts = parts_of(model=model)
    assert "no whole image" in refusal(parts, [parts.splits.test[index] for index in range(most)])
