"""From whom a peer takes over the state of the run: the owner first, then those whom the owner trusts.

hivemind asks first whoever says that it comes first, takes its answer, however long, and lets the caller see whether it
is one. Here a donor's pass says what it is, and what it gives is read as it comes; if it is not what one of the owner's
side has signed, the next one is asked.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterable, Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Any

import msgpack
import torch
from hivemind.p2p import PeerID
from torch import Tensor

from trainkit.collaborative.admission import Admission, Member
from trainkit.collaborative.digests import Digest, digest_of, read_digest

State = tuple[Digest, list[Tensor]]
"""What was signed, and the tensors: weights and momentum."""
_LONGEST_METADATA = 16_384


async def in_order(found: object, own_id: str, look_up: Callable[[str], Awaitable[Member | None]]) -> list[PeerID]:
    """Whom to ask for the state, in this order; of equals any first.

    Args:
        found: the DHT's record of those who give it away, by peer.
        own_id: of this peer, who is not asked.
        look_up: who a peer is; None: nobody.
    """
    known: list[tuple[bool, float, PeerID]] = []
    for subkey, told in found.items() if isinstance(found, dict) else ():
        if getattr(told, "value", None) is None or not isinstance(subkey, bytes):
            continue  # it does not any more
        with suppress(ValueError):
            peer = PeerID(subkey)
            member = None if str(peer) == own_id else await look_up(str(peer))
            if member is not None and member.trusted:
                known.append((member.role != "owner", random.random(), peer))
    return [peer for *_, peer in sorted(known, key=lambda item: item[:2])]


async def read_state(messages: AsyncIterable[Any], sizes: Sequence[int], admission: Admission, run_id: str) -> State:
    """A state as it comes from a donor.

    Args:
        messages: hivemind's, each with a piece of a tensor.
        sizes: values of each tensor.

    Raises ValueError when it is too long or another number of values, UntrustedError when nobody of the owner's side
    has signed it.
    """
    most, metadata, tensor = sum(sizes) * 4, b"", -1
    buffers = [bytearray() for _ in sizes]
    async for message in messages:
        metadata = message.metadata or metadata
        tensor += bool(message.tensor_part.dtype)  # which only the first piece of a tensor has
        most -= len(message.tensor_part.buffer)
        if most < 0 or not 0 <= tensor < len(sizes) or len(metadata) > _LONGEST_METADATA:
            raise ValueError("it is longer than the state of this run")
        buffers[tensor] += message.tensor_part.buffer
    if [len(buffer) for buffer in buffers] != [4 * size for size in sizes]:
        raise ValueError("it is shorter than the state of this run")
    tensors = [torch.frombuffer(buffer, dtype=torch.float32) for buffer in buffers]
    try:
        told = msgpack.unpackb(metadata, raw=False, strict_map_key=True, max_ext_len=0)["digest"]
    except (KeyError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise ValueError("nobody has signed it") from error
    if not isinstance(told, bytes):
        raise ValueError("nobody has signed it")
    signed = read_digest(admission, told, run_id=run_id)
    if digest_of(signed.run_id, signed.round, tensors) != signed:
        raise ValueError("it is not what was signed")
    return signed, tensors
