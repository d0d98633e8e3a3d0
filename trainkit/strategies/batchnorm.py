"""BatchNorm over all ranks."""

from __future__ import annotations

from torch import nn

from trainkit.distributed.process_group import Distributed
from trainkit.errors import UserError


def synchronize_batchnorm(model: nn.Module, dist: Distributed) -> nn.Module:
    """Replace every BatchNorm by one whose statistics are those of the global batch.

    Raises UserError on CPU: torch implements `SyncBatchNorm` for GPUs only.
    """
    if dist.device.type != "cuda":
        raise UserError(
            "strategy.sync_batchnorm=true needs GPUs.",
            why="torch implements SyncBatchNorm for GPUs only.",
            fix="Remove it, or use a model without BatchNorm.",
        )
    converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return converted
