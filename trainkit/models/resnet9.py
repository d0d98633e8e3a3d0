"""A residual network of nine layers for 32x32 photos, shallow and wide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.common.errors import require

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainkit.common.image_input import DataInfo


def build(info: DataInfo, *, width: int = 64, logit_scale: float = 0.125) -> nn.Module:
    """Eight 3x3 convolutions, two pairs of them with a shortcut, three poolings, and a linear layer.

    The layout is the one that David Page found in "How to train your ResNet" (2018, part 4), where it reached 94 % in
    24 epochs: shallow and wide, so that a GPU is busy at 32x32, and with the largest of what is left of each channel
    rather than its mean. Each convolution is followed by BatchNorm and CELU, which the last part of that series found
    to learn sooner than ReLU. ``logit_scale`` keeps the first losses small: nothing normalises the last layer.
    """
    from torch import nn

    class Shortcut(nn.Module):
        """Residual block: the sum of its input and its layers' output."""

        def __init__(self, *layers: nn.Module) -> None:
            super().__init__()
            self.layers = nn.Sequential(*layers)

        def forward(self, images: Tensor) -> Tensor:
            more: Tensor = self.layers(images)
            return images + more

    class Scaled(nn.Linear):
        def forward(self, features: Tensor) -> Tensor:
            return super().forward(features) * logit_scale

    def convolution(inputs: int, outputs: int) -> nn.Module:
        layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.CELU(0.3, inplace=True))

    def stage(inputs: int) -> list[nn.Module]:
        return [convolution(inputs, 2 * inputs), nn.MaxPool2d(2)]

    def shortcut(channels: int) -> nn.Module:
        return Shortcut(convolution(channels, channels), convolution(channels, channels))

    return nn.Sequential(
        convolution(info.in_chans, width),
        *stage(width),
        shortcut(2 * width),
        *stage(2 * width),
        *stage(4 * width),
        shortcut(8 * width),
        nn.AdaptiveMaxPool2d(1),
        nn.Flatten(),
        Scaled(8 * width, info.num_classes, bias=False),
    )


def check(*, width: int, logit_scale: float) -> None:
    """Refuse values that make no network."""
    require(width >= 1, "model.width", width, "1 or more")
    require(logit_scale > 0, "model.logit_scale", logit_scale, "above 0: what the last layer says is multiplied by it")
