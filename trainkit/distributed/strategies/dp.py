"""DataParallel: one process splits each batch over the GPUs that it sees."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from trainkit.common.accelerators import REPLICATES
from trainkit.distributed.device import kind_of
from trainkit.distributed.process_group import Distributed
from trainkit.distributed.strategies.base import AsItIs

RANKS = "one"
GPUS_PER_RANK = "all"


class Replicas(nn.Module):
    """`nn.DataParallel` for GPUs that it does not know: each has a copy of the model, and a part of a batch.

    The parts are queued one after the other, by one thread. Statistics of BatchNorm are those of the first GPU.
    """

    def __init__(self, module: nn.Module, devices: list[torch.device]) -> None:
        super().__init__()
        self.module = module
        self._devices = devices

    def forward(self, *inputs: Tensor) -> Any:
        first, *others = self._devices
        parts = list(zip(*(item.chunk(len(self._devices)) for item in inputs), strict=True))
        outputs = [self.module(*parts[0])]
        for device, part in zip(others, parts[1:], strict=False):  # a small batch has fewer parts
            with torch.accelerator.device_index(device.index):
                # Through autograd: what the copies learn comes back to the first.
                tensors = [*self.module.named_parameters(), *self.module.named_buffers()]
                copies = {name: tensor.to(device) for name, tensor in tensors}
                moved = tuple(item.to(device) for item in part)
                outputs.append(functional_call(self.module, copies, moved).to(first))
        return torch.cat(outputs)


class DataParallelStrategy(AsItIs):
    """`nn.DataParallel` over every visible GPU; on CPU, or with one GPU, the model as it is."""

    def __init__(self, dist: Distributed) -> None:
        kind = dist.device.type
        self._devices: list[torch.device] = []
        if kind != "cpu":
            self._devices = [torch.device(kind, index) for index in range(torch.accelerator.device_count())]
        self._replicates = nn.DataParallel if kind_of(dist.device).has(REPLICATES) else Replicas

    def parallelize(self, model: nn.Module) -> nn.Module:
        if len(self._devices) < 2:
            return model
        return self._replicates(model, self._devices)


def build(dist: Distributed) -> DataParallelStrategy:
    """No options."""
    return DataParallelStrategy(dist)
