from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from trainkit.data.datasets import synthetic
from trainkit.data.loader import TensorSamples
from trainkit.errors import UserError

ROOT = Path("nowhere")


def test_an_image_is_a_function_of_its_index() -> None:
    torch.manual_seed(1)
    first = synthetic.build(ROOT).train[7]
    torch.manual_seed(2)
    again = synthetic.build(ROOT).train[7]
    assert torch.equal(first[0], again[0])
    assert first[1] == again[1] == 7


def test_few_small_images_are_made_at_once_and_are_the_same() -> None:
    made, one_by_one = synthetic.build(ROOT, train_size=300), synthetic.build(ROOT, train_size=20_001)
    assert isinstance(made.train, TensorSamples)
    assert not isinstance(one_by_one.train, TensorSamples)
    assert not isinstance(synthetic.build(ROOT, image_size=65, train_size=9).train, TensorSamples)
    for index in (0, 7, 255, 256, 299):
        assert torch.equal(made.train[index][0], one_by_one.train[index][0])
        assert made.train[index][1] == one_by_one.train[index][1]


def test_splits_share_classes_but_no_image() -> None:
    data = synthetic.build(ROOT)
    assert data.train[0][1] == data.val[0][1]
    assert not torch.equal(data.train[0][0], data.val[0][0])


def test_sizes_are_as_asked() -> None:
    data = synthetic.build(ROOT, num_classes=3, image_size=12, in_chans=2, train_size=9, val_size=5, test_size=4)
    assert [len(split) for split in (data.train, data.val, data.test)] == [9, 5, 4]
    assert tuple(data.train_transform(data.train[0][0]).shape) == (2, 12, 12)
    assert {data.train[index][1] for index in range(9)} == {0, 1, 2}


def test_a_sample_beyond_the_end_is_an_error() -> None:
    with pytest.raises(IndexError):
        synthetic.build(ROOT, train_size=4).train[4]


def test_the_classes_can_be_told_apart() -> None:
    data = synthetic.build(ROOT, image_size=16)
    means = torch.stack([data.train[label][0].float() for label in range(10)])
    right = 0
    for index in range(100):
        image, label = data.val[index]
        right += int((means - image.float()).flatten(1).norm(dim=1).argmin()) == label
    assert right > 95


@pytest.mark.parametrize(
    "options", [{"num_classes": 1}, {"image_size": 2}, {"in_chans": 0}, {"noise": 1.5}, {"train_size": 0}]
)
def test_an_impossible_option_is_refused_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UserError, match=f"data.{name}="):
        synthetic.build(ROOT, **options)
