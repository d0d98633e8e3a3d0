"""What the loop needs of a strategy; nothing else in the loop knows about DDP or FSDP."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn


class Strategy(Protocol):
    """How one model becomes a model on many ranks."""

    def parallelize(self, model: nn.Module) -> nn.Module:
        """The model to call. Make the optimizer from ``model`` afterwards: sharding replaces its parameters."""
        ...

    def grad_sync(self, model: nn.Module, *, enabled: bool) -> AbstractContextManager[object]:
        """Whether backward passes inside exchange gradients; off for all but the last micro batch of an update."""
        ...


@runtime_checkable
class SharesOptimizer(Protocol):
    """A strategy that has this verb as well spreads the optimizer over the ranks, beside or instead of the model."""

    def share(self, optimizer: torch.optim.Optimizer) -> None:
        """Change ``optimizer``, which has made no update yet."""
        ...


@runtime_checkable
class HasTensors(Protocol):
    """A strategy that has this as well goes on from them after a restart."""

    def tensors(self) -> Mapping[str, Tensor]:
        """Name -> tensor that belongs into a checkpoint and is filled from one, in place; the same on every rank, or
        with the rank in its name. Complete once a model is parallelized."""
        ...


@runtime_checkable
class TakesHollow(Strategy, Protocol):
    """A strategy that has this as well parallelizes a model whose tensors are on the meta device: each rank gets its
    share of their numbers afterwards, and none has the whole."""

    @property
    def home(self) -> torch.device:
        """Where the parameters are kept."""
        ...


class AsItIs:
    """The model as it is, in this one process."""

    def parallelize(self, model: nn.Module) -> nn.Module:
        return model

    def grad_sync(self, model: nn.Module, *, enabled: bool) -> AbstractContextManager[object]:
        return nullcontext()
