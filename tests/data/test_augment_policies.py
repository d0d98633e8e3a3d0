"""Draws of each image of a batch, and the image that torchvision or Pillow makes by the same draws."""

from typing import Any

import pytest
import torch
from PIL import ImageFilter
from torchvision.transforms import AutoAugmentPolicy, v2
from torchvision.transforms.v2 import functional as F

from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.data import draws
from trainkit.data.augment_policies import (
    AutoAugment,
    Policy,
    RandAugment,
    ThreeAugment,
    TrivialAugmentWide,
    operations,
)

COUNT, HEIGHT, WIDTH = 400, 17, 14
KEYS = draws.keys(0, 0, torch.arange(COUNT))
PHOTOS = torch.randint(0, 256, (COUNT, 3, HEIGHT, WIDTH), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
NAMES = list(operations())


def steps(policy: Policy) -> list[list[tuple[str, float]]]:
    """Operations of each image, and their strengths."""
    layers = policy.draw(KEYS, HEIGHT, WIDTH)
    columns = [zip(layer.chosen.tolist(), layer.strength.tolist(), strict=True) for layer in layers]
    return [[(NAMES[number], strength) for number, strength in one] for one in zip(*columns, strict=True)]


@pytest.mark.parametrize(
    ("ours", "theirs", "levels"),
    [(RandAugment(2, 9), v2.RandAugment(2, 9), 31), (RandAugment(1, 30), v2.RandAugment(1, 30), 31),
     (RandAugment(3, 17), v2.RandAugment(3, 17), 31), (TrivialAugmentWide(), v2.TrivialAugmentWide(), 31),
     *((AutoAugment(name), v2.AutoAugment(AutoAugmentPolicy(name)), 10) for name in ("imagenet", "cifar10", "svhn"))],
    ids=["rand", "rand strongest", "rand 3", "trivial_wide", "auto_imagenet", "auto_cifar10", "auto_svhn"],
)  # fmt: skip
@pytest.mark.parametrize("channels", [3, 1])
def test_each_image_is_as_torchvision_makes_it_by_the_same_draws(
    ours: Policy, theirs: Any, levels: int, channels: int
) -> None:
    images, space = PHOTOS[:, :channels], theirs._AUGMENTATION_SPACE
    expected = []
    for image, drawn in zip(images, steps(ours), strict=True):
        for name, strength in drawn:
            if name == "Identity":
                continue
            magnitudes, signed = space[name]
            possible = magnitudes(levels, HEIGHT, WIDTH)
            assert strength == 0 or abs(strength) in possible.double(), "one of torchvision's"
            assert strength >= 0 or signed
            how = {"interpolation": theirs.interpolation, "fill": theirs._fill}
            image = theirs._apply_image_or_video_transform(image, name, strength, **how)
        expected.append(image)
    assert torch.equal(ours(images, KEYS), torch.stack(expected))


def shares(numbers: torch.Tensor) -> dict[Any, float]:
    """Share of each number."""
    values, counts = numbers.unique(return_counts=True)
    return dict(zip(values.tolist(), (counts / len(numbers)).tolist(), strict=True))


MANY = draws.keys(1, 1, torch.arange(30_000))


def test_rand_augment_draws_every_operation_as_often_and_either_way() -> None:
    ((chosen, strength),) = RandAugment(1, 9).draw(MANY, 32, 32)
    assert shares(chosen) == {number: pytest.approx(1 / 14, abs=0.01) for number in range(14)}
    ways = shares(strength[chosen == NAMES.index("Rotate")].sign())
    assert ways == {-1: pytest.approx(0.5, abs=0.05), 1: pytest.approx(0.5, abs=0.05)}
    assert (strength[chosen == NAMES.index("Posterize")] > 0).all()


def test_trivial_augment_draws_every_operation_and_strength_as_often() -> None:
    ((chosen, strength),) = TrivialAugmentWide().draw(MANY, 32, 32)
    assert shares(chosen) == {number: pytest.approx(1 / 14, abs=0.01) for number in range(14)}
    found = shares(strength[chosen == NAMES.index("Rotate")])
    assert len(found) == 61, "30 in each direction, and none"
    assert found[0.0] == pytest.approx(1 / 31, abs=0.015)
    assert all(share == pytest.approx(1 / 62, abs=0.012) for strength, share in found.items() if strength)


def test_auto_augment_draws_each_pair_as_often_with_its_probabilities() -> None:
    policies = v2.AutoAugment(AutoAugmentPolicy.CIFAR10)._policies
    expected: dict[str, float] = dict.fromkeys(NAMES, 0.0)
    for name, probability, _ in (one for pair in policies for one in pair):
        expected[name] += probability / len(policies)
    layers = AutoAugment("cifar10").draw(MANY, 32, 32)
    found = torch.stack([layer.chosen.bincount(minlength=len(NAMES)) for layer in layers]).sum(0) / len(MANY)
    for name, share in zip(NAMES[1:], found.tolist()[1:], strict=True):
        assert share == pytest.approx(expected[name], abs=0.015), name


def test_three_augment_draws_one_of_three_and_jitter_in_any_order() -> None:
    first, *jitter = ThreeAugment().draw(MANY, 32, 32)
    three = [NAMES.index(name) for name in ("Solarize", "Grayscale", "GaussianBlur")]
    assert shares(first.chosen) == {number: pytest.approx(1 / 3, abs=0.02) for number in three}
    sigma = first.strength[first.chosen == NAMES.index("GaussianBlur")]
    assert 0.1 <= sigma.min() < 0.11 < 1.99 < sigma.max() <= 2.0
    orders = torch.stack([layer.chosen for layer in jitter], dim=1)
    kinds, counts = orders.unique(dim=0, return_counts=True)
    assert {tuple(order) for order in kinds.sort(1).values.tolist()} == {(6, 7, 8)}
    assert ((counts / len(MANY) - 1 / 6).abs() < 0.02).all()
    for layer in jitter:
        assert layer.strength.abs().max() < 0.3
        assert abs(layer.strength.mean()) < 0.01


def test_three_augment_makes_of_an_image_what_torchvision_and_pillow_do() -> None:
    """Pillow blurs by three box filters, which come near to a Gaussian."""
    photos = v2.functional.resize(PHOTOS, [64, 48], antialias=False)  # of no more detail than a photo
    first, *jitter = ThreeAugment().draw(KEYS, 64, 48)
    expected, blurred = [], first.chosen == NAMES.index("GaussianBlur")
    for number, image in enumerate(photos):
        strength = float(first.strength[number])
        if NAMES[first.chosen[number]] == "Grayscale":
            image = F.rgb_to_grayscale(image, num_output_channels=3)
        elif NAMES[first.chosen[number]] == "Solarize":
            image = F.solarize(image, 128.0)
        else:
            image = F.pil_to_tensor(F.to_pil_image(image).filter(ImageFilter.GaussianBlur(strength)))
        for layer in jitter:
            change = {6: F.adjust_brightness, 7: F.adjust_saturation, 8: F.adjust_contrast}[int(layer.chosen[number])]
            image = change(image, 1 + float(layer.strength[number]))
        expected.append(image)
    made, wanted = ThreeAugment()(photos, KEYS), torch.stack(expected)
    assert torch.equal(made[~blurred], wanted[~blurred])
    assert (made[blurred].float() - wanted[blurred].float()).abs().mean() < 1
    assert ThreeAugment()(PHOTOS[:, :1, :4, :4], KEYS).shape == (COUNT, 1, 4, 4)


def test_a_policy_beside_rand_augment_is_refused() -> None:
    with pytest.raises(UserError, match=r"augment\.rand_augment_ops=2 and augment\.policy=three"):
        load("single", ["augment.policy=three", "augment.rand_augment_ops=2"])
    with pytest.raises(UserError, match=r"augment\.policy(.|\n)*trivial_wide"):
        load("single", ["augment.policy=trivial"])
