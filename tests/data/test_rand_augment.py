from __future__ import annotations

import pytest
import torch
from torchvision.transforms import v2

from trainkit.data import order
from trainkit.data.augment import RandAugment

KEYS = order.keys(0, 0, torch.arange(200))
IMAGES = torch.randint(0, 256, (200, 3, 17, 14), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("num_ops", "magnitude", "channels"), [(2, 9, 3), (1, 30, 3), (1, 0, 1), (3, 17, 1)])
def test_each_image_is_what_torchvisions_makes_of_it_with_the_same_draws(
    num_ops: int, magnitude: int, channels: int
) -> None:
    images, ours = IMAGES[:, :channels], RandAugment(num_ops, magnitude)
    theirs = v2.RandAugment(num_ops, magnitude)
    space = list(theirs._AUGMENTATION_SPACE.items())
    expected = []
    for image, drawn in zip(images, torch.stack(ours.draw(KEYS), dim=1).tolist(), strict=True):
        for number in drawn:
            name, (strengths, signed) = space[number // 2]
            strength = strengths(31, 17, 14)
            strength = 0.0 if strength is None else float(strength[magnitude])
            assert signed or number % 2 == 0
            image = theirs._apply_image_or_video_transform(
                image, name, -strength if number % 2 else strength, theirs.interpolation, theirs._fill
            )
        expected.append(image)
    assert torch.equal(ours(images, KEYS), torch.stack(expected))


def test_every_operation_comes_up_as_often_and_half_go_the_other_way() -> None:
    (drawn,) = RandAugment(1, 9).draw(order.keys(1, 1, torch.arange(28_000)))
    counts = torch.bincount(drawn, minlength=28).view(14, 2)
    assert ((counts.sum(1) - 2000).abs() < 250).all()
    signed = counts[:, 1] > 0
    assert signed.sum() == 9
    assert ((counts[signed] - 1000).abs() < 160).all()


def test_a_second_operation_is_drawn_anew() -> None:
    first, second = RandAugment(2, 9).draw(KEYS)
    assert not torch.equal(first, second)


def test_what_becomes_of_an_image_does_not_depend_on_the_batch() -> None:
    made = RandAugment(2, 9)
    assert torch.equal(made(IMAGES[20:31], KEYS[20:31]), made(IMAGES, KEYS)[20:31])
