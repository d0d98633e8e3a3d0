"""The state of a run as tensors: collect it, write it to safetensors, load it, or only its weights."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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

# One safetensors file: written as it is hashed, without a copy of what it holds.
#
# The format is safetensors' own (https://github.com/huggingface/safetensors#format): a length, a JSON header, the
# bytes of the tensors. Its library wants a copy of all of them before it writes, and a second look at the file to
# hash it.

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
}  # fmt: skip
_CHUNK = 1 << 22
SHARDS = "shards"
"""Key of the file's metadata that says of which tensors it holds a part, as JSON: name -> [shape of the whole, offset
of the part in it]."""


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
    def of(cls, name: str, value: Tensor) -> Entry:
        """A whole tensor."""
        return cls(name, value.dtype, tuple(value.shape), tuple(value.shape), (0,) * value.ndim)

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)

    @property
    def is_whole(self) -> bool:
        return self.shape == self.whole


def in_order(entries: Iterable[Entry]) -> list[Entry]:
    """As their bytes follow one another: large items first, so that each is aligned."""
    return sorted(entries, key=lambda entry: (-entry.dtype.itemsize, entry.name))


def write(
    out: BinaryIO,
    entries: Sequence[Entry],
    bytes_of: Callable[[Entry], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> FileFacts:
    """Fill an open file and flush it to the disk; its size and hash. Raises OSError.

    Args:
        entries: in any order.
        bytes_of: asked once for each entry that is not empty, `in_order`: its bytes, as a flat uint8 tensor on the CPU.
        metadata: goes into the header.
    """
    digest, size = hashlib.sha256(), 0

    def put(data: memoryview) -> None:
        nonlocal size
        while data:  # what a disk that is nearly full takes may be less
            try:
                done = out.write(data[:_CHUNK])
            except OSError as error:
                error.filename = out.name  # which a write does not tell
                raise
            digest.update(data[:done])  # while the processor has it near
            data, size = data[done:], size + done

    put(memoryview(_header(in_order(entries), metadata)))
    for entry in in_order(entries):
        if entry.bytes:
            put(bytes_of(entry).numpy().data)
    out.flush()
    os.fsync(out.fileno())
    return FileFacts(size, digest.hexdigest())


def as_bytes(value: Tensor) -> Tensor:
    """``value``, from any device, as a flat uint8 tensor on the CPU; a view where it can be."""
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8)


def _header(entries: Sequence[Entry], metadata: Mapping[str, str] | None) -> bytes:
    told: dict[str, object] = {}
    parts = {entry.name: [entry.whole, entry.offset] for entry in entries if not entry.is_whole}
    notes = {**(metadata or {}), **({SHARDS: json.dumps(parts)} if parts else {})}
    if notes:
        told["__metadata__"] = notes
    end = 0
    for entry in entries:
        begin, end = end, end + entry.bytes
        told[entry.name] = {"dtype": DTYPES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


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
            raise BrokenCheckpointError(f"{stem}.safetensors is not readable ({error})") from None
        for name, parts in self._parts.items():
            if not _tile([entry for _, entry in parts]):
                raise BrokenCheckpointError(f"the parts of '{name}' in {stem} are no whole")
        self.facts = {name: (parts[0][1].dtype, parts[0][1].whole) for name, parts in self._parts.items()}
        """Name -> dtype and shape of the whole."""

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
                there = tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, entry.offset, strict=True))
                here = tuple(slice(a - o, b - o) for a, b, o in zip(begin, end, offset, strict=True))
                # A slice of a tensor without dimensions cannot be asked for.
                found[here] = file.get_slice(name)[there] if there else file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise BrokenCheckpointError(f"{self._stem}.safetensors is not readable ({error})") from None
        return found

    def take(self, name: str, like: Tensor | None) -> Tensor:
        """This rank's part of a tensor, as ``like`` is sharded; None: nothing is wanted."""
        return torch.empty(0) if like is None else self.read(name, *place_of(like))


def place_of(value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of this rank's part of a tensor, cut along each dimension of its mesh in turn."""
    offset, shape = [0] * value.ndim, list(value.shape)
    mesh = getattr(value, "device_mesh", None)
    if mesh is not None:
        for axis, placement in enumerate(value.placements):  # type: ignore[attr-defined]
            if not placement.is_replicate():
                dim, mine = placement.dim, mesh.get_local_rank(axis)
                size = -(-shape[dim] // mesh.size(axis))
                first = min(mine * size, shape[dim])
                offset[dim] += first
                shape[dim] = min(size, shape[dim] - first)
    return tuple(offset), tuple(shape)


def read_tensors(folder: Path, record: Record, stem: str) -> dict[str, Tensor]:
    """All tensors of a stem of a checkpoint that is `format.verified`, on the CPU.

    Raises BrokenCheckpointError when there are none.
    """
    stored = Stored(folder, record, stem)
    return {name: stored.read(name) for name in stored.facts}


def _entries(file: Any) -> Iterator[Entry]:
    """What a file says that it holds: names, dtypes, and where parts belong."""
    shards = fileio.parse((file.metadata() or {}).get(SHARDS, "{}"))
    for name in file.keys():  # noqa: SIM118 - it is no mapping
        held = file.get_slice(name)
        shape = tuple(held.get_shape())
        whole, offset = shards.get(name, (shape, (0,) * len(shape)))
        whole, offset = tuple(map(_size, whole)), tuple(map(_size, offset))
        inside = zip(offset, shape, whole, strict=True)
        if any(first + size > all_of_it for first, size, all_of_it in inside):
            raise ValueError(f"a part of '{name}' lies outside of it")
        yield Entry(name, _DTYPES[held.get_dtype()], shape, whole, offset)


def _size(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} is no size")
    return value


def _tile(parts: Sequence[Entry]) -> bool:
    """Parts of one tensor, each of which is there once."""
    first = parts[0]
    alike = all((part.whole, part.dtype) == (first.whole, first.dtype) for part in parts)
    apart = len({part.offset for part in parts}) == len(parts)
    return alike and apart and sum(math.prod(part.shape) for part in parts) == math.prod(first.whole)


def export(folder: Path, which: str, stems: tuple[str, ...], file: Path, notes: Mapping[str, str]) -> tuple[int, str]:
    """Write the weights of a checkpoint (``best``, ``latest`` or a step) to one ``file`` that other libraries load.

    Returns its step, and the stem taken. The file is complete or absent, and replaces one that is there. One tensor at
    a time is in memory.

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
        entries = [Entry(name, dtype, shape, shape, (0,) * len(shape)) for name, (dtype, shape) in stored.facts.items()]
        with fileio.replacing(file) as out:
            header = {"format": "pt", "step": str(step), **notes}
            write(out, entries, lambda entry: as_bytes(stored.read(entry.name)), header)
    except BrokenCheckpointError as fault:
        others = ", ".join(str(other) for other in format.steps(folder) if other != step)
        raise UserError(
            f"The checkpoint of step {step} cannot be exported.",
            why=f"{fault}.",
            fix=f"Use another: {others or 'there is none'}.",
        ) from None
    except OSError as problem:
        raise UserError(
            f"{file} cannot be written.", why=f"{problem.strerror}.", fix="Give another place, or make room."
        ) from None
    return step, stem


# The tensors of a model and an optimizer, by names that depend neither on the strategy nor on the world size.
#
# A tensor stays where it is, sharded or not: a save takes of it what is a rank's own, and a load fills that.


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


# Weights to start from: a file of somebody's training, of the same network up to its head.

# Keys of the weights in a file that holds more: averaged ones first, which are the better ones.
_INSIDE = ("state_dict_ema", "model_ema", "ema", "state_dict", "model", "module")
_SHOWN = 3


def start_from(file: Path, model: nn.Module, dist: Distributed) -> tuple[str, ...]:
    """Give ``model`` the weights in ``file``; names of what stays as it is, for another head than the file's.

    Every rank calls it, whatever the strategy; only rank 0 reads the file. A ``.safetensors`` file, or one of
    ``torch.save``, of which only tensors are unpickled. Prefixes of DDP and of torch.compile are left out.

    Raises:
        UserError: on every rank, if the file cannot be read or is of another network.
    """
    own = weights_of(model)
    given = dist.together(lambda: _read(file) if dist.is_main else {})
    anew = dist.together(lambda: _left_out(file, given, own) if dist.is_main else ())
    taken = {name: value for name, value in given.items() if name in own and name not in anew}
    load_where_named(own, Sent(Held(taken), dist), dist)
    follow_masters(model.parameters())
    return tuple(dist.broadcast_json(list(anew)))


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
        raise UserError(
            f"The weights in {file} cannot be read.",
            why=f"{why}.".replace("..", "."),
            fix="Use a .safetensors file, or one that torch.save(model.state_dict(), FILE) has written.",
            key="model.checkpoint",
        ) from problem
    for key in _INSIDE:
        if isinstance(held, Mapping) and isinstance(held.get(key), Mapping):
            held = held[key]
            break
    tensors = {str(k): v for k, v in held.items() if isinstance(v, Tensor)} if isinstance(held, Mapping) else {}
    if not tensors:
        raise UserError(
            f"There are no weights in {file}.",
            why="It is no mapping of names to tensors, nor does it hold one as 'state_dict' or 'model'.",
            fix="Write it with torch.save(model.state_dict(), FILE).",
            key="model.checkpoint",
        )
    return {plain_name(name).removeprefix("module."): value for name, value in tensors.items()}


def _left_out(file: Path, given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[str, ...]:
    """Names of the model's own head, if the file has another one."""
    matrices = [name for name, value in own.items() if value.ndim > 1]
    head = f"{matrices[-1].rpartition('.')[0]}." if matrices else ""
    different = [
        name
        for name, value in own.items()  # older torch had no num_batches_tracked, and nobody needs it
        if (given[name].shape != value.shape if name in given else not name.endswith(".num_batches_tracked"))
    ]
    different += [name for name in given if name not in own]
    wrong = [name for name in different if not (head and name.startswith(head))]
    if wrong:
        words = "; ".join(f"{name} is {_shape(given, name)} there, {_shape(own, name)} here" for name in wrong[:_SHOWN])
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise UserError(
            f"The weights in {file} are of another network.",
            why=f"{words}{more}.",
            fix="Give model.name and its options as they were when the file was made.",
            key="model.checkpoint",
        )
    return tuple(name for name in own if name in different or (different and name.startswith(head)))


def _shape(tensors: Mapping[str, Tensor], name: str) -> str:
    return "x".join(map(str, tensors[name].shape)) or "one number" if name in tensors else "absent"
