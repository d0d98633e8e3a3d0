"""A model that takes 64 MiB and more for each sample, and a small data set for it."""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from tests.training import poisoned
from tests.training.poisoned import Grey, same
from trainkit.common.image_input import DataInfo
from trainkit.data.base import Splits

BATCH = 16
SETTINGS = (
    "data.name=tests.training.hungry:data",
    "model.name=tests.training.hungry:model",
    f"train.global_batch_size={BATCH}",
    "train.max_steps=2",
    "train.grad_clip_norm=1",
)


def data(root: Path) -> Splits:
    info = DataInfo("grey", 2, 1, 4, ("dark", "light"), (0.4,), (0.2,))
    return Splits(info, Grey(3 * BATCH), Grey(2), Grey(2), same, same, in_memory=True)


class Hungry(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(16, 64), nn.BatchNorm1d(64), nn.Dropout(0.3)
        self.last = nn.Linear(64, 2)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.drop(self.norm(self.first(images.flatten(1))))
        if self.training:
            # 32 MiB a sample: the C library keeps smaller blocks.
            wide = hidden[:, :1].expand(len(images), 1 << 23) * self.scale
            hidden = hidden + (wide * wide).mean(1, keepdim=True)  # which the backward pass asks for
        logits: Tensor = self.last(hidden)
        return logits


def model(info: DataInfo) -> nn.Module:
    return Hungry()


class Failing(nn.Module):
    """Runs out of memory with more than 2 samples, on the last rank only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.3), nn.Linear(8, 2))

    def forward(self, images: Tensor) -> Tensor:
        last = torch.distributed.get_rank() == torch.distributed.get_world_size() - 1
        if self.training and len(images) > 2 and last:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
        logits: Tensor = self.layers(images)
        return logits


def failing(info: DataInfo) -> nn.Module:
    return Failing()


train_and_tell = partial(poisoned.train_and_tell, all_have=SETTINGS)
