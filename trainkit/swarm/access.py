"""Who may ask, write and call what: a peer's identity, signed records, requests to the DHT, bounds, and who is out.

An address ends with the id of a peer, and that id is the hash of the peer's public key: libp2p lets nobody else answer
there. What the peer may do beyond that its pass says, which comes from the run's owner (see `invitations`).

The owner's side shares one list of bans (``bans.jsonl``): every reducer keeps it and signs what it tells the others of
it, and what was said last about an id counts. So a ban outlives the peer that pronounced it, and lifting it anywhere
lifts it everywhere.
"""

from __future__ import annotations

import asyncio
import json
import os
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache, partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import base58
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P
from hivemind.proto import crypto_pb2, dht_pb2
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils import MSGPackSerializer, auth, crypto
from pydantic import Field, TypeAdapter

from trainkit import fileio, terminal
from trainkit.errors import RefusedError, UserError
from trainkit.process import end_with_parent
from trainkit.swarm import admission, invitations, messages
from trainkit.swarm.admission import Admission, Member
from trainkit.swarm.invitations import Pass, UntrustedError, pack, unpack
from trainkit.swarm.messages import BANNED, CREDITS, MANIFEST, MOST_PEERS, PROGRESS, REVOKED, PeerProgress

_LONGEST_VALUE = 8192  # bytes


@lru_cache(maxsize=4096)
def hashed(name: str) -> bytes:
    """A record's key as a DHT has it: hivemind keeps only the hash."""
    return bytes(DHTID.generate(source=name).to_bytes())


_SHAPES = {hashed(key): shape for key, shape in messages.SHAPES.items()}


class SignedRecords(RecordValidatorBase):  # type: ignore[misc]
    """Signs what this peer stores, and refuses what was not signed by its writer.

    Every record, hivemind's own for matchmaking included, lies under the peer id of its writer and holds the value, the
    writer's credential, and a signature by the key that the peer id is the hash of. What a record may be depends on the
    writer's role: a volunteer tells of itself and of nothing else.

    The answer depends on the record and the owner's key only, not on the time or on who was revoked meanwhile: of many
    records under one key hivemind refuses all as soon as it refuses one, so those who store and those who read must
    agree. Revoked peers cannot store (see `Authorizer`), and what they have stored expires.
    """

    def __init__(self, identity: Identity) -> None:
        self._identity, self._subkey = identity, _subkey(identity.peer_id)

    def sign_value(self, record: DHTRecord) -> bytes:
        """The value as others take it, if it lies where this peer may write."""
        if record.subkey != self._subkey:
            return bytes(record.value)
        signature = self._identity.key.sign(_content(record, record.value))
        return pack([record.value, self._identity.credential, signature])

    def validate(self, record: DHTRecord) -> bool:
        """Whether its writer has signed it, is admitted, and may write it, and the value has the shape of its key.

        Never raises: hivemind would take the node that has sent a bad record for a dead one.
        """
        try:
            value, credential, signature = unpack(record.value, 3)
            longest, shape = _SHAPES.get(record.key, (_LONGEST_VALUE, None))
            if len(value) > longest:
                return False
            writer = self._identity.admission.invited(credential, record.expiration_time)
            if not (
                record.subkey == _subkey(writer.peer_id)
                and _may_write(record.key, writer)
                and _public_key(writer.public_key).verify(_content(record, value), signature)
            ):
                return False
            told = shape.validate_python(MSGPackSerializer.loads(value)) if shape is not None else None
            # Nobody calls a volunteer: whom it names would be dialled by everybody, and remembered for who is there.
            return writer.trusted or not (isinstance(told, PeerProgress) and told.addresses)
        except Exception:  # whatever the parsers of a stranger's bytes raise
            return False

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value as it was before `sign_value`."""
        return unpack(record.value, 3)[0]


def _may_write(key: bytes, writer: Member) -> bool:
    if key in (hashed(MANIFEST), hashed(CREDITS)):
        return writer.role == "owner"
    # Of the owner's side: who reduces and who gives its state away, by hivemind's records; and the lists of who is out.
    return writer.trusted or key in (hashed(PROGRESS), hashed(admission.peer_key(writer.peer_id)))


def _in_der(public: Any) -> bytes:
    return bytes(public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo))


@lru_cache(maxsize=1024)
def _der_of_ssh(public: bytes) -> bytes:
    return _in_der(serialization.load_ssh_public_key(public))


@lru_cache(maxsize=1024)
def _public_key(der: bytes) -> Any:
    key = serialization.load_der_public_key(der)
    if not isinstance(key, rsa.RSAPublicKey):
        raise UntrustedError("it is no RSA key")
    return crypto.RSAPublicKey(key)


@lru_cache(maxsize=4096)
def _subkey(peer_id: str) -> bytes:
    return bytes(MSGPackSerializer.dumps(base58.b58decode(peer_id)))


def _content(record: DHTRecord, value: bytes) -> bytes:
    return pack([b"trainkit record", record.key, record.subkey, value, struct.pack(">d", record.expiration_time)])


_NOTHING = bytes(DHTID.HASH_NBYTES)  # a key under which nobody stores
# A peer of ours asks for one at a time. A message has room for 200,000, and meanwhile nobody else gets an answer.
_MOST_KEYS = 16
_LONGEST_KEY = 1024  # bytes; RSA of 4096 bits has 725 in this form
_LONGEST_NONCE = 64  # bytes; hivemind's have 8, and a node remembers each for minutes


class Authorizer(auth.TokenAuthorizerBase):  # type: ignore[misc]
    """Takes requests of those who are admitted, and answers of the owner's side: nobody else keeps the DHT.

    hivemind signs every message with the peer's key and refuses repeated ones; here the token of each request and of
    each answer is its sender's credential. A peer without one reads and writes nothing.
    """

    def __init__(self, identity: Identity) -> None:
        super().__init__(identity.key)
        self.admission = identity.admission
        public_key = identity.key.get_public_key().to_bytes()
        self._own = AccessToken(public_key=public_key, signature=identity.credential)

    async def get_token(self) -> AccessToken:
        """This peer's own."""
        return self._own

    def does_token_need_refreshing(self, access_token: AccessToken) -> bool:
        """Never: it lasts as long as the invitation."""
        return False

    def is_token_valid(self, access_token: AccessToken) -> bool:
        """Whether its holder was invited; asked of both sides, and more is asked of each below."""
        return _holder(access_token, partial(self.admission.invited, until=time.time())) is not None

    async def validate_request(self, request: Any) -> bool:
        """Whether to answer."""
        if len(getattr(request, "keys", ())) > _MOST_KEYS or len(request.auth.nonce) > _LONGEST_NONCE:
            return False
        if not await super().validate_request(request):
            return False
        member = _holder(request.auth.client_access_token, self.admission.introduce)
        if member is None or not member.trusted:
            # Not into the routing tables: others would ask it for records.
            request.ClearField("peer")
            # Whole dictionaries are copies, which others keep; one of 2.6 MB took seconds to read.
            if DHTProtocol.IS_DICTIONARY in getattr(request, "subkeys", ()):
                request.CopyFrom(dht_pb2.StoreRequest(auth=request.auth))
        if member is None:
            _keep_who_is_out(request)
        return True

    async def validate_response(self, response: Any, request: Any) -> bool:
        """Whether to believe it."""
        member = _holder(response.auth.service_access_token, self.admission.introduce)
        return member is not None and member.trusted and bool(await super().validate_response(response, request))


def _holder(token: AccessToken, look_up: Callable[[bytes], Member]) -> Member | None:
    with suppress(UntrustedError, ValueError):
        member = look_up(token.signature)
        if len(token.public_key) <= _LONGEST_KEY and _der_of_ssh(token.public_key) == member.public_key:
            return member
    return None


def _keep_who_is_out(request: Any) -> None:
    """Reduce a request to the lists of those who are out: a peer that is on one may ask for nothing else.

    Not a refusal: hivemind would take this node for dead and ask it no more, and the peer would wait for ever.
    """
    if isinstance(request, dht_pb2.FindRequest):
        request.keys[:] = [key if key in (hashed(REVOKED), hashed(BANNED)) else _NOTHING for key in request.keys]
    if isinstance(request, dht_pb2.StoreRequest):
        request.CopyFrom(dht_pb2.StoreRequest(auth=request.auth))


@dataclass(frozen=True)
class Identity:
    """A peer's key, in a file as libp2p's daemon wants it when it starts, and what the peer may do with it."""

    path: Path
    content: bytes = field(repr=False)
    """Of the file."""
    key: Any = field(repr=False)
    kept: bool
    """The file outlives the peer, so that it comes back under the same address."""
    own: Pass
    """What the run's owner allows this peer."""
    admission: Admission

    @cached_property
    def public_key(self) -> bytes:
        """The public half of the key, in DER (SubjectPublicKeyInfo)."""
        return _in_der(self.key._private_key.public_key())

    @property
    def peer_id(self) -> str:
        """As an address has it."""
        return admission.peer_id_of(self.public_key)

    @property
    def subkey(self) -> bytes:
        """Under this subkey of a record only this peer can write."""
        return bytes(base58.b58decode(self.peer_id))

    @cached_property
    def credential(self) -> bytes:
        """What this peer shows to others: its key, under its invitation."""
        return self.own.state("peer", self.public_key)


@contextmanager
def identity(path: Path | None, own: Pass, admission: Admission) -> Iterator[Identity]:
    """The identity in ``path``, made if it does not exist; without a path a new one, whose file is gone afterwards.

    Raises UserError when the file cannot be written or holds no key.
    """
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        file = Path(folder) / "identity" if path is None else path.expanduser().absolute()
        try:
            if not file.exists():
                made = Path(folder) / "made"
                P2P.generate_identity(str(made))
                fileio.write(file, fileio.read_bytes(made), private=True)
            key = crypto.RSAPrivateKey.__new__(crypto.RSAPrivateKey)
            content = fileio.read_bytes(file)
            key.__setstate__({"_private_key": crypto_pb2.PrivateKey.FromString(content).data})
        except Exception as error:  # of the disk; protobuf and cryptography have exceptions of their own
            why = f"{getattr(error, 'strerror', None) or str(error) or type(error).__name__}."
            fix = "Give --identity the file of an earlier peer, or one that you may write and that does not exist yet."
            raise UserError(f"Cannot use the identity {file}.", why=why, fix=fix) from None
        yield Identity(file, content, key, path is not None, own, admission)


# A round, and three more in which nobody has heard of a peer, are shorter.
_LONGEST_NEWS = 3600.0
# Peers that use one invitation, by name and for guests.
_MOST_OF_ONE, _MOST_OF_GUESTS = 64, 800
_MOST_INVITATIONS = 1000


class Places:
    """Which volunteers a node keeps records of, by their invitation: whoever has one can make up peers without end."""

    def __init__(self) -> None:
        self._until: dict[str, dict[Any, float]] = {}

    def take(self, value: bytes, subkey: Any, until: float) -> bool:
        """Whether a record, valid as it is, may stay until then."""
        grant = invitations.Grant.from_bytes(unpack(unpack(value, 3)[1], 4)[0])
        if grant.role != "volunteer":
            return True
        taken, now = self._until.get(grant.id, {}), time.time()
        if subkey not in taken:
            taken = {one: ends for one, ends in taken.items() if ends > now}
        most = _MOST_OF_GUESTS if grant.name == invitations.GUESTS else _MOST_OF_ONE
        if until > now + _LONGEST_NEWS or (subkey not in taken and len(taken) >= most):
            return False
        taken[subkey] = max(until, taken.get(subkey, 0.0))
        admission.remember(self._until, grant.id, taken, _MOST_INVITATIONS)
        return True


@cache
def bound_node() -> None:
    """Bound the records that this process and those that it forks keep and read. Call it before a node starts.

    hivemind's nodes keep every record that is valid, and read as many as somebody sends; of many they refuse all as
    soon as one is not valid. A volunteer's records must not outlast an hour: whoever floods a node gives up their place
    by then. Every program that the process starts through asyncio is killed when it dies: hivemind starts libp2p's
    daemon so, and has no hook.
    """
    validate, store, places = DHTProtocol._validate_record, DHTLocalStorage.store_subkey, Places()

    def store_bounded(self: Any, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        if not places.take(value, subkey, expiration_time):
            return False
        known = self.get(key)
        there = known.value if known is not None and isinstance(known.value, DictionaryDHTValue) else {}
        # Peers that are there may stay: else a flood of newcomers would wash away everybody.
        if len(there) >= MOST_PEERS and subkey not in there:
            return False
        # hivemind would keep the newer record and drop it when the older one expires: a peer that sends again what
        # somebody has said before could make that peer, or the run, vanish.
        before = there.get(subkey)
        if before is not None and before.expiration_time >= expiration_time:
            return False
        return bool(store(self, key, subkey, value, expiration_time))

    def validate_bounded(self: Any, key_bytes: bytes, dictionary: Any) -> bool:
        """Leave out what is not valid, and what is too much."""
        if not isinstance(dictionary, DictionaryDHTValue):
            return False
        with dictionary.freeze():
            for place, (subkey, (value, expires)) in enumerate(list(dictionary.items())):
                if place >= MOST_PEERS or not validate(self, key_bytes, self.serializer.dumps(subkey), value, expires):
                    del dictionary[subkey]
        return True

    DHTLocalStorage.store_subkey = store_bounded
    DHTProtocol._validate_dictionary = validate_bounded
    asyncio.subprocess.create_subprocess_exec = partial(
        asyncio.create_subprocess_exec, preexec_fn=_detach_from_terminal
    )


def _detach_from_terminal() -> None:
    os.setpgid(0, 0)  # or Ctrl-C would end the daemon before the peer has said goodbye
    end_with_parent()


# Calls of one peer at once. An honest one looks for a group, sends its parts and fetches a state; and may do so anew
# while what it has given up is still being closed.
MOST_CALLS = 8
# A part is 256 kB, the list of a full group 1 MB.
LONGEST_MESSAGE = 1 << 21
FIRST_SECONDS = 10.0
# For the rest of a message that has begun, and for the other side to take an answer: 8 kB/s for the longest part.
REST_SECONDS = 30.0


def bound_calls() -> None:
    """Bound what the averager's process takes of a call. Call it before it listens.

    hivemind's streams wait for ever for the first word, for the rest of a message, and for somebody to read the
    answers; and they make room for a message of whatever length its first eight bytes announce. All that before anybody
    is asked who they are, so it is open to whoever reaches the port.
    """
    add = P2P.add_binary_stream_handler
    calls: Counter[str] = Counter()

    async def add_bounded(self: Any, name: str, handler: Any, balanced: bool = False) -> None:
        async def bounded(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = str(info.peer_id)
            if calls[peer] >= MOST_CALLS:
                writer.close()
                return
            calls[peer] += 1
            try:
                await handler(info, Reader(reader), Writer(writer))
            finally:
                calls[peer] -= 1
                if not calls[peer]:
                    del calls[peer]

        await add(self, name, bounded, balanced=balanced)

    P2P.add_binary_stream_handler = add_bounded


class Reader:
    """What hivemind uses of a stream's reader. A peer that says too much or too little has hung up to it."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader, self._limit = reader, FIRST_SECONDS

    async def readexactly(self, size: int) -> bytes:
        """As asyncio's: a message's mark (one byte), its length (eight), or the message."""
        # Between messages there may be silence, as long as a search for a group lasts.
        limit = None if size == 1 and self._limit == REST_SECONDS else self._limit
        try:
            if size > LONGEST_MESSAGE:
                raise asyncio.TimeoutError
            return await asyncio.wait_for(self._reader.readexactly(size), limit)
        except asyncio.TimeoutError:
            raise asyncio.IncompleteReadError(b"", size) from None
        finally:
            self._limit = REST_SECONDS


class Writer:
    """What hivemind uses of a stream's writer."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.write, self.close = writer.write, writer.close

    async def drain(self) -> None:
        """Raises TimeoutError when nobody takes what was written."""
        await asyncio.wait_for(self._writer.drain(), REST_SECONDS)


BANS_FILE = "bans.jsonl"
STRIKES = 3
"""Rounds in a row with a dropped contribution after which a peer is banned; one may be a fault on the way."""
# Of them at once; strangers can make up as many ids as they like.
_MOST_BANS = 1000
# Bytes of a list as it is told; a record of the DHT holds no more. The newest are told.
_LONGEST_LIST = 60_000
# A ban from further in the future would be the last word for ever; clocks agree within three seconds.
_AHEAD_SECONDS = 60.0
_Text = Annotated[str, Field(max_length=200)]


class Ban(NamedTuple):
    """Somebody who may not take part any more; or, ``lifted``, may again."""

    id: _Text
    """Of a peer, or of an invitation: then a banned guest does not come back with a new key."""
    name: _Text
    why: _Text
    time: Annotated[float, Field(ge=0, le=fileio.LATEST)] = 0.0
    """When it was said, in seconds since 1970."""
    lifted: bool = False


_BANS = TypeAdapter(list[Ban])


class Bans:
    """The list. In a run folder each line bans or lifts a ban, so that a run and a command can both write."""

    def __init__(self, file: Path | None = None) -> None:
        """``file``: None for a list that ends with its peer, or until `keep_in`."""
        self._file = file
        self._said: dict[str, Ban] = {}

    def keep_in(self, folder: Path) -> None:
        """From now on in the run's folder, with what is there already."""
        said, self._said, self._file = list(self.said()), {}, folder / BANS_FILE
        self.merge(said)

    def read(self) -> dict[str, Ban]:
        """Id -> ban, as it is now."""
        return {ban.id: ban for ban in self.said() if not ban.lifted}

    def said(self) -> Iterable[Ban]:
        """The last word about each id, oldest first; also of bans that were lifted."""
        if self._file is not None:
            for record in fileio.read_jsonl(self._file):
                if isinstance(record.get("id"), str):  # whatever else is damaged, somebody was banned
                    name, why = (text if isinstance(text := record.get(key), str) else "" for key in ("name", "why"))
                    said = record["time"] if fileio.is_time(record.get("time")) else 0.0
                    self._note(Ban(record["id"], name, why, float(said), record.get("lifted") is True))
        return self._said.values()

    def add(self, ban: Ban) -> None:
        """From now on."""
        if ban.id not in self.read():
            self._write_if_room(ban._replace(time=time.time()))

    def lift(self, name: str) -> list[Ban]:
        """Let those of that name (or id) take part again; who they were. Raises OSError."""
        found = [ban for ban in self.read().values() if name in (ban.name, ban.id)]
        for ban in found:
            self._write(ban._replace(time=time.time(), lifted=True))
        return found

    def merge(self, others: Iterable[Ban]) -> None:
        """Take over what others have said later than what is known here."""
        self.said()
        for ban in others:
            known = self._said.get(ban.id)
            if known is None or ban.time > known.time:
                self._write_if_room(ban)

    def _write_if_room(self, ban: Ban) -> None:
        with suppress(OSError):  # a full disk: it holds as long as this peer lives, and others know of it
            self._write(ban)

    def _write(self, ban: Ban) -> None:
        self._note(ban)
        if self._file is not None:
            record = ban._asdict()
            fileio.append_jsonl(self._file, {key: value for key, value in record.items() if value is not False})

    def _note(self, ban: Ban) -> None:
        known = self._said.get(ban.id)
        if known is None or known.time <= ban.time:
            admission.remember(self._said, ban.id, ban, _MOST_BANS)


def bans_list(own: Pass, bans: Iterable[Ban]) -> bytes:
    """What this peer tells the others of who is banned, signed."""
    short = [ban._replace(name=ban.name[: terminal.LONGEST_NAME], why=ban.why[:200]) for ban in bans]
    while len(told := json.dumps(short, ensure_ascii=False).encode()) > _LONGEST_LIST:
        del short[: len(short) // 10 + 1]
    return own.state("bans", told)


def read_bans(admission: Admission, statement: bytes) -> list[Ban]:
    """What somebody of the owner's side says about who is banned.

    Raises UntrustedError when a volunteer or a stranger has signed it.
    """
    latest = time.time() + _AHEAD_SECONDS
    return [ban for ban in admission.told(statement, "bans", _BANS) if ban.time <= latest]


def banned_with(member: Member | None, peer_id: str, own_id: str) -> str:
    """What is banned with a peer, by ``own_id``; empty for whom it must not ban.

    A volunteer goes with its invitation, or it would come back with a new key. Of the owner's side, and of an
    invitation for many, only the peer goes, or one of them could have all the others banned. Nobody bans the owner,
    without whom there is no run, or itself: two newcomers are a majority against either.
    """
    if peer_id == own_id or (member is not None and member.role == "owner"):
        return ""
    return peer_id if member is None or member.trusted or member.name == invitations.GUESTS else member.invitation


class Excluded:
    """What one peer knows of who is out: invitations that the owner has revoked, and bans by its side.

    Both are signed lists in the DHT. Whoever is of the owner's side stores them anew in every round, so that they
    outlive whoever has made them. Who is out may still ask for these lists, and for nothing else, and so learns of it.
    """

    def __init__(self, own: Pass, peer_id: str, admission: Admission) -> None:
        self._own, self._peer_id, self._admission = own, peer_id, admission
        self._revoked = b""
        self.bans = Bans()

    def remember(self, folder: Path) -> None:
        """What the owner has decided so far, by the run's folder, before anybody else can ask."""
        if revoked := admission.revoked_in(folder):
            self.hear(REVOKED, revoked)
        self.bans.keep_in(folder)
        self._admission.ban(self.bans.read())

    def hear(self, key: str, statement: bytes) -> None:
        """Take over what somebody says. Bans count once `Sentry` has seen them.

        Raises UntrustedError unless it is signed by somebody who may say so.
        """
        if key == BANNED:
            self.bans.merge(read_bans(self._admission, statement))
        elif self._admission.revoke(statement):
            self._revoked = statement

    def take(self, key: str, found: Any) -> None:
        """Take over what the DHT has returned for one of the two lists."""
        for statement in messages.records_in(key, found).values():
            with suppress(UntrustedError):
                self.hear(key, statement)

    def told(self) -> dict[str, bytes]:
        """Record's key -> what this peer tells others; nothing, if it is a volunteer: they would not believe it."""
        if self._own.grant.role == "volunteer":
            return {}
        said = list(self.bans.said())
        told = {REVOKED: self._revoked, BANNED: bans_list(self._own, said) if said else b""}
        return {key: statement for key, statement in told.items() if statement}

    def require_welcome(self) -> None:
        """Raises RefusedError, in words for the person at this machine, if this very peer is out."""
        grant, bans, fix = self._own.grant, self.bans.read(), "Ask whoever runs it for another."
        ban = bans.get(self._peer_id) or bans.get(grant.id)
        if grant.id in self._admission.revoked:
            why = f"The owner of the run has ended the invitations of {grant.name}."
            raise RefusedError("Your invitation was revoked.", why=why, fix=fix)
        if ban is not None and grant.role != "owner":
            lift = terminal.command("swarm", "unban", terminal.name(ban.name))
            why = f"{STRIKES} times in a row your part of a round was left out: {terminal.one_line(ban.why, 200)}."
            fix = f"See whether this machine computes nonsense; whoever runs it may lift it: {lift}"
            raise RefusedError("You were banned from the run.", why=why, fix=fix)
        if grant.expires <= time.time():
            why = f"It was good until {invitations.date(grant.expires)}."
            raise RefusedError("Your invitation has expired.", why=why, fix=fix)
