"""Invitations: who may take part in a run, as what, and until when; checked by anybody, with no server to ask.

A chain of three signatures, each checked with the owner's public key alone:

    owner's key  signs  a grant: the run, the invitee's name, role, expiry, and the public key of this invitation
    invitation's key  signs  what its holder says: "this libp2p key is mine", "this is the state of round 7"
    the peer's libp2p key  is what a connection proves, so that nobody can use another's word

Signatures are Ed25519 (RFC 8032) over exact bytes. A message carries the bytes that were signed, so nobody has to write
a text anew in the very same form to check it. The purpose is part of what is signed: an invitation's signature is none
of a state's digest.

A *token* is the invitation as one line of text: the grant, its secret key, where the swarm is, and what is installed
there, so that a newcomer can read it before there is a trainkit. Whoever has it is in, as with a house key, so it is
treated like a password. Several machines may use one; they go by one name and are revoked together.
"""

from __future__ import annotations

import base64
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import filterfalse
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from pydantic import Field, TypeAdapter, ValidationError

from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError
from trainkit.common.terminal import LONGEST_NAME
from trainkit.swarm.protocol.addresses import check_address, is_address
from trainkit.swarm.protocol.messages import MOST_NEEDS, NEEDS

T = TypeVar("T")

KEY_SIZE = 32


class UntrustedError(Exception):
    """Word of a stranger that is not what it says. The text says why, in words that are safe to print."""


def _require(is_so: bool, otherwise: str) -> None:
    if not is_so:
        raise UntrustedError(otherwise)


class Key:
    """A private key; its ``seed`` of 32 bytes is the secret."""

    def __init__(self, seed: bytes) -> None:
        self._private = Ed25519PrivateKey.from_private_bytes(seed)
        self.public = self._private.public_key().public_bytes_raw()
        """32 bytes, which everybody may know."""

    @classmethod
    def generate(cls) -> Key:
        """A new one."""
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @property
    def seed(self) -> bytes:
        """The secret, to keep in a file or to send in a token."""
        return self._private.private_bytes_raw()

    def sign(self, purpose: str, content: bytes) -> bytes:
        """A signature of 64 bytes."""
        return self._private.sign(_message(purpose, content))


def is_signed(public: bytes, signature: bytes, purpose: str, content: bytes) -> bool:
    """Return whether ``signature`` was made with the private half of ``public``, for this purpose and this content."""
    with suppress(InvalidSignature, ValueError):
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _message(purpose, content))
        return True
    return False


def _message(purpose: str, content: bytes) -> bytes:
    return pack([b"trainkit", purpose.encode(), content])


def pack(parts: Sequence[bytes]) -> bytes:
    """Several parts in one, each behind its length."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def unpack(data: bytes, count: int) -> list[bytes]:
    """The ``count`` parts of `pack`.

    Raises UntrustedError when something is missing or left over.
    """
    parts = []
    at = 0
    for _ in range(count):
        start = at + 4
        at = start + int.from_bytes(data[at:start], "big")
        _require(start <= at <= len(data), "it is truncated")
        parts.append(data[start:at])
    _require(at == len(data), "it is longer than it states")
    return parts


def parsed(kind: TypeAdapter[T], content: bytes, what: str) -> T:
    """JSON that somebody has signed, if it has these types and bounds.

    Raises UntrustedError, with ``what`` it is not, for anything else.
    """
    try:
        return kind.validate_json(content, strict=True)
    except ValidationError as error:
        raise UntrustedError(f"it is no {what}") from error


Role = Literal["owner", "reducer", "volunteer"]
"""Owner: holds the run's key. Reducer: trusted, averages for others and gives away the state. The owner's side is
these two. Volunteer: everybody else; calls out only, neither averages for others nor gives away a state."""

PREFIX = "trainkit1."
GUESTS, RANKS = "guest", "ranks"
"""Names of invitations that many use: by the token that `swarm create` prints, and the ranks of one job."""

LONGEST_FILE = 16_384
_LONGEST_TOKEN = 8000
# Alone, or in the line that was printed with it: TRAINKIT_TOKEN=trainkit1.... python -m jobs.join
_TOKEN = re.compile(r"(?<![\w/.-])trainkit\d+\.(?:(?!\s+python\b).)*", re.DOTALL)
_LONGEST_STATEMENT = 70_000
_MOST_ADDRESSES = 16
_LONGEST_RUN = 128
# Addresses, which begin with a slash, and requirements.
_WORDS: TypeAdapter[list[str]] = TypeAdapter(
    Annotated[list[str], Field(min_length=1, max_length=_MOST_ADDRESSES + MOST_NEEDS)]
)
# Of a grant: run, owner, key, name, role, and the second since 1970 at which it expires.
_GRANT = TypeAdapter(tuple[str, str, str, str, Role, Annotated[int, Field(gt=0, lt=1 << 40)]])


@dataclass(frozen=True)
class Grant:
    """Permission by an owner."""

    run: str
    owner: bytes
    """Public key of the run's owner."""
    key: bytes
    """Public key of this invitation."""
    name: str
    role: Role
    expires: int
    """Seconds since 1970."""

    @property
    def id(self) -> str:
        """Return what a list of revoked invitations names."""
        return self.key.hex()

    def to_bytes(self) -> bytes:
        """Return what is signed."""
        fields = [self.run, _text(self.owner), _text(self.key), self.name, self.role, self.expires]
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Grant:
        """Raises UntrustedError unless every field has its type and size."""
        run, owner, key, name, role, expires = parsed(_GRANT, data, "invitation")
        grant = cls(run, _bytes(owner), _bytes(key), name, role, expires)
        for text, longest in ((run, _LONGEST_RUN), (name, LONGEST_NAME)):
            _require(0 < len(text) <= longest and text.isprintable(), "its names are too long or cannot be printed")
        _require(len(grant.owner) == len(grant.key) == KEY_SIZE, "it is not an invitation")
        return grant


@dataclass(frozen=True)
class Pass:
    """An invitation that is in use: what its holder signs, others believe as far as the grant goes."""

    grant: Grant
    signature: bytes
    """The owner's, of the grant."""
    key: Key = field(repr=False)

    def state(self, purpose: str, content: bytes) -> bytes:
        """``content`` as a statement that `read_statement` takes."""
        grant = self.grant.to_bytes()
        return pack([grant, self.signature, content, self.key.sign(purpose, pack([grant, content]))])


class Statement(NamedTuple):
    """Word of the holder of a grant."""

    grant: Grant
    content: bytes


def grant(owner: Key, run: str, name: str, role: Role, expires: float) -> Pass:
    """A new invitation by the owner of a run."""
    key = Key.generate()
    # Read back, so that nothing is signed that nobody would take.
    granted = Grant.from_bytes(Grant(run, owner.public, key.public, name, role, int(expires)).to_bytes())
    return Pass(granted, owner.sign("grant", granted.to_bytes()), key)


def read_statement(data: bytes, purpose: str, *, owner: bytes, now: float | None = None) -> Statement:
    """Return what ``data`` says, if it is signed by somebody whom the owner has invited.

    Args:
        owner: the owner's public key.
        now: seconds since 1970, to see what has expired.

    Raises:
        UntrustedError: it is forged, expired, for another purpose or of another run.
    """
    _require(len(data) <= _LONGEST_STATEMENT, "it is too long")
    granted, owners, content, signature = unpack(data, 4)
    grant = Grant.from_bytes(granted)
    _require(grant.owner == owner, "it is an invitation to another run")
    _require(is_signed(owner, owners, "grant", granted), "the owner has not signed it")
    is_own = is_signed(grant.key, signature, purpose, pack([granted, content]))
    _require(is_own, "it was not signed with the key of its invitation")
    _require(grant.expires > (now or time.time()), "its invitation has expired")
    return Statement(grant, content)


def write_token(own: Pass, addresses: Sequence[str], needs: Sequence[str] = ()) -> str:
    """An invitation as one line of text; ``needs``: what the run's creator has, as pip installs it."""
    where = json.dumps([*addresses[:_MOST_ADDRESSES], *needs], separators=(",", ":")).encode()
    body = pack([own.grant.to_bytes(), own.signature, own.key.seed, where])
    # Signed as a whole as well: a token that lost a letter on its way is told from one that leads nowhere.
    return PREFIX + _text(pack([body, own.key.sign("token", body)]))


def looks_like(text: str) -> bool:
    """Return whether ``text`` is meant as a token, or is a whole line with one in it."""
    return _TOKEN.search(text) is not None


def read_token(text: str, *, now: float | None = None) -> tuple[Pass, tuple[str, ...]]:
    """The invitation in ``text``, and the addresses of the swarm. Quick: a mistyped one is refused before anything
    heavy is imported.

    Raises UserError, which does not repeat the token: it is a secret.
    """
    match = _TOKEN.search(text)
    text = "".join((match[0] if match else text).split()).strip("'\"")  # a mail program has wrapped it
    try:
        _require(len(text) <= _LONGEST_TOKEN, "it is too long")
        _require(text.startswith(PREFIX), f"it does not begin with {PREFIX}")
        body, signature = unpack(_bytes(text.removeprefix(PREFIX)), 2)
        granted, owners, seed, where = unpack(body, 4)
        _require(len(seed) == KEY_SIZE, "it contains no key")
        own = Pass(Grant.from_bytes(granted), owners, Key(seed))
        is_whole = own.key.public == own.grant.key and is_signed(own.grant.key, signature, "token", body)
        _require(is_whole, "it has been changed")
        _require(is_signed(own.grant.owner, owners, "grant", granted), "the owner of the run has not signed it")
        words = parsed(_WORDS, where, "way to the run")
        found = [check_address(word) for word in words if word.startswith("/")]
        needs = [word for word in words if not word.startswith("/")]
        # Whoever has no trainkit yet reads these, and installs them.
        parsed(NEEDS, json.dumps(needs).encode(), "list of what to install")
        _require(bool(found), "it leads nowhere")
    except UntrustedError as error:
        why = f"It is mistyped or incomplete: {error}."
        fix = "Copy the whole line again; the token is one word."
        raise UserError("This is not a token.", why=why, fix=fix) from None
    if own.grant.expires <= (now or time.time()):
        why = f"It was good until {date(own.grant.expires)}."
        fix = "Ask its owner for another."
        raise UserError(f"The invitation of {own.grant.name} to {own.grant.run} has expired.", why=why, fix=fix)
    return own, tuple(found)


def credited(invited: str, said: str) -> str:
    """Under which name a peer's work is counted: that of its invitation, which the owner has signed.

    Where many use one, it is told apart by what a peer says of itself; ``invited`` is empty for the owner's own.
    """
    if invited in (GUESTS, RANKS):
        return f"{invited} {said}".rstrip()
    return invited or said


def date(seconds: float) -> str:
    """A moment in words that mean the same everywhere."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(seconds))


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    data = b""
    with suppress(ValueError):
        # validate: without it Python passes over letters that are none of base64.
        data = base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
    # A last letter may carry bits that mean nothing.
    _require(_text(data) == text, "it has been changed, lacks letters, or has extra ones")
    return data


# The entry of a peer: what it was given to find a swarm and to prove who it is.

TOKEN_VARIABLE = "TRAINKIT_TOKEN"
"""A token in the environment is not in the list of processes, which everybody on a machine can read."""


@dataclass(frozen=True)
class Entry:
    """Way to the swarm, and what this peer may do there."""

    addresses: tuple[str, ...]
    own: Pass

    @property
    def name(self) -> str:
        """Name of whom the owner has invited; empty for guests, who are many."""
        name = self.own.grant.name
        return "" if name == GUESTS else name

    @property
    def text(self) -> str:
        """Text that `entry_of` takes: a secret."""
        return write_token(self.own, self.addresses)


def with_token(text: str, more: Sequence[str] = ()) -> Entry:
    """Return the way in of somebody who was invited; ``more`` addresses are tried before those of the token."""
    own, addresses = read_token(text)
    return Entry((*map(check_address, more), *addresses), own)


def entry_of(words: Sequence[str], env: Mapping[str, str]) -> Entry:
    """The way in that was given. A token among the words is warned of on stderr: others on this machine see it for as
    long as the process runs.

    Args:
        words: a token, a file that holds one, or ``-`` to read it from standard input; and addresses to try before its
            own, for the run may have moved. Without the former it is in TRAINKIT_TOKEN.

    Raises UserError when there is no token.
    """
    others = " ".join(filterfalse(is_address, words))
    text = others or env.get(TOKEN_VARIABLE, "")
    if others == "-":
        text = sys.stdin.read(LONGEST_FILE)
    elif os.path.isfile(others):
        text = fileio.read_start(Path(others), LONGEST_FILE, follow=True)
    if looks_like(text):
        entry = with_token(text, [*filter(is_address, words)])
        if text == others:
            seen = "Other users of this machine can see the token in the list of processes"
            terminal.warn(f"{seen}; put it in {TOKEN_VARIABLE} or a file, or give -.")
        return entry
    why = f"Only people whom its owner invited may join a run; their tokens begin with '{PREFIX}'."
    fix = "Copy the whole line that `python -m jobs.swarm create` or `invite` printed."
    # Not what was given itself: it may be most of a secret.
    where = "what was given" if others else TOKEN_VARIABLE
    raise UserError(f"There is no token in {where}.", why=why, fix=fix)


def is_setting(word: str) -> bool:
    """``section.key=value``; neither a token nor an address is."""
    return re.match(r"[a-z_]+(\.[a-z_0-9]+)*=", word) is not None
