from __future__ import annotations

import math

import pytest
import torch
from sklearn.datasets import load_sample_images
from torch import Tensor
from torchvision.transforms import functional, v2

from trainkit.data.base import ModelInput
from trainkit.data.folders import RandomPart, photo_statistics, photo_transforms, random_part


@pytest.fixture(scope="module")
def photo() -> Tensor:
    """uint8 [3, 427, 640]."""
    return torch.from_numpy(load_sample_images().images[0].copy()).permute(2, 0, 1)


@pytest.mark.parametrize("shape", [(3, 300, 500), (3, 40, 20), (1, 64, 64), (3, 8, 400)])
def test_photos_of_any_size_get_the_asked_size(shape: tuple[int, ...]) -> None:
    train, evaluate = photo_transforms(32, augment=True)
    image = torch.zeros(shape, dtype=torch.uint8)
    for transform in (train, evaluate):
        assert (transform(image).shape, transform(image).dtype) == ((shape[0], 32, 32), torch.uint8)


def test_photos_are_augmented_only_in_training() -> None:
    train, evaluate = photo_transforms(32, augment=True)
    image = torch.arange(3 * 64 * 64).remainder(251).to(torch.uint8).reshape(3, 64, 64)
    assert not torch.equal(train(image), train(image))
    assert torch.equal(evaluate(image), evaluate(image))
    plain, _ = photo_transforms(32, augment=False)
    assert torch.equal(plain(image), evaluate(image))


@pytest.mark.parametrize(("interpolation", "crop"), [("bicubic", 0.95), ("bilinear", 0.5), ("nearest", 0.9)])
def test_photos_for_pretrained_weights_are_resized_and_cropped_as_those_were(
    interpolation: str, crop: float, photo: Tensor
) -> None:
    expected = ModelInput("some", (0.5,) * 3, (0.5,) * 3, interpolation, crop)
    train, evaluate = photo_transforms(38, expected, augment=True)
    mode = v2.InterpolationMode(interpolation)
    resized = v2.functional.resize(photo, [round(38 / crop)], interpolation=mode, antialias=True)
    assert torch.equal(evaluate(photo), v2.functional.center_crop(resized, [38, 38]))
    torch.manual_seed(3)
    made = train(photo)
    torch.manual_seed(3)
    part = v2.functional.resized_crop(photo, *random_part(427, 640), [38, 38], interpolation=mode, antialias=True)
    assert torch.equal(made, part.flip(-1) if torch.rand(()).item() < 0.5 else part)


def test_random_parts_are_drawn_as_torchvision_draws_them() -> None:
    """Mean and deviation of their area, ratio and place, within three standard errors."""
    torch.manual_seed(0)
    photo, count = torch.empty(3, 375, 500), 3000
    ours = [random_part(375, 500) for _ in range(count)]
    theirs = [v2.RandomResizedCrop.make_params(v2.RandomResizedCrop(224), [photo]) for _ in range(count)]
    boxes = [(made["top"], made["left"], made["height"], made["width"]) for made in theirs]

    def measures(parts: list[tuple[int, int, int, int]]) -> Tensor:
        return torch.tensor(
            [[y, x, h * w / 187_500, math.log(w / h), h, w] for y, x, h, w in parts], dtype=torch.float64
        )

    one, other = measures(ours), measures(boxes)
    error = (one.var(0) + other.var(0)).div(count).sqrt()
    assert bool(((one.mean(0) - other.mean(0)).abs() < 3 * error).all())
    assert bool((one.std(0) / other.std(0) - 1).abs().max() < 0.06)


def test_a_part_has_the_pixels_that_torchvisions_reference_makes_with_pillow(photo: Tensor) -> None:
    """Peak signal to noise of 45 dB and more: they differ by rounding."""
    torch.manual_seed(0)
    picture, worst, means = functional.to_pil_image(photo), math.inf, []
    for seed in range(20):
        torch.manual_seed(seed)
        made = RandomPart(224, "bilinear")(photo).double()
        torch.manual_seed(seed)
        box = random_part(427, 640)
        reference = functional.pil_to_tensor(functional.resized_crop(picture, *box, [224, 224])).double()
        if torch.rand(()).item() < 0.5:
            reference = reference.flip(-1)
        error = (made - reference).square().mean().item()
        worst = min(worst, 10 * math.log10(255**2 / max(error, 1e-12)))
        means.append((made.mean() - reference.mean(), made.std() - reference.std()))
    assert worst > 45
    assert bool((torch.tensor(means).abs() < 0.2).all())  # of 255


def test_gray_photos_have_the_average_of_the_colours_statistics() -> None:
    mean, std = photo_statistics(1)
    assert (round(mean[0], 3), round(std[0], 3)) == (0.449, 0.226)
