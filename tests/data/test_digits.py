from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from trainkit.data.base import normalize
from trainkit.data.datasets import digits
from trainkit.errors import UserError

ROOT = Path("nowhere")


def test_all_digits_are_in_one_split() -> None:
    data = digits.build(ROOT)
    sizes = [len(split) for split in (data.train, data.val, data.test)]
    assert sum(sizes) == 1797
    assert [round(size / 1797, 2) for size in sizes] == [0.7, 0.15, 0.15]


def test_they_are_the_ones_that_scikit_learn_loads() -> None:
    from sklearn.datasets import load_digits

    theirs = load_digits()
    table = digits._table()
    assert (table[:, :-1] == theirs.data).all()
    assert (table[:, -1] == theirs.target).all()


def test_every_class_is_in_every_split_alike() -> None:
    data = digits.build(ROOT)
    counts = Counter(data.val[index][1] for index in range(len(data.val)))
    assert sorted(counts) == list(range(10))
    assert max(counts.values()) - min(counts.values()) <= 2


def test_images_are_bytes_that_use_the_whole_range() -> None:
    data = digits.build(ROOT)
    images = torch.stack([data.train[index][0] for index in range(100)])
    assert (images.dtype, tuple(images.shape)) == (torch.uint8, (100, 1, 8, 8))
    assert (int(images.min()), int(images.max())) == (0, 255)


def test_normalised_digits_have_zero_mean_and_unit_variance() -> None:
    data = digits.build(ROOT)
    images = normalize(torch.stack([data.train[index][0] for index in range(len(data.train))]), data.info)
    assert abs(float(images.mean())) < 0.01
    assert abs(float(images.std()) - 1) < 0.01


def test_augmentation_moves_a_digit_by_one_pixel_at_most() -> None:
    data = digits.build(ROOT)
    image = data.train[0][0]
    padded = torch.nn.functional.pad(image, (1, 1, 1, 1))
    windows = [padded[:, y : y + 8, x : x + 8] for y in range(3) for x in range(3)]
    moved = [data.train_transform(image) for _ in range(50)]
    assert all(any(torch.equal(one, window) for window in windows) for one in moved)
    assert any(not torch.equal(one, image) for one in moved)
    assert torch.equal(data.eval_transform(image), image)


def test_digits_for_a_model_of_colour_photos() -> None:
    data = digits.build(ROOT, image_size=32, in_chans=3, augment=False)
    assert tuple(data.eval_transform(data.val[0][0]).shape) == (3, 32, 32)
    assert len(data.info.mean) == len(data.info.std) == 3
    assert data.in_memory


@pytest.mark.parametrize("options", [{"image_size": 7}, {"in_chans": 2}, {"shift": 8}, {"shift": -1}])
def test_an_impossible_option_is_refused_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UserError, match=f"data.{name}="):
        digits.build(ROOT, **options)
