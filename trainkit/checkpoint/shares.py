"""Who writes what: each rank its own shards, and of what several ranks have, the lowest."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.checkpoint.record import file_name
from trainkit.checkpoint.tensorfile import Entry
from trainkit.distributed.process_group import Distributed
from trainkit.distributed.sharded import local_part


@dataclass(frozen=True)
class Share:
    """What this rank writes of a checkpoint, and who else writes."""

    files: Mapping[str, Mapping[Entry, Tensor]]
    """File name -> entry -> what this rank holds of it, where it lies."""
    writers: tuple[int, ...]
    """Ranks that write anything; rank 0 alone if nothing is spread over the ranks."""


class Shares:
    """Every rank calls it with the same stems; what they tell each other is remembered while it does not change."""

    def __init__(self, dist: Distributed) -> None:
        self._dist = dist
        self._digests: list[str] = []
        self._told: list[dict[str, Any]] = []

    def of(self, stems: Mapping[str, Mapping[str, Tensor]]) -> Share:
        """This rank's share of stem -> name -> tensor, sharded (a DTensor) or not, on every rank or some."""
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
        return Share(files, tuple(sorted(writers)))


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
