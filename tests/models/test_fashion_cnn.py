from typing import Any

import pytest
import torch

from tests.models.test_init import info
from trainkit.common.errors import UserError
from trainkit.config.schema import ModelConfig
from trainkit.models import fashion_cnn
from trainkit.models.library import build_model


@pytest.mark.parametrize(
    ("image_size", "in_chans", "num_classes"),
    [(4, 1, 2), (8, 1, 10), (9, 1, 10), (28, 1, 10), (32, 3, 100), (224, 3, 2)],
)
def test_images_of_any_size_become_scores(image_size: int, in_chans: int, num_classes: int) -> None:
    model = fashion_cnn.build(info(image_size, in_chans, num_classes), width=8)
    assert tuple(model(torch.zeros(2, in_chans, image_size, image_size)).shape) == (2, num_classes)


@pytest.mark.parametrize("norm", ["group", "batch"])
def test_an_image_is_scored_alike_in_any_company_but_for_batch_norm(norm: str) -> None:
    model = fashion_cnn.build(info(8, 1), norm=norm)  # type: ignore[arg-type]
    images = torch.randn(8, 1, 8, 8)
    assert torch.allclose(model(images)[:2], model(images[:2]), atol=1e-5) == (norm == "group")


@pytest.mark.parametrize("options", [{"width": 12}, {"width": 0}, {"dropout": 1.0}, {"dropout": -0.1}])
def test_an_impossible_option_is_refused_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UserError, match=f"model.{name}="):
        build_model(ModelConfig.model_validate({"name": "fashion_cnn", **options}), info(8, 1), 0)
