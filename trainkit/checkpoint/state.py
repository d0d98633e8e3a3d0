"""The state of a run as tensors: collect it, write it to safetensors, load it, or only its weights.

Names depend neither on the strategy nor on the world size. A tensor stays where it is, sharded or not: a save takes of
it what is a rank's own, and a load fills that.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as c10d
from safetensors.torch import load_file
from torch import Tensor, nn

from trainkit.checkpoint.format import file_name
from trainkit.checkpoint.safetensors_files import Stored, TensorEntry, TensorFacts, place_of
from trainkit.common.errors import UserError
from trainkit.distributed.process_group import Distributed, is_sharded, local_part


class Held:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.facts: Mapping[str, TensorFacts] = {
            name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()
        }

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def take(self, name: str, like: Tensor | None) -> Tensor:
        value = self._tensors[name]
        if like is not None:
            for dim, (first, length) in enumerate(zip(*place_of(like), strict=True)):
                value = value.narrow(dim, first, length)
        return value


class Sent:
    """Tensors that one rank sends to the others, one at a time. Names and shapes travel as JSON: nothing is unpickled.

    Every rank takes every tensor, in the order of ``facts``.

    Args:
        held: looked at on the sender only.
        sender: its rank.
    """

    def __init__(self, held: Stored | Held, dist: Distributed, sender: int = 0) -> None:
        self._held = held
        self._dist = dist
        self._sender = sender
        mine: list[Any] = []
        if dist.rank == sender:
            for name, (dtype, shape) in held.facts.items():
                mine.append([name, str(dtype).removeprefix("torch."), shape])
        self.facts: dict[str, TensorFacts] = {}
        for name, dtype_name, sizes in dist.broadcast_json(mine, src=sender):
            self.facts[str(name)] = (getattr(torch, dtype_name), tuple(map(int, sizes)))

    def take(self, name: str, like: Tensor | None) -> Tensor:
        dtype, shape = self.facts[name]
        # As bytes, which every backend carries, so that it stays the same; over this rank's own device.
        value = torch.empty(shape, dtype=dtype)
        if self._dist.rank == self._sender:
            value = self._held.read(name)
        value = value.to(self._dist.device).contiguous()
        if self._dist.world_size > 1 and value.numel():
            c10d.broadcast(value.view(-1).view(torch.uint8), src=self._sender)
        value = Held({name: value}).take(name, like)
        if like is not None and like.device.type == "meta":
            value = value.cpu()
        return value


TensorSource = Stored | Held | Sent
"""Source of a checkpoint's tensors: its files, memory, or another rank."""


def shares_of(
    stems: Mapping[str, Mapping[str, Tensor]], dist: Distributed
) -> tuple[dict[str, dict[TensorEntry, Tensor]], set[int]]:
    """Distribute what is written: each rank writes its own shards, and of a tensor that several ranks have, the lowest.

    Args:
        stems: stem -> name -> tensor, sharded (a DTensor) or not, on every rank or some; the same stems on every rank.

    Returns:
        File name -> entry -> this rank's part, where it lies; and the ranks that write anything, which is rank 0 alone
        if nothing is spread over the ranks.
    """
    split = {stem: _split(named) for stem, named in stems.items()}
    told: list[Any] = dist.gather_json({stem: [sorted(whole), bool(parts)] for stem, (whole, parts) in split.items()})
    files: dict[str, dict[TensorEntry, Tensor]] = {}
    writers = {0}
    for stem, (whole, parts) in split.items():
        owner: dict[str, int] = {}
        of_stem: set[int] = set()
        for rank, of_rank in enumerate(told):
            names, has_parts = of_rank[stem]
            for name in names:
                owner.setdefault(name, rank)
            if has_parts:
                of_stem.add(rank)
        of_stem.update(owner.values())
        of_stem = of_stem or {0}
        writers |= of_stem
        if dist.rank in of_stem:
            mine: dict[TensorEntry, Tensor] = {}
            for name, value in whole.items():
                if owner[name] == dist.rank:
                    mine[TensorEntry.of(name, value.dtype, value.shape)] = value
            file = file_name(stem, sorted(of_stem).index(dist.rank), len(of_stem))
            files[file] = {**mine, **parts}
    return files, writers


def _split(named: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[TensorEntry, Tensor]]:
    """Tensors that this rank has as a whole, and the parts of others that are its to write."""
    whole: dict[str, Tensor] = {}
    parts: dict[TensorEntry, Tensor] = {}
    for name, value in named.items():
        offset, shape = place_of(value)
        if shape == tuple(value.shape):
            whole[name] = local_part(value).detach()
        elif math.prod(value.shape) == 0:  # nobody has anything of it
            whole[name] = torch.empty(value.shape, dtype=value.dtype)
        elif math.prod(shape) and _is_first_copy(value):
            parts[TensorEntry(name, value.dtype, shape, tuple(value.shape), offset)] = local_part(value).detach()
    return whole, parts


def _is_first_copy(value: Any) -> bool:
    """Tell the first copy, along each dimension of the mesh, of a shard that several ranks have (HSDP)."""
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return False
    for mine, placement in zip(coordinate, value.placements, strict=True):
        if mine != 0 and placement.is_replicate():
            return False
    return True


_NUMBER = ":number"
"""Ends the name of a value that is no tensor to its optimizer."""

# Parts of the names of parameters that wrappers add, beside the `module.` of DDP and DataParallel.
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Name in the plain model -> the model's own tensor, a sharded one as it is; where it has one, its master."""
    inner = unwrapped(model)
    state = inner.state_dict()
    for name, parameter in inner.named_parameters(remove_duplicate=False):
        if hasattr(parameter, "master") and name in state:
            state[name] = parameter.master.detach()
    return {plain_name(name): value for name, value in state.items() if isinstance(value, Tensor)}


Named = nn.Module | Mapping[str, nn.Parameter]
"""A model whose parameters an optimizer has, or these by the names that they are saved by."""


def moments_of(model: Named, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Name -> the optimizer's own tensor, as this rank has it; a number as one.

    Of groups it is what the optimizer itself has changed: rates and the like come from the configuration.
    """
    found: dict[str, object] = {}
    for name, parameter in parameters_of(model).items():
        for kind, value in sorted(optimizer.state.get(parameter, {}).items()):
            found[f"state.{name}.{kind}"] = value
    built = getattr(optimizer, "as_built", None)
    for index, group in enumerate(optimizer.param_groups):  # where some count their updates
        for kind, value in sorted(group.items()):
            if isinstance(value, Tensor) or (built and kind != "lr" and value != built[index].get(kind)):
                found[f"group.{index}.{kind}"] = value
    moments: dict[str, Tensor] = {}
    for name, value in found.items():
        if isinstance(value, Tensor):
            moments[name] = value
        elif isinstance(value, float):
            moments[name + _NUMBER] = torch.tensor(value, dtype=torch.float64)
        elif isinstance(value, bool | int):
            moments[name + _NUMBER] = torch.tensor(value)  # bool, or int64
    return moments


def _place(name: str) -> tuple[str, str, str]:
    """Take a name apart: ``state`` or ``group``; the parameter's name, or the group's index; and the kind."""
    room, _, rest = name.partition(".")
    whose, _, kind = rest.rpartition(".")
    return room, whose, kind


def _as_kept(kind: str, value: Tensor) -> tuple[str, Any]:
    if kind.endswith(_NUMBER):
        return kind.removesuffix(_NUMBER), value.item()
    return kind, value


def load_weights(model: nn.Module, source: TensorSource, dist: Distributed) -> None:
    """Load weights into the model of every rank.

    Raises:
        UserError: on every rank, if they are those of another model for one of them.
    """
    own = weights_of(model)
    dist.raise_together(_misfit(_shapes(own), source.facts))
    _fill(own, source)
    follow_masters(model.parameters())


def load_where_named(into: Mapping[str, Tensor], source: TensorSource, dist: Distributed) -> None:
    """Give ``into`` what the source has of the same name; the rest stays, and may differ from rank to rank.

    Raises:
        UserError: on every rank, if one of them has another shape.
    """
    there = {name: source.facts[name] for name in into if name in source.facts}
    dist.raise_together(_misfit(_shapes({name: into[name] for name in there}), there))
    _fill(into, source)


def load_moments(model: Named, optimizer: torch.optim.Optimizer, source: TensorSource, dist: Distributed) -> None:
    """Load optimizer state into the optimizer of every rank: that of the parameters which it has there.

    Raises:
        UserError: on every rank, if it is that of another model or optimizer for one of them.
    """
    own = parameters_of(model)
    groups = optimizer.param_groups
    places = {name: _place(name) for name in source.facts}

    def fits(name: str, shape: tuple[int, ...]) -> bool:
        room, whose, _ = places[name]
        if room == "group":
            return shape == () and int(whose) < len(groups)
        if room != "state" or whose not in own:
            return False
        # A count of updates and the like is a single number; everything else is one number per weight, or, where a rank
        # has the whole weight, fewer.
        weight = own[whose]
        return shape in ((), tuple(weight.shape)) or (not is_sharded(weight) and math.prod(shape) < weight.numel())

    shapes: dict[str, tuple[int, ...] | None] = {}
    for name, (_, shape) in source.facts.items():
        shapes[name] = shape if fits(name, shape) else None
    dist.raise_together(_misfit(shapes, source.facts))
    order = [parameter for group in groups for parameter in group["params"]]
    # Ids of parameters whose state is another rank's to keep.
    elsewhere: frozenset[int] = getattr(optimizer, "elsewhere", frozenset())
    held = {id(parameter) for parameter in order} - elsewhere
    loaded: dict[nn.Parameter, dict[str, Any]] = {}
    changed: list[tuple[int, str, Any]] = []
    for name, (dtype, shape) in source.facts.items():
        room, whose, kind = places[name]
        if room == "group":
            changed.append((int(whose), *_as_kept(kind, source.take(name, torch.empty(shape, device="meta")))))
            continue
        target = own[whose]
        if id(target) not in held:
            source.take(name, None)
        elif shape == tuple(target.shape) and shape != ():
            with torch.no_grad():
                value = torch.empty_like(target, dtype=dtype)
                local_part(value).copy_(source.take(name, target))
            loaded.setdefault(target, {})[kind] = value
        else:  # on the CPU, where optimizers keep their counts; what needs them on the GPU moves them
            kind, count = _as_kept(kind, source.take(name, torch.empty(shape, device="meta")))
            loaded.setdefault(target, {})[kind] = count.to(target.device) if shape else count
    state = {index: loaded[parameter] for index, parameter in enumerate(order) if parameter in loaded}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    for target, kinds in loaded.items():  # torch gives all of it the format of the weights
        for kind, value in kinds.items():
            if isinstance(value, Tensor) and value.dtype != optimizer.state[target][kind].dtype:
                optimizer.state[target][kind] = value
    for index, kind, value in changed:  # not `groups`: torch has made new ones meanwhile
        optimizer.param_groups[index][kind] = value


def _fill(into: Mapping[str, Tensor], source: TensorSource) -> None:
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
    for parameter in parameters:
        if hasattr(parameter, "master"):
            parameter.copy_(parameter.master)


def plain_name(name: str) -> str:
    """A parameter's name in the plain model."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of `DataParallel` or DDP, or the model itself."""
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        return cast(nn.Module, model.module)
    return model


def parameters_of(model: Named) -> Mapping[str, nn.Parameter]:
    """Name in the plain model -> parameter, or its master."""
    if isinstance(model, Mapping):
        return model
    unwrapped(model).state_dict()  # a sharded model shows its parameters as the optimizer knows them from then on
    return {plain_name(name): master_of(parameter) for name, parameter in unwrapped(model).named_parameters()}


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(value.shape) for name, value in tensors.items()}


def _misfit(own: Mapping[str, tuple[int, ...] | None], there: Mapping[str, TensorFacts]) -> UserError | None:
    """The error where tensors of one name differ in their shape, or one is missing."""
    for name in {**there, **own}:
        expected = own.get(name)
        found = there[name][1] if name in there else None
        if expected != found:
            why = f"'{name}' is {shape_in_words(found)} in the checkpoint and {shape_in_words(expected)} in the model."
            fix = "Use its own configuration (config.yaml in its run folder), and data of its classes and image size."
            return UserError("The checkpoint does not fit the model.", why=why, fix=fix)
    return None


def shape_in_words(shape: tuple[int, ...] | None) -> str:
    if shape is None:
        return "absent"
    return str(shape) if shape else "one number"


# Keys of the weights in a file that holds more: averaged ones first, which are the better ones.
_INSIDE = ("state_dict_ema", "model_ema", "ema", "state_dict", "model", "module")


def start_from(file: Path, model: nn.Module, dist: Distributed) -> tuple[str, ...]:
    """Give ``model`` the weights in ``file``; names of what stays as it is, for another head than the file's.

    Every rank calls it, whatever the strategy; only rank 0 reads the file. A ``.safetensors`` file, or one of
    ``torch.save``, of which only tensors and plain values are unpickled. Prefixes of DDP and of torch.compile are left
    out.

    Raises:
        UserError: on every rank, if the file cannot be read or is of another network.
    """
    own = weights_of(model)
    given = dist.together(lambda: _read(file) if dist.is_main else {})
    anew = dist.together(lambda: _left_out(file, given, own) if dist.is_main else [])
    taken = {name: value for name, value in given.items() if name in own and name not in anew}
    load_where_named(own, Sent(Held(taken), dist), dist)
    follow_masters(model.parameters())
    return tuple(dist.broadcast_json(anew))


def _read(file: Path) -> dict[str, Tensor]:
    try:
        if file.suffix == ".safetensors":
            held: object = load_file(file)
        else:
            # timm's and torchvision's training scripts save their arguments beside the weights.
            with torch.serialization.safe_globals([argparse.Namespace]):
                held = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as problem:  # whatever torch makes of a file that is something else
        why = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        # By its name, for nothing here has to do with pickle. Torch's own words advise to run whatever is in there.
        if type(problem).__name__ == "UnpicklingError":
            why = (
                "It is not a file of torch.save, or has objects other than tensors, which could run code of a stranger"
            )
        what = f"The weights in {file} cannot be read."
        why = f"{why}.".replace("..", ".")
        fix = "Use a .safetensors file, or one that torch.save(model.state_dict(), FILE) has written."
        raise UserError(what, why=why, fix=fix, key="model.checkpoint") from problem
    for key in _INSIDE:
        if isinstance(held, Mapping) and isinstance(held.get(key), Mapping):
            held = held[key]
            break
    tensors: dict[str, Tensor] = {}
    for name, value in held.items() if isinstance(held, Mapping) else ():
        if isinstance(value, Tensor) and name != "n_averaged":  # a count of torch's AveragedModel
            tensors[plain_name(str(name)).removeprefix("module.")] = value
    if not tensors:
        why = "It is not a mapping of names to tensors, and has none under 'state_dict' or 'model'."
        fix = "Write it with torch.save(model.state_dict(), FILE)."
        raise UserError(f"There are no weights in {file}.", why=why, fix=fix, key="model.checkpoint")
    return tensors


def _left_out(file: Path, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """Names of the model's own head, if the file has another one."""
    there = _shapes(given)
    here = _shapes(own)
    matrices = [name for name, shape in here.items() if len(shape) > 1]
    head = f"{matrices[-1].rpartition('.')[0]}." if matrices else ""
    different: list[str] = []
    for name in {**here, **there}:
        # Older torch had no num_batches_tracked, and nobody needs it.
        is_needed = name in there or not name.endswith(".num_batches_tracked")
        if is_needed and there.get(name) != here.get(name):
            different.append(name)
    wrong = [name for name in different if not head or not name.startswith(head)]
    if wrong:
        words = [
            f"{name} is {shape_in_words(there.get(name))} there, {shape_in_words(here.get(name))} here"
            for name in wrong[:3]
        ]
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        what = f"The weights in {file} belong to another network."
        fix = "Give model.name and its options as they were when the file was made."
        raise UserError(what, why=f"{'; '.join(words)}{more}.", fix=fix, key="model.checkpoint")
    if not different:
        return []
    return [name for name in own if name in different or name.startswith(head)]
