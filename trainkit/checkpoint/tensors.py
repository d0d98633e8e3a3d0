"""One safetensors file: written as it is hashed, without a copy of what it holds.

The format is safetensors' own (https://github.com/huggingface/safetensors#format): a length, a JSON header, the bytes
of the tensors. Its library wants a copy of all of them before it writes, and a second look at the file to hash it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainkit import fileio
from trainkit.checkpoint import format
from trainkit.checkpoint.format import BrokenCheckpointError, FileFacts, Record, path_of
from trainkit.errors import UserError

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
