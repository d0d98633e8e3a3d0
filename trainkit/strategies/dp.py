"""DataParallel: one process splits each batch over the GPUs that it sees."""

import torch
from torch import nn

from trainkit.distributed.process_group import Distributed
from trainkit.strategies import AsItIs

RANKS = "one"
GPUS_PER_RANK = "all"


class DataParallelStrategy(AsItIs):
    """`nn.DataParallel` over every visible GPU; on CPU, or with one GPU, the model as it is."""

    def __init__(self, dist: Distributed) -> None:
        self._devices = list(range(torch.cuda.device_count())) if dist.device.type == "cuda" else []

    def parallelize(self, model: nn.Module) -> nn.Module:
        return nn.DataParallel(model, device_ids=self._devices) if len(self._devices) > 1 else model


def build(dist: Distributed) -> DataParallelStrategy:
    """No options."""
    return DataParallelStrategy(dist)
