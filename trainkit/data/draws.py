"""Random numbers of samples, for whole batches at once.

They are a function of (seed, epoch, index), without any state. SplitMix64 (Steele, Lea and Flood, OOPSLA 2014;
constants of Vigna's splitmix64.c) needs one 64-bit number to start from, and gives the n-th number of its stream
without those before it. Each sample has such a stream in each epoch. So neither ranks nor loader processes nor micro
batches nor a restart change what is drawn for it.

int64 tensors overflow as unsigned numbers do; only shifting to the right needs a mask.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


SHIFT = 0
POLICY = 16
MIXING = 64
ERASING = 96
"""Places in a sample's stream where the draws of each augmentation begin: none takes another's."""


def _signed(value: int) -> int:
    """Interpret the lower 64 bits of a number as a signed one."""
    value %= 1 << 64
    return value - (1 << 64) if value >> 63 else value


_GAMMA = _signed(0x9E3779B97F4A7C15)
_STEPS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def keys(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """Start of each sample's stream: int64, like ``indices``."""
    digest = hashlib.blake2b(repr((seed, epoch)).encode(), digest_size=8).digest()
    return _mixed(indices * _GAMMA + int.from_bytes(digest, "little", signed=True))


def stream(keys: Tensor, draw: int | Tensor) -> Tensor:
    """The ``draw``-th number of each stream, from 0, with all of its 64 bits: where a further stream may start."""
    offset = (draw + 1) * _GAMMA
    if isinstance(offset, int):
        offset = _signed(offset)  # a tensor's overflows by itself
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
