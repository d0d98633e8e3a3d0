"""What trains: everything that is made of a configuration, some data and a rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from trainkit.config.schema import Config
from trainkit.data.base import Splits
from trainkit.data.order import steps_per_epoch
from trainkit.distributed.process_group import Distributed
from trainkit.strategies.base import Strategy
from trainkit.training.precision import Precision
from trainkit.training.schedule import lr_at


@dataclass(frozen=True)
class Parts:
    """The parts of a training, as `trainkit.experiment.build` makes them: the same for every loop."""

    config: Config
    dist: Distributed
    splits: Splits
    model: nn.Module
    """As made by the strategy: the one to call."""
    strategy: Strategy
    optimizer: torch.optim.Optimizer
    precision: Precision
    workers: int
    """Loader processes of this rank."""

    @cached_property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(len(self.splits.train), self.config.train.global_batch_size)

    @cached_property
    def total_steps(self) -> int:
        return self.config.train.max_steps or self.config.train.epochs * self.steps_per_epoch

    @cached_property
    def micro_batch_size(self) -> int:
        """Samples per rank and forward pass."""
        return self.config.train.micro_batch_size or self.config.train.global_batch_size // self.dist.world_size

    @cached_property
    def grad_accum_steps(self) -> int:
        return self.config.train.global_batch_size // (self.micro_batch_size * self.dist.world_size)

    @cached_property
    def num_parameters(self) -> int:
        """Trainable ones, of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def lr_at(self, step: int) -> float:
        """Learning rate of update ``step``, from 0."""
        return lr_at(
            step,
            optim=self.config.optim,
            schedule=self.config.schedule,
            steps_per_epoch=self.steps_per_epoch,
            total_steps=self.total_steps,
        )
