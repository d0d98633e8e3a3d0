"""Reading a checkpoint's tensors: whole ones or parts, out of one file or of one for each rank that wrote it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainkit import reading
from trainkit.checkpoint.files import path_of
from trainkit.checkpoint.record import BrokenCheckpointError, Record
from trainkit.checkpoint.tensorfile import DTYPES, SHARDS, Entry

_DTYPES = {name: dtype for dtype, name in DTYPES.items()}


class Stored:
    """The tensors of one stem of a checkpoint that is `files.verified`; read when they are asked for.

    Raises BrokenCheckpointError when its files do not hold whole tensors between them.
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
        """A tensor, or the part of ``shape`` from ``offset`` on, on the CPU, with memory of its own.

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


def read_tensors(folder: Path, record: Record, stem: str) -> dict[str, Tensor]:
    """All tensors of a stem of a checkpoint that is `files.verified`, on the CPU.

    Raises BrokenCheckpointError when there are none.
    """
    stored = Stored(folder, record, stem)
    return {name: stored.read(name) for name in stored.facts}


def _entries(file: Any) -> Iterator[Entry]:
    """What a file says that it holds: names, dtypes, and where parts belong."""
    shards = reading.parse((file.metadata() or {}).get(SHARDS, "{}"))
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
