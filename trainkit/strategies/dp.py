"""DataParallel: one process splits each batch over the GPUs that it sees."""

import torch
from torch import nn

from trainkit.accelerators import REPLICATES
from trainkit.distributed.device import kind_of
from trainkit.distributed.process_group import Distributed
from trainkit.errors import require
from trainkit.strategies import AsItIs

RANKS = "one"
GPUS_PER_RANK = "all"


class DataParallelStrategy(AsItIs):
    """`nn.DataParallel` over every visible GPU; on CPU, or with one GPU, the model as it is.

    Raises UserError for several GPUs between which torch does not replicate a model.
    """

    def __init__(self, dist: Distributed) -> None:
        self._devices = list(range(torch.accelerator.device_count())) if dist.device.type != "cpu" else []
        kind = kind_of(dist.device)
        must_be = f"ddp with several GPUs by {kind.maker}: torch.nn.DataParallel does not know them"
        require(len(self._devices) < 2 or kind.has(REPLICATES), "strategy.name", "dp", must_be)

    def parallelize(self, model: nn.Module) -> nn.Module:
        return nn.DataParallel(model, device_ids=self._devices) if len(self._devices) > 1 else model


def build(dist: Distributed) -> DataParallelStrategy:
    """No options."""
    return DataParallelStrategy(dist)
