"""Mixed precision: which number format, autocast, and loss scaling for fp16."""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainkit.checkpoint.state import follow_masters, master_of
from trainkit.common.errors import RefusedError
from trainkit.data.loader import moved
from trainkit.distributed.device import allow_tf32, formats_of, is_free_to_ask
from trainkit.distributed.process_group import Distributed, is_sharded, local_part

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def choose_precision(asked: str, device: torch.device) -> str:
    """Return the number format to train in: for ``auto`` the fastest one of this device that trains well.

    Raises RefusedError when tf32 is asked for on a device without it.
    """
    formats = formats_of(device)
    if asked == "auto":
        return formats[0]
    if asked == "tf32" and "tf32" not in formats:
        why = "TF32 is a format of NVIDIA GPUs from Ampere on."
        fix = "Use train.precision=auto."
        raise RefusedError(f"train.precision=tf32 does not exist on {device.type}.", why=why, fix=fix)
    return asked


class Skip(NamedTuple):
    """fp16's loss scale around an update that it skipped, and where that began."""

    before: float
    after: float
    parameter: int
    """Index of the first trained parameter whose gradient was not finite on any rank."""


class Stepped(NamedTuple):
    """Outcome of one update."""

    norm: Tensor | None
    """The gradients' global norm before clipping, if it was needed."""
    nonfinite: Tensor
    """On the device: 1.0 where a gradient of any rank was infinite or not a number, and the weights stayed."""
    skip: Skip | None
    """fp16 only: the update was skipped. All ranks know it at once."""


class Precision:
    """Autocast, backward and update in one number format.

    ``skipped_steps`` counts the updates that fp16 skipped because a gradient overflowed.
    """

    def __init__(self, name: str, dist: Distributed) -> None:
        self.name = name
        self.skipped_steps = 0
        self._dist = dist
        self._dtype = _DTYPES.get(name)
        self._scaler = GradScaler(dist.device.type, enabled=name in ("fp16", "o2"))
        if dist.device.type != "cpu":
            allow_tf32(name == "tf32")

    @property
    def scales_loss(self) -> bool:
        """fp16 and o2: an update whose gradients overflow is skipped and tried again with a smaller scale."""
        return self._scaler.is_enabled()

    def autocast(self) -> AbstractContextManager[None]:
        """Around forward pass and loss."""
        if self._dtype is None:
            return nullcontext()
        return torch.autocast(self._dist.device.type, dtype=self._dtype)

    def around(self, module: nn.Module) -> nn.Module:
        """``module``, in place, whose ``forward`` computes in this format and gives float32."""
        if self._dtype is not None:
            module.forward = partial(_computed, module.forward, self._dist.device.type, self._dtype)
        return module

    def backward(self, loss: Tensor) -> None:
        """Accumulate gradients of ``loss``, scaled if need be."""
        self._scaler.scale(loss).backward()

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        max_norm: float | None,
        changes: Callable[[], None] = lambda: None,
    ) -> Stepped:
        """Clip, update, clear the gradients. Gradients that are not finite never reach the weights or the optimizer.

        All ranks skip as soon as one must: a sharded rank sees only its part of the gradients. Where a GPU would have
        to be waited for the answer stays there, and the fused optimizers skip by themselves; fp16 always asks.

        Args:
            changes: called before anything changes that a checkpoint holds, once the ranks have nothing more to tell
                each other.
        """
        parameters = list(parameters)
        if self.scales_loss:
            self._scaler.unscale_(optimizer)
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        norm = whole_norm = None
        if max_norm is None:
            checked = self._norm_here(gradients)
        else:
            norm = get_total_norm(gradients)
            whole_norm = checked = norm.full_tensor() if is_sharded(norm) else norm  # type: ignore[attr-defined]
        nonfinite = (~torch.isfinite(checked)).float()
        # Elsewhere the ranks have averaged their gradients, or have the norm of all: they hold the same.
        differ = self.scales_loss or (max_norm is None and any(map(is_sharded, gradients)))
        if differ and self._dist.world_size > 1:
            torch.distributed.all_reduce(nonfinite, op=torch.distributed.ReduceOp.MAX)
        # torch's fused optimizers look on the device for whether their update is to come to nothing.
        can_skip = getattr(optimizer, "_step_supports_amp_scaling", False)
        may_ask = self.scales_loss or is_free_to_ask(nonfinite.device) or not can_skip
        skip = None
        if may_ask and nonfinite.item():
            if self.scales_loss:
                skip = self._skip(parameters, changes)
        else:
            changes()
            if max_norm is not None and norm is not None:
                clip_grads_with_norm_(parameters, max_norm, norm)
            if not may_ask:
                _begin_momentum(optimizer)
                optimizer.found_inf = nonfinite  # type: ignore[attr-defined]  # torch's GradScaler tells it so, too
            optimizer.step()
            if self.scales_loss:
                self._scaler.update()
        optimizer.zero_grad()
        return Stepped(whole_norm, nonfinite, skip)

    def _norm_here(self, gradients: Sequence[Tensor]) -> Tensor:
        """The norm of this rank's gradients or shards, where they lie: FSDP can keep them in host memory."""
        parts = [local_part(gradient) for gradient in gradients]
        filled = [part for part in parts if part.numel()]
        return get_total_norm(filled).to(gradients[0].device if gradients else self._dist.device)

    def _skip(self, parameters: Sequence[nn.Parameter], changes: Callable[[], None]) -> Skip:
        """Count an update that is left out, lower the loss scale, and find where it began, on any rank."""
        bad = len(parameters) - 1
        for index, parameter in enumerate(parameters):
            if parameter.grad is not None and not torch.isfinite(local_part(parameter.grad)).all():
                bad = index
                break
        first = torch.tensor(bad, device=self._dist.device)
        if self._dist.world_size > 1:
            torch.distributed.all_reduce(first, op=torch.distributed.ReduceOp.MIN)
        changes()
        self.skipped_steps += 1
        # Not by the scaler's own look at the gradients: a sharded rank may have seen nothing in its part.
        state = self._scaler.state_dict()
        lower = {**state, "scale": state["scale"] * state["backoff_factor"], "_growth_tracker": 0}
        self._scaler.update(lower["scale"])
        self._scaler.load_state_dict(lower)
        return Skip(state["scale"], lower["scale"], int(first.item()))

    def state_dict(self) -> dict[str, Any]:
        """Plain numbers: the loss scale and its history."""
        return {"skipped_steps": self.skipped_steps, "scaler": self._scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict`; one of another precision has no scale, and the scaler starts anew."""
        self.skipped_steps = int(state.get("skipped_steps", 0))
        if self._scaler.is_enabled() and state.get("scaler"):
            self._scaler.load_state_dict(state["scaler"])


def _begin_momentum(optimizer: torch.optim.Optimizer) -> None:
    """Begin SGD's momentum with zeros, which is the same: its first update makes room for it, and what happens to be
    there stays if that update comes to nothing."""
    if isinstance(optimizer, torch.optim.SGD) and optimizer.defaults["momentum"] and not optimizer.state:
        elsewhere = getattr(optimizer, "elsewhere", ())  # on another rank
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None and id(parameter) not in elsewhere:
                    optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def to_half(model: nn.Module, dist: Distributed) -> nn.Module:
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
    model.register_forward_pre_hook(lambda model, inputs: tuple(map(_halved, inputs)))
    return model


def _halved(item: Any) -> Any:
    if isinstance(item, Tensor) and item.is_floating_point():
        return item.half()
    return item


def _computed(forward: Callable[..., Any], device: str, dtype: torch.dtype, *args: Any, **named: Any) -> Any:
    with torch.autocast(device, dtype=dtype):
        output = forward(*args, **named)
    return moved(output, lambda item: item.float() if item.dtype in _DTYPES.values() else item)


class O2(Precision):
    """Backward and update of a model of `to_half`, with a scaled loss.

    The model computes in fp16, all but its BatchNorm; what learns are fp32 weights beside it. Known by that name from
    NVIDIA Apex (Micikevicius et al., arXiv 1710.03740). Autocast keeps fp32 weights, cast for each operation; here
    nothing is cast in the forward pass, and gradients are fp16, half the bytes between ranks.
    """

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Iterable[nn.Parameter],
        max_norm: float | None,
        changes: Callable[[], None] = lambda: None,
    ) -> Stepped:
        """Do what `Precision.step` does on the masters of ``parameters``, which then follow them."""
        parameters = list(parameters)
        masters = [master_of(parameter) for parameter in parameters]
        for parameter, master in zip(parameters, masters, strict=True):
            if master is not parameter:
                master.grad = None if parameter.grad is None else parameter.grad.float()
                parameter.grad = None
        stepped = super().step(optimizer, masters, max_norm, changes)
        if stepped.skip is None:
            follow_masters(parameters)
        return stepped
