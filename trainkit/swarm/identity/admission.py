"""Admission to a run: credentials, and who was revoked.

A *credential* says "this libp2p key is mine", signed by an invitation. A peer shows it with every request to the DHT,
and keeps it there, so that others can look up who has a peer id that libp2p has proven.

A peer has three processes that must agree: its own, the DHT's and the averager's, forked from it. Each has its copy of
`Admission`; what changes while the run goes on (who is revoked or banned) is on a `Board` in shared memory, which the
peer's own process writes and all of them read.

Only ``owner.key`` in the run folder is a secret: whoever has it decides who takes part. A token is printed once and
kept nowhere.
"""

import asyncio
import ctypes
import hashlib
import json
import math
import multiprocessing
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Annotated, Any, TypeVar

import base58
from pydantic import Field, TypeAdapter

from trainkit.common import fileio
from trainkit.swarm.identity import invitations
from trainkit.swarm.identity.invitations import Pass, UntrustedError
from trainkit.swarm.protocol.messages import records_in

# Members that are known at once; a new one takes the place of the first.
_MOST_MEMBERS = 4096
_BOARD_SIZE = 1 << 20
_LONGEST_KEY = 1024  # bytes; RSA of 4096 bits has 550
_Id = Annotated[str, Field(min_length=64, max_length=64)]
# A list of revoked invitations: its serial, and their ids.
_REVOKED = TypeAdapter(tuple[Annotated[int, Field(gt=0, lt=1 << 50)], Annotated[list[_Id], Field(max_length=500)]])
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True)
class Member:
    """A peer that takes part."""

    peer_id: str
    name: str
    role: invitations.Role
    expires: int
    """Seconds since 1970."""
    invitation: str
    """Id of its invitation; all machines that use one have it."""
    public_key: bytes = field(repr=False)
    """Key of libp2p, in DER."""

    @property
    def trusted(self) -> bool:
        """Member of the owner's side: may average for others, give away its state, and sign what others take over."""
        return self.role != "volunteer"


class Board:
    """A small piece of JSON in memory that forked processes share: one writes, all read."""

    def __init__(self) -> None:
        fork = multiprocessing.get_context("fork")
        self._data = fork.RawArray(ctypes.c_char, _BOARD_SIZE)
        self._version: Any = fork.RawValue(ctypes.c_uint64)
        self._seen: tuple[int, dict[str, Any]] = (0, {})  # a version, and the values that it has

    def write(self, **changes: Any) -> None:
        """Change some values. Raises ValueError, and changes nothing, when they do not fit."""
        data = json.dumps({**self.read(), **changes}).encode()
        if len(data) >= _BOARD_SIZE:
            raise ValueError("too many statements for the board")
        # No lock: a reader that was killed would hold it for ever.
        self._version.value += 1
        self._data.value = data
        self._version.value += 1

    def read(self) -> dict[str, Any]:
        """All values; cheap when nothing has changed."""
        version = self._version.value
        if version != self._seen[0] and version % 2 == 0:  # odd while it is written
            with suppress(ValueError):
                value = fileio.parse(self._data.value)
                if self._version.value == version:
                    self._seen = (version, value)
        return self._seen[1]


class Admission:
    """Answers for one run: who is this peer, and is it still welcome?"""

    def __init__(self, owner: bytes) -> None:
        """``owner``: the public key of the run's owner, from whom everything comes."""
        self._owner = owner
        self._board = Board()
        self._known: dict[str, Member] = {}
        self._board.write(serial=0, revoked=[], banned=[])

    @property
    def revoked(self) -> list[str]:
        """Ids of the invitations that do not count any more."""
        return list(self._board.read()["revoked"])

    def told(self, statement: bytes, purpose: str, kind: TypeAdapter[V], *, by_owner: bool = False) -> V:
        """Return what somebody of the owner's side, or the owner alone, has stated for that purpose, if it is of that
        kind.

        Raises UntrustedError.
        """
        said = invitations.read_statement(statement, purpose, owner=self._owner)
        if said.grant.id in self.revoked:
            raise UntrustedError("its invitation was revoked")
        if said.grant.role == "volunteer" or (by_owner and said.grant.role != "owner"):
            raise UntrustedError(f"a {said.grant.role} does not say such a thing")
        return invitations.parsed(kind, said.content, f"statement of that kind ({purpose})")

    def introduce(self, credential: bytes) -> Member:
        """Learn who a peer is. Raises UntrustedError."""
        member = self.invited(credential, until=0.0)
        why = self._objection(member, time.time())
        if why:
            raise UntrustedError(why)
        return member

    def admitted(self, peer_id: str, *, now: float | None = None) -> Member | None:
        """The peer of that id, if it was introduced here and is still welcome.

        Ask anew each time: an invitation expires or is revoked while its peer is connected.
        """
        member = self._known.get(peer_id)
        if member is None or self._objection(member, now or time.time()):
            return None
        return member

    def invited(self, credential: bytes, until: float) -> Member:
        """Whoever was invited until then, and may have been revoked or banned since: as the writer of a record.

        Raises UntrustedError.
        """
        member = _member_of(credential, self._owner)
        if member.expires < until:
            raise UntrustedError("it outlasts its invitation")
        if not self._objection(member, time.time()):
            remember(self._known, member.peer_id, member, _MOST_MEMBERS)
        return member

    def names(self) -> dict[str, str]:
        """Peer id -> name of its invitation, of those that are known here."""
        return {member.peer_id: member.name for member in self._known.values()}

    def revoke(self, statement: bytes) -> bool:
        """Take over a list of revoked invitations (see `revoked_list`). False if this one is not newer.

        Raises UntrustedError unless the owner has signed it.
        """
        serial, revoked = self.told(statement, "revoked", _REVOKED, by_owner=True)
        if serial <= self._board.read()["serial"]:
            return False
        self._board.write(serial=serial, revoked=revoked)
        return True

    def ban(self, banned: Iterable[str]) -> None:
        """From now on exactly these are banned: ids of peers, or of invitations with all who use them."""
        self._board.write(banned=sorted(banned))

    def _objection(self, member: Member, now: float) -> str:
        """Why a peer is not welcome (any more); empty if it is."""
        facts = self._board.read()
        if member.expires <= now:
            return "its invitation has expired"
        if member.invitation in facts["revoked"]:
            return "its invitation was revoked"
        # A run without its owner would be none: nobody bans it.
        if member.role != "owner" and not {member.peer_id, member.invitation}.isdisjoint(facts["banned"]):
            return "it was banned from this run"
        return ""


@lru_cache(maxsize=_MOST_MEMBERS)
def _member_of(credential: bytes, owner: bytes) -> Member:
    """Return whom a credential is of: its signatures are checked, once; what may change is not looked at."""
    said = invitations.read_statement(credential, "peer", owner=owner, now=-1.0)
    own = said.grant
    return Member(peer_id_of(said.content), own.name, own.role, own.expires, own.id, said.content)


def remember(known: dict[K, V], key: K, value: V, most: int = 1000) -> None:
    """Put it last, and forget the oldest beyond the limit."""
    known.pop(key, None)
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]


def peer_key(peer_id: str) -> str:
    """The DHT's key of a peer's credential."""
    return f"trainkit_peer_{peer_id}"


def introduced(admission: Admission, peer_id: str, found: Any) -> Member | None:
    """Return who a peer is, by what the DHT returned for `peer_key`; None if it does not take part."""
    for credential in records_in(peer_key(peer_id), found).values():
        with suppress(UntrustedError):
            member = admission.introduce(credential)
            if member.peer_id == peer_id:
                return member
    return None


_LOOK_SECONDS = 3.0
# How long a stranger is not looked up again.
_STRANGER_SECONDS = 5.0


class Guard:
    """In the averager's process: who asks to average, or for the state? Looks up in the DHT whom it does not know."""

    def __init__(self, dht: Any, admission: Admission) -> None:
        self.dht = dht
        self.admission = admission
        self._strangers: dict[str, float] = {}

    async def member(self, peer_id: str) -> Member | None:
        """The member of that id; None for a stranger, and for a peer that the run does not want any more."""
        member = self.admission.admitted(peer_id)
        now = time.monotonic()
        if member is not None or now - self._strangers.get(peer_id, -math.inf) < _STRANGER_SECONDS:
            return member
        with suppress(asyncio.TimeoutError, OSError):
            asked = self.dht.get(peer_key(peer_id), latest=False, return_future=True)
            member = introduced(self.admission, peer_id, await asyncio.wait_for(asked, _LOOK_SECONDS))
        if member is None:
            remember(self._strangers, peer_id, now)
        return member

    async def trusts(self, peer_id: str) -> bool:
        """Return whether that peer is of the owner's side."""
        member = await self.member(peer_id)
        return member is not None and member.trusted


def revoked_list(own: Pass, serial: int, ids: Iterable[str]) -> bytes:
    """A signed list of all invitations that were revoked so far; of two lists the one with the higher serial counts."""
    return own.state("revoked", json.dumps([serial, sorted(ids)]).encode())


def peer_id_of(public_key: bytes) -> str:
    """libp2p's id of an RSA key in DER: base58 of a multihash (0x12: SHA-256, 32 bytes) of its protobuf.

    Raises UntrustedError when it is too long for a key.
    """
    size = len(public_key)
    if not 0 < size <= _LONGEST_KEY:
        raise UntrustedError("it does not contain a peer's key")
    # libp2p's PublicKey {key_type = 1: RSA (0), data = 2}, its length in groups of seven bits.
    length = [size & 127 | 128, size >> 7] if size >= 128 else [size]
    digest = hashlib.sha256(b"\x08\x00\x12" + bytes(length) + public_key).digest()
    return base58.b58encode(b"\x12\x20" + digest).decode()
