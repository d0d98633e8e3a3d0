"""Who takes part in a run: credentials, revoked invitations, bans. One answer for all processes of a peer.

A *credential* says "this libp2p key is mine", signed by an invitation. A peer shows it with every request to the DHT,
and keeps it there, so that whoever is asked by a peer id that libp2p has proven can look up who that is.

A peer has three processes that must agree: its own, the DHT's and the averager's, forked from it. Each has its copy of
`Admission`; what changes while the run goes on (revoked, banned, the owner's key at a run that was joined by its
address) is on a `Board` in shared memory, which the peer's own process writes and all of them read.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import multiprocessing
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import base58

from trainkit import reading
from trainkit.collaborative.invitation import NOBODY, Pass, Role, Statement, read_statement
from trainkit.collaborative.signing import UntrustedError

# Of them at once; who comes later takes the place of whoever came first.
_MOST_MEMBERS = 4096
_MOST_REVOKED = 500
_BOARD_SIZE = 1 << 17
_LONGEST_KEY = 1024  # bytes; RSA of 4096 bits has 550
_LOCK_SECONDS = 1.0


@dataclass(frozen=True)
class Member:
    """A peer that takes part."""

    peer_id: str
    name: str
    role: Role
    expires: int
    """Seconds since 1970."""
    invitation: str
    """Id of its invitation; all machines that use one have it."""
    public_key: bytes = field(repr=False)
    """Of libp2p, in DER."""

    @property
    def trusted(self) -> bool:
        """Of the owner's side: may average for others, give away its state, and sign what others take over."""
        return self.role != "volunteer"


class Board:
    """A small piece of JSON in memory that forked processes share: one writes, all read."""

    def __init__(self) -> None:
        fork = multiprocessing.get_context("fork")
        self._lock = fork.Lock()
        self._data = fork.RawArray(ctypes.c_char, _BOARD_SIZE)
        self._version: Any = fork.RawValue(ctypes.c_uint64)
        self._seen, self._value = 0, dict[str, Any]()

    def write(self, value: dict[str, Any]) -> None:
        """Raises ValueError when it does not fit."""
        data = json.dumps(value).encode()
        if len(data) >= _BOARD_SIZE:
            raise ValueError("too much for the board")
        # A reader that was killed holds the lock for ever; those that are left must still be told.
        held = self._lock.acquire(timeout=_LOCK_SECONDS)
        try:
            self._data.value = data
            self._version.value += 1
        finally:
            if held:
                self._lock.release()

    def read(self) -> dict[str, Any]:
        """What was written last; cheap when nothing has changed."""
        if self._version.value != self._seen and self._lock.acquire(timeout=_LOCK_SECONDS):
            try:
                self._value, self._seen = reading.parse(self._data.value), self._version.value
            finally:
                self._lock.release()
        return self._value


class Admission:
    """Answers for one run: who is this peer, and is it still welcome?"""

    def __init__(self, owner: bytes | None, *, open_run: bool = False) -> None:
        """
        Args:
            owner: the public key that everything comes from. None for who joins an open run by its address, and reads
                the key in the manifest that this address vouches for: until `settle`, any owner's word is taken.
            open_run: strangers are welcome as volunteers.
        """
        self._board = Board()
        self._known: dict[str, Member] = {}
        self._verified: dict[tuple[bytes, bytes | None, bool], Member] = {}
        self._facts: dict[str, Any] = {
            "owner": owner.hex() if owner else None, "open": open_run, "serial": 0, "revoked": [], "banned": []
        }  # fmt: skip
        self._board.write(self._facts)

    @property
    def owner(self) -> bytes | None:
        """The owner's public key."""
        known = self._board.read()["owner"]
        return bytes.fromhex(known) if known else None

    @property
    def open_run(self) -> bool:
        """Whether strangers are welcome."""
        return bool(self._board.read()["open"])

    def settle(self, owner: bytes, *, open_run: bool) -> None:
        """From now on only this owner's word counts. Raises ValueError if it is known to be another's."""
        if self.owner not in (None, owner):
            raise ValueError("the owner is known")
        self._write(owner=owner.hex(), open=open_run)
        self._known.clear()  # they may have come with another owner's word

    def read(self, data: bytes, purpose: str, *, now: float | None = None) -> Statement:
        """A statement of somebody who takes part.

        Raises UntrustedError.
        """
        found = read_statement(data, purpose, owner=self.owner, open_run=self.open_run, now=now)
        if found.grant.id in self._board.read()["revoked"]:
            raise UntrustedError("its invitation was revoked")
        return found

    def introduce(self, credential: bytes, *, now: float | None = None) -> Member:
        """Learn who a peer is.

        Raises UntrustedError.
        """
        member = self._member_of(credential)
        if why := self._objection(member, now):
            raise UntrustedError(why)
        _keep(self._known, member.peer_id, member)
        return member

    def admitted(self, peer_id: str, *, now: float | None = None) -> Member | None:
        """The peer of that id, if it was introduced here and is still welcome.

        Ask anew each time: an invitation expires or is revoked while its peer is connected.
        """
        member = self._known.get(peer_id)
        return None if member is None or self._objection(member, now) else member

    def invited(self, credential: bytes, until: float) -> Member:
        """Whoever was invited until then, and may have been revoked or banned since: as the writer of a record.

        Raises UntrustedError.
        """
        member = self._member_of(credential)
        if member.expires < until:
            raise UntrustedError("it outlasts its invitation")
        return member

    def names(self) -> dict[str, str]:
        """Peer id -> name of its invitation, of those whose signature was checked here."""
        return {member.peer_id: member.name for member in self._verified.values()}

    @property
    def revoked(self) -> list[str]:
        """Ids of the invitations that do not count any more."""
        return list(self._board.read()["revoked"])

    def revoke(self, statement: bytes) -> bool:
        """Take over a list of revoked invitations (see `revoked_list`). False if this one is not newer.

        Raises UntrustedError unless the owner has signed it.
        """
        found = self.read(statement, "revoked")
        if found.grant.role != "owner":
            raise UntrustedError("only the owner revokes")
        serial, revoked = _read_revoked(found.content)
        if serial <= self._facts["serial"]:
            return False
        self._write(serial=serial, revoked=revoked)
        return True

    def ban(self, banned: Iterable[str]) -> None:
        """From now on exactly these are banned: ids of peers, or of invitations with all who use them."""
        self._write(banned=sorted(banned))

    def _write(self, **facts: Any) -> None:
        self._facts = {**self._facts, **facts}
        self._board.write(self._facts)

    def _member_of(self, credential: bytes) -> Member:
        """Its signatures are checked once; what may change is not looked at."""
        key = (credential, self.owner, self.open_run)
        if (known := self._verified.get(key)) is not None:
            return known
        found = read_statement(credential, "peer", owner=key[1], open_run=key[2], now=0.0)
        grant = found.grant
        member = Member(peer_id_of(found.content), grant.name, grant.role, grant.expires, grant.id, found.content)
        _keep(self._verified, key, member)
        return member

    def _objection(self, member: Member, now: float | None) -> str:
        """Why a peer is not welcome (any more); empty if it is."""
        facts = self._board.read()
        if member.expires <= (time.time() if now is None else now):
            return "its invitation has expired"
        if member.invitation in facts["revoked"]:
            return "its invitation was revoked"
        # A run without its owner would be none: nobody bans it.
        if member.role != "owner" and (member.peer_id in facts["banned"] or member.invitation in facts["banned"]):
            return "it was banned from this run"
        return ""


def _keep(found: dict[Any, Member], key: Any, member: Member) -> None:
    found.pop(key, None)
    found[key] = member
    if len(found) > _MOST_MEMBERS:  # the one that came first
        del found[next(iter(found))]


def credential(own: Pass, public_key: bytes) -> bytes:
    """What a peer shows: its libp2p key, an RSA key in DER (SubjectPublicKeyInfo), under its invitation."""
    return own.state("peer", public_key)


def revoked_list(own: Pass, serial: int, invitations: Iterable[str]) -> bytes:
    """A signed list of all invitations that were revoked so far; of two lists the one with the higher serial counts."""
    return own.state("revoked", json.dumps([serial, sorted(invitations)]).encode())


def peer_id_of(public_key: bytes) -> str:
    """libp2p's id of an RSA key in DER: base58 of a multihash (0x12: SHA-256, 32 bytes) of its protobuf.

    Raises UntrustedError when it is too long for a key.
    """
    if not 0 < len(public_key) <= _LONGEST_KEY:
        raise UntrustedError("it holds no key of a peer")
    # libp2p's PublicKey {key_type = 1: RSA (0), data = 2}.
    size, length = len(public_key), b""
    while size > 127:
        length, size = length + bytes([size & 127 | 128]), size >> 7
    message = b"\x08\x00\x12" + length + bytes([size]) + public_key
    return str(base58.b58encode(b"\x12\x20" + hashlib.sha256(message).digest()).decode())


def _read_revoked(content: bytes) -> tuple[int, list[str]]:
    try:
        serial, revoked = reading.parse(content)
    except (ValueError, TypeError, RecursionError) as error:
        raise UntrustedError("it is no list of revoked invitations") from error
    if not (
        type(serial) is int
        and 0 < serial < 1 << 50
        and isinstance(revoked, list)
        and len(revoked) <= _MOST_REVOKED
        and all(isinstance(item, str) and len(item) == 2 * len(NOBODY) for item in revoked)
    ):
        raise UntrustedError("it is no list of revoked invitations")
    return serial, revoked
