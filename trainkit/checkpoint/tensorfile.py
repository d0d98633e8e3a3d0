"""One safetensors file: written as it is hashed, without a copy of what it holds.

The format is safetensors' own (https://github.com/huggingface/safetensors#format): a length, a JSON header, the bytes
of the tensors. Its library wants a copy of all of them before it writes, and a second look at the file to hash it.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO

import torch
from torch import Tensor

from trainkit.checkpoint.record import FileFacts

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
    """Fill an open file and flush it to the disk; its size and hash.

    Args:
        entries: in any order.
        bytes_of: asked once for each entry that is not empty, `in_order`: its bytes, as a flat uint8 tensor on the CPU.
        metadata: goes into the header.

    Raises:
        OSError: it could not be written.
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
