"""A user's own model that fails on the last rank, once it trains."""

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
        rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
        world_size = int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"])
        if self.training and torch.is_grad_enabled() and rank == world_size - 1:
            raise RuntimeError(f"rank {rank} fails")
        logits: Tensor = self.linear(images.flatten(1))
        return logits


def build(info: DataInfo) -> nn.Module:
    """The model for images of the data's size."""
    return Failing(info.in_chans * info.image_size**2, info.num_classes)
