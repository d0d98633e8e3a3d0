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


# Random numbers that are a function of (seed, epoch, index): for whole batches at once, and without any state.
#
# SplitMix64 (Steele, Lea and Flood, OOPSLA 2014; constants of Vigna's splitmix64.c) needs one 64-bit number to start
# from, and gives the n-th number of its stream without those before it. Each sample has such a stream in each epoch.
# So neither ranks nor loader processes nor micro batches nor a restart change what is drawn for it.
#
# int64 tensors overflow as unsigned numbers do; only shifting to the right needs a mask.


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


SHIFT = 0
RAND_AUGMENT = 16
MIXING = 64
ERASING = 96
"""Where in a sample's stream the draws of each augmentation begin: none takes another's."""

_GAMMA = _signed(0x9E3779B97F4A7C15)
_STEPS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def keys(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """Where each sample's stream starts: int64, like ``indices``."""
    digest = hashlib.blake2b(repr((seed, epoch)).encode(), digest_size=8).digest()
    return _mixed(indices * _GAMMA + int.from_bytes(digest, "little", signed=True))


def stream(keys: Tensor, draw: int | Tensor) -> Tensor:
    """The ``draw``-th number of each stream, from 0, with all of its 64 bits: where a further stream may start."""
    offset = _signed((draw + 1) * _GAMMA % (1 << 64)) if isinstance(draw, int) else (draw + 1) * _GAMMA
    return _mixed(keys + offset)


def bits(keys: Tensor, draw: int | Tensor) -> Tensor:
    """The upper half of it: int64 of 0 to 2**32 - 1."""
    return (stream(keys, draw) >> 32) & 0xFFFFFFFF


def below(keys: Tensor, draw: int | Tensor, end: int) -> Tensor:
    """The ``draw``-th number as one of 0 to ``end - 1``, int64. All are equally likely, for ``end``
    is far below 2**31."""
    return (bits(keys, draw) * end) >> 32


def uniform(keys: Tensor, draw: int | Tensor) -> Tensor:
    """The ``draw``-th number as one between 0 and 1, float64, neither of them ever."""
    return (bits(keys, draw).double() + 0.5) / (1 << 32)


def normal(keys: Tensor, draw: int | Tensor) -> Tensor:
    """The ``draw``-th number as one of mean 0 and variance 1, float32, normally distributed up to 5 sigma."""
    middle = ((bits(keys, draw) >> 9).float() + 0.5) / (1 << 22) - 1  # 23 bits and a half: no float32 is between
    return middle.erfinv_() * 2**0.5


def _mixed(numbers: Tensor) -> Tensor:
    for shift, factor in _STEPS:
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, shift: int) -> Tensor:
    return (numbers >> shift) & ((1 << (64 - shift)) - 1)
