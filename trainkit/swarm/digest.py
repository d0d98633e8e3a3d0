"""The state that a run has in common, as a peer takes it over from others: who gives it, and who has signed it.

A peer that takes over a state computes its digest anew. So it matters neither who handed it over nor how old that peer
says it is: a state counts if one of the owner's side has signed it, for this run and for the round that it claims.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Annotated, Any, NamedTuple

import msgpack
import torch
from hivemind.p2p import PeerID
from pydantic import Field, TypeAdapter
from torch import Tensor

from trainkit.swarm.admission import Admission, Member
from trainkit.swarm.invitations import Pass, Role, UntrustedError, parsed
from trainkit.swarm.messages import plain_msgpack
from trainkit.swarm.sync import PROBE_SIZE

_LONGEST_METADATA = 16_384
# Relative distance beyond which a peer takes over the state of the owner's side. Rounding to fp16 gives about 1e-5.
_DRIFT = 1e-3


class Digest(NamedTuple):
    """What was signed about a state."""

    run_id: str
    """Of this start of the run: the state of an earlier one is none of this one's."""
    round: Annotated[int, Field(ge=0)]
    """The round that begins with this state."""
    sha256: str
    """Of the weights and the momentum, in hex."""


_DIGEST = TypeAdapter(Digest)
State = tuple[Digest, list[Tensor]]
"""What was signed, and the tensors: weights and momentum."""


def digest_of(run_id: str, round_index: int, tensors: Iterable[Tensor]) -> Digest:
    """Of tensors on the CPU in their order, each with its length in bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        data: Any = tensor.numpy()
        found.update(data.nbytes.to_bytes(8, "big"))
        found.update(data)
    return Digest(run_id, round_index, found.hexdigest())


def sign_digest(own: Pass, digest: Digest) -> bytes:
    """The digest as a statement."""
    return own.state("state", json.dumps(digest).encode())


def read_digest(admission: Admission, statement: bytes, *, run_id: str, now: float | None = None) -> Digest:
    """What the owner's side says about a state.

    Raises UntrustedError when a volunteer or a stranger has signed it, or it belongs to another run.
    """
    found = admission.read(statement, "state", now=now)
    if found.grant.role == "volunteer":
        raise UntrustedError("a volunteer does not say which state is the run's")
    digest = parsed(_DIGEST, found.content, "digest")
    if digest.run_id != run_id:
        raise UntrustedError("it is the digest of another run")
    return digest


# hivemind asks first whoever says that it comes first, takes its answer, however long, and lets the caller see
# whether it is one. Here a donor's pass says what it is, and what it gives is read as it comes; if it is not what one
# of the owner's side has signed, the next one is asked.


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
    told = None
    with suppress(ValueError, KeyError, TypeError, msgpack.UnpackException, RecursionError):
        told = plain_msgpack(metadata)["digest"]
    if not isinstance(told, bytes):
        raise ValueError("nobody has signed it")
    signed = read_digest(admission, told, run_id=run_id)
    if digest_of(signed.run_id, signed.round, tensors) != signed:
        raise ValueError("it is not what was signed")
    return signed, tensors


def reference_among(trusted: Iterable[Member], role: Role, own_id: str) -> str | None:
    """With whose weights a peer compares its own: the owner's; without the owner, of the first of its side by id.

    None if it is itself the one that others compare with; what it has trained counts, whatever anybody says.
    """
    first = min(trusted, key=lambda member: (member.role != "owner", member.peer_id), default=None)
    return None if first is None or role == "owner" or first.peer_id == own_id else first.peer_id


def has_drifted(probe: object, own: Tensor) -> bool:
    """Whether this peer's ``own`` probe is no longer that of the peer which has sent ``probe``."""
    if not isinstance(probe, bytes) or len(probe) != 4 * PROBE_SIZE:
        return False
    theirs = torch.frombuffer(bytearray(probe), dtype=torch.float32)
    return not float((theirs - own).norm()) <= _DRIFT * float(own.norm())  # also for not-a-number
