from __future__ import annotations

import pytest
import torch
from torch import nn

from trainkit.data.base import DataInfo
from trainkit.errors import UserError
from trainkit.models import check_shapes

INFO = DataInfo("x", 5, 3, 16, tuple("abcde"), (0.5,) * 3, (0.5,) * 3)


def test_a_model_that_fits_is_left_as_it_was() -> None:
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(3 * 16 * 16, 5))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    check_shapes(model, INFO, "mine")
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_model_for_another_image_size_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 5))
    with pytest.raises(UserError, match=r"'mine' cannot take images of 3 x 16 x 16"):
        check_shapes(model, INFO, "mine")


def test_a_model_with_other_classes_is_refused_with_the_right_shape() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 10))
    with pytest.raises(UserError, match=r"shape \(2, 10\)[\s\S]*shape \(2, 5\)"):
        check_shapes(model, INFO, "mine")


class Pair(nn.Module):
    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return images, images


def test_a_model_that_returns_no_tensor_is_refused() -> None:
    with pytest.raises(UserError, match="it returned tuple, not a tensor"):
        check_shapes(Pair(), INFO, "mine")
