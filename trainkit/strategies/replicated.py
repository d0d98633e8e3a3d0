"""The whole model on every rank, for strategies that leave it so: gradients are averaged while they are computed."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from trainkit.distributed.process_group import Distributed
from trainkit.errors import UserError
from trainkit.strategies.batchnorm import synchronize_batchnorm

if TYPE_CHECKING:
    from trainkit.strategies.powersgd import PowerSGD


def hook_of(
    name: str, dist: Distributed, precision: str, *, rank: int, start_step: int, find_unused_parameters: bool
) -> str | PowerSGD:
    """The communication hook ``name``, with the options of PowerSGD.

    Raises UserError where PowerSGD cannot be.
    """
    if name != "powersgd":
        return name
    if precision in ("fp16", "o2") or find_unused_parameters or start_step < 2 or rank < 1:
        which, why = (
            (f"train.precision={precision}", "What it keeps back is in units of a loss scale that changes.")
            if precision in ("fp16", "o2")
            else ("strategy.find_unused_parameters=true", "What it keeps back needs buckets that stay as they are.")
            if find_unused_parameters
            else (f"strategy.powersgd_start_step={start_step}", "torch exchanges the first two whole.")
            if start_step < 2
            else (f"strategy.powersgd_rank={rank}", "Its matrices have at least one column.")
        )
        raise UserError(
            f"strategy.comm_hook=powersgd does not go with {which}.",
            why=why,
            fix="Change that, or use strategy.comm_hook=bf16.",
            key="strategy.comm_hook",
        )
    from trainkit.strategies.powersgd import PowerSGD

    return PowerSGD(dist, rank, start_step)


@dataclass(frozen=True)
class Replicated:
    """`DistributedDataParallel` with gradients living in the communication buckets. Fields: options of ddp."""

    dist: Distributed
    bucket_cap_mb: int
    find_unused_parameters: bool
    static_graph: bool
    comm_hook: str | PowerSGD
    sync_batchnorm: bool

    def parallelize(self, model: nn.Module) -> nn.Module:
        if self.sync_batchnorm:
            model = synchronize_batchnorm(model, self.dist)
        device = self.dist.device
        ddp = DistributedDataParallel(
            model,
            device_ids=[device.index] if device.type == "cuda" else None,
            bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters,
            gradient_as_bucket_view=True,
            static_graph=self.static_graph,
        )
        if not isinstance(self.comm_hook, str):
            self.comm_hook.attach(ddp)
        elif self.comm_hook != "none":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
            ddp.register_comm_hook(None, hooks[self.comm_hook])
        if device.type == "cpu" and not self.find_unused_parameters and isinstance(self.comm_hook, str):
            # After its first step DDP lays out its buckets anew, which changes the order in which three and more ranks
            # are summed. Have it do so before the first step: else that step differs in its last bits between a run
            # that goes on there and one that was never interrupted.
            ddp.reducer._push_all_rebuilt_params()
        return ddp

    def tensors(self) -> Mapping[str, Tensor]:
        """State of the hook."""
        return {} if isinstance(self.comm_hook, str) else self.comm_hook.tensors()

    def grad_sync(self, model: nn.Module, *, enabled: bool) -> AbstractContextManager[object]:
        assert isinstance(model, DistributedDataParallel)
        return nullcontext() if enabled else model.no_sync()
