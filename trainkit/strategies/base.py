"""What the loop needs of a strategy; nothing else in the loop knows about DDP or FSDP."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

from torch import nn


class Strategy(Protocol):
    """How one model becomes a model on many ranks."""

    def parallelize(self, model: nn.Module) -> nn.Module:
        """The model to call. Make the optimizer from ``model`` afterwards: sharding replaces its parameters."""
        ...

    def grad_sync(self, model: nn.Module, *, enabled: bool) -> AbstractContextManager[object]:
        """Whether backward passes inside exchange gradients; off for all but the last micro batch of an update."""
        ...


class AsItIs:
    """The model as it is, in this one process."""

    def parallelize(self, model: nn.Module) -> nn.Module:
        return model

    def grad_sync(self, model: nn.Module, *, enabled: bool) -> AbstractContextManager[object]:
        return nullcontext()
