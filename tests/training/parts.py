"""What trains, in this very process: for tests of what is done with it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from tests.rank_functions import QUICK
from trainkit import experiment
from trainkit.config.loading import load
from trainkit.data import build_data
from trainkit.distributed.process_group import Distributed
from trainkit.ranks.env import RankEnv
from trainkit.training.parts import Parts

SMALL = (
    "data.name=synthetic", "data.train_size=24", "data.val_size=10", "data.test_size=6", "data.image_size=4",
    "data.num_classes=7", "data.augment=false", "train.global_batch_size=8", "train.micro_batch_size=4",
)  # fmt: skip


def parts_of(*overrides: str, dist: Distributed | None = None, model: nn.Module | None = None) -> Parts:
    """Of a preset for one process, or as ``dist`` says, with little data."""
    preset = "single" if dist is None else "ddp"
    config = load(preset, (*QUICK, *SMALL, *overrides)).config
    dist = dist or Distributed(RankEnv.single(), torch.device("cpu"))
    parts = experiment.build(config, dist, build_data(config.data), model=Linear())
    return parts if model is None else replace(parts, model=model)


class Linear(nn.Module):
    """A small model whose weights are always the same, and that notes how it is called."""

    def __init__(self) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(0)
        self.layer = nn.Linear(3 * 4 * 4, 7)
        self.layer.weight.data = torch.randn(7, 48, generator=random)
        self.layer.bias.data = torch.randn(7, generator=random)
        self.calls: list[tuple[int, bool, bool]] = []
        """Size of the batch, whether training, whether gradients are kept."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self.calls.append((len(images), self.training, torch.is_grad_enabled()))
        scores: torch.Tensor = self.layer(images.flatten(1))
        return scores
