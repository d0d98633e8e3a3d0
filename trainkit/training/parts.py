"""What trains: everything that is made of a configuration, some data and a rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.config.checks import lost_when_resized
from trainkit.config.schema import Config
from trainkit.config.task import Described, judged_by, metrics_of
from trainkit.data.base import Splits, normalize
from trainkit.data.folders import Broken
from trainkit.data.order import steps_per_epoch
from trainkit.distributed.process_group import Distributed
from trainkit.strategies.base import HasTensors, SharesOptimizer, Strategy
from trainkit.tasks import build_task
from trainkit.tasks.base import Task
from trainkit.training.ema import Ema
from trainkit.training.optim import build_optimizer
from trainkit.training.precision import Precision
from trainkit.training.schedule import lr_at


@dataclass(frozen=True)
class Parts:
    """The parts of a training, as `trainkit.training.building.build` makes them: the same for every loop."""

    config: Config
    dist: Distributed
    splits: Splits
    model: nn.Module
    """As made by the strategy: the one to call."""
    strategy: Strategy
    precision: Precision
    workers: int
    """Loader processes of this rank."""
    flops_per_image: float | None = None
    """Forward and backward; None where nobody can tell what share of a device's they are, or what they are."""

    @cached_property
    def broken(self) -> Broken:
        """The broken images that this rank has met."""
        return Broken(self.config.data.max_broken)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        """Made when it is first asked for: who evaluates has none, nor the seconds that torch takes to import it."""
        optimizer = build_optimizer(self.model, self.config.optim)
        if isinstance(self.strategy, SharesOptimizer):
            self.strategy.share(optimizer)
        return optimizer

    @cached_property
    def ema(self) -> Ema | None:
        """The averaged weights, if the configuration wants any; they begin with those that the model then has."""
        return Ema(self.model, self.config.train.ema_decay) if self.config.train.ema_decay is not None else None

    @cached_property
    def task(self) -> Task:
        """Made when it is first asked for: a peer that does not train has no data to ask for the weights of classes."""
        return build_task(self.config, self.splits)

    @cached_property
    def metrics(self) -> Described:
        """What the task measures."""
        return metrics_of(self.config.task.name)

    @cached_property
    def judged_by(self) -> str:
        """What the best model is judged by, such as val/loss."""
        return judged_by(self.config)

    def further_tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """What belongs into a checkpoint beside model and optimizer: file stem -> name -> tensor."""
        own = self.strategy.tensors() if isinstance(self.strategy, HasTensors) else {}
        return {
            **({"ema": self.ema.tensors()} if self.ema is not None else {}),
            **({"strategy": own} if own else {}),
        }

    @cached_property
    def steps_per_epoch(self) -> int:
        return steps_per_epoch(len(self.splits.train), self.config.train.global_batch_size)

    @cached_property
    def total_steps(self) -> int:
        return self.config.train.max_steps or self.config.train.epochs * self.steps_per_epoch

    @cached_property
    def micro_batch_size(self) -> int:
        """Samples per rank and forward pass."""
        train = self.config.train
        assert train.micro_batch_size != "auto", "`settled` makes a number of it, before there are parts"
        return train.given_micro_batch_size or train.global_batch_size // self.dist.world_size

    @cached_property
    def grad_accum_steps(self) -> int:
        return self.config.train.global_batch_size // (self.micro_batch_size * self.dist.world_size)

    @cached_property
    def num_parameters(self) -> int:
        """Trainable ones, of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def differs_from(self, saved: Mapping[str, Any]) -> str:
        """What a run that is continued on another number of ranks has in common with before, and what not; empty if
        all is as it was.

        Args:
            saved: state of the checkpoint that it goes on from.
        """
        before, ranks = saved.get("world_size"), self.dist.world_size
        if before == ranks or not isinstance(before, int):
            return ""
        who = "1 rank goes" if ranks == 1 else f"{ranks} ranks go"
        words = (
            f"{who} on where {before} {'has' if before == 1 else 'have'} saved, with the same data in the same order"
        )
        size, now = saved.get("micro_batch_size"), self.micro_batch_size
        lost = "".join(f"; {item}" for item in lost_when_resized(self.config))
        if size == now:
            return f"{words} and micro batch; sums may differ in their last bits{lost}"
        was = str(size) if isinstance(size, int) else "another size"
        return (
            f"{words}; micro batches are of {now} instead of {was}, by which dropout and BatchNorm go: these differ"
            + lost
        )

    def normalized(self, images: Tensor) -> Tensor:
        """Images, uint8 [N, C, H, W], as the model takes them: float32, normalised, in its layout."""
        return normalize(images, self.splits.info, channels_last=self.config.train.channels_last)

    def lr_at(self, step: int) -> float:
        """Learning rate of update ``step``, from 0."""
        return lr_at(
            step,
            optim=self.config.optim,
            schedule=self.config.schedule,
            steps_per_epoch=self.steps_per_epoch,
            total_steps=self.total_steps,
        )
