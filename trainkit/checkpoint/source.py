"""Where a rank gets a checkpoint's tensors from: the files, if it sees them, else rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as c10d
from torch import Tensor

from trainkit.checkpoint.shares import place_of
from trainkit.checkpoint.stored import Stored
from trainkit.distributed.process_group import Distributed

Facts = tuple[torch.dtype, tuple[int, ...]]
"""Dtype and shape of a whole tensor."""


class Source(Protocol):
    """Every rank takes every tensor, in the order of ``facts``: one may have to send."""

    @property
    def facts(self) -> Mapping[str, Facts]: ...

    def take(self, name: str, like: Tensor | None) -> Tensor:
        """This rank's part of a tensor, as ``like`` is sharded; it has the same shape. None: nothing is wanted."""
        ...


@dataclass(frozen=True)
class Seen:
    """Files that this rank reads itself: just what it needs."""

    stored: Stored

    @property
    def facts(self) -> Mapping[str, Facts]:
        return self.stored.facts

    def take(self, name: str, like: Tensor | None) -> Tensor:
        return torch.empty(0) if like is None else self.stored.read(name, *place_of(like))


class Readable(Protocol):
    """What rank 0 has."""

    @property
    def facts(self) -> Mapping[str, Facts]: ...

    def read(self, name: str, /) -> Tensor: ...


class Held:
    """Tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        self.facts: Mapping[str, Facts] = {name: (value.dtype, tuple(value.shape)) for name, value in tensors.items()}

    def read(self, name: str) -> Tensor:
        return self._tensors[name]


class Sent:
    """What rank 0 has, one tensor at a time. Names and shapes travel as JSON: nothing is unpickled.

    Args:
        held: looked at on rank 0 only.
    """

    def __init__(self, held: Readable, dist: Distributed) -> None:
        self._held, self._dist = held, dist
        mine = [[name, str(dtype).removeprefix("torch."), list(shape)] for name, (dtype, shape) in held.facts.items()]
        told: Any = dist.broadcast_json(mine if dist.is_main else [])
        self.facts: Mapping[str, Facts] = {
            str(name): (_dtype(dtype), tuple(int(size) for size in shape)) for name, dtype, shape in told
        }

    def take(self, name: str, like: Tensor | None) -> Tensor:
        dtype, shape = self.facts[name]
        # As bytes, which every backend carries, so that it stays the same; over this rank's own device.
        value = torch.empty(shape, dtype=dtype) if not self._dist.is_main else self._held.read(name)
        value = value.to(self._dist.device).contiguous()
        if self._dist.world_size > 1 and value.numel():
            c10d.broadcast(value.view(-1).view(torch.uint8), src=0)
        if like is None:
            return value
        offset, size = place_of(like)
        for dim, (first, length) in enumerate(zip(offset, size, strict=True)):
            value = value.narrow(dim, first, length)
        return value if like.device.type != "meta" else value.cpu()


def _dtype(name: Any) -> torch.dtype:
    dtype = getattr(torch, str(name), None)
    assert isinstance(dtype, torch.dtype), f"rank 0 announces a tensor of type {name!r}"
    return dtype
