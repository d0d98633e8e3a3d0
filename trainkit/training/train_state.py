"""The state of a training: what every loop and every checkpoint works with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.common.errors import UserError, require
from trainkit.common.image_input import DataInfo
from trainkit.config.checks import lost_when_resized
from trainkit.config.schema import Config
from trainkit.config.task_metrics import TaskMetrics, judged_by, metrics_of
from trainkit.data.base import Batch, EvalBatch, Samples, Splits, normalize
from trainkit.data.loader import Batches, Loading, eval_batches, resolve_workers, train_batches
from trainkit.data.losses import BrokenImages
from trainkit.data.order import steps_per_epoch
from trainkit.data.tensors import to_device as data_to_device
from trainkit.distributed.device import cpus_of_rank, device_name, require_compiler
from trainkit.distributed.process_group import Distributed
from trainkit.distributed.strategies.base import HasTensors, SharesOptimizer, Strategy, TakesHollow, build_strategy
from trainkit.models.library import build_model, check_shapes, expected_input, freeze
from trainkit.training.clock import flops_per_image, peak_flops
from trainkit.training.distillation import Teacher
from trainkit.training.ema import Ema
from trainkit.training.optim import build_optimizer
from trainkit.training.placement import spread, to_device, use_process
from trainkit.training.precision import O2, Precision, choose_precision, to_half
from trainkit.training.schedule import lr_at
from trainkit.training.survivor import Survivor
from trainkit.training.tasks.base import Task, build_task


@dataclass(frozen=True)
class TrainState:
    """The parts of a training, as `trainkit.training.train_state.build` makes them: the same for every loop."""

    config: Config
    dist: Distributed
    splits: Splits
    model: nn.Module
    """Model as made by the strategy: the one to call."""
    strategy: Strategy
    precision: Precision
    workers: int
    """Loader processes of this rank."""
    flops_per_image: float | None = None
    """Forward and backward; None where nobody can tell what share of a device's they are, or what they are."""
    survivor: Survivor = field(default_factory=Survivor)

    @cached_property
    def broken(self) -> BrokenImages:
        """The broken images that this rank has met."""
        return BrokenImages(self.config.data.max_broken)

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
        train = self.config.train
        if train.ema_decay is None:
            return None
        return Ema(self.model, train.ema_decay, warmup=train.ema_warmup)

    @cached_property
    def task(self) -> Task:
        """Made when it is first asked for: a peer that does not train has no data to ask for the weights of classes."""
        return build_task(self.config, self.splits)

    @cached_property
    def teacher(self) -> Teacher | None:
        """The model that this one learns from, if the configuration names a run."""
        if self.config.train.distill_from is None:
            return None
        return Teacher(self.config, self.splits.info, self.task, self.dist.device)

    @cached_property
    def metrics(self) -> TaskMetrics:
        """Metrics of the task."""
        return metrics_of(self.config.task.name)

    @cached_property
    def judged_by(self) -> str:
        """Name of the metric that the best model is judged by, such as val/loss."""
        return judged_by(self.config)

    def further_tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """Return the tensors of a checkpoint beside model and optimizer: file stem -> name -> tensor."""
        found: dict[str, Mapping[str, Tensor]] = {}
        if self.ema is not None:
            found["ema"] = self.ema.tensors()
        found["strategy"] = self.strategy_tensors()
        return {stem: tensors for stem, tensors in found.items() if tensors}

    def strategy_tensors(self) -> Mapping[str, Tensor]:
        """Return what the strategy has of its own."""
        return self.strategy.tensors() if isinstance(self.strategy, HasTensors) else {}

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
        assert train.micro_batch_size != "auto", "`resolve_micro_batch_size` makes a number of it before"
        return train.given_micro_batch_size or train.global_batch_size // self.dist.world_size

    @cached_property
    def grad_accum_steps(self) -> int:
        return self.config.train.global_batch_size // (self.micro_batch_size * self.dist.world_size)

    @cached_property
    def num_parameters(self) -> int:
        """Trainable ones, of the whole model."""
        return sum(parameter.numel() for parameter in self.model.parameters() if parameter.requires_grad)

    def differs_from(self, saved: Mapping[str, Any]) -> str:
        """Say what a run that goes on with another number of ranks keeps of before, and what not; empty if all
        is as it was.

        Args:
            saved: state of the checkpoint that it goes on from.
        """
        before = saved.get("world_size")
        ranks = self.dist.world_size
        if before == ranks or not isinstance(before, int):
            return ""
        size = saved.get("micro_batch_size")
        now = self.micro_batch_size
        words = " and micro batch; sums may differ in their last bits"
        if size != now:
            size = size if isinstance(size, int) else "another size"
            words = f"; micro batches are of {now} instead of {size}, by which dropout and BatchNorm go: these differ"
        same = f"ranks: {ranks} where {before} saved, with the same data in the same order{words}"
        return "; ".join([same, *lost_when_resized(self.config)])

    def batches(self, start: int, stop: int, *, seed: int | None = None, workers: int | None = None) -> Batches[Batch]:
        """This rank's micro batches for the updates from position ``start`` of the data up to ``stop``."""
        config = self.config
        return train_batches(
            self.splits,
            self._loading(self.workers if workers is None else workers),
            seed=config.seed if seed is None else seed,
            steps=range(start, stop),
            global_batch_size=config.train.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            repeats=config.augment.repeats,
        )

    def eval_batches(self, samples: Samples, batch_size: int | None = None) -> Batches[EvalBatch]:
        """This rank's batches for one pass over ``samples``, of ``batch_size``; None: of as many as in training."""
        size = batch_size or self.micro_batch_size
        return eval_batches(samples, self.splits.eval_transform, self._loading(self.workers), batch_size=size)

    def _loading(self, workers: int) -> Loading:
        dist = self.dist
        return Loading(dist.rank, dist.world_size, workers, dist.device, self.broken)

    def normalized(self, images: Tensor) -> Tensor:
        """Images, uint8 [N, C, H, W], as the model takes them: float32, normalised, in its layout."""
        return normalize(images, self.splits.info, channels_last=self.config.train.channels_last)

    def size_at(self, position: int) -> int:
        """Side of the training images of the global batch at ``position`` of the data, in pixels."""
        return self.config.augment.size_at(position // self.steps_per_epoch, self.splits.info.image_size)

    def lr_at(self, step: int, falls: int = 0) -> float:
        """Learning rate of update ``step``, from 0; ``falls``: how often a plateau has brought it down."""
        config = self.config
        steps = {"steps_per_epoch": self.steps_per_epoch, "total_steps": self.total_steps}
        return lr_at(step, optim=config.optim, schedule=config.schedule, falls=falls, **steps)


def build(config: Config, dist: Distributed, splits: Splits, *, model: nn.Module | None = None) -> TrainState:
    """Build everything that trains or evaluates, on this rank's device.

    Args:
        model: the plain model, where the caller had to have it before there was a device.
    """
    use_process(config)
    if config.train.compile != "off":
        require_compiler(dist.device, config.train.compile)
    name = choose_precision(config.train.precision, dist.device)
    precision = O2(name, dist) if name == "o2" else Precision(name, dist)
    strategy = build_strategy(config.strategy, dist, name)
    plain = model or build_model(config.model, splits.info, config.seed)
    splits = splits.prepared_for(expected_input(config.model, plain, splits.info))
    _check_sizes(plain, config, splits.info)
    workers = resolve_workers(config.data.workers, splits, cpus_of_rank(dist.env))
    freeze(plain, config.model.freeze)
    flops = None
    is_of_one_size = config.augment.min_size is None  # or each epoch takes other FLOPs
    if is_of_one_size and peak_flops(device_name(dist.device), name) is not None:
        flops = flops_per_image(plain, splits.info.in_chans, splits.info.image_size)
    if isinstance(strategy, TakesHollow):
        model = spread(plain, strategy, config, dist)
    else:
        plain = to_device(plain, config, dist.device)
        if name == "o2":
            plain = to_half(plain, dist)
        model = strategy.parallelize(plain)
    splits = data_to_device(splits, config.data.device, dist.device, workers=workers)
    return TrainState(config, dist, splits, model, strategy, precision, workers, flops)


def _check_sizes(plain: nn.Module, config: Config, info: DataInfo) -> None:
    """Refuse progressive resizing from what is no smaller size, or of a model that takes images of one size."""
    smallest = config.augment.min_size
    if smallest is None:
        return
    must_be = f"smaller than the images, which have {info.image_size}"
    require(smallest < info.image_size, "augment.min_size", smallest, must_be)
    for size in config.augment.sizes(info.image_size)[:-1]:
        try:
            check_shapes(plain, replace(info, image_size=size), config.model.name)
        except UserError as error:
            fix = "Omit augment.min_size, or use a model for any size (timm's ViTs: model.dynamic_img_size=true)."
            raise UserError(error.what, why=error.why, fix=fix, key="augment.min_size") from error


def alone(config: Config) -> Config:
    """``config`` for one process that holds the whole model."""
    return config.model_copy(update={"strategy": type(config.strategy)(name="single")})
