"""One process, one device."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn

from trainkit.distributed.process_group import Distributed
from trainkit.strategies.base import require_one_rank


class Single:
    """The model as it is."""

    def parallelize(self, model: nn.Module) -> nn.Module:
        return model

    def grad_sync(self, model: nn.Module, *, enabled: bool) -> AbstractContextManager[object]:
        return nullcontext()


def build(dist: Distributed) -> Single:
    """Raises UserError when there is more than one rank: each would train a model of its own."""
    require_one_rank(dist, "single")
    return Single()
