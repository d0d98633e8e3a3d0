"""Files of ranks that do not see the run's folder: sent to rank 0 tensor by tensor, which writes them on their behalf.

In a process group of its own, since it goes on behind training, whose collectives must not meet it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as c10d
from torch import Tensor

from trainkit.checkpoint import tensorfile
from trainkit.checkpoint.files import new_file
from trainkit.checkpoint.record import FileFacts
from trainkit.checkpoint.tensorfile import Entry


def send(files: Mapping[str, Mapping[Entry, Tensor]], group: c10d.ProcessGroup) -> None:
    """Send this rank's files to rank 0."""
    told = {name: [_told(entry) for entry in held] for name, held in files.items()}
    content = torch.frombuffer(bytearray(json.dumps(told).encode()), dtype=torch.uint8)
    c10d.send(torch.tensor([content.numel()]), dst=0, group=group)
    c10d.send(content, dst=0, group=group)
    for held in files.values():
        for entry in tensorfile.in_order(held):
            if entry.bytes:
                c10d.send(tensorfile.as_bytes(held[entry]), dst=0, group=group)


def receive(rank: int, folder: Path, group: c10d.ProcessGroup) -> dict[str, FileFacts]:
    """Write the files of ``rank`` into ``folder``.

    Raises:
        OSError: they could not be written; all that was sent has been taken nevertheless.
    """
    size = torch.zeros(1, dtype=torch.int64)
    c10d.recv(size, src=rank, group=group)
    content = torch.empty(int(size), dtype=torch.uint8)
    c10d.recv(content, src=rank, group=group)
    told: dict[str, list[Any]] = json.loads(content.numpy().tobytes())
    facts, problem = {}, None
    for name, entries in told.items():
        coming = [entry for entry in tensorfile.in_order(map(_entry, entries)) if entry.bytes]

        def next_bytes(entry: Entry, coming: list[Entry] = coming) -> Tensor:
            coming.remove(entry)
            data = torch.empty(entry.bytes, dtype=torch.uint8)
            c10d.recv(data, src=rank, group=group)
            return data

        try:
            if problem is None:
                with new_file(folder, name) as out:
                    facts[name] = tensorfile.write(out, [*map(_entry, entries)], next_bytes)
        except OSError as error:
            problem = error
        for entry in [*coming]:
            next_bytes(entry)
    if problem is not None:
        raise problem
    return facts


def _told(entry: Entry) -> list[Any]:
    return [entry.name, str(entry.dtype).removeprefix("torch."), entry.shape, entry.whole, entry.offset]


def _entry(told: Any) -> Entry:
    name, dtype, *sizes = told
    return Entry(name, getattr(torch, dtype), *(tuple(size) for size in sizes))
