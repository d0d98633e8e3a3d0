"""What is in a checkpoint: full tensors, gathered from however many ranks, and scattered again to however many.

Tensors travel as tensors and their names as JSON. torch's own functions for this (torch.distributed.checkpoint's
``set_model_state_dict`` with ``broadcast_from_rank0``) send names and shapes pickled.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor, nn

from trainkit.distributed.process_group import Distributed
from trainkit.errors import UserError

# What wrappers put into the names of parameters, beside the `module.` of DDP and DataParallel.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def gather_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, dist: Distributed
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Full weights and optimizer state on rank 0's CPU, empty elsewhere. Every rank must call it.

    Names are those of the plain model: neither DDP's nor a sharding's trace is left in them. Only tensors are kept of
    the optimizer: learning rates and the like come from the configuration.
    """
    weights, moments = {}, {}
    for name, value in _tensors_of(model).items():
        full = _full(value, dist)
        if full is not None:
            weights[name] = full
    if optimizer is not None:
        for name, parameter in _parameters_of(model).items():
            for kind, value in sorted(optimizer.state.get(parameter, {}).items()):
                full = _full(value, dist) if isinstance(value, Tensor) else None
                if full is not None:
                    moments[f"state.{name}.{kind}"] = full
        for index, group in enumerate(optimizer.param_groups):  # where some count their updates
            for kind, value in sorted(group.items()):
                full = _full(value, dist) if isinstance(value, Tensor) else None
                if full is not None:
                    moments[f"group.{index}.{kind}"] = full
    return weights, moments


def gather_tensors(named: Mapping[str, Tensor], dist: Distributed) -> dict[str, Tensor]:
    """Full tensors on rank 0's CPU, empty elsewhere, of what the ranks have between them. Every rank must call it.

    A tensor may be sharded over the ranks (a DTensor), the same on every rank, or on some ranks only: the lowest one's
    counts.
    """
    told: list[Any] = dist.gather_json(
        [[name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in named.items()]
    )
    owners = {
        str(name): (rank, _dtype(dtype), [int(size) for size in shape])
        for rank, one in reversed([*enumerate(told)])
        for name, dtype, shape in one
    }
    full: dict[str, Tensor] = {}
    for name, (owner, dtype, shape) in sorted(owners.items()):
        value = _full(named[name], dist) if name in named else None
        if owner == dist.rank != 0:
            c10d.send(named[name].detach().cpu().contiguous().view(-1).view(torch.uint8), dst=0)
        elif owner != 0 and dist.is_main:
            value = torch.empty(shape, dtype=dtype)
            c10d.recv(value.view(-1).view(torch.uint8), src=owner)
        if value is not None:
            full[name] = value
    return full


def fill_tensors(into: Mapping[str, Tensor], tensors: Mapping[str, Tensor], dist: Distributed) -> None:
    """Give ``into`` what rank 0's ``tensors`` have of the same name; the rest stays. Every rank must call it.

    Raises:
        UserError: on every rank, if one of them has another shape.
    """
    there = _announced(tensors, dist)
    own = {name: tuple(value.shape) for name, value in into.items() if name in there}
    dist.raise_together(_misfit(own, {name: facts for name, facts in there.items() if name in own}))
    for name, (dtype, shape) in there.items():
        with torch.no_grad():
            value = _received(tensors.get(name), dtype, shape, dist)
            if name in into:
                _local(into[name]).copy_(_own_shard(value, into[name]))


def scatter_state_dict(model: nn.Module, weights: Mapping[str, Tensor], dist: Distributed) -> None:
    """Load rank 0's ``weights`` into the model of every rank; what the other ranks pass is not looked at.

    Raises:
        UserError: on every rank, if they are those of another model for one of them.
    """
    own = _tensors_of(model)
    there = _announced(weights, dist)
    dist.raise_together(_misfit({name: tuple(value.shape) for name, value in own.items()}, there))
    for name, (dtype, shape) in there.items():
        with torch.no_grad():
            value = _received(weights.get(name), dtype, shape, dist)
            target = own[name]
            _local(target).copy_(_own_shard(value, target))


def scatter_optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, moments: Mapping[str, Tensor], dist: Distributed
) -> None:
    """Load rank 0's optimizer state into the optimizer of every rank; what the others pass is not looked at.

    Raises:
        UserError: on every rank, if it is that of another model or optimizer for one of them.
    """
    _tensors_of(model)  # a sharded model shows its parameters as the optimizer knows them from then on
    own = _parameters_of(model)
    there = _announced(moments, dist)
    shapes: dict[str, tuple[int, ...] | None] = {}
    for name, (_, shape) in there.items():
        if name.startswith("group."):
            shapes[name] = () if int(name.split(".")[1]) < len(optimizer.param_groups) else None
            continue
        parameter, _, kind = name.removeprefix("state.").rpartition(".")
        # A count of updates and the like is a single number; everything else is one number per weight.
        fits = parameter in own and shape in ((), tuple(own[parameter].shape))
        shapes[name] = shape if fits and name == f"state.{parameter}.{kind}" else None
    dist.raise_together(_misfit(shapes, there))
    loaded: dict[nn.Parameter, dict[str, Tensor]] = {}
    counts: dict[str, Tensor] = {}
    for name, (dtype, shape) in there.items():
        if name.startswith("group."):
            counts[name] = _received(moments.get(name), dtype, shape, dist).cpu()
            continue
        parameter, _, kind = name.removeprefix("state.").rpartition(".")
        target = own[parameter]
        with torch.no_grad():
            value = _received(moments.get(name), dtype, shape, dist)
            if shape == tuple(target.shape) and shape != ():
                shard = _own_shard(value, target)
                value = torch.empty_like(target, dtype=dtype)
                _local(value).copy_(shard)
            else:
                value = value.cpu()  # where optimizers keep their counts; what needs them on the GPU moves them
        loaded.setdefault(target, {})[kind] = value
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    state = {index: loaded[parameter] for index, parameter in enumerate(order) if parameter in loaded}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for name, count in counts.items():
        _, index, kind = name.split(".")
        optimizer.param_groups[int(index)][kind] = count


def plain_name(name: str) -> str:
    """A parameter's name in the plain model."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _inner(model: nn.Module) -> nn.Module:
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    return model.module if isinstance(model, wrappers) else model


def _tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Plain name -> the model's own tensor, sharded ones as they are."""
    state = _inner(model).state_dict()
    return {plain_name(name): value for name, value in state.items() if isinstance(value, Tensor)}


def _parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): parameter for name, parameter in _inner(model).named_parameters()}


def _full(value: Tensor, dist: Distributed) -> Tensor | None:
    """The whole tensor on rank 0's CPU, with memory of its own: safetensors refuses tied ones."""
    value = value.detach()
    if hasattr(value, "full_tensor"):  # sharded: a collective
        value = value.full_tensor()
    return value.cpu().clone(memory_format=torch.contiguous_format) if dist.is_main else None


def _announced(tensors: Mapping[str, Tensor], dist: Distributed) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Names, dtypes and shapes of rank 0's tensors, on every rank."""
    mine = [[name, str(value.dtype).removeprefix("torch."), list(value.shape)] for name, value in tensors.items()]
    told: Any = dist.broadcast_json(mine if dist.is_main else [])
    return {str(name): (_dtype(dtype), tuple(int(size) for size in shape)) for name, dtype, shape in told}


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    assert isinstance(dtype, torch.dtype), f"rank 0 announces a tensor of type {name!r}"
    return dtype


def _received(mine: Tensor | None, dtype: torch.dtype, shape: tuple[int, ...], dist: Distributed) -> Tensor:
    """Rank 0's tensor on this rank's device. It travels as bytes, which every backend carries, so it stays the same."""
    if dist.is_main:
        assert mine is not None
        value = mine.to(dist.device).contiguous()
    else:
        value = torch.empty(shape, dtype=dtype, device=dist.device)
    if dist.world_size > 1 and value.numel():
        c10d.broadcast(value.view(-1).view(torch.uint8), src=0)
    return value


def _own_shard(full: Tensor, like: Tensor) -> Tensor:
    """This rank's part of ``full``, if ``like`` is sharded: cut along each dimension of the mesh in turn."""
    mesh = getattr(like, "device_mesh", None)
    if mesh is None:
        return full
    for axis, placement in enumerate(like.placements):  # type: ignore[attr-defined]
        if not placement.is_replicate():
            parts = full.chunk(mesh.size(axis), dim=placement.dim)
            mine = mesh.get_local_rank(axis)
            full = parts[mine] if mine < len(parts) else full.narrow(placement.dim, 0, 0)
    return full


def _local(value: Tensor) -> Tensor:
    return value.to_local() if hasattr(value, "to_local") else value


def _misfit(
    own: Mapping[str, tuple[int, ...] | None], there: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]
) -> UserError | None:
    for name in [*there, *(name for name in own if name not in there)]:
        expected, found = own.get(name), there[name][1] if name in there else None
        if expected != found:
            return UserError(
                "The checkpoint does not fit the model.",
                why=f"'{name}' is {_words(found)} in the checkpoint and {_words(expected)} in the model.",
                fix="Use the configuration that the checkpoint was made with: config.yaml in its run folder.",
            )
    return None


def _words(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(shape) if shape else "one number"
