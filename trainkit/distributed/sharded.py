"""Tensors of which each rank may hold a part only (torch's DTensor, as FSDP makes them)."""

from __future__ import annotations

from torch import Tensor


def is_sharded(value: Tensor) -> bool:
    """Whether it is one of these."""
    return hasattr(value, "_local_tensor")


def local_part(value: Tensor) -> Tensor:
    """What this rank holds of a tensor, where it lies; all of one that is not sharded.

    ``to_local`` would make a view through autograd, for each tensor of each update.
    """
    part: Tensor = getattr(value, "_local_tensor", value)
    return part
