"""The blocks of a network are found without naming a class."""

import pytest
import timm
import torch
import torchvision
from torch import nn

from trainkit.distributed.strategies.base import repeated_blocks


def size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("model", "count", "share"),
    [
        ("timm/vit_base_patch16_224", 12, 0.98),
        ("timm/convnext_tiny", 18, 0.91),
        ("timm/resnet50", 16, 0.91),
        ("timm/efficientnet_b4", 30, 0.86),
        ("torchvision/convnext_tiny", 21, 0.97),  # the three between its stages count as well
        ("torchvision/swin_t", 15, 0.97),
        ("torchvision/regnet_y_1_6gf", 27, 0.92),
        ("torchvision/efficientnet_v2_s", 40, 0.93),  # the first two are one, being small
    ],
)
def test_the_blocks_found_hold_nearly_all_parameters(model: str, count: int, share: float) -> None:
    library, name = model.split("/")
    with torch.device("cpu" if "/regnet" in model else "meta"):  # torchvision's computes with its weights
        network: nn.Module = (timm.create_model if library == "timm" else torchvision.models.get_model)(name)
    blocks = repeated_blocks(network, min_params=10_000)
    assert len(blocks) == count
    found = sum(size(block) for block in blocks) / size(network)
    assert share <= found < share + 0.015
    inside = {id(child) for block in blocks for child in block.modules() if child is not block}
    assert not inside & {id(block) for block in blocks}, "no block lies inside another"


def test_small_blocks_stay_with_their_parent() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(10, 10), nn.ReLU()), nn.Sequential(nn.Linear(100, 200), nn.ReLU()))
    assert repeated_blocks(model, min_params=10_000) == [model[1]]
