"""The state of a run as tensors: collect it, write it to safetensors, load it, or only its weights.

Names depend neither on the strategy nor on the world size. A tensor stays where it is, sharded or not: a save takes of
it what is a rank's own, and a load fills that.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
import torch.distributed as c10d
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from trainkit import fileio
from trainkit.checkpoint import format
from trainkit.checkpoint.format import BrokenCheckpointError, FileFacts, Record, file_name, path_of
from trainkit.distributed.process_group import Distributed, is_sharded, local_part
from trainkit.errors import UserError

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_CHUNK = 1 << 22
_SHARDS = "shards"
"""Key of the file's metadata that says of which tensors it holds a part, as JSON: name -> [shape of the whole, offset
of the part in it]."""

Facts = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a whole tensor."""


@dataclass(frozen=True)
class Entry:
    """A tensor of a file, or a part of one: its bytes may still be elsewhere."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Of what is in the file."""
    whole: tuple[int, ...]
    """Of the tensor it is a part of."""
    offset: tuple[int, ...]
    """Of the part in the whole."""

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, shape: Iterable[int]) -> Entry:
        """A whole tensor."""
        shape = tuple(shape)
        return cls(name, dtype, shape, shape, (0,) * len(shape))

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def write(
    put: Callable[[memoryview], object],
    entries: Iterable[Entry],
    tensor_of: Callable[[Entry], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> FileFacts:
    """Write a safetensors file (https://github.com/huggingface/safetensors#format); its size and hash.

    It is hashed on the way, and one tensor at a time is in memory: the format's own library does neither.

    Args:
        put: takes the file, part by part.
        tensor_of: asked once for each entry that is not empty; on any device.
        metadata: goes into the header.
    """
    # Large items first, so that each is aligned.
    entries = sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))
    tensors = (_bytes_of(tensor_of(entry)) for entry in entries if entry.bytes)
    digest, size = hashlib.sha256(), 0
    for data in itertools.chain([memoryview(_header(entries, metadata or {}))], tensors):
        for start in range(0, len(data), _CHUNK):
            part = data[start : start + _CHUNK]
            put(part)
            digest.update(part)  # while the processor has it near
        size += len(data)
    return FileFacts(size, digest.hexdigest())


def _bytes_of(value: Tensor) -> memoryview:
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    told: dict[str, object] = {}
    parts = {entry.name: [entry.whole, entry.offset] for entry in entries if entry.shape != entry.whole}
    if notes := {**metadata, **({_SHARDS: json.dumps(parts)} if parts else {})}:
        told["__metadata__"] = notes
    end = 0
    for entry in entries:
        begin, end = end, end + entry.bytes
        told[entry.name] = {"dtype": _DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Stored:
    """The tensors of one stem of a checkpoint that is `format.verified`: in one file, or one for each rank that wrote.

    They are read when they are asked for. Raises BrokenCheckpointError when the files do not hold whole tensors.
    """

    def __init__(self, folder: Path, record: Record, stem: str) -> None:
        self._stem = stem
        self._parts: dict[str, list[tuple[Any, Entry]]] = {}
        try:
            for name in record.files_of(stem):
                file = safe_open(path_of(folder, record.step) / name, framework="pt")
                for entry in _entries(file):
                    self._parts.setdefault(entry.name, []).append((file, entry))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise self._unreadable(error) from None
        for name, parts in self._parts.items():
            if not _tile([entry for _, entry in parts]):
                raise BrokenCheckpointError(f"the parts of '{name}' in {stem} are no whole")
        self.facts = {name: (parts[0][1].dtype, parts[0][1].whole) for name, parts in self._parts.items()}

    def read(self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """Read a tensor, or its part of ``shape`` from ``offset`` on, to the CPU.

        Raises BrokenCheckpointError when the disk no longer gives it.
        """
        dtype, whole = self.facts[name]
        offset, shape = offset or (0,) * len(whole), whole if shape is None else shape
        found = torch.empty(tuple(shape), dtype=dtype)
        try:
            for file, entry in self._parts[name]:
                begin = [max(a, b) for a, b in zip(entry.offset, offset, strict=True)]
                end = [min(a + n, b + m) for a, n, b, m in zip(entry.offset, entry.shape, offset, shape, strict=True)]
                if any(a >= b for a, b in zip(begin, end, strict=True)) or 0 in entry.shape:
                    continue
                there, here = (
                    tuple(slice(a - first, b - first) for a, b, first in zip(begin, end, of, strict=True))
                    for of in (entry.offset, offset)
                )
                # A slice of a tensor without dimensions cannot be asked for.
                found[here] = file.get_slice(name)[there] if there else file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise self._unreadable(error) from None
        return found

    def read_all(self) -> dict[str, Tensor]:
        """All tensors, on the CPU."""
        return {name: self.read(name) for name in self.facts}

    def take(self, name: str, like: Tensor | None) -> Tensor:
        """This rank's part of a tensor, as ``like`` is sharded; None: nothing is wanted."""
        return torch.empty(0) if like is None else self.read(name, *place_of(like))

    def _unreadable(self, error: Exception) -> BrokenCheckpointError:
        return BrokenCheckpointError(f"{self._stem}.safetensors is not readable ({error})")


class Held:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.facts: Mapping[str, Facts] = {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]

    def take(self, name: str, like: Tensor | None) -> Tensor:
        value = self._tensors[name]
        places = [] if like is None else zip(*place_of(like), strict=True)
        for dim, (first, length) in enumerate(places):
            value = value.narrow(dim, first, length)
        return value


class Sent:
    """Tensors that rank 0 sends to the others, one at a time. Names and shapes travel as JSON: nothing is unpickled.

    Every rank takes every tensor, in the order of ``facts``.

    Args:
        held: looked at on rank 0 only.
    """

    def __init__(self, held: Stored | Held, dist: Distributed) -> None:
        self._held, self._dist = held, dist
        mine = [[name, str(dtype).removeprefix("torch."), list(shape)] for name, (dtype, shape) in held.facts.items()]
        told: Any = dist.broadcast_json(mine if dist.is_main else [])
        self.facts: Mapping[str, Facts] = {
            str(name): (getattr(torch, dtype), tuple(int(size) for size in shape)) for name, dtype, shape in told
        }

    def take(self, name: str, like: Tensor | None) -> Tensor:
        dtype, shape = self.facts[name]
        # As bytes, which every backend carries, so that it stays the same; over this rank's own device.
        value = self._held.read(name) if self._dist.is_main else torch.empty(shape, dtype=dtype)
        value = value.to(self._dist.device).contiguous()
        if self._dist.world_size > 1 and value.numel():
            c10d.broadcast(value.view(-1).view(torch.uint8), src=0)
        value = Held({name: value}).take(name, like)
        return value.cpu() if like is not None and like.device.type == "meta" else value


Source = Stored | Held | Sent
"""Where a checkpoint's tensors come from: its files, memory, or rank 0."""


def place_of(value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of this rank's part of a tensor, cut along each dimension of its mesh in turn."""
    offset, shape = [0] * value.ndim, list(value.shape)
    if (mesh := getattr(value, "device_mesh", None)) is not None:
        for axis, placement in enumerate(value.placements):  # type: ignore[attr-defined]
            if not placement.is_replicate():
                dim, mine = placement.dim, mesh.get_local_rank(axis)
                size = -(-shape[dim] // mesh.size(axis))
                first = min(mine * size, shape[dim])
                offset[dim] += first
                shape[dim] = min(size, shape[dim] - first)
    return tuple(offset), tuple(shape)


def _entries(file: Any) -> Iterator[Entry]:
    """What a file says that it holds: names, dtypes, and where parts belong."""
    shards = fileio.parse((file.metadata() or {}).get(_SHARDS, "{}"))
    for name in file.keys():  # noqa: SIM118 - it is no mapping
        held = file.get_slice(name)
        shape = tuple(held.get_shape())
        whole, offset = map(tuple, shards.get(name, (shape, (0,) * len(shape))))
        for size in (*whole, *offset):
            if type(size) is not int or size < 0:
                raise ValueError(f"{size!r} is no size")
        if any(first + size > all_of_it for first, size, all_of_it in zip(offset, shape, whole, strict=True)):
            raise ValueError(f"a part of '{name}' lies outside of it")
        yield Entry(name, DTYPES[held.get_dtype()], shape, whole, offset)


def _tile(parts: Sequence[Entry]) -> bool:
    """Parts of one tensor, each of which is there once."""
    first = parts[0]
    alike = all((part.whole, part.dtype) == (first.whole, first.dtype) for part in parts)
    apart = len({part.offset for part in parts}) == len(parts)
    return alike and apart and sum(math.prod(part.shape) for part in parts) == math.prod(first.whole)


def export(folder: Path, which: str, stems: tuple[str, ...], file: Path, notes: Mapping[str, str]) -> tuple[int, str]:
    """Write the weights of a checkpoint (``best``, ``latest`` or a step) to one ``file`` that other libraries load.

    Returns its step, and the stem taken. The file is complete or absent, and replaces one that is there.

    Args:
        stems: the first of these that the checkpoint has.
        notes: for the file's metadata, besides ``format`` and ``step``.

    Raises:
        UserError: there is no such checkpoint, it is broken, or the file cannot be written.
    """
    step = format.resolve(folder, which)
    try:
        record = format.described(folder, step)
        stem = next((stem for stem in stems if stem in record.stems), stems[-1])
        format.compare(folder, record, record.files_of(stem))
        stored = Stored(folder, record, stem)
        entries = [Entry.of(name, *facts) for name, facts in stored.facts.items()]
        header = {"format": "pt", "step": str(step), **notes}
        with written(file) as out:
            write(out.write, entries, lambda entry: stored.read(entry.name), header)
    except BrokenCheckpointError as fault:
        others = ", ".join(str(other) for other in format.steps(folder) if other != step)
        what = f"The checkpoint of step {step} cannot be exported."
        fix = f"Use another: {others or 'there is none'}."
        raise UserError(what, why=f"{fault}.", fix=fix) from None
    return step, stem


@contextmanager
def written(file: Path) -> Iterator[BinaryIO]:
    """A file for others, complete or absent, in a folder that is made if need be. Raises UserError."""
    with fileio.disk_errors_as(f"{file} cannot be written.", fix="Give another place, or make room."):
        fileio.make_folder(file.parent)
        with fileio.replacing(file, durable=True) as out:
            yield out


def shares_of(
    stems: Mapping[str, Mapping[str, Tensor]], dist: Distributed
) -> tuple[dict[str, dict[Entry, Tensor]], set[int]]:
    """Who writes what: each rank its own shards, and of a tensor that several ranks have, the lowest one.

    Args:
        stems: stem -> name -> tensor, sharded (a DTensor) or not, on every rank or some; the same stems on every rank.

    Returns:
        File name -> entry -> this rank's part, where it lies; and the ranks that write anything, which is rank 0 alone
        if nothing is spread over the ranks.
    """
    split = {stem: _split(named) for stem, named in stems.items()}
    told: list[Any] = dist.gather_json({stem: [sorted(whole), bool(parts)] for stem, (whole, parts) in split.items()})
    files: dict[str, dict[Entry, Tensor]] = {}
    writers = {0}
    for stem, (whole, parts) in split.items():
        # From the highest rank down: what several hold is written by the lowest of them.
        owner = {key: other for other in reversed(range(len(told))) for key in told[other][stem][0]}
        of_stem = {*owner.values(), *(other for other, of_other in enumerate(told) if of_other[stem][1])} or {0}
        writers |= of_stem
        if dist.rank in of_stem:
            name = file_name(stem, sorted(of_stem).index(dist.rank), len(of_stem))
            mine = {key: value for key, value in whole.items() if owner[key] == dist.rank}
            files[name] = {**{Entry.of(key, value.dtype, value.shape): value for key, value in mine.items()}, **parts}
    return files, writers


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


def moments_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Name -> the optimizer's own tensor, as this rank has it; a number as one.

    Of groups it is what the optimizer itself has changed: rates and the like come from the configuration.
    """
    found: dict[str, object] = {
        f"state.{name}.{kind}": value
        for name, parameter in _parameters_of(model).items()
        for kind, value in sorted(optimizer.state.get(parameter, {}).items())
    }
    built = getattr(optimizer, "as_built", None)
    for index, group in enumerate(optimizer.param_groups):  # where some count their updates
        for kind, value in sorted(group.items()):
            if isinstance(value, Tensor) or (built and kind != "lr" and value != built[index].get(kind)):
                found[f"group.{index}.{kind}"] = value
    moments: dict[str, Tensor] = {}
    for name, value in found.items():
        if isinstance(value, Tensor):
            moments[name] = value
        elif isinstance(value, bool | int | float):
            dtype = torch.bool if isinstance(value, bool) else torch.int64 if isinstance(value, int) else torch.float64
            moments[name + _NUMBER] = torch.tensor(value, dtype=dtype)
    return moments


def _place(name: str) -> tuple[str, str, str]:
    """What a tensor is: ``state`` or ``group``; its parameter's name, or the group's index; and its kind."""
    room, _, rest = name.partition(".")
    whose, _, kind = rest.rpartition(".")
    return room, whose, kind


def _as_kept(kind: str, value: Tensor) -> tuple[str, Any]:
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
    dist.raise_together(_misfit(own, {name: source.facts[name] for name in own}))
    _fill(into, source)


def load_moments(model: nn.Module, optimizer: torch.optim.Optimizer, source: Source, dist: Distributed) -> None:
    """Load optimizer state into the optimizer of every rank: that of the parameters which it has there.

    Raises:
        UserError: on every rank, if it is that of another model or optimizer for one of them.
    """
    weights_of(model)  # a sharded model shows its parameters as the optimizer knows them from then on
    own, groups = _parameters_of(model), optimizer.param_groups
    places = {name: _place(name) for name in source.facts}

    def fits(name: str, shape: tuple[int, ...]) -> bool:
        room, whose, _ = places[name]
        if room == "group":
            return shape == () and int(whose) < len(groups)
        # A count of updates and the like is a single number; everything else is one number per weight, or, where a rank
        # has the whole weight, fewer.
        return room == "state" and whose in own and (
            shape in ((), tuple(own[whose].shape))
            or (not is_sharded(own[whose]) and math.prod(shape) < own[whose].numel())
        )  # fmt: skip

    shapes = {name: shape if fits(name, shape) else None for name, (_, shape) in source.facts.items()}
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
        elif id(target := own[whose]) not in held:
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
    return model.module if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel) else model


def _parameters_of(model: nn.Module) -> dict[str, nn.Parameter]:
    return {plain_name(name): master_of(parameter) for name, parameter in unwrapped(model).named_parameters()}


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


# Keys of the weights in a file that holds more: averaged ones first, which are the better ones.
_INSIDE = ("state_dict_ema", "model_ema", "ema", "state_dict", "model", "module")


def start_from(file: Path, model: nn.Module, dist: Distributed) -> tuple[str, ...]:
    """Give ``model`` the weights in ``file``; names of what stays as it is, for another head than the file's.

    Every rank calls it, whatever the strategy; only rank 0 reads the file. A ``.safetensors`` file, or one of
    ``torch.save``, of which only tensors are unpickled. Prefixes of DDP and of torch.compile are left out.

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
            held = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as problem:  # whatever torch makes of a file that is something else
        why = str(problem).splitlines()[0] if str(problem) else type(problem).__name__
        # By its name, for nothing here has to do with pickle. Torch's own words advise to run whatever is in there.
        if type(problem).__name__ == "UnpicklingError":
            why = "It is no file of torch.save, or holds more than tensors: objects that could run code of a stranger"
        what = f"The weights in {file} cannot be read."
        why = f"{why}.".replace("..", ".")
        fix = "Use a .safetensors file, or one that torch.save(model.state_dict(), FILE) has written."
        raise UserError(what, why=why, fix=fix, key="model.checkpoint") from problem
    for key in _INSIDE:
        if isinstance(held, Mapping) and isinstance(held.get(key), Mapping):
            held = held[key]
            break
    tensors = {str(k): v for k, v in held.items() if isinstance(v, Tensor)} if isinstance(held, Mapping) else {}
    if not tensors:
        why = "It is no mapping of names to tensors, nor does it hold one as 'state_dict' or 'model'."
        fix = "Write it with torch.save(model.state_dict(), FILE)."
        raise UserError(f"There are no weights in {file}.", why=why, fix=fix, key="model.checkpoint")
    return {plain_name(name).removeprefix("module."): value for name, value in tensors.items()}


def _left_out(file: Path, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> list[str]:
    """Names of the model's own head, if the file has another one."""
    there, here = ({name: tuple(value.shape) for name, value in of.items()} for of in (given, own))
    matrices = [name for name, shape in here.items() if len(shape) > 1]
    head = f"{matrices[-1].rpartition('.')[0]}." if matrices else ""
    different = [
        name
        for name in {**here, **there}  # older torch had no num_batches_tracked, and nobody needs it
        if there.get(name) != here.get(name) and (name in there or not name.endswith(".num_batches_tracked"))
    ]
    if wrong := [name for name in different if not (head and name.startswith(head))]:
        words = [f"{name} is {_words(there.get(name))} there, {_words(here.get(name))} here" for name in wrong[:3]]
        more = f"; and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        what = f"The weights in {file} are of another network."
        why = f"{'; '.join(words)}{more}."
        fix = "Give model.name and its options as they were when the file was made."
        raise UserError(what, why=why, fix=fix, key="model.checkpoint")
    return [name for name in own if name in different or (different and name.startswith(head))]
