"""Codecs of what peers send, and the parts into which they cut it.

All peers cut the vector that they average into the same parts. A part arrives or does not; a peer with a slow link
sends some parts in one round and others in the next.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

Codec = Literal["none", "fp16", "8bit", "4bit"]

CODECS: tuple[Codec, ...] = ("none", "fp16", "8bit", "4bit")
"""From the finest to the coarsest."""
PART = 1 << 16
"""Values in a part. All peers cut the vector alike, whatever codec they use."""
BLOCK = 512
"""Values that share one scale, in 8 and 4 bit."""
LEVELS = {"8bit": 127, "4bit": 7}
"""A value is one of so many steps on each side of zero."""
_LARGEST_HALF = float(torch.finfo(torch.float16).max)


def num_parts(values: int) -> int:
    """Parts of a vector of ``values`` numbers."""
    return -(-values // PART)


def cuts(values: int) -> Iterator[slice]:
    """Yield where the parts are, in order."""
    return (slice(first, min(first + PART, values)) for first in range(0, values, PART))


def halves(part: slice, size: int) -> tuple[slice, slice]:
    """Return what lies before position ``size`` of a part, and what from there on; either may be empty."""
    return slice(part.start, min(part.stop, size)), slice(max(part.start, size), part.stop)


def encoded_bytes(values: int, codec: Codec) -> int:
    """Bytes of ``values`` numbers."""
    if codec in LEVELS:
        return (values if codec == "8bit" else -(-values // 2)) + 4 * -(-values // BLOCK)
    return values * (2 if codec == "fp16" else 4)


# hivemind's 8 bit codecs have one codebook for half a million values, in which layers of different scale spoil each
# other (an error of 11 to 39 % of the vector's length; here 1.2 %, in a third of the time), and which numpy 2.4
# cannot read back. Here every 512 values have their own scale, as in block-wise quantization (Dettmers et al.,
# arXiv 2110.02861), which costs 0.8 % more bytes. In 4 bit the error is 14 %: see `OuterState.give`.


def encode(part: Tensor, codec: Codec) -> bytes:
    """``part``, a flat float32 vector on the CPU. Equal parts give equal bytes."""
    most = LEVELS.get(codec)
    if most:
        blocks = pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True) / most
        # A block of zeros has scale 0: divided by the smallest number there is, it stays zero.
        levels = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        levels = levels.view(-1)[: part.numel()]
        if codec == "4bit":
            pairs = pad(levels + most, (0, levels.numel() % 2)).view(-1, 2).view(torch.uint8)
            levels = pairs[:, 0] * 16 + pairs[:, 1]
        return bytes(scales.numpy().tobytes() + levels.numpy().tobytes())
    exact = part.clamp(-_LARGEST_HALF, _LARGEST_HALF).half() if codec == "fp16" else part
    return bytes(exact.numpy().tobytes())


def decode(data: bytes, codec: str, values: int) -> Tensor:
    """The ``values`` numbers in ``data``, as float32. The bytes come from others and are only ever read as numbers.

    Raises ValueError for an unknown codec and for another number of values.
    """
    if codec not in CODECS:
        raise ValueError("unknown codec")
    if len(data) != encoded_bytes(values, codec):
        raise ValueError(f"{len(data)} bytes instead of {encoded_bytes(values, codec)}")
    if codec not in LEVELS:
        return torch.from_numpy(np.frombuffer(data, np.float16 if codec == "fp16" else np.float32).copy()).float()
    blocks = -(-values // BLOCK)
    scales = torch.from_numpy(np.frombuffer(data, np.float32, blocks).copy())
    read = np.frombuffer(data, np.int8 if codec == "8bit" else np.uint8, offset=4 * blocks)
    if codec == "4bit":
        read = (np.stack([read >> 4, read & 15], axis=1).reshape(-1)[:values]).astype(np.int8) - LEVELS[codec]
    levels = torch.from_numpy(read.copy()).float()
    return (pad(levels, (0, -values % BLOCK)).view(-1, BLOCK) * scales[:, None]).view(-1)[:values].clone()


COARSE_PART = encoded_bytes(PART, "8bit")
"""Bytes of a part in 8 bit."""
# Of a number, its exponent and three bits of what follows: steps of an eighth of an octave.
_SHIFT = 20


def coarse(values: Tensor) -> Tensor:
    """A flat float32 vector on the CPU in 8 bit, part by part, as uint8."""
    parts = (bytearray(encode(values[part], "8bit")) for part in cuts(len(values)))
    return torch.cat([torch.frombuffer(part, dtype=torch.uint8) for part in parts])


def exact(kept: Tensor, part: slice) -> Tensor:
    """The numbers that `coarse` was given, or some parts of them, to 1 % of their length. Raises ValueError for others
    than so many bytes."""
    if kept.dtype != torch.uint8:
        raise ValueError("no bytes")
    pieces = kept[part.start // PART * COARSE_PART : -(-part.stop // PART) * COARSE_PART].split(COARSE_PART)
    decoded = list[Tensor]()
    for place, piece in zip(cuts(part.stop - part.start), pieces, strict=False):
        decoded.append(decode(piece.numpy().tobytes(), "8bit", place.stop - place.start))
    return torch.cat(decoded)


def coarse_squares(values: Tensor) -> Tensor:
    """The same of numbers of which none is negative, and of which small ones matter as much as large ones."""
    bits = values.view(torch.int32)
    lowest = (bits.max() >> _SHIFT) - 255
    kept = [lowest.view(1).view(torch.uint8)]
    for part in cuts(len(values)):  # which fits into a cache
        levels = ((bits[part] >> _SHIFT) - lowest).clamp_(1, 255).mul_(bits[part] > 0)
        kept.append(levels.to(torch.uint8))
    return torch.cat(kept)


def exact_squares(kept: Tensor, part: slice) -> Tensor:
    """The numbers that `coarse_squares` was given, or some of them, to 6 %. Raises ValueError for other bytes."""
    if kept.dtype != torch.uint8 or len(kept) < 4 + part.stop:
        raise ValueError("no squares")
    levels = kept[4:][part].int()
    codes = levels + kept[:4].clone().view(torch.int32)
    return ((codes << _SHIFT) + (1 << _SHIFT - 1)).view(torch.float32) * (levels > 0)


def rounded(part: Tensor) -> Tensor:
    """``part`` as it arrives in 4 bit, float32."""
    return decode(encode(part.float(), "4bit"), "4bit", part.numel())


def misrounded(told: Tensor, exact: Tensor) -> Tensor:
    """Return by how much each value of ``told``, a part, differs from what ``exact`` may become in 4 bit.

    A value halfway between two levels may become either: on another machine it is a little more, or less.
    """
    most = pad(exact, (0, -exact.numel() % BLOCK)).view(-1, BLOCK).abs().amax(dim=1).repeat_interleave(BLOCK)
    steps = (most[: exact.numel()] / LEVELS["4bit"]).clamp_min(torch.finfo(torch.float32).tiny)
    nearest = (told / steps).round() * steps
    return (told - nearest).abs() + ((exact - nearest).abs() - steps / 2).clamp_min(0.0)
