"""DistributedDataParallel: every rank holds the whole model; gradients are averaged while they are computed."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.distributed.process_group import Distributed
from trainkit.strategies.batchnorm import synchronize_batchnorm


class DDP:
    """`DistributedDataParallel` with gradients living in the communication buckets."""

    def __init__(
        self, dist: Distributed, bucket_cap_mb: int, find_unused_parameters: bool, sync_batchnorm: bool
    ) -> None:
        self._dist = dist
        self._bucket_cap_mb = bucket_cap_mb
        self._find_unused_parameters = find_unused_parameters
        self._sync_batchnorm = sync_batchnorm

    def parallelize(self, model: nn.Module) -> nn.Module:
        if self._sync_batchnorm:
            model = synchronize_batchnorm(model, self._dist)
        device = self._dist.device
        ddp = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=self._bucket_cap_mb,
            find_unused_parameters=self._find_unused_parameters,
            gradient_as_bucket_view=True,
        )
        if device.type == "cpu" and not self._find_unused_parameters:
            # After its first step DDP lays out its buckets anew, which changes the order in which three and more ranks
            # are summed. Have it do so before the first step: else that step differs in its last bits between a run
            # that goes on there and one that was never interrupted.
            ddp.reducer._push_all_rebuilt_params()
        return ddp

    def grad_sync(self, model: nn.Module, *, enabled: bool) -> AbstractContextManager[object]:
        assert isinstance(model, DistributedDataParallel)
        return nullcontext() if enabled else model.no_sync()


def build(
    dist: Distributed,
    *,
    bucket_cap_mb: int = 25,
    find_unused_parameters: bool = False,
    sync_batchnorm: bool = False,
) -> DDP:
    """Options: see `torch.nn.parallel.DistributedDataParallel`; ``sync_batchnorm`` needs GPUs."""
    return DDP(dist, bucket_cap_mb, find_unused_parameters, sync_batchnorm)
