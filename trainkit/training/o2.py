"""O2: the model computes in fp16, all but its BatchNorm; what learns are fp32 weights beside it.

Known by that name from NVIDIA Apex (Micikevicius et al., arXiv 1710.03740). Autocast keeps fp32 weights, cast for each
operation; here nothing is cast in the forward pass, and gradients are fp16, half the bytes between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainkit.checkpoint.state import follow_masters, master_of
from trainkit.distributed.process_group import Distributed
from trainkit.training.precision import Precision, Stepped


def halve(model: nn.Module, dist: Distributed) -> nn.Module:
    """``model`` in fp16, in place, before it is parallelized: its BatchNorms stay fp32, and each parameter has its fp32
    value as ``master`` (`trainkit.checkpoint.state.master_of`), the same on every rank. Takes images of any format.
    """
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue  # sums over a batch do not fit into fp16
        for parameter in module.parameters(recurse=False):
            if parameter.dtype == torch.float32:  # a tied one is met again
                master = nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
                if dist.world_size > 1:  # as DDP does with the parameters, which are no longer these
                    torch.distributed.broadcast(master.data, src=0)
                parameter.master = master  # type: ignore[attr-defined]
                parameter.data = parameter.data.half()
        for buffer in module.buffers(recurse=False):
            if buffer.dtype == torch.float32:
                buffer.data = buffer.data.half()
    model.register_forward_pre_hook(_in_half)
    return model


def _in_half(model: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(item.half() if isinstance(item, Tensor) and item.is_floating_point() else item for item in inputs)


class O2(Precision):
    """Backward and update of a model that `halve` has halved, with a scaled loss."""

    def step(
        self, optimizer: torch.optim.Optimizer, parameters: Iterable[nn.Parameter], max_norm: float | None
    ) -> Stepped:
        """As `Precision.step`, on the masters of ``parameters``, which then follow them."""
        parameters = list(parameters)
        masters = [master_of(parameter) for parameter in parameters]
        for parameter, master in zip(parameters, masters, strict=True):
            if master is not parameter:
                master.grad, parameter.grad = None if parameter.grad is None else parameter.grad.float(), None
        stepped = super().step(optimizer, masters, max_norm)
        if stepped.skip is None:
            follow_masters(parameters)
        return stepped
