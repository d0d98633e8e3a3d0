from typing import Any

import pytest
import torch

from tests.models.test_init import info
from trainkit.common.errors import UserError
from trainkit.config.schema import ModelConfig
from trainkit.models import resnet9
from trainkit.models.library import build_model


def of(side: int, in_chans: int = 3, **options: Any) -> torch.nn.Module:
    return resnet9.build(info(side, in_chans, num_classes=10), **options)


def test_it_is_the_published_network_of_nine_layers() -> None:
    model = of(32)
    layers = [module for module in model.modules() if isinstance(module, torch.nn.Conv2d | torch.nn.Linear)]
    assert len(layers) == 9
    assert sum(parameter.numel() for parameter in model.parameters()) == 6_573_120


@pytest.mark.parametrize(("side", "in_chans"), [(32, 3), (28, 1), (8, 1)])
def test_images_of_any_size_get_a_score_for_each_class(side: int, in_chans: int) -> None:
    assert of(side, in_chans, width=8)(torch.rand(4, in_chans, side, side)).shape == (4, 10)


@pytest.mark.parametrize("options", [{"width": 0}, {"logit_scale": 0.0}])
def test_what_makes_no_network_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="is not possible"):
        build_model(ModelConfig.model_validate({"name": "resnet9", **options}), info(32, 3), 0)
