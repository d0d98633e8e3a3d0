from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from timm.data import random_erasing

from trainkit.data import order
from trainkit.data.augment import RandomErasing

COUNT = 2000
KEYS = order.keys(0, 0, torch.arange(COUNT))
IMAGES = torch.full((COUNT, 3, 20, 16), 5.0)


def rectangles(erased: torch.Tensor) -> torch.Tensor:
    return erased.any(2)[:, :, None] & erased.any(1)[:, None, :]


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_one_rectangle_of_so_many_images_is_filled(mode: Any) -> None:
    made = RandomErasing(0.25, mode)(IMAGES.clone(), KEYS)
    erased = (made != 5.0).all(1)
    assert torch.equal(erased, rectangles(erased))
    assert erased.any(2).any(1).float().mean() == pytest.approx(0.25, abs=0.03)
    inside = made.permute(1, 0, 2, 3)[:, erased]
    if mode == "const":
        assert (inside == 0).all()
    else:
        assert abs(inside.mean()) < 0.1
        assert inside.std() == pytest.approx(1, abs=0.06)


def test_a_random_colour_is_one_of_each_channel_and_noise_is_another_in_each_pixel() -> None:
    sides = RandomErasing(1.0, "rand").draw(KEYS[:20], 20, 16).tolist()
    colours, noises = (RandomErasing(1.0, mode)(IMAGES[:20].clone(), KEYS[:20]) for mode in ("rand", "pixel"))
    for (top, bottom, left, right), colour, noise in zip(sides, colours, noises, strict=True):
        colour, noise = (image[:, top:bottom, left:right].flatten(1) for image in (colour, noise))
        assert (colour == colour[:, :1]).all()
        assert len(set(colour[:, 0].tolist())) == 3
        assert len(set(noise.flatten().tolist())) == noise.numel()


def test_the_rectangles_are_timms() -> None:
    theirs_of: Any = cast(Any, random_erasing).RandomErasing(1.0, device="cpu")
    theirs = theirs_of(torch.ones(COUNT, 1, 20, 16)).squeeze(1) == 0
    ours = RandomErasing(1.0, "const")(torch.ones(COUNT, 1, 20, 16), KEYS).squeeze(1) == 0
    measured = [(found.float().mean((1, 2)), found.any(2).sum(1)) for found in (ours, theirs)]
    for one, other in zip(*measured, strict=True):
        assert one.float().mean() == pytest.approx(other.float().mean().item(), rel=0.05)
        assert one.float().std() == pytest.approx(other.float().std().item(), rel=0.08)
    where = torch.stack([ours.float().mean(0), theirs.float().mean(0)])
    assert (where[0] - where[1]).abs().max() < 0.06


def test_what_becomes_of_an_image_does_not_depend_on_the_batch() -> None:
    erase = RandomErasing(0.5, "pixel")
    whole = erase(IMAGES.clone(), KEYS)
    assert torch.equal(erase(IMAGES[7:12].clone(), KEYS[7:12]), whole[7:12])
