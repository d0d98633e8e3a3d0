"""A checkpoint says which images its model takes, and is a model that predicts without training and its data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.training.parts import keeper_of, parts_of
from trainkit.checkpoint import format
from trainkit.data.folders import CenterCrop, photo_splits
from trainkit.saved_model import input_in, told_input
from trainkit.training.recorder import Progress

PHOTOS = photo_splits("photos", ("cat", "dog"), [[(torch.zeros(3, 9, 9), 0)]] * 3, 40, augment=True)


def test_a_checkpoint_says_how_images_are_prepared_for_its_model(tmp_path: Path) -> None:
    parts = parts_of()
    keeper_of(parts, tmp_path / "run", Progress()).save()
    found = input_in(format.described(tmp_path / "run" / "checkpoints", 0).state)
    assert found is not None
    info, crop = found
    assert info == parts.splits.info
    assert (crop.image_size, crop.shorter, crop.mode) == (4, 4, "bilinear")
    found = input_in(told_input(PHOTOS))
    assert found is not None
    info, crop = found
    assert info == PHOTOS.info
    image = torch.randint(256, (3, 50, 70), dtype=torch.uint8)
    assert torch.equal(crop(image), PHOTOS.eval_transform(image))


def test_a_peer_without_data_and_transforms_of_ones_own_tell_no_input() -> None:
    assert told_input(replace(PHOTOS, train=[])) == {}
    assert told_input(replace(PHOTOS, eval_transform=lambda image: image)) == {"classes": ["cat", "dog"]}
    assert input_in({"classes": ["cat", "dog"]}) is None, "an older checkpoint"


@pytest.mark.parametrize(
    ("key", "value"),
    [("in_chans", 4), ("image_size", 1 << 40), ("resize", "40"), ("crop", 0), ("mean", [0.5, 0.5]), ("std", [0, 1, 1]),
     ("std", None), ("outputs", 3), ("interpolation", "evil"), ("mean", [1e999, 0, 0]), ("crop", True)],
)  # fmt: skip
def test_an_input_that_cannot_be_is_none(key: str, value: Any) -> None:
    told = told_input(PHOTOS)
    assert input_in(told) is not None
    assert input_in({**told, "input": {**told["input"], key: value}}) is None
    assert input_in({**told, "input": [1]}) is None


def test_the_crop_of_images_of_one_size_is_what_evaluation_makes_of_them() -> None:
    from trainkit.data.datasets.digits import build

    splits = build(Path(), image_size=20)
    found = input_in(told_input(splits))
    assert found is not None
    assert isinstance(found[1], CenterCrop)
    images = [splits.test[index][0] for index in range(20)]
    assert all(torch.equal(found[1](image), splits.eval_transform(image)) for image in images)
