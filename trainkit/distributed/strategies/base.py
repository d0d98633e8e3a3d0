"""Strategies turn one model into a model on many ranks: one file a strategy.

Its function ``build(dist, *, <options>)`` gives a `Strategy`; with a second argument, ``build(dist, precision, ...)``,
it is told in which format the model computes. What others must know of it without loading it the file states as
upper-case constants: ``RANKS = "one"``, ``SHARDED = True``, ``LOOP = "collaborative"``, ``EXCLUDES = {...}``. See
`trainkit.config.checks.StrategyTraits`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from trainkit.common.accelerators import SYNCHRONIZES_BATCHNORM
from trainkit.common.errors import UserError, require
from trainkit.config import plugin_options, plugins
from trainkit.config.checks import strategy_traits
from trainkit.distributed.device import kind_of
from trainkit.distributed.process_group import Distributed

if TYPE_CHECKING:
    from trainkit.config.schema import StrategyConfig


def build_strategy(config: StrategyConfig, dist: Distributed, precision: str = "fp32") -> Strategy:
    """The strategy of a configuration.

    Raises UserError for one that does not exist, for options that it does not have, and for several ranks where it is
    one process: each of them would train a model of its own.
    """
    plugins.check_options(__package__, config.name, config.options, where="strategy")
    if strategy_traits(config.name).ranks == "one" and dist.world_size > 1:
        what = f"strategy.name={config.name} runs in one process, but {dist.world_size} ranks were started."
        why = "Each of them would train a model of its own."
        fix = "Use a strategy for many ranks, such as strategy.name=ddp, or start one rank."
        raise UserError(what, why=why, fix=fix, key="strategy.name")
    build = plugins.load(__package__, config.name)
    kinds = [parameter.kind for parameter in inspect.signature(build).parameters.values()]
    told = (dist, precision)[: kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    strategy: Strategy = build(*told, **plugin_options.fill(build, config.options, where="strategy"))
    absent = [verb for verb in ("parallelize", "grad_sync") if not callable(getattr(strategy, verb, None))]
    if absent:
        why = f"It returned {type(strategy).__name__}, which has no {' and no '.join(absent)}."
        fix = "Return an object with both: see trainkit.distributed.strategies.base.Strategy. Then submit again."
        raise UserError(f"{config.name} returned no strategy.", why=why, fix=fix, key="strategy.name")
    return strategy


class Strategy(Protocol):
    """Turns one model into a model on many ranks."""

    def parallelize(self, model: nn.Module) -> nn.Module:
        """The model to call. Make the optimizer from ``model`` afterwards: sharding replaces its parameters."""

    def grad_sync(self, model: nn.Module, *, enabled: bool) -> AbstractContextManager[object]:
        """Return a context whose backward passes exchange gradients; enabled for an update's last micro batch."""


@runtime_checkable
class SharesOptimizer(Protocol):
    """A strategy that has this verb as well spreads the optimizer over the ranks, beside or instead of the model."""

    def share(self, optimizer: torch.optim.Optimizer) -> None:
        """Change ``optimizer``, which has made no update yet."""


@runtime_checkable
class HasTensors(Protocol):
    """A strategy that has this as well goes on from them after a restart."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Name -> tensor that belongs into a checkpoint and is filled from one, in place; the same on every rank, or
        with the rank in its name. Complete once a model is parallelized."""


@runtime_checkable
class SharesBuffers(Protocol):
    """A strategy that has this verb as well lets the loop say when the ranks exchange the model's buffers."""

    def share_buffers(self, model: nn.Module) -> Callable[[], Mapping[int, Tensor]]:
        """Return what gives all ranks the buffers of rank 0, and a copy of each by its address; see `Updater`."""


@runtime_checkable
class TakesHollow(Strategy, Protocol):
    """A strategy that has this as well parallelizes a model whose tensors are on the meta device: each rank gets its
    share of their numbers afterwards, and none has the whole."""

    @property
    def home(self) -> torch.device:
        """Device on which the parameters are kept."""


class AsItIs:
    """The model as it is, in this one process."""

    def parallelize(self, model: nn.Module) -> nn.Module:
        return model

    def grad_sync(self, model: nn.Module, *, enabled: bool) -> AbstractContextManager[object]:
        return nullcontext()


def synchronize_batchnorm(model: nn.Module, dist: Distributed) -> nn.Module:
    """Replace every BatchNorm by one whose statistics are those of the global batch.

    Raises UserError on a device for which torch has no `SyncBatchNorm`.
    """
    must_be = "false here: torch does not implement SyncBatchNorm for CPUs and Apple's GPUs"
    require(kind_of(dist.device).has(SYNCHRONIZES_BATCHNORM), "strategy.sync_batchnorm", "true", must_be)
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted


_ROWS = (nn.Sequential, nn.ModuleList)


def repeated_blocks(model: nn.Module, min_params: int) -> list[nn.Module]:
    """The blocks that a network repeats: innermost members of its Sequentials and ModuleLists with enough parameters.

    For a ViT these are its transformer blocks, for a ResNet its bottlenecks; no class needs to be named. Modules below
    ``min_params`` parameters stay with their parent, because gathering them costs more than it saves.
    """

    def inside(module: nn.Module) -> list[nn.Module]:
        found: list[nn.Module] = []
        children = [*module.children()]
        # The stages of timm's RegNet are no Sequentials, but have several of one class and nothing else either.
        alike = len(children) > 1 and len({*map(type, children)}) == 1 and not isinstance(children[0], _ROWS)
        is_row = isinstance(module, _ROWS) or alike
        for child in children:
            blocks = inside(child)
            size = _size([child])
            # One matrix or filter is a part, as is what has little of its block: EfficientNet's squeeze and excitation.
            whole = [block for block in blocks if sum(parameter.ndim > 1 for parameter in block.parameters()) > 1]
            if is_row and [*child.children()] and size >= min_params and 2 * _size(whole) < size:
                blocks = [child]
            found += blocks
        return found

    return [block for block in inside(model) if block is not model]


def _size(modules: Iterable[nn.Module]) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())
