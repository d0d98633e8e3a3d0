"""A small convolutional network for small images: 8x8 digits, 28x28 clothes, 32x32 photos."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Literal

from trainkit.common.errors import require

if TYPE_CHECKING:
    from torch import nn

    from trainkit.common.image_input import DataInfo


def build(
    info: DataInfo, *, width: int = 32, dropout: float = 0.0, norm: Literal["group", "batch"] = "group"
) -> nn.Module:
    """Stages of two 3x3 convolutions; each halves the image and doubles the channels (to 8 x width), until 4x4 is left.

    What is left is averaged to 2x2, not to one: where a stroke lies tells digits apart (99.8 % instead of 99.6 %).
    Everything in it is smooth: where a ReLU or the winner of a max pooling flips on the last bit of a sum, two runs
    that add in another order part for good (1e-4 relative after 20 updates on digits, against 4e-8).
    ``norm="group"`` looks at one image at a time, so that the same numbers come out on 1 GPU and on 8; ``"batch"``
    looks at a rank's micro batch, and they do not.
    """
    from torch import nn

    def stage(inputs: int, outputs: int) -> list[nn.Module]:
        layers: list[nn.Module] = []
        for channels in (inputs, outputs):
            layers.append(nn.Conv2d(channels, outputs, 3, padding=1, bias=False))
            layers.append(nn.GroupNorm(8, outputs) if norm == "group" else nn.BatchNorm2d(outputs))
            layers.append(nn.GELU())
        return layers

    layers = stage(info.in_chans, width)
    channels = width
    side = info.image_size
    for _ in range(max(1, math.ceil(math.log2(info.image_size / 4)))):
        layers.append(nn.AvgPool2d(2))
        outputs = min(channels * 2, width * 8)
        layers += stage(channels, outputs)
        channels = outputs
        side = side // 2
    features = channels * (side // 2) ** 2
    layers += [nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(dropout), nn.Linear(features, info.num_classes)]
    return nn.Sequential(*layers)


def check(*, width: int, dropout: float, norm: str) -> None:
    """Refuse values that make no network."""
    require(width >= 8 and width % 8 == 0, "model.width", width, "8 or a multiple: channels are normalised in 8 groups")
    require(0.0 <= dropout < 1.0, "model.dropout", dropout, "from 0 up to, not including, 1")
