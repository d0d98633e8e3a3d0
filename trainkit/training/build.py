"""What trains: configuration + data + rank -> model, strategy and precision, on this rank's device."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainkit import process
from trainkit.checkpoint.state import Held, Sent, load_where_named
from trainkit.config.checks import lost_when_resized, strategy_traits
from trainkit.config.components import TaskMetrics, judged_by, metrics_of
from trainkit.config.schema import Config
from trainkit.data.base import Batch, DataInfo, EvalBatch, Samples, Splits, normalize, steps_per_epoch
from trainkit.data.folders import BrokenImages
from trainkit.data.loader import Batches, eval_batches, resolve_workers, train_batches
from trainkit.data.loader import to_device as data_to_device
from trainkit.distributed.device import cpus_of_rank, device_name, gpu_is_here, require_compiler
from trainkit.distributed.process_group import Distributed
from trainkit.errors import UserError, require
from trainkit.fileio import make_own
from trainkit.models import build_model, check_shapes, expected_input, freeze
from trainkit.run import folder as run_folder
from trainkit.strategies import HasTensors, SharesOptimizer, Strategy, TakesHollow, build_strategy, repeated_blocks
from trainkit.tasks.base import Task, build_task
from trainkit.training.optim import Ema, build_optimizer
from trainkit.training.precision import O2, Precision, choose_precision, to_half
from trainkit.training.schedule import lr_at
from trainkit.training.timing import flops_per_image, peak_flops
from trainkit.workarounds import keep_freed_memory, put_off_torch_compiler

if TYPE_CHECKING:
    from trainkit.training.distillation import Teacher


@dataclass(frozen=True)
class TrainState:
    """The parts of a training, as `trainkit.training.build.build` makes them: the same for every loop."""

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
        return Ema(self.model, train.ema_decay, warmup=train.ema_warmup) if train.ema_decay is not None else None

    @cached_property
    def task(self) -> Task:
        """Made when it is first asked for: a peer that does not train has no data to ask for the weights of classes."""
        return build_task(self.config, self.splits)

    @cached_property
    def teacher(self) -> Teacher | None:
        """The model that this one learns from, if the configuration names a run."""
        if self.config.train.distill_from is None:
            return None
        from trainkit.training.distillation import Teacher

        return Teacher(self)

    @cached_property
    def metrics(self) -> TaskMetrics:
        """What the task measures."""
        return metrics_of(self.config.task.name)

    @cached_property
    def judged_by(self) -> str:
        """What the best model is judged by, such as val/loss."""
        return judged_by(self.config)

    def further_tensors(self) -> dict[str, Mapping[str, Tensor]]:
        """What belongs into a checkpoint beside model and optimizer: file stem -> name -> tensor."""
        ema = self.ema.tensors() if self.ema is not None else {}
        own = self.strategy.tensors() if isinstance(self.strategy, HasTensors) else {}
        return {stem: tensors for stem, tensors in (("ema", ema), ("strategy", own)) if tensors}

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
        """What a run that is continued on another number of ranks has in common with before, and what not; empty if
        all is as it was.

        Args:
            saved: state of the checkpoint that it goes on from.
        """
        before, ranks = saved.get("world_size"), self.dist.world_size
        if before == ranks or not isinstance(before, int):
            return ""
        size, now = saved.get("micro_batch_size"), self.micro_batch_size
        words = " and micro batch; sums may differ in their last bits"
        if size != now:
            size = size if isinstance(size, int) else "another size"
            words = f"; micro batches are of {now} instead of {size}, by which dropout and BatchNorm go: these differ"
        same = f"ranks: {ranks} where {before} saved, with the same data in the same order{words}"
        return "; ".join([same, *lost_when_resized(self.config)])

    def batches(self, start: int, stop: int, *, seed: int | None = None, workers: int | None = None) -> Batches[Batch]:
        """This rank's micro batches for the updates from position ``start`` of the data up to ``stop``."""
        train, dist = self.config.train, self.dist
        return train_batches(
            self.splits,
            seed=self.config.seed if seed is None else seed,
            start_step=start,
            stop_step=stop,
            global_batch_size=train.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            rank=dist.rank,
            world_size=dist.world_size,
            workers=self.workers if workers is None else workers,
            device=dist.device,
            broken=self.broken,
            repeats=self.config.augment.repeats,
        )

    def eval_batches(self, samples: Samples, batch_size: int | None = None) -> Batches[EvalBatch]:
        """This rank's batches for one pass over ``samples``, of ``batch_size``; None: of as many as in training."""
        dist = self.dist
        return eval_batches(
            samples, self.splits.eval_transform, batch_size=batch_size or self.micro_batch_size, rank=dist.rank,
            world_size=dist.world_size, workers=self.workers, device=dist.device, broken=self.broken,
        )  # fmt: skip

    def normalized(self, images: Tensor) -> Tensor:
        """Images, uint8 [N, C, H, W], as the model takes them: float32, normalised, in its layout."""
        return normalize(images, self.splits.info, channels_last=self.config.train.channels_last)

    def size_at(self, position: int) -> int:
        """Side of the training images of the global batch at ``position`` of the data, in pixels."""
        return self.config.augment.size_at(position // self.steps_per_epoch, self.splits.info.image_size)

    def lr_at(self, step: int, falls: int = 0) -> float:
        """Learning rate of update ``step``, from 0; ``falls``: how often a plateau has brought it down."""
        return lr_at(
            step,
            optim=self.config.optim,
            schedule=self.config.schedule,
            steps_per_epoch=self.steps_per_epoch,
            total_steps=self.total_steps,
            falls=falls,
        )


_MIN_BLOCK_PARAMS = 10_000
"""Smaller blocks are not worth a compilation of their own."""
_META = torch.device("meta")


def to_device(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """``model`` on ``device``, before it is parallelized.

    Compiled in place, so that names in checkpoints stay those of the plain model. What is sharded has to be contiguous:
    there ``channels_last`` is the images' alone.
    """
    train = config.train
    model = model.to(device)
    if train.channels_last and not strategy_traits(config.strategy.name).sharded:
        model = model.to(memory_format=torch.channels_last)
    checkpoint_activations(model, train.activation_checkpointing)
    compiled = {"off": [], "model": [model], "blocks": repeated_blocks(model, _MIN_BLOCK_PARAMS)}
    for module in compiled[train.compile]:
        module.compile()
    return model


def make_deterministic(asked: bool) -> None:
    """Whether kernels that may give other bits each time are kept out of this process.

    Where they are not, cuDNN tries its ways to convolve on the first images of each size, and takes the quickest.
    """
    torch.backends.cudnn.benchmark = not asked
    if asked:
        process.set_variables({"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}, unless_set=True)  # before cuBLAS is first called
    if torch.are_deterministic_algorithms_enabled() != asked:  # saying so again would import torch's compiler
        torch.use_deterministic_algorithms(asked)


def use_own_compiler_cache() -> None:
    """Keep compiled code where only this user can write, unless TORCHINDUCTOR_CACHE_DIR says where.

    torch keeps it in a folder of /tmp with a predictable name, and runs what it finds there, whoever made that folder.
    """
    if not process.is_set("TORCHINDUCTOR_CACHE_DIR"):
        own = Path(tempfile.gettempdir(), f"trainkit-{os.geteuid()}")
        folder = own if make_own(own) else run_folder.state_file("cache")
        process.set_variables({"TORCHINDUCTOR_CACHE_DIR": str(folder / "torchinductor")})


def checkpoint_activations(model: nn.Module, which: Literal["none", "full"] | int) -> None:
    """Have all blocks of ``model`` (``full``), or every ``which``-th, keep their inputs only, and compute again what
    the backward pass needs; in place.

    The numbers stay the same to the last bit: dropout draws again what it drew, and BatchNorm does not count the second
    look at a batch. Only the blocks' ``forward`` changes, so that names in checkpoints stay those of the plain model.

    Raises UserError for a model with fewer blocks.
    """
    if which == "none":
        return
    every = 1 if which == "full" else which
    blocks = repeated_blocks(model, _MIN_BLOCK_PARAMS)
    some = f"{len(blocks)} or less, or " if blocks else ""
    must_be = f"{some}none: {type(model).__name__} has {len(blocks) or 'no'} blocks that repeat"
    require(len(blocks) >= every, "train.activation_checkpointing", which, must_be)
    for block in blocks[every - 1 :: every]:
        norms = [module for module in block.modules() if getattr(module, "track_running_stats", False)]
        # Of the first pass, and of the second.
        contexts = partial(lambda norms: (nullcontext(), _statistics_kept(norms)), norms)
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)


@contextmanager
def _statistics_kept(norms: Sequence[nn.Module]) -> Iterator[None]:
    """What BatchNorm learns from its input goes into copies that are thrown away."""
    own = [(module, dict(module._buffers)) for module in norms]
    for module, buffers in own:
        module._buffers.update({name: buffer.clone() for name, buffer in buffers.items() if buffer is not None})
    try:
        yield
    finally:
        for module, buffers in own:
            module._buffers.update(buffers)


def spread(plain: nn.Module, strategy: TakesHollow, config: Config, dist: Distributed) -> nn.Module:
    """``plain``, made by ``strategy`` from shards, one tensor after the other, of what it is on rank 0.

    Args:
        plain: on the CPU; only rank 0's numbers count.
    """
    whole = _tensors(plain) if dist.is_main else {}
    model = strategy.parallelize(to_device(_emptied(plain), config, _META))
    own = _tensors(_emptied(model, strategy.home, dist.device))
    assert not dist.is_main or own.keys() == whole.keys()
    load_where_named(own, Sent(Held(whole), dist), dist)
    return model


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    """All of them: also the buffers that are in no checkpoint."""
    return dict(model.named_parameters()) | dict(model.named_buffers())


def _emptied(model: nn.Module, parameters: torch.device = _META, buffers: torch.device = _META) -> nn.Module:
    """``model`` with empty tensors, on these devices, in the places of its own. What was one tensor in two places stays
    one, which `nn.Module.to_empty` does not see to."""
    made: dict[int, tuple[Tensor, Tensor]] = {}  # with the old ones, or an id could come twice

    def emptied(old: Tensor, device: torch.device) -> Tensor:
        if id(old) not in made:
            new = torch.empty_like(old, device=device).detach()
            is_parameter = isinstance(old, nn.Parameter)
            made[id(old)] = old, nn.Parameter(new, requires_grad=old.requires_grad) if is_parameter else new
        return made[id(old)][1]

    for module in model.modules():
        for tensors, device in ((module._parameters, parameters), (module._buffers, buffers)):
            own: dict[str, Any] = tensors
            own.update({name: emptied(old, device) for name, old in own.items() if old is not None})
    return model


def use_process(config: Config, device: torch.device) -> None:
    """Have this process compute as the configuration says, whatever it computes."""
    use_own_compiler_cache()
    if config.train.compile == "off":
        put_off_torch_compiler()
    make_deterministic(config.train.deterministic)
    if device.type == "cpu":
        keep_freed_memory()


def wants_gpu(config: Config) -> bool:
    """Train on GPU: there is one, and the configuration does not say zero.

    Raises RefusedError where GPUs are granted and none is seen.
    """
    return config.launch.gpus_per_node != 0 and gpu_is_here()


def build(config: Config, dist: Distributed, splits: Splits, *, model: nn.Module | None = None) -> TrainState:
    """Everything that trains or evaluates, on this rank's device.

    Args:
        model: the plain model, where the caller had to have it before there was a device.
    """
    use_process(config, dist.device)
    if config.train.compile != "off":
        require_compiler(dist.device, config.train.compile)
    name = choose_precision(config.train.precision, dist.device)
    precision = (O2 if name == "o2" else Precision)(name, dist)
    strategy = build_strategy(config.strategy, dist, name)
    plain = model or build_model(config.model, splits.info, config.seed)
    splits = splits.prepared_for(expected_input(config.model, plain, splits.info))
    _check_sizes(plain, config, splits.info)
    workers = resolve_workers(config.data.workers, splits, cpus_of_rank(dist.env))
    freeze(plain, config.model.freeze)
    is_of_one_size = config.augment.min_size is None  # or each epoch takes other FLOPs
    known = is_of_one_size and peak_flops(device_name(dist.device), precision.name) is not None
    flops = flops_per_image(plain, splits.info.in_chans, splits.info.image_size) if known else None
    if isinstance(strategy, TakesHollow):
        model = spread(plain, strategy, config, dist)
    else:
        plain = to_device(plain, config, dist.device)
        model = strategy.parallelize(to_half(plain, dist) if name == "o2" else plain)
    splits = data_to_device(splits, config.data.device, dist.device, workers=workers)
    return TrainState(config, dist, splits, model, strategy, precision, workers, flops)


def _check_sizes(plain: nn.Module, config: Config, info: DataInfo) -> None:
    """Refuse progressive resizing from what is no smaller size, or of a model that takes images of one size."""
    if (smallest := config.augment.min_size) is None:
        return
    must_be = f"smaller than the images, which have {info.image_size}"
    require(smallest < info.image_size, "augment.min_size", smallest, must_be)
    for size in config.augment.sizes(info.image_size)[:-1]:
        try:
            check_shapes(plain, replace(info, image_size=size), config.model.name)
        except UserError as error:
            fix = "Leave augment.min_size out, or use a model for images of any size (timm's vision transformers: "
            fix += "model.dynamic_img_size=true)."
            raise UserError(error.what, why=error.why, fix=fix, key="augment.min_size") from error


def alone(config: Config) -> Config:
    """``config`` for one process that holds the whole model."""
    return config.model_copy(update={"strategy": type(config.strategy)(name="single")})
