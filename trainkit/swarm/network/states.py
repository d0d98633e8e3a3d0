"""States that newcomers take over: signed, sent in pieces, and read.

A state counts, whoever hands it over, if one of the owner's side has signed it for this run and the round that it
claims.
"""

import hashlib
import json
import random
from collections.abc import AsyncIterable, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import torch
from hivemind.p2p import PeerID
from hivemind.proto import runtime_pb2
from hivemind.proto.averaging_pb2 import DownloadData
from pydantic import Field, TypeAdapter
from torch import Tensor

from trainkit.swarm.identity.admission import Admission, Member
from trainkit.swarm.identity.invitations import Pass, UntrustedError
from trainkit.swarm.protocol.messages import plain_msgpack
from trainkit.swarm.protocol.outer_step import OuterState

PIECE = 1 << 16
"""Bytes of a message, of what is sent in several."""
_LONGEST_METADATA = 16_384


class Digest(NamedTuple):
    """Digest of a state, as it was signed."""

    run_id: str
    """Id of this start of the run: the state of an earlier one is none of this one's."""
    round: Annotated[int, Field(ge=0)]
    """The round that begins with this state."""
    sha256: str
    """Digest of the weights and the momentum, in hex."""


_DIGEST = TypeAdapter(Digest)
State = tuple[Digest, list[Tensor]]
"""Signed digest, and the tensors: weights and momentum."""


def digest_of(run_id: str, round_index: int, tensors: Iterable[Tensor]) -> Digest:
    """The digest of tensors on the CPU in their order, each with its length in bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        data: Any = tensor.numpy()
        digest.update(data.nbytes.to_bytes(8, "big"))
        digest.update(data)
    return Digest(run_id, round_index, digest.hexdigest())


def sign_digest(own: Pass, digest: Digest) -> bytes:
    """The digest as a statement."""
    return own.state("state", json.dumps(digest).encode())


def read_digest(admission: Admission, statement: bytes, *, run_id: str) -> Digest:
    """Return what the owner's side says about a state.

    Raises UntrustedError when a volunteer or a stranger has signed it, or it belongs to another run.
    """
    digest = admission.told(statement, "state", _DIGEST)
    if digest.run_id != run_id:
        raise UntrustedError("it is the digest of another run")
    return digest


class OwnState:
    """State of a peer as others fetch it: signed, and copied once for all who fetch it before it changes."""

    def __init__(self, common: OuterState, own: Pass, run_id: str) -> None:
        self._common = common
        self._own = own
        self._run_id = run_id
        self._signed = -1, b""
        """Number of the change after which it was signed, and the signature."""
        self._copy: list[Tensor] = []
        """Emptied in its place: hivemind's thread holds on to what it has got last."""

    def signed(self) -> bytes:
        """This peer's signature that the state is the run's."""
        common = self._common
        with common.lock:
            if self._signed[0] != common.changes:
                self._copy.clear()
                digest = digest_of(self._run_id, common.round, [common.theta, common.momentum])
                self._signed = common.changes, sign_digest(self._own, digest)
            return self._signed[1]

    def copy(self) -> tuple[bytes, list[Tensor]]:
        """The signature, and weights and momentum in shared memory."""
        common = self._common
        with common.lock:
            signed = self.signed()
            if not self._copy:
                self._copy += common.theta.clone().share_memory_(), common.momentum.clone().share_memory_()
            return signed, self._copy


async def in_order(
    record: Mapping[bytes, Any], own_id: str, look_up: Callable[[str], Awaitable[Member | None]]
) -> list[PeerID]:
    """Return whom to ask for the state: the owner first, then any of its side. What donors say of themselves does not
    count.

    Args:
        record: of the DHT, of those who give it away, by peer; its validators have checked who has written each.
        own_id: of this peer, who is not asked.
        look_up: who a peer is; None: nobody.
    """
    donors: dict[PeerID, tuple[bool, float]] = {}
    for subkey, entry in record.items():
        peer = PeerID(subkey)
        member = None if str(peer) == own_id else await look_up(str(peer))
        if member is not None and member.trusted and entry.value is not None:  # None: it does no longer
            donors[peer] = member.role != "owner", random.random()
    return sorted(donors, key=lambda peer: donors[peer])


async def read_state(
    messages: AsyncIterable[Any],
    sizes: Sequence[int],
    admission: Admission,
    run_id: str,
    *,
    newer_than: float = -1,
    note: Callable[[float], object] = lambda share: None,
) -> State:
    """Read a state as it comes from a donor.

    Args:
        messages: hivemind's, each with a piece of a tensor, one after the other; the first also with the signature.
        sizes: values of each tensor.
        newer_than: the state must be of a later round.
        note: called with the share that has arrived, after each piece.

    Raises ValueError when it is too long or another number of values, or too old; UntrustedError when nobody of the
    owner's side has signed it.
    """
    values = torch.empty(0)
    signed = None
    size = 0
    async for message in messages:
        if signed is None:
            signed = _signed(message.metadata, admission, run_id)
            if signed.round <= newer_than:
                raise ValueError("it is not of a later round")
            values = torch.empty(sum(sizes)).share_memory_()  # another process reads it: no copy for that
        end = size + len(message.tensor_part.buffer)
        if end > values.nbytes:
            raise ValueError("it is longer than the state of this run")
        data: Any = values.numpy()
        memoryview(data).cast("B")[size:end] = message.tensor_part.buffer
        size = end
        note(size / values.nbytes)
    if signed is None or size < values.nbytes:
        raise ValueError("it is shorter than the state of this run")
    tensors = list(values.split(list(sizes)))
    if digest_of(signed.run_id, signed.round, tensors) != signed:
        raise ValueError("it is not what was signed")
    return signed, tensors


def _signed(metadata: bytes, admission: Admission, run_id: str) -> Digest:
    told = plain_msgpack(metadata) if len(metadata) <= _LONGEST_METADATA else None
    if not (isinstance(told, dict) and isinstance(told.get("digest"), bytes)):
        raise ValueError("nobody has signed it")
    return read_digest(admission, told["digest"], run_id=run_id)


def pieces(data: bytes | memoryview, metadata: bytes = b"") -> Iterator[DownloadData]:
    """Yield what is sent in several messages; the first one has the ``metadata``."""
    for first in range(0, len(data), PIECE):
        piece = runtime_pb2.Tensor(buffer=bytes(data[first : first + PIECE]))
        yield DownloadData(tensor_part=piece, metadata=b"" if first else metadata)
