"""What travels from the data to the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class Batch(NamedTuple):
    """A micro batch of training."""

    images: Tensor
    """uint8 [N, C, H, W], on the device that trains."""
    labels: Tensor
    """int64 [N], on the device that trains."""
    keys: Tensor
    """int64 [N], on the host: what each sample's random numbers are drawn by (`draws.keys`)."""


class EvalBatch(NamedTuple):
    """A batch of evaluation, on the device."""

    images: Tensor
    """uint8 [N, C, H, W]."""
    labels: Tensor
    """int64 [N]."""
    mask: Tensor
    """bool [N]: False on what only fills the batch."""
