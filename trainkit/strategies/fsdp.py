"""FSDP2: parameters, gradients and optimizer state are sharded; each block is gathered when it is needed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from trainkit.distributed.process_group import Distributed
from trainkit.strategies.batchnorm import synchronize_batchnorm
from trainkit.strategies.blocks import repeated_blocks


class FSDP:
    """`fully_shard` on every repeated block of the model and on what is left."""

    def __init__(
        self, dist: Distributed, reshard_after_forward: bool, min_block_params: int, sync_batchnorm: bool
    ) -> None:
        self._dist = dist
        self._reshard_after_forward = reshard_after_forward
        self._min_block_params = min_block_params
        self._sync_batchnorm = sync_batchnorm

    def parallelize(self, model: nn.Module) -> nn.Module:
        if self._sync_batchnorm:
            model = synchronize_batchnorm(model, self._dist)
        mesh = init_device_mesh(self._dist.device.type, (self._dist.world_size,))
        for block in repeated_blocks(model, self._min_block_params):
            fully_shard(block, mesh=mesh, reshard_after_forward=self._reshard_after_forward)
        fully_shard(model, mesh=mesh, reshard_after_forward=self._reshard_after_forward)
        return model

    @contextmanager
    def grad_sync(self, model: nn.Module, *, enabled: bool) -> Iterator[None]:
        assert isinstance(model, FSDPModule)
        model.set_requires_gradient_sync(enabled)
        yield


def build(
    dist: Distributed,
    *,
    reshard_after_forward: bool = True,
    min_block_params: int = 10_000,
    sync_batchnorm: bool = False,
) -> FSDP:
    """Options: ``reshard_after_forward=false`` keeps gathered parameters until the backward pass (ZeRO-2: faster, more
    memory); ``min_block_params`` is the smallest block that is sharded on its own."""
    return FSDP(dist, reshard_after_forward, min_block_params, sync_batchnorm)
