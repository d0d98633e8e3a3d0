"""Who takes part in a run: credentials and who was revoked; the way in, and what the owner's folder holds.

A *credential* says "this libp2p key is mine", signed by an invitation. A peer shows it with every request to the DHT,
and keeps it there, so that others can look up who has a peer id that libp2p has proven.

A peer has three processes that must agree: its own, the DHT's and the averager's, forked from it. Each has its copy of
`Admission`; what changes while the run goes on (who is revoked or banned) is on a `Board` in shared memory, which the
peer's own process writes and all of them read.

Only ``owner.key`` in the run folder is a secret: whoever has it decides who takes part. A token is printed once and
kept nowhere.
"""

import asyncio
import base64
import ctypes
import hashlib
import json
import math
import multiprocessing
import os
import re
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

import base58
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from pydantic import Field, TypeAdapter

from trainkit import fileio, terminal
from trainkit.errors import TrainkitError, UserError
from trainkit.run.folder import RunDir, find_run, list_runs, runs_root
from trainkit.swarm import address, invitations, processes
from trainkit.swarm.invitations import Pass, UntrustedError
from trainkit.swarm.messages import REVOKED, records_in

# Members that are known at once; a new one takes the place of the first.
_MOST_MEMBERS = 4096
_BOARD_SIZE = 1 << 20
_LONGEST_KEY = 1024  # bytes; RSA of 4096 bits has 550
# A list of revoked invitations: its serial, and their ids.
_Serial = Annotated[int, Field(gt=0, lt=1 << 50)]
_Id = Annotated[str, Field(min_length=64, max_length=64)]
_REVOKED = TypeAdapter(tuple[_Serial, Annotated[list[_Id], Field(max_length=500)]])
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
    """Of libp2p, in DER."""

    @property
    def trusted(self) -> bool:
        """Of the owner's side: may average for others, give away its state, and sign what others take over."""
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
            raise ValueError("too much for the board")
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
        self._owner, self._board = owner, Board()
        self._known: dict[str, Member] = {}
        self._board.write(serial=0, revoked=[], banned=[])

    @property
    def revoked(self) -> list[str]:
        """Ids of the invitations that do not count any more."""
        return list(self._board.read()["revoked"])

    def told(self, statement: bytes, purpose: str, kind: TypeAdapter[V], *, by_owner: bool = False) -> V:
        """What somebody of the owner's side, or the owner alone, has stated for that purpose, if it is of that kind.

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
        if why := self._objection(member, time.time()):
            raise UntrustedError(why)
        return member

    def admitted(self, peer_id: str, *, now: float | None = None) -> Member | None:
        """The peer of that id, if it was introduced here and is still welcome.

        Ask anew each time: an invitation expires or is revoked while its peer is connected.
        """
        member = self._known.get(peer_id)
        return None if member is None or self._objection(member, time.time() if now is None else now) else member

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
    """Whom a credential is of: its signatures are checked, once; what may change is not looked at."""
    statement = invitations.read_statement(credential, "peer", owner=owner, now=0.0)
    own, public_key = statement.grant, statement.content
    return Member(peer_id_of(public_key), own.name, own.role, own.expires, own.id, public_key)


def remember(known: dict[K, V], key: K, value: V, most: int) -> None:
    """Put it last, and forget the oldest beyond the limit."""
    known.pop(key, None)
    known[key] = value
    if len(known) > most:
        del known[next(iter(known))]


def peer_key(peer_id: str) -> str:
    """The DHT's key of a peer's credential."""
    return f"trainkit_peer_{peer_id}"


def introduced(admission: Admission, peer_id: str, found: Any) -> Member | None:
    """Who a peer is, by what the DHT returned for `peer_key`; None if it does not take part."""
    for credential in records_in(peer_key(peer_id), found).values():
        with suppress(UntrustedError):
            if (member := admission.introduce(credential)).peer_id == peer_id:
                return member
    return None


_LOOK_SECONDS = 3.0
# How long a stranger is not looked up again, and how many strangers are remembered.
_STRANGER_SECONDS = 5.0
_MOST_STRANGERS = 1000


class Guard:
    """In the averager's process: who asks to average, or for the state? Looks up in the DHT whom it does not know."""

    def __init__(self, dht: Any, admission: Admission) -> None:
        self.dht, self.admission = dht, admission
        self._strangers: dict[str, float] = {}

    async def member(self, peer_id: str) -> Member | None:
        """The member of that id; None for a stranger, and for a peer that the run does not want any more."""
        member, now = self.admission.admitted(peer_id), time.monotonic()
        if member is not None or now - self._strangers.get(peer_id, -math.inf) < _STRANGER_SECONDS:
            return member
        with suppress(asyncio.TimeoutError, OSError):
            asked = self.dht.get(peer_key(peer_id), latest=False, return_future=True)
            member = introduced(self.admission, peer_id, await asyncio.wait_for(asked, _LOOK_SECONDS))
        if member is None:
            remember(self._strangers, peer_id, now, _MOST_STRANGERS)
        return member

    async def trusts(self, peer_id: str) -> bool:
        """Whether that peer is of the owner's side."""
        member = await self.member(peer_id)
        return member is not None and member.trusted


def revoked_list(own: Pass, serial: int, ids: Iterable[str]) -> bytes:
    """A signed list of all invitations that were revoked so far; of two lists the one with the higher serial counts."""
    return own.state("revoked", json.dumps([serial, sorted(ids)]).encode())


def peer_id_of(public_key: bytes) -> str:
    """libp2p's id of an RSA key in DER: base58 of a multihash (0x12: SHA-256, 32 bytes) of its protobuf.

    Raises UntrustedError when it is too long for a key.
    """
    if not 0 < (size := len(public_key)) <= _LONGEST_KEY:
        raise UntrustedError("it holds no key of a peer")
    # libp2p's PublicKey {key_type = 1: RSA (0), data = 2}, its length in groups of seven bits.
    length = bytes([size]) if size < 128 else bytes([size & 127 | 128, size >> 7])
    digest = hashlib.sha256(b"\x08\x00\x12" + length + public_key).digest()
    return base58.b58encode(b"\x12\x20" + digest).decode()


VARIABLE = "TRAINKIT_TOKEN"
"""A token in the environment is not in the list of processes, which everybody on a machine can read."""
_LONGEST_FILE = 16_384


@dataclass(frozen=True)
class Entry:
    """Where the swarm is, and what this peer may do there."""

    addresses: tuple[str, ...]
    own: Pass

    @property
    def name(self) -> str:
        """Of whom the owner has invited; empty for guests, who are many."""
        return self.own.grant.name if self.own.grant.name != invitations.GUESTS else ""

    @property
    def text(self) -> str:
        """As `entry_of` takes it: a secret."""
        return invitations.write_token(self.own, self.addresses)

    def admission(self) -> Admission:
        """Who else takes part."""
        return Admission(self.own.grant.owner)


def with_token(text: str, more: Sequence[str] = ()) -> Entry:
    """As somebody who was invited; ``more`` addresses are tried before those of the token."""
    own, addresses = invitations.read_token(text)
    return Entry((*map(address.check, more), *addresses), own)


def entry_of(words: Sequence[str], env: Mapping[str, str]) -> Entry:
    """The way in that was given. A token among the words is warned of on stderr: others on this machine see it for as
    long as the process runs.

    Args:
        words: a token, a file that holds one, or ``-`` to read it from standard input; and addresses to try before its
            own, for the run may have moved. Without the former it is in TRAINKIT_TOKEN.

    Raises UserError when there is no token.
    """
    given = [word for word in words if address.looks_like(word)]
    others = " ".join(word for word in words if not address.looks_like(word))
    text = others or env.get(VARIABLE, "")
    if others == "-":
        text = sys.stdin.read(_LONGEST_FILE)
    elif os.path.isfile(others):
        text = fileio.read_start(Path(others), _LONGEST_FILE, follow=True)
    if invitations.looks_like(text):
        entry = with_token(text, given)
        if text == others:
            seen = f"Who uses this machine sees the token in its list of processes; put it in {VARIABLE} or a file"
            print(f"{seen}, or give -.", file=sys.stderr, flush=True)
        return entry
    why = f"Only those whom its owner has invited may join a run; their tokens begin with '{invitations.PREFIX}'."
    fix = "Copy the whole line that `python -m jobs.swarm create` or `invite` has printed."
    # Not what was given itself: it may be most of a secret.
    raise UserError(f"There is no token in {'what was given' if others else VARIABLE}.", why=why, fix=fix)


def is_setting(word: str) -> bool:
    """``section.key=value``; neither a token nor an address is."""
    return re.match(r"[a-z_]+(\.[a-z_0-9]+)*=", word) is not None


KEY_FILE = "owner.key"
_INVITED_FILE = "invited.jsonl"
_REVOKED_FILE = "revoked"
NEEDS_FILE = "requirements.txt"
"""What the run's creator has, as `pip install -r` takes it."""
# What the owner grants itself lasts longer than any run.
_FOR_EVER = 20 * 365 * 86400.0


class Owner:
    """The owner of a run, by its folder."""

    def __init__(self, folder: Path, key: invitations.Key) -> None:
        self.key, self.folder, self._invited = key, folder, folder / _INVITED_FILE

    def invite(self, name: str, role: invitations.Role, seconds: float) -> Pass:
        """An invitation that is valid for a time, and a line about it in the list.

        Raises UserError when the name is none.
        """
        if not (0 < len(name) <= terminal.LONGEST_NAME and name.isprintable() and name == terminal.name(name)):
            why = f"It has 1 to {terminal.LONGEST_NAME} letters, single spaces between words, and nothing invisible."
            raise UserError("That is no name for an invitation.", why=why, fix="Use a short one.")
        made = invitations.grant(self.key, self.folder.name, name, role, time.time() + seconds)
        about = {"time": time.time(), "name": name, "role": role, "expires": made.grant.expires, "id": made.grant.id}
        fileio.append_jsonl(self._invited, about)
        return made

    def revoke(self, name: str) -> bytes:
        """Revoke all invitations of that name; the signed list of everything that was revoked so far.

        Raises UserError when nobody of that name was invited.
        """
        invited = list(fileio.read_jsonl(self._invited))
        ids = [str(line["id"]) for line in invited if line.get("name") == name]
        if not ids:
            names = sorted({str(line["name"]) for line in invited if "name" in line})
            why = f"Invited to {self.folder.name}: {', '.join(names) or 'nobody'}."
            fix = "Give the name of an invitation, as `python -m jobs.swarm invite` was given it."
            raise UserError(f"Nobody was invited as '{name}'.", why=why, fix=fix)
        for item in ids:
            fileio.append_jsonl(self._invited, {"time": time.time(), "id": item, "revoked": True})
        revoked = {*ids, *(str(line["id"]) for line in invited if line.get("revoked"))}
        # Those that have expired need not be named any more.
        expired = {str(line["id"]) for line in invited if float(line.get("expires") or math.inf) <= time.time()}
        # Time makes a good serial: it grows, whichever machine with this folder it is.
        serial = time.time_ns() // 1_000_000
        statement = revoked_list(own_pass(self.key, "owner"), serial, revoked - expired)
        fileio.write(self.folder / _REVOKED_FILE, base64.b64encode(statement), self.folder)
        return statement


def revoked_in(folder: Path) -> bytes:
    """The list that `Owner.revoke` has made last; empty if nobody was revoked yet."""
    with suppress(OSError, ValueError):
        return base64.b64decode(fileio.read_bytes(folder / _REVOKED_FILE))
    return b""


def keep_needs(folder: Path, needs: Sequence[str]) -> None:
    """Write what tokens say of what to install; see `invite`."""
    fileio.write(folder / NEEDS_FILE, "".join(f"{item}\n" for item in needs), folder)


def own_pass(key: invitations.Key, name: str, role: invitations.Role = "owner") -> Pass:
    """A pass for a peer of the owner's own, as far as a grant may hold its name; it is on no list."""
    short = terminal.name(name)[: terminal.LONGEST_NAME] or "peer"
    return invitations.grant(key, "own", short, role, time.time() + _FOR_EVER)


def owner_of(folder: Path) -> Owner:
    """The owner of the run in ``folder``.

    Raises UserError when there is no key, it can be read by others, or it is none.
    """
    file = folder / KEY_FILE
    if not file.exists():
        why = f"There is no {KEY_FILE} in {folder}: only the creator of a swarm has it."
        fix = "Name a run that `python -m jobs.swarm create` has made on this machine."
        raise UserError(f"{folder.name} was not created here.", why=why, fix=fix)
    try:
        fileio.require_private(file, "Whoever has that key decides who takes part in the run.")
        private = serialization.load_pem_private_key(fileio.read_bytes(file, follow=True), password=None)
        if not isinstance(private, Ed25519PrivateKey):
            raise ValueError("it is a key of another kind")
        return Owner(folder, invitations.Key(private.private_bytes_raw()))
    except (OSError, ValueError, TypeError) as error:
        why = f"{getattr(error, 'strerror', None) or error}."
        fix = "Restore it from a copy; without it nobody can be invited any more."
        raise UserError(f"{file} is no key of a run.", why=why, fix=fix) from None


def key_of(folder: Path) -> invitations.Key:
    """The key of a run that goes on; of one that begins, a new one, to be kept by `keep_key`.

    Raises UserError as `owner_of` does, and when the key is gone that has signed who is revoked.
    """
    if (folder / KEY_FILE).exists():
        return owner_of(folder).key
    if revoked_in(folder):
        why = f"Without it {folder / _REVOKED_FILE} counts no more, nor does any token that was given out."
        fix = f"Restore it from a copy; or delete {_REVOKED_FILE} too, and invite everybody anew."
        raise UserError(f"{folder / KEY_FILE} is missing.", why=why, fix=fix)
    return invitations.Key.generate()


def keep_key(folder: Path, key: invitations.Key) -> Owner:
    """Write the run's key into its folder, unless it is there already."""
    file = folder / KEY_FILE
    if not file.exists():
        kind = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        pem = Ed25519PrivateKey.from_private_bytes(key.seed).private_bytes(*kind)
        fileio.write(file, pem, folder, private=True)
    return owner_of(folder)


def run_with(file: str, reference: str | None, env: Mapping[str, str], *, fix: str = "Name its folder") -> RunDir:
    """The run of that name or path, or the newest one here that has such a file of a swarm's.

    Raises UserError when there is none; ``fix`` is what to give instead.
    """
    if reference is not None:
        return find_run(reference, env)
    root = runs_root(env)
    if swarms := [run for run in list_runs(root) if (run.path / file).is_file()]:
        return swarms[-1]
    fix = f"{fix}, or create one: python -m jobs.swarm create hivemind"
    raise UserError(f"No swarm in {root}.", why="None of the runs there has created one.", fix=fix)


def addresses_of(run: RunDir) -> tuple[str, ...]:
    """Where the swarm of a run is, or was last, the best first.

    Raises UserError when it has not been anywhere yet.
    """
    if not (known := address.addresses_in(run)):
        fix = f"See how far it is: {terminal.command('logs', run.path)}"
        raise UserError(f"{run.name} has no address yet.", why="Its swarm has not started, or it has none.", fix=fix)
    saved = address.saved_peer(run)  # which knows its anchors
    return tuple(dict.fromkeys((*known, *(saved.others if saved else ()))))


def invite(owner: Owner, addresses: tuple[str, ...], name: str, seconds: float, role: invitations.Role) -> list[str]:
    """Make a token; the lines that hold it. They are for a terminal and for nothing that is kept."""
    made = owner.invite(name, role, seconds)
    may = "average for others and give away the state" if role == "reducer" else "train"
    needs: list[str] = []
    with suppress(OSError, ValueError):  # a run of before, or changed by hand: nobody would take it
        text = fileio.read_text(owner.folder / NEEDS_FILE, _LONGEST_FILE)
        needs = invitations.NEEDS.validate_python(text.splitlines())
    until, token = invitations.date(made.grant.expires), invitations.write_token(made, addresses, needs)
    return [
        f"Until {until} {name} may {may}. Whoever has this line may, so send it as you would a key:",
        # Not as an argument: everybody on a machine sees those of all processes.
        f"  {VARIABLE}={token} {terminal.command('join')}",
    ]


def revoke(run: RunDir, name: str) -> str:
    """Revoke the invitations of that name, and tell the swarm; what to tell the user."""
    owner = owner_of(run.path)
    statement, own = owner.revoke(name), own_pass(owner.key, "revoke")
    try:
        processes.require_hivemind()
        from trainkit.swarm.access import identity
        from trainkit.swarm.dht import open_dht

        admission = Admission(owner.key.public)
        with identity(None, own, admission) as known, open_dht(known, peers=addresses_of(run)) as dht:
            dht.excluded.hear(REVOKED, statement)
            dht.publish_excluded(wait=True)
    except TrainkitError:
        return f"Revoked: {name}. The swarm does not answer from here; its creator reads it in the next round."
    return f"Revoked: {name}. The swarm knows."
