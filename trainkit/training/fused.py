"""The updates of torch's fused optimizers, for less than `Optimizer.step` takes.

Their kernel makes the update of all parameters at once. What `step` does around it takes longer on a small model: it
looks through all parameters and their state anew, sorts them by device and format, and marks itself for a profiler that
nearly never runs; of a sharded model it takes each shard out of its DTensor. None of that changes between two updates.
Here the same kernels get the same arguments, from lists that are kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd import _profiler_enabled  # type: ignore[attr-defined]
from torch.optim import optimizer as hooks

_MOMENTS = {torch.optim.AdamW: ("exp_avg", "exp_avg_sq", "step"), torch.optim.SGD: ("momentum_buffer",)}


class _Part(NamedTuple):
    """Parameters of one group, device and format."""

    group: Mapping[str, Any]
    """What says how they learn: the optimizer's own, whose ``lr`` changes."""
    parameters: list[Tensor]
    moments: list[list[Tensor]]
    """By kind, and then as the parameters."""


class Stepper:
    """Makes the updates of an optimizer, which stays as it is to everybody who looks at it.

    Where it is not one of torch's fused, somebody has hooks on it, a profile is under way, or some parameter has no
    gradient or no state yet, that is its own ``step``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._names = _MOMENTS.get(type(optimizer), ())
        self._state: object = ()
        self._groups: tuple[object, int] = ((), 0)
        self._parts: list[_Part] = []

    def step(self, nonfinite: Tensor | None = None) -> None:
        """Make an update.

        Args:
            nonfinite: for an optimizer that can do without asking the device: 1.0 there, and the update comes to
                nothing.
        """
        optimizer = self._optimizer
        gradients = self._gradients()
        if gradients:
            with torch.no_grad():
                for part, own in zip(self._parts, gradients, strict=True):
                    _update(part, own, nonfinite)
            return
        if nonfinite is not None:
            self._begin_momentum()
            optimizer.found_inf = nonfinite  # type: ignore[attr-defined]
        optimizer.step()

    def clear(self) -> None:
        """Forget the gradients."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def _begin_momentum(self) -> None:
        """SGD's first update makes room for it, and what happens to be there stays if that update comes to nothing; a
        later one adds to it. Beginning with zeros is the same."""
        optimizer = self._optimizer
        if type(optimizer) is torch.optim.SGD and optimizer.defaults["momentum"] and not optimizer.state:
            elsewhere = getattr(optimizer, "elsewhere", ())  # on another rank
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None and id(parameter) not in elsewhere:
                        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    def _gradients(self) -> list[list[Tensor]]:
        """Of each part; empty where the optimizer has to make the update itself."""
        optimizer = self._optimizer
        hooked = (
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or hooks._global_optimizer_pre_hooks
            or hooks._global_optimizer_post_hooks
        )
        if not self._names or hooked or _profiler_enabled():
            return []
        # Loading a checkpoint replaces the state, and somebody may have added a group.
        groups = optimizer.param_groups
        if optimizer.state is not self._state or self._groups != (id(groups), len(groups)):
            self._parts = self._planned()
            if self._parts:
                self._state, self._groups = optimizer.state, (id(groups), len(groups))
        gradients = []
        for part in self._parts:
            own = [parameter.grad for parameter in part.parameters]
            if any(gradient is None for gradient in own):
                return []
            gradients.append(cast(list[Tensor], own))
        return gradients

    def _planned(self) -> list[_Part]:
        """What to do for an update; empty while there is not all of a state, or the optimizer is of another kind."""
        parts: dict[tuple[int, torch.device, torch.dtype], _Part] = {}
        for number, group in enumerate(self._optimizer.param_groups):
            kinds = self._names if group.get("momentum", 1) else ()
            if not group["fused"] or group.get("amsgrad"):
                return []
            for parameter in group["params"]:
                state = self._optimizer.state.get(parameter, {})
                if any(state.get(kind) is None for kind in kinds):
                    return []
                key = (number, parameter.device, parameter.dtype)
                part = parts.setdefault(key, _Part(group, [], [[] for _ in kinds]))
                part.parameters.append(parameter)
                for moments, kind in zip(part.moments, kinds, strict=True):
                    moments.append(state[kind])
        return list(parts.values())


def _update(part: _Part, gradients: list[Tensor], nonfinite: Tensor | None) -> None:
    group, parameters, moments = part
    if nonfinite is not None:
        nonfinite = nonfinite.to(gradients[0].device)  # of parameters that are kept in host memory
    if hasattr(gradients[0], "_local_tensor"):  # may be others in each update, other than what is kept of them
        parameters, gradients, *moments = map(_local, (parameters, gradients, *moments))
    common = {
        "lr": group["lr"],
        "weight_decay": group["weight_decay"],
        "maximize": group["maximize"],
        "grad_scale": None,
        "found_inf": nonfinite,
    }
    if "betas" not in group:
        torch._fused_sgd_(
            parameters,
            gradients,
            moments[0] if moments else [],
            momentum=group["momentum"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            is_first_step=False,
            **common,
        )
        return
    averages, squares, steps = moments
    beta1, beta2 = group["betas"]
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        parameters,
        gradients,
        averages,
        squares,
        [],
        steps,
        beta1=beta1,
        beta2=beta2,
        eps=group["eps"],
        amsgrad=False,
        **common,
    )
    if nonfinite is not None:
        torch._foreach_sub_(steps, [nonfinite] * len(steps))


def _local(tensors: list[Tensor]) -> list[Tensor]:
    return [getattr(tensor, "_local_tensor", tensor) for tensor in tensors]
