"""The tensors of a model and an optimizer, by names that depend neither on the strategy nor on the world size.

A tensor stays where it is, sharded or not: a save takes of it what is a rank's own, and a load fills that.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
import torch.distributed as c10d
from torch import Tensor, nn

from trainkit.checkpoint.format import file_name
from trainkit.checkpoint.tensors import Entry, Stored, place_of
from trainkit.distributed.process_group import Distributed, is_sharded, local_part
from trainkit.errors import UserError


class Shares:
    """Who writes what: each rank its own shards, and of a tensor that several ranks have, the lowest one.

    Every rank calls it with the same stems. The ranks' answers are remembered while they do not change.
    """

    def __init__(self, dist: Distributed) -> None:
        self._dist = dist
        self._digests: list[str] = []
        self._told: list[dict[str, Any]] = []

    def of(self, stems: Mapping[str, Mapping[str, Tensor]]) -> tuple[dict[str, dict[Entry, Tensor]], tuple[int, ...]]:
        """This rank's share of stem -> name -> tensor, sharded (a DTensor) or not, on every rank or some.

        Returns file name -> entry -> this rank's part, where it lies; and the ranks that write anything, which is rank
        0 alone if nothing is spread over the ranks.
        """
        rank = self._dist.rank
        split = {stem: _split(named) for stem, named in stems.items()}
        own = {stem: {"whole": sorted(whole), "parts": bool(parts)} for stem, (whole, parts) in split.items()}
        digest = hashlib.sha256(json.dumps(own, sort_keys=True).encode()).hexdigest()
        digests = self._dist.gather_json(digest)
        if digests != self._digests:
            self._digests, self._told = digests, self._dist.gather_json(own)
        files: dict[str, dict[Entry, Tensor]] = {}
        writers = {0}
        for stem, (whole, parts) in split.items():
            owner: dict[str, int] = {}
            for other, told in enumerate(self._told):
                for name in told[stem]["whole"]:
                    owner.setdefault(name, other)
            of_stem = {*owner.values(), *(other for other, told in enumerate(self._told) if told[stem]["parts"])} or {0}
            writers |= of_stem
            if rank in of_stem:
                name = file_name(stem, sorted(of_stem).index(rank), len(of_stem))
                mine = {Entry.of(key, value): value for key, value in whole.items() if owner[key] == rank}
                files[name] = {**mine, **parts}
        return files, tuple(sorted(writers))


def _split(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[Entry, Tensor]]:
    """Tensors that this rank has as a whole, and the parts of others that are its to write."""
    whole: dict[str, Tensor] = {}
    parts: dict[Entry, Tensor] = {}
    for name, value in named.items():
        offset, shape = place_of(value)
        if shape == tuple(value.shape):
            whole[name] = local_part(value).detach()
        elif math.prod(value.shape) == 0:  # nobody has anything of it
            whole[name] = torch.empty(value.shape, dtype=value.dtype)
        elif math.prod(shape) and _is_first_copy(value):
            parts[Entry(name, value.dtype, shape, tuple(value.shape), offset)] = local_part(value).detach()
    return whole, parts


def _is_first_copy(value: Any) -> bool:
    """Of a shard that several ranks have (HSDP), the first along each dimension of the mesh counts."""
    coordinate = value.device_mesh.get_coordinate()
    return coordinate is not None and all(
        mine == 0 or not placement.is_replicate() for mine, placement in zip(coordinate, value.placements, strict=True)
    )


Facts = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a whole tensor."""


class Held:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.facts: Mapping[str, Facts] = {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def take(self, name: str, like: Tensor | None) -> Tensor:
        """This rank's part of a tensor, as ``like`` is sharded; None: nothing is wanted."""
        value = self._tensors[name]
        if like is not None:
            for dim, (first, length) in enumerate(zip(*place_of(like), strict=True)):
                value = value.narrow(dim, first, length)
        return value


class Sent:
    """Tensors that rank 0 sends to the others, one at a time. Names and shapes travel as JSON: nothing is unpickled.

    Args:
        held: looked at on rank 0 only.
    """

    def __init__(self, held: Stored | Held, dist: Distributed) -> None:
        self._held, self._dist = held, dist
        mine = [[name, str(dtype).removeprefix("torch."), list(shape)] for name, (dtype, shape) in held.facts.items()]
        told: Any = dist.broadcast_json(mine if dist.is_main else [])
        self.facts: Mapping[str, Facts] = {
            str(name): (_dtype(dtype), tuple(int(size) for size in shape)) for name, dtype, shape in told
        }

    def take(self, name: str, like: Tensor | None) -> Tensor:
        """As `Held.take`. Every rank takes every tensor, in the order of ``facts``."""
        dtype, shape = self.facts[name]
        # As bytes, which every backend carries, so that it stays the same; over this rank's own device.
        value = torch.empty(shape, dtype=dtype) if not self._dist.is_main else self._held.read(name)
        value = value.to(self._dist.device).contiguous()
        if self._dist.world_size > 1 and value.numel():
            c10d.broadcast(value.view(-1).view(torch.uint8), src=0)
        value = Held({name: value}).take(name, like)
        return value.cpu() if like is not None and like.device.type == "meta" else value


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    assert isinstance(dtype, torch.dtype), f"rank 0 announces a tensor of type {name!r}"
    return dtype


Source = Stored | Held | Sent
"""Of a checkpoint's tensors: its files, for a rank that sees them; memory; or rank 0."""

_NUMBER = ":number"
"""Ends the name of a value that is no tensor to its optimizer."""

# Parts of the names of parameters that wrappers add, beside the `module.` of DDP and DataParallel.
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
    """Name -> the optimizer's own tensor, as this rank has it; a number as one.

    Of groups it is what the optimizer itself has changed: rates and the like come from the configuration.
    """
    moments: dict[str, Tensor] = {}
    for name, parameter in _parameters_of(model).items():
        for kind, value in sorted(optimizer.state.get(parameter, {}).items()):
            moments.update(_kept(f"state.{name}.{kind}", value))
    built = getattr(optimizer, "as_built", None)
    for index, group in enumerate(optimizer.param_groups):  # where some count their updates
        for kind, value in sorted(group.items()):
            if isinstance(value, Tensor) or (built and kind != "lr" and value != built[index].get(kind)):
                moments.update(_kept(f"group.{index}.{kind}", value))
    return moments


def _kept(name: str, value: object) -> dict[str, Tensor]:
    if isinstance(value, Tensor):
        return {name: value}
    if isinstance(value, bool | int | float):
        dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
        return {f"{name}{_NUMBER}": torch.tensor(value, dtype=dtype)}
    return {}


def _restored(kind: str, value: Tensor) -> tuple[str, Any]:
    return (kind.removesuffix(_NUMBER), value.item()) if kind.endswith(_NUMBER) else (kind, value)


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
        # A count of updates and the like is a single number; everything else is one number per weight, or, where a rank
        # has the whole weight, fewer.
        fits = parameter in own and (
            shape in ((), tuple(own[parameter].shape))
            or (not is_sharded(own[parameter]) and math.prod(shape) < own[parameter].numel())
        )
        shapes[name] = shape if fits and name == f"state.{parameter}.{kind}" else None
    dist.raise_together(_misfit(shapes, source.facts))
    order = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    # Ids of parameters whose state is another rank's to keep.
    elsewhere: frozenset[int] = getattr(optimizer, "elsewhere", frozenset())
    held = {id(parameter) for parameter in order} - elsewhere
    loaded: dict[nn.Parameter, dict[str, Any]] = {}
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
            kind, count = _restored(kind, source.take(name, number))
            loaded.setdefault(target, {})[kind] = count.to(target.device) if shape else count
    state = {index: loaded[parameter] for index, parameter in enumerate(order) if parameter in loaded}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for target, kinds in loaded.items():  # torch gives all of it the format of the weights
        for kind, value in kinds.items():
            if isinstance(value, Tensor) and value.dtype != optimizer.state[target][kind].dtype:
                optimizer.state[target][kind] = value
    for name, count in counts.items():
        _, index, kind = name.split(".")
        kind, value = _restored(kind, count)
        optimizer.param_groups[int(index)][kind] = value


def _fill(into: Mapping[str, Tensor], source: Source) -> None:
    with torch.no_grad():
        for name in source.facts:
            target = into.get(name)
            value = source.take(name, target)
            if target is not None:
                local_part(target).copy_(value)


def master_of(parameter: Tensor) -> nn.Parameter:
    """The fp32 weights of a parameter that computes in fp16, which are trained and saved; else the parameter itself."""
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
