"""Models of a user's: odd ones, a large one, and one of several blocks."""

import torch
from torch import Tensor, nn

from trainkit.common.image_input import DataInfo


class Odd(nn.Module):
    """Tied, frozen and uneven weights, buffers of all kinds."""

    def __init__(self, info: DataInfo) -> None:
        super().__init__()
        pixels = info.in_chans * info.image_size**2
        self.body = nn.Sequential(nn.Linear(pixels, 35), nn.BatchNorm1d(35), nn.Linear(35, 35, bias=False))
        self.tied = nn.Linear(35, 35, bias=False)
        self.tied.weight = self.body[2].weight  # type: ignore[assignment]
        self.frozen = nn.Parameter(torch.rand(3), requires_grad=False)
        self.head = nn.Linear(35, info.num_classes)
        self.order: Tensor
        self.register_buffer("order", torch.randperm(35), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        inner = self.tied(self.body(images.flatten(1)))[:, self.order] + self.frozen.sum()
        scores: Tensor = self.head(inner)
        return scores


def odd(info: DataInfo) -> Odd:
    return Odd(info)


def large(info: DataInfo) -> nn.Sequential:
    """128 MiB."""
    pixels = info.in_chans * info.image_size**2
    blocks = [nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.ReLU()) for _ in range(32)]
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 1024), *blocks, nn.Linear(1024, info.num_classes))


def stacked(info: DataInfo, *, dropout: float = 0.1) -> nn.Sequential:
    """Four blocks with BatchNorm and dropout."""
    pixels = info.in_chans * info.image_size**2
    blocks = (nn.Sequential(nn.Linear(128, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.Dropout(dropout)) for _ in range(4))
    return nn.Sequential(nn.Flatten(), nn.Linear(pixels, 128), *blocks, nn.Linear(128, info.num_classes))


def of_any_size(info: DataInfo) -> nn.Sequential:
    layers = [nn.Conv2d(info.in_chans, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.GELU(), nn.AdaptiveAvgPool2d(1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(8, info.num_classes))
