"""A user's own model: the kit's small network, with pauses: peers on one machine leave each other time to start.

A peer trains for as long as a round lasts, and a few hundred updates are enough for the digits.
"""

import time
from typing import Any

from torch import Tensor, nn

from trainkit.common.image_input import DataInfo
from trainkit.models.fashion_cnn import build


def _pause(module: nn.Module, arguments: tuple[Tensor]) -> Any:
    if module.training:
        time.sleep(0.6)


def model(info: DataInfo) -> nn.Module:
    """``fashion_cnn``, and 0.6 s more for each micro batch of training."""
    network = build(info)
    network.register_forward_pre_hook(_pause)
    return network


def wide(info: DataInfo) -> nn.Module:
    """3 million weights that cost little to train, with the same pauses."""
    size = info.in_chans * info.image_size**2
    network = nn.Sequential(
        nn.Flatten(),
        nn.Linear(size, 1650),
        nn.ReLU(),
        nn.Linear(1650, 1650),
        nn.ReLU(),
        nn.Linear(1650, info.num_classes),
    )
    network.register_forward_pre_hook(_pause)
    return network
