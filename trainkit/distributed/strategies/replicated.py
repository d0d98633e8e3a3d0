"""The whole model on every rank, for strategies that leave it so: gradients are averaged while they are computed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel

from trainkit.common.errors import UserError, require
from trainkit.distributed.process_group import Distributed
from trainkit.distributed.strategies.base import synchronize_batchnorm

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


GLOBAL_BATCHNORM = "strategy.sync_batchnorm=true"
LESS_TRAFFIC = "strategy.comm_hook=bf16"
LOST_WHEN_RESIZED = {"strategy.comm_hook=powersgd": "what PowerSGD had not sent yet is given up"}
EXCLUDES = {
    "strategy.comm_hook=powersgd, train.precision=fp16|o2": (
        "What it keeps back for the next update is in units of a loss scale that changes.",
        "Use train.precision=bf16, or strategy.comm_hook=fp16.",
    ),
    "train.micro_batch_size=auto, strategy.static_graph=true": (
        "Sizes are tried in updates of several micro batches, and a static graph cannot accumulate gradients.",
        "Leave out strategy.static_graph, or use train.micro_batch_size=null: each rank's share at once.",
    ),
    "strategy.static_graph=true, grad_accum_steps>1": (
        "torch learns the graph from a first backward pass that exchanges gradients; one of several micro batches does "
        "not.",
        "Leave out strategy.static_graph, or use train.micro_batch_size=null: each rank's share at once.",
    ),
}


@dataclass(frozen=True)
class PowerSGD:
    """PowerSGD (Vogels et al., arXiv 1905.13727): each gradient matrix travels as two thin ones, and what they leave
    out is added to the next gradients. torch's hook, with a state that can be saved and that no bad update spoils.

    The hook of one model: `attach` it before its first backward pass.
    """

    dist: Distributed
    rank: int
    start_step: int
    count: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.int64))
    """Exchanges of gradients so far; the first ``start_step`` are whole."""
    kept: dict[int, Tensor] = field(default_factory=dict)
    """Bucket -> what this rank has not sent yet."""
    thin: dict[int, Tensor] = field(default_factory=dict)
    """Bucket -> the second thin matrices of the last exchange, with which the next one begins."""

    def attach(self, ddp: DistributedDataParallel) -> None:
        """Compress what ``ddp`` exchanges. Raises UserError for a model with parameters that are no matrices to it."""
        for name, parameter in ddp.module.named_parameters():
            if parameter.requires_grad and (parameter.ndim == 0 or parameter.numel() == 0):
                what = "strategy.comm_hook=powersgd does not go with this model."
                lacks = "elements" if parameter.ndim else "dimensions"
                why = f"{name} has no {lacks}, and torch's PowerSGD makes a matrix of every parameter."
                fix = f"Use {LESS_TRAFFIC}, or give {name} the shape (1,)."
                raise UserError(what, why=why, fix=fix, key="strategy.comm_hook")
        # A gradient can vanish, so that it needs an epsilon.
        state = torchs.PowerSGDState(
            None, self.rank, start_powerSGD_iter=self.start_step, orthogonalization_epsilon=1e-8
        )
        # The state goes by buckets, which DDP would lay out anew after its first step, in this process or a later one.
        # Of `reducer` nothing is public, and DDP has no public way to lay out its buckets, or to ask for them.
        ddp.reducer._push_all_rebuilt_params()
        ddp.reducer._rebuild_buckets()
        for bucket in ddp.reducer._get_zeros_like_grad_buckets():
            index = bucket.index()
            buffer = bucket.buffer()
            rows = columns = 0  # of all first and of all second thin matrices, as torch's hook lays them out
            for gradient in bucket.gradients():
                n, m = gradient.view(gradient.shape[0], -1).shape
                rank = min(n, m, self.rank)
                # torch's hook makes these matrices itself, but at random: what it makes them for it says nowhere else.
                if torchs._should_compress(n, m, rank, state.min_compression_rate)[0]:
                    rows += n * rank
                    columns += m * rank
            self.kept[index] = torch.zeros_like(buffer)
            # The same on every rank and in every process, so that no random state is to be saved.
            first = torch.randn(columns, generator=torch.Generator().manual_seed(index))
            self.thin[index] = first.to(buffer)
            state.p_memory_dict[index] = buffer.new_zeros(rows)
        state.error_dict = self.kept
        state.q_memory_dict = self.thin
        ddp.register_comm_hook(state, lambda state, bucket: self._exchange(state, bucket))

    def tensors(self) -> Mapping[str, Tensor]:
        """Tensors for a checkpoint. What a rank keeps is its own: another number of ranks begins with nothing."""
        own = f"kept.{self.dist.rank}-of-{self.dist.world_size}"
        found = {"count": self.count}
        found |= {f"thin.{index}": value for index, value in self.thin.items() if value.numel()}
        found |= {f"{own}.{index}": value for index, value in self.kept.items()}
        return found

    def _exchange(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        index = bucket.index()
        state.iter = int(self.count)
        if bucket.is_last():
            self.count.add_(1)
        if state.iter < self.start_step:
            return torchs.powerSGD_hook(state, bucket)
        before = self.kept[index]
        thin = self.thin[index].clone()

        def unspoilt(done: torch.futures.Future[Tensor]) -> Tensor:
            """An update that is not finite is left out, and what would spoil all that follow, too."""
            gradients = done.value()
            finite = torch.isfinite(gradients).all()
            self.kept[index] = torch.where(finite, self.kept[index], before)
            self.thin[index] = torch.where(finite, self.thin[index], thin)
            return gradients

        return torchs.powerSGD_hook(state, bucket).then(unspoilt)


class _LastFirst(DistributedDataParallel):
    """Lays out its buckets from the model's end to its start, about as the backward pass is done with them.

    A bucket is sent when its gradients are there and all before it are sent: with the first layers in the first one,
    nothing would be exchanged before the backward pass is over. torch has no public way to say the order.
    """

    def _build_params_for_reducer(self) -> tuple[list[nn.Parameter], list[bool]]:
        parameters, sparse = super()._build_params_for_reducer()  # type: ignore[no-untyped-call]
        return parameters[::-1], sparse[::-1]


@dataclass(frozen=True)
class Replicated:
    """`DistributedDataParallel` with gradients living in the communication buckets. Fields: see `replicated`."""

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
        # After its first step DDP lays out its buckets anew, which changes the order in which three and more ranks are
        # summed. Have it do so before: else the first step of a run that goes on differs in its last bits from the
        # same step of one that was never interrupted.
        laid_out = device.type == "cpu" and not self.find_unused_parameters and isinstance(self.comm_hook, str)
        kind = _LastFirst if laid_out else DistributedDataParallel
        ddp = kind(
            model, device_ids=None if device.type == "cpu" else [device.index], bucket_cap_mb=self.bucket_cap_mb,
            find_unused_parameters=self.find_unused_parameters, gradient_as_bucket_view=True,
            static_graph=self.static_graph,
        )  # fmt: skip
        if not isinstance(self.comm_hook, str):
            self.comm_hook.attach(ddp)
        elif self.comm_hook != "none":
            from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

            hooks = {"fp16": default_hooks.fp16_compress_hook, "bf16": default_hooks.bf16_compress_hook}
            ddp.register_comm_hook(None, hooks[self.comm_hook])
        if laid_out:
            ddp.reducer._push_all_rebuilt_params()
        return ddp

    def tensors(self) -> Mapping[str, Tensor]:
        """State of the hook."""
        if isinstance(self.comm_hook, str):
            return {}
        return self.comm_hook.tensors()

    def share_buffers(self, model: nn.Module) -> Callable[[], Mapping[int, Tensor]]:
        """Take the exchange of ``model``'s buffers, BatchNorm's statistics, out of its forward pass. Returns what makes
        it, on all ranks: it gives all those of rank 0, and returns a copy of each by its address.

        After an update's last backward pass, so that with the weights of an update every rank has its statistics.
        """
        assert isinstance(model, DistributedDataParallel)
        if self.dist.world_size == 1:
            return dict
        model.broadcast_buffers = False
        inner = model.module

        @torch.no_grad()
        def share() -> Mapping[int, Tensor]:
            kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
            for buffer in inner.buffers():
                if buffer.numel():
                    kinds.setdefault((buffer.dtype, buffer.device), []).append(buffer)
            copies: dict[int, Tensor] = {}
            for buffers in kinds.values():
                flat = torch.cat([buffer.flatten() for buffer in buffers])
                torch.distributed.broadcast(flat, src=0)
                parts = flat.split([buffer.numel() for buffer in buffers])
                shaped = [part.view_as(buffer) for part, buffer in zip(parts, buffers, strict=True)]
                if not self.dist.is_main:
                    torch._foreach_copy_(buffers, shaped)
                copies |= {buffer.data_ptr(): part for buffer, part in zip(buffers, shaped, strict=True)}
            return copies

        return share

    def grad_sync(self, model: nn.Module, *, enabled: bool) -> AbstractContextManager[object]:
        assert isinstance(model, DistributedDataParallel)
        if enabled:
            return nullcontext()
        return model.no_sync()


@dataclass(frozen=True, kw_only=True)
class Compression:
    """Compression of the gradients between ranks; the model computes in `train.precision`."""

    comm_hook: Literal["none", "fp16", "bf16", "powersgd"] = "none"
    """Compression of the gradients between ranks; the model computes in `train.precision`. ``fp16`` and ``bf16`` halve
    the traffic and round each rank's gradients, fp16 to more digits of a smaller range. ``powersgd`` sends matrices of
    few columns and adds what they leave out to the next ones; a rank keeps that for itself, as much as it has weights,
    and a checkpoint holds it for all ranks."""
    powersgd_rank: int = 4
    """Rank of PowerSGD's matrices."""
    powersgd_start_step: int = 1000
    """Number of uncompressed exchanges before PowerSGD starts."""

    def power_sgd(self, dist: Distributed, precision: str) -> PowerSGD:
        """PowerSGD's hook. Raises UserError where it cannot be."""
        must_be = "bf16 or fp32 with PowerSGD: what it keeps back is in units of a loss scale that changes"
        require(precision not in ("fp16", "o2"), "train.precision", precision, must_be)
        must_be = "2 or more: torch sends two whole"
        require(self.powersgd_start_step >= 2, "strategy.powersgd_start_step", self.powersgd_start_step, must_be)
        must_be = "1 or more: its matrices have at least one column"
        require(self.powersgd_rank >= 1, "strategy.powersgd_rank", self.powersgd_rank, must_be)
        return PowerSGD(dist, self.powersgd_rank, self.powersgd_start_step)


def replicated(
    dist: Distributed,
    precision: str = "fp32",
    *,
    bucket_cap_mb: int = 25,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    compression: Compression,
    sync_batchnorm: bool = False,
) -> Replicated:
    """Options; `torch.nn.parallel.DistributedDataParallel` documents them further.

    ``bucket_cap_mb``: size of the buckets in which gradients are exchanged, in MiB. ``find_unused_parameters``: for
    models that do not use all parameters in each update. ``static_graph``: torch records the order of the gradients
    once; only without accumulation. ``sync_batchnorm``: compute BatchNorm's statistics over all ranks; needs GPUs.

    Raises UserError where PowerSGD cannot be.
    """
    hook: str | PowerSGD = compression.comm_hook
    if hook == "powersgd":
        must_be = "false with PowerSGD: it needs buckets that stay as they are"
        require(not find_unused_parameters, "strategy.find_unused_parameters", "true", must_be)
        hook = compression.power_sgd(dist, precision)
    return Replicated(dist, bucket_cap_mb, find_unused_parameters, static_graph, hook, sync_batchnorm)
