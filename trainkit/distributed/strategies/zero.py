"""ZeRO-1 (Rajbhandari et al., arXiv 1910.02054): like ddp, but the optimizer's state is spread over the ranks.

torch's `ZeroRedundancyOptimizer` is not used: it knows no fused optimizer that skips an update by itself, hides its
state from checkpoints until it is gathered pickled, and gives up at groups with settings of their own.
"""

from collections.abc import Sequence
from functools import wraps
from itertools import chain
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from trainkit.distributed.strategies.replicated import (
    EXCLUDES,
    GLOBAL_BATCHNORM,
    LESS_TRAFFIC,
    LOST_WHEN_RESIZED,
    Replicated,
    replicated,
)

__all__ = ["EXCLUDES", "GLOBAL_BATCHNORM", "LESS_TRAFFIC", "LOST_WHEN_RESIZED", "build"]

IMPORTS = ("torch._dynamo",)
_SMALL = 1 << 14
"""A parameter of fewer numbers travels with others of its rank: copying it costs less than a broadcast of its own."""


class Zero(Replicated):
    """Each rank updates its part of the parameters, with the state that this takes, and gives them to the others."""

    def share(self, optimizer: torch.optim.Optimizer) -> None:
        """Let ``optimizer`` keep state of this rank's part only.

        It goes on knowing all parameters, so that clipping, loss scaling and skipped updates are those of ddp: what
        makes it pass by the others is that they have no gradient when it makes an update.
        """
        dist = self.dist
        parameters = list(chain.from_iterable(group["params"] for group in optimizer.param_groups))
        parts = balanced(parameters, dist.world_size)
        others = [*chain.from_iterable(parts[: dist.rank]), *chain.from_iterable(parts[dist.rank + 1 :])]

        def only_own(optimizer: torch.optim.Optimizer, *_: object) -> None:
            for parameter in others:
                parameter.grad = None

        small: list[list[Tensor]] = []
        large = []
        for rank, part in enumerate(parts):
            small.append([item for item in part if item.numel() < _SMALL])
            large += [(rank, item) for item in part if item.numel() >= _SMALL]

        @torch.no_grad()
        def give(optimizer: torch.optim.Optimizer, *_: object) -> None:
            flat = [(rank, torch.cat([item.flatten() for item in items])) for rank, items in enumerate(small) if items]
            sent = [c10d.broadcast(item.detach(), src=rank, async_op=True) for rank, item in [*large, *flat]]
            for work in sent:
                assert work is not None
                work.wait()
            for rank, whole in flat:
                first = 0
                for item in small[rank]:
                    item.copy_(whole[first : first + item.numel()].view_as(item))
                    first += item.numel()

        if dist.world_size > 1:
            for parameter in others:  # some have a state from the beginning
                optimizer.state.pop(parameter, None)
            optimizer.register_step_pre_hook(only_own)
            optimizer.register_step_post_hook(give)
            optimizer.elsewhere = frozenset(map(id, others))  # type: ignore[attr-defined]  # who restores looks at it


def balanced(parameters: Sequence[Tensor], parts: int) -> list[list[Tensor]]:
    """``parameters`` in ``parts`` of nearly the same size, the same on every rank: the largest first, each to the part
    that has the least. No part is smaller than another by more than the largest parameter."""
    shares: list[list[Tensor]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for parameter in sorted(parameters, key=lambda item: -item.numel()):
        least = sizes.index(min(sizes))
        shares[least].append(parameter)
        sizes[least] += parameter.numel()
    return shares


@wraps(replicated)
def build(*args: Any, **options: Any) -> Zero:
    return Zero(**vars(replicated(*args, **options)))
