"""PowerSGD (Vogels et al., arXiv 1905.13727): each gradient matrix travels as two thin ones, and what they leave out is
added to the next gradients. torch's hook, with a state that can be saved and that no bad update spoils."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as torchs
from torch.nn.parallel import DistributedDataParallel

from trainkit.distributed.process_group import Distributed

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket


@dataclass(frozen=True)
class PowerSGD:
    """The hook of one model. `attach` it before its first backward pass."""

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
        """Compress what ``ddp`` exchanges."""
        state = torchs.PowerSGDState(
            None,
            matrix_approximation_rank=self.rank,
            start_powerSGD_iter=self.start_step,
            orthogonalization_epsilon=1e-8,  # a gradient can vanish
        )
        # The state goes by buckets, which DDP would lay out anew after its first step, in this process or a later one.
        ddp.reducer._push_all_rebuilt_params()
        ddp.reducer._rebuild_buckets()
        for bucket in ddp.reducer._get_zeros_like_grad_buckets():
            index, buffer = bucket.index(), bucket.buffer()
            rows, columns = self._thin_sizes(bucket.gradients(), state.min_compression_rate)
            self.kept[index] = torch.zeros_like(buffer)
            # The same on every rank and in every process, so that no random state is to be saved.
            first = torch.randn(columns, generator=torch.Generator().manual_seed(index))
            self.thin[index] = first.to(buffer)
            state.p_memory_dict[index] = buffer.new_zeros(rows)
        state.error_dict, state.q_memory_dict = self.kept, self.thin
        ddp.register_comm_hook(state, lambda state, bucket: self._exchange(state, bucket))

    def tensors(self) -> Mapping[str, Tensor]:
        """What belongs into a checkpoint. What a rank keeps is its own: another number of ranks begins with nothing."""
        own = f"kept.{self.dist.rank}-of-{self.dist.world_size}"
        thin = {f"thin.{index}": value for index, value in self.thin.items() if value.numel()}
        return {"count": self.count, **thin, **{f"{own}.{index}": value for index, value in self.kept.items()}}

    def _exchange(self, state: Any, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        index = bucket.index()
        state.iter = int(self.count)
        if bucket.is_last():
            self.count.add_(1)
        if state.iter < self.start_step:
            return torchs.powerSGD_hook(state, bucket)
        before, thin = self.kept[index], self.thin[index].clone()

        def unspoilt(done: torch.futures.Future[Tensor]) -> Tensor:
            """An update that is not finite is left out, and what would spoil all that follow, too."""
            gradients = done.value()
            finite = torch.isfinite(gradients).all()
            self.kept[index] = torch.where(finite, self.kept[index], before)
            self.thin[index] = torch.where(finite, self.thin[index], thin)
            return gradients

        return torchs.powerSGD_hook(state, bucket).then(unspoilt)

    def _thin_sizes(self, gradients: list[Tensor], rate: float) -> tuple[int, int]:
        """Numbers of all first and of all second thin matrices of a bucket, as torch's hook lays them out."""
        rows = columns = 0
        for gradient in gradients:
            n, m = gradient.view(gradient.shape[0], -1).shape
            rank = min(n, m, self.rank)
            if torchs._should_compress(n, m, rank, rate)[0]:
                rows, columns = rows + n * rank, columns + m * rank
        return rows, columns
