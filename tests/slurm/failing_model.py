"""A user's own model that fails on rank 3, once it trains."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn

from trainkit.data.base import DataInfo


class Failing(nn.Module):
    """A linear model; one rank of it raises."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear = nn.Linear(inputs, outputs)

    def forward(self, images: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled() and os.environ.get("RANK", os.environ.get("SLURM_PROCID")) == "3":
            raise RuntimeError("rank 3 fails")
        logits: Tensor = self.linear(images.flatten(1))
        return logits


def build(info: DataInfo) -> nn.Module:
    """The model for images of the data's size."""
    return Failing(info.in_chans * info.image_size**2, info.num_classes)
