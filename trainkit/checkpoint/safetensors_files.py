"""Safetensors files: write tensors or parts of them, read them back, send them to rank 0, export them."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as c10d
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainkit.checkpoint import format
from trainkit.checkpoint.format import BrokenCheckpointError, CheckpointManifest, FileFacts, path_of
from trainkit.common import fileio
from trainkit.common.errors import UserError

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

TensorFacts = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a whole tensor."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file, or a part of one: its bytes may still be elsewhere."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of what is in the file."""
    whole: tuple[int, ...]
    """Shape of the tensor it is a part of."""
    offset: tuple[int, ...]
    """Offset of the part in the whole."""

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, shape: Iterable[int]) -> TensorEntry:
        """A whole tensor."""
        shape = tuple(shape)
        return cls(name, dtype, shape, shape, (0,) * len(shape))

    @property
    def bytes(self) -> int:
        return self.dtype.itemsize * math.prod(self.shape)


def write(
    put: Callable[[memoryview], object],
    entries: Iterable[TensorEntry],
    tensor_of: Callable[[TensorEntry], Tensor],
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
    digest = hashlib.sha256()
    size = 0
    for data in itertools.chain([memoryview(_header(entries, metadata or {}))], tensors):
        for start in range(0, len(data), _CHUNK):
            part = data[start : start + _CHUNK]
            put(part)
            digest.update(part)  # while the processor has it near
        size += len(data)
    return FileFacts(size, digest.hexdigest())


def _bytes_of(value: Tensor) -> memoryview:
    return value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data


def _header(entries: Sequence[TensorEntry], metadata: Mapping[str, str]) -> bytes:
    told: dict[str, object] = {}
    parts = {entry.name: [entry.whole, entry.offset] for entry in entries if entry.shape != entry.whole}
    notes = dict(metadata)
    if parts:
        notes[_SHARDS] = json.dumps(parts)
    if notes:
        told["__metadata__"] = notes
    begin = 0
    for entry in entries:
        end = begin + entry.bytes
        told[entry.name] = {"dtype": _DTYPE_NAMES[entry.dtype], "shape": entry.shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(told, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


class Stored:
    """The tensors of one stem of a checkpoint that is `format.verified`: in one file, or one for each rank that wrote.

    They are read when they are asked for. Raises BrokenCheckpointError when the files do not hold whole tensors.
    """

    def __init__(self, folder: Path, record: CheckpointManifest, stem: str) -> None:
        self._stem = stem
        self._parts: dict[str, list[tuple[Any, TensorEntry]]] = {}
        try:
            for name in record.files_of(stem):
                file = safe_open(path_of(folder, record.step) / name, framework="pt")
                for entry in _entries(file):
                    self._parts.setdefault(entry.name, []).append((file, entry))
        except (SafetensorError, OSError, ValueError, KeyError, TypeError) as error:
            raise self._unreadable(error) from None
        for name, parts in self._parts.items():
            if not _tile([entry for _, entry in parts]):
                raise BrokenCheckpointError(f"the parts of '{name}' in {stem} are incomplete")
        self.facts = {name: (parts[0][1].dtype, parts[0][1].whole) for name, parts in self._parts.items()}

    def read(self, name: str, offset: Sequence[int] | None = None, shape: Sequence[int] | None = None) -> Tensor:
        """Read a tensor, or its part of ``shape`` from ``offset`` on, to the CPU.

        Raises BrokenCheckpointError when the disk no longer gives it.
        """
        dtype, whole = self.facts[name]
        if offset is None or shape is None:
            offset = [0] * len(whole)
            shape = whole
        found = torch.empty(tuple(shape), dtype=dtype)
        try:
            for file, entry in self._parts[name]:
                there: list[slice] = []
                here: list[slice] = []
                for dim, first in enumerate(entry.offset):
                    begin = max(first, offset[dim])
                    end = min(first + entry.shape[dim], offset[dim] + shape[dim])
                    there.append(slice(begin - first, end - first))
                    here.append(slice(begin - offset[dim], end - offset[dim]))
                if any(side.start >= side.stop for side in here):
                    continue
                # A slice of a tensor without dimensions cannot be asked for.
                found[tuple(here)] = file.get_slice(name)[tuple(there)] if there else file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise self._unreadable(error) from None
        return found

    def read_all(self) -> dict[str, Tensor]:
        """All tensors, on the CPU."""
        return {name: self.read(name) for name in self.facts}

    def take(self, name: str, like: Tensor | None) -> Tensor:
        """This rank's part of a tensor, as ``like`` is sharded; None: nothing is wanted."""
        if like is None:
            return torch.empty(0)
        return self.read(name, *place_of(like))

    def _unreadable(self, error: Exception) -> BrokenCheckpointError:
        return BrokenCheckpointError(f"{self._stem}.safetensors is not readable ({error})")


def place_of(value: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offset and shape of this rank's part of a tensor, cut along each dimension of its mesh in turn."""
    offset = [0] * value.ndim
    shape = list(value.shape)
    mesh = getattr(value, "device_mesh", None)
    if mesh is not None:
        for axis, placement in enumerate(value.placements):  # type: ignore[attr-defined]
            if not placement.is_replicate():
                dim = placement.dim
                size = -(-shape[dim] // mesh.size(axis))
                first = min(mesh.get_local_rank(axis) * size, shape[dim])
                offset[dim] += first
                shape[dim] = min(size, shape[dim] - first)
    return tuple(offset), tuple(shape)


def _entries(file: Any) -> Iterator[TensorEntry]:
    """Read from a file's header what it holds: names, dtypes, and where parts belong."""
    shards = fileio.parse((file.metadata() or {}).get(_SHARDS, "{}"))
    for name in file.keys():  # noqa: SIM118 - it is no mapping
        held = file.get_slice(name)
        shape = tuple(held.get_shape())
        whole, offset = map(tuple, shards.get(name, (shape, (0,) * len(shape))))
        for size in (*whole, *offset):
            if type(size) is not int or size < 0:
                raise ValueError(f"{size!r} is not a size")
        if any(first + size > all_of_it for first, size, all_of_it in zip(offset, shape, whole, strict=True)):
            raise ValueError(f"a part of '{name}' lies outside of it")
        yield TensorEntry(name, DTYPES[held.get_dtype()], shape, whole, offset)


def _tile(parts: Sequence[TensorEntry]) -> bool:
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
        record = format.manifest_of(folder, step)
        stem = next((stem for stem in stems if stem in record.stems), stems[-1])
        format.compare(folder, record, record.files_of(stem))
        stored = Stored(folder, record, stem)
        entries = [TensorEntry.of(name, *facts) for name, facts in stored.facts.items()]
        header = {"format": "pt", "step": str(step), **notes}
        with written(file) as out:
            write(out.write, entries, lambda entry: stored.read(entry.name), header)
    except BrokenCheckpointError as fault:
        others = ", ".join(str(other) for other in format.steps(folder) if other != step)
        what = f"The checkpoint of step {step} cannot be exported."
        raise UserError(what, why=f"{fault}.", fix=f"Use another: {others or 'there is none'}.") from None
    return step, stem


# Files of ranks that do not see the run's folder are written by rank 0. Each sends the name of a file, its content in
# parts and an empty part; and an empty name in the end.


def send(part: memoryview | bytes, group: c10d.ProcessGroup) -> None:
    """Send rank 0 a part of a file, or a name."""
    c10d.send(torch.tensor([len(part)]), dst=0, group=group)
    if part:
        c10d.send(torch.frombuffer(bytearray(part), dtype=torch.uint8), dst=0, group=group)


def _receive(rank: int, group: c10d.ProcessGroup) -> bytes:
    size = torch.zeros(1, dtype=torch.int64)
    c10d.recv(size, src=rank, group=group)
    part = torch.empty(int(size), dtype=torch.uint8)
    if len(part):
        c10d.recv(part, src=rank, group=group)
    return part.numpy().tobytes()


def write_for(rank: int, folder: Path, group: c10d.ProcessGroup) -> OSError | None:
    """Write the files that ``rank`` sends. Takes all of them, and returns why not all could be written."""
    problem = None
    for name in iter(lambda: _receive(rank, group), b""):
        parts = iter(lambda: _receive(rank, group), b"")
        try:
            with format.new_file(folder, name.decode()) as out:
                for part in parts:
                    out.write(part)
        except OSError as error:
            problem = error
            for _ in parts:
                pass
    return problem


@contextmanager
def written(file: Path) -> Iterator[BinaryIO]:
    """A file for others, complete or absent, in a folder that is made if need be. Raises UserError."""
    with fileio.disk_errors_as(f"{file} cannot be written.", fix="Give another path, or free some space."):
        fileio.make_folder(file.parent)
        with fileio.replacing(file, durable=True) as out:
            yield out
