"""What of a model and an optimizer is in a checkpoint, by names that neither a strategy nor a world size shows in.

A tensor stays where it is, sharded or not: who saves takes of it what is a rank's own, who loads gives it that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import cast

import torch
from torch import Tensor, nn

from trainkit.checkpoint.source import Facts, Source
from trainkit.distributed.process_group import Distributed
from trainkit.distributed.sharded import local_part
from trainkit.errors import UserError

# What wrappers put into the names of parameters, beside the `module.` of DDP and DataParallel.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Name in the plain model -> the model's own tensor, a sharded one as it is; where it has one, its master."""
    inner = _inner(model)
    state = inner.state_dict()
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "master") and name in state:
            state[name] = parameter.master.detach()
    return {plain_name(name): value for name, value in state.items() if isinstance(value, Tensor)}


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Name -> the optimizer's own tensor, as this rank has it.

    Only tensors are kept of the optimizer: learning rates and the like come from the configuration.
    """
    moments: dict[str, Tensor] = {}
    for name, parameter in _parameters_of(model).items():
        for kind, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                moments[f"state.{name}.{kind}"] = value
    for index, group in enumerate(optimizer.param_groups):  # where some count their updates
        for kind, value in sorted(group.items()):
            if isinstance(value, Tensor):
                moments[f"group.{index}.{kind}"] = value
    return moments


def load_weights(model: nn.Module, source: Source, dist: Distributed) -> None:
    """Load weights into the model of every rank.

    Raises:
        UserError: on every rank, if they are those of another model for one of them.
    """
    own = weights_of(model)
    dist.raise_together(_misfit({name: tuple(value.shape) for name, value in own.items()}, source.facts))
    _fill(own, source)
    follow_masters(model.parameters())


def load_where_named(into: Mapping[str, Tensor], source: Source, dist: Distributed) -> None:
    """Give ``into`` what the source has of the same name; the rest stays, and may differ from rank to rank.

    Raises:
        UserError: on every rank, if one of them has another shape.
    """
    own = {name: tuple(value.shape) for name, value in into.items() if name in source.facts}
    dist.raise_together(_misfit(own, {name: facts for name, facts in source.facts.items() if name in own}))
    _fill(into, source)


def load_moments(model: nn.Module, optimizer: torch.optim.Optimizer, source: Source, dist: Distributed) -> None:
    """Load optimizer state into the optimizer of every rank: that of the parameters which it has there.

    Raises:
        UserError: on every rank, if it is that of another model or optimizer for one of them.
    """
    weights_of(model)  # a sharded model shows its parameters as the optimizer knows them from then on
    own = _parameters_of(model)
    shapes: dict[str, tuple[int, ...] | None] = {}
    for name, (_, shape) in source.facts.items():
        if name.startswith("group."):
            shapes[name] = () if int(name.split(".")[1]) < len(optimizer.param_groups) else None
            continue
        parameter, _, kind = name.removeprefix("state.").rpartition(".")
        # A count of updates and the like is a single number; everything else is one number per weight.
        fits = parameter in own and shape in ((), tuple(own[parameter].shape))
        shapes[name] = shape if fits and name == f"state.{parameter}.{kind}" else None
    dist.raise_together(_misfit(shapes, source.facts))
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Ids of parameters whose state is another rank's to keep.
    elsewhere: frozenset[int] = getattr(optimizer, "elsewhere", frozenset())
    held = {id(parameter) for parameter in order} - elsewhere
    loaded: dict[nn.Parameter, dict[str, Tensor]] = {}
    counts: dict[str, Tensor] = {}
    for name, (dtype, shape) in source.facts.items():
        number = torch.empty(shape, device="meta")
        if name.startswith("group."):
            counts[name] = source.take(name, number)
            continue
        parameter, _, kind = name.removeprefix("state.").rpartition(".")
        target = own[parameter]
        if id(target) not in held:
            source.take(name, None)
        elif shape == tuple(target.shape) and shape != ():
            with torch.no_grad():
                value = torch.empty_like(target, dtype=dtype)
                local_part(value).copy_(source.take(name, target))
            loaded.setdefault(target, {})[kind] = value
        else:  # on the CPU, where optimizers keep their counts; what needs them on the GPU moves them
            loaded.setdefault(target, {})[kind] = source.take(name, number)
    state = {index: loaded[parameter] for index, parameter in enumerate(order) if parameter in loaded}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for name, count in counts.items():
        _, index, kind = name.split(".")
        optimizer.param_groups[int(index)][kind] = count


def _fill(into: Mapping[str, Tensor], source: Source) -> None:
    with torch.no_grad():
        for name in source.facts:
            target = into.get(name)
            value = source.take(name, target)
            if target is not None:
                local_part(target).copy_(value)


def master_of(parameter: Tensor) -> nn.Parameter:
    """What learns and what is saved: the fp32 weights of a parameter that computes in fp16; else it does so itself."""
    return cast(nn.Parameter, getattr(parameter, "master", parameter))


@torch.no_grad()
def follow_masters(parameters: Iterable[nn.Parameter]) -> None:
    """Give each parameter the value of its master, which has changed."""
    pairs = [(parameter, parameter.master) for parameter in parameters if hasattr(parameter, "master")]
    if pairs:
        halves, masters = zip(*pairs, strict=True)
        torch._foreach_copy_(halves, masters)


def plain_name(name: str) -> str:
    """A parameter's name in the plain model."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def _inner(model: nn.Module) -> nn.Module:
    wrappers = (nn.DataParallel, nn.parallel.DistributedDataParallel)
    return model.module if isinstance(model, wrappers) else model


def _parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): master_of(parameter) for name, parameter in _inner(model).named_parameters()}


def _misfit(own: Mapping[str, tuple[int, ...] | None], there: Mapping[str, Facts]) -> UserError | None:
    for name in [*there, *(name for name in own if name not in there)]:
        expected, found = own.get(name), there[name][1] if name in there else None
        if expected != found:
            return UserError(
                "The checkpoint does not fit the model.",
                why=f"'{name}' is {_words(found)} in the checkpoint and {_words(expected)} in the model.",
                fix="Use the configuration that it was made with (config.yaml in its run folder), and data of the same "
                "classes and image size as then.",
            )
    return None


def _words(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else str(shape) if shape else "one number"
