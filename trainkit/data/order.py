"""The order of the data is a pure function of (seed, epoch, position).

It depends neither on the number of ranks nor on loader processes nor on where a run was resumed: global step ``s`` sees
the same samples however many GPUs share them.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

from trainkit.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


def derive_seed(*parts: int) -> int:
    """A 32-bit seed from integers of any size.

    Hashed, because torch's CPU generator looks at the low 32 bits of a seed only: a seed composed by shifting, such as
    ``seed << 32 | epoch``, would lose its upper part.
    """
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=4).digest()
    return int.from_bytes(digest, "little")


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The permutation of ``range(num_samples)`` that epoch ``epoch`` walks through: int32, or int64 if need be."""
    import torch

    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    # The same numbers in half of the memory are drawn in less than half of the time.
    dtype = torch.int32 if num_samples < 1 << 31 else torch.int64
    return torch.randperm(num_samples, generator=generator, dtype=dtype)


def steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Optimizer steps in one epoch. The remainder is dropped; the next permutation brings it back."""
    if num_samples < global_batch_size:
        raise UserError(
            f"train.global_batch_size={global_batch_size} is larger than the training data.",
            why=f"The training split has {num_samples} images, so that not even one step fits into an epoch.",
            fix=f"Use train.global_batch_size={largest_power_of_two(num_samples)}, or more data.",
            key="train.global_batch_size",
        )
    return num_samples // global_batch_size


def largest_power_of_two(limit: int) -> int:
    """The largest power of two that is at most ``limit`` (at least 1)."""
    return 1 << max(limit.bit_length() - 1, 0)


def share_of(order: Tensor, micro_batch_size: int, *, rank: int, world_size: int) -> Tensor:
    """The micro batches of ``rank`` in some whole global batches ``order``: int64 [count, micro_batch_size].

    Each micro step takes ``world_size * micro_batch_size`` samples, of which rank ``r`` takes the r-th part: together
    the ranks see exactly ``order``.
    """
    return order.view(-1, world_size, micro_batch_size)[:, rank].long()


def global_batch(num_samples: int, seed: int, position: int, global_batch_size: int) -> list[int]:
    """Indices of the samples in the ``position``-th global batch of a run, from 0."""
    epoch, step = divmod(position, steps_per_epoch(num_samples, global_batch_size))
    first = step * global_batch_size
    indices: list[int] = epoch_order(num_samples, seed, epoch)[first : first + global_batch_size].tolist()
    return indices
