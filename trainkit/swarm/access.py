"""Who may ask, write and call what: a peer's identity, signed records, requests to the DHT, and bounds on hivemind.

An address ends with the id of a peer, and that id is the hash of the peer's public key: libp2p lets nobody else answer
there. What the peer may do beyond that its pass says, which comes from the run's owner (see `invitations`).
"""

from __future__ import annotations

import asyncio
import os
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import base58
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey as _RSA
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P
from hivemind.proto import crypto_pb2, dht_pb2
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils import MSGPackSerializer
from hivemind.utils.auth import TokenAuthorizerBase
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from trainkit import fileio
from trainkit.errors import UserError
from trainkit.process import end_with_parent
from trainkit.swarm.admission import Admission, Member, credential, peer_id_of, peer_key
from trainkit.swarm.invitations import Pass, UntrustedError, pack, unpack
from trainkit.swarm.messages import MOST_PEERS, is_credits, is_manifest, progress_of

# Records in the DHT carry who wrote them: the DHT admits nobody whom the run's owner has not admitted.
#
# Every record, hivemind's own for matchmaking included, lies under the peer id of its writer and holds the value, the
# writer's credential, and a signature by the key that the peer id is the hash of. Everybody who stores or reads it
# checks all of that. What a record may be depends on the writer's role: a volunteer tells of itself and of nothing
# else.
#
# The answer depends on the record and the owner's key only, not on the time or on who was revoked meanwhile: of many
# records under one key hivemind refuses all as soon as it refuses one, so those who store and those who read must
# agree. Revoked peers cannot store (see `Authorizer`), and what they have stored expires.

MANIFEST, PROGRESS = "trainkit_manifest", "trainkit_progress"
CREDITS, REVOKED, BANNED = "trainkit_credits", "trainkit_revoked", "trainkit_banned"

_LONGEST_VALUE = 8192
_LONGEST = {MANIFEST: 1 << 17, CREDITS: 1 << 16, REVOKED: 1 << 16, BANNED: 1 << 16}
_SHAPES: dict[str, Callable[[Any], bool]] = {
    MANIFEST: is_manifest,
    PROGRESS: lambda value: progress_of(value) is not None,
    CREDITS: is_credits,
    REVOKED: lambda value: isinstance(value, bytes),
    BANNED: lambda value: isinstance(value, bytes),
}


class SignedRecords(RecordValidatorBase):  # type: ignore[misc]
    """Signs what this peer stores, and refuses what was not signed by its writer."""

    def __init__(self, key: RSAPrivateKey, credential: bytes, admission: Admission) -> None:
        self._key, self._credential, self._admission = key, credential, admission
        self._subkey = _subkey(peer_id_of(der_of(key)))
        # hivemind keeps only the hash of a key.
        self._longest = {hashed(name): size for name, size in _LONGEST.items()}
        self._shapes = {hashed(name): has_shape for name, has_shape in _SHAPES.items()}
        self._by_owner, self._by_all = {hashed(MANIFEST), hashed(CREDITS)}, {hashed(PROGRESS)}

    def sign_value(self, record: DHTRecord) -> bytes:
        """The value as others take it, if it lies where this peer may write."""
        if record.subkey != self._subkey:
            return bytes(record.value)
        signature = self._key.sign(_content(record, record.value))
        return pack([record.value, self._credential, signature])

    def validate(self, record: DHTRecord) -> bool:
        """Whether its writer has signed it, is admitted, and may write it, and the value has the shape of its key.

        Never raises: hivemind would take the node that has sent a bad record for a dead one.
        """
        try:
            value, credential, signature = unpack(record.value, 3)
            if len(value) > self._longest.get(record.key, _LONGEST_VALUE):
                return False
            writer = self._admission.invited(credential, record.expiration_time)
            if record.subkey != _subkey(writer.peer_id) or not self._may_write(record.key, writer.role, writer.peer_id):
                return False
            if not _public_key(writer.public_key).verify(_content(record, value), signature):
                return False
            has_shape = self._shapes.get(record.key)
            return has_shape is None or has_shape(MSGPackSerializer.loads(value))
        except Exception:  # whatever the parsers of a stranger's bytes raise
            return False

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value as it was before `sign_value`."""
        return unpack(record.value, 3)[0]

    def _may_write(self, key: bytes, role: str, peer_id: str) -> bool:
        if key in self._by_owner:
            return role == "owner"
        if key in self._by_all or key == hashed(peer_key(peer_id)):
            return True
        # Who reduces and who gives its state away, by hivemind's records; and the lists of those who are out.
        return role != "volunteer"


def der_of(key: RSAPrivateKey) -> bytes:
    """The public half of a libp2p key, in DER (SubjectPublicKeyInfo)."""
    return _in_der(key._private_key.public_key())


@lru_cache(maxsize=1024)
def _der_of_ssh(public: bytes) -> bytes:
    return _in_der(serialization.load_ssh_public_key(public))


def _in_der(public: Any) -> bytes:
    return bytes(public.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo))


@lru_cache(maxsize=1024)
def _public_key(der: bytes) -> Any:
    found = serialization.load_der_public_key(der)
    if not isinstance(found, _RSA):
        raise UntrustedError("it is no RSA key")
    return RSAPublicKey(found)


@lru_cache(maxsize=4096)
def _subkey(peer_id: str) -> bytes:
    return bytes(MSGPackSerializer.dumps(base58.b58decode(peer_id)))


@lru_cache(maxsize=4096)
def hashed(name: str) -> bytes:
    """A record's key as a DHT has it."""
    return bytes(DHTID.generate(source=name).to_bytes())


def _content(record: DHTRecord, value: bytes) -> bytes:
    return pack([b"trainkit record", record.key, record.subkey, value, struct.pack(">d", record.expiration_time)])


# hivemind's hook for access to the DHT: each request and each answer carries the credential of its sender.
#
# A peer without one reads nothing and writes nothing; a peer that is out by now may still ask why. hivemind's protocol
# (its issue 253) signs every message with the peer's key and refuses repeated ones; ours is only what counts as a
# token.

_NOTHING = bytes(DHTID.HASH_NBYTES)  # a key under which nobody stores
# A peer of ours asks for one at a time. A message has room for 200,000, and meanwhile nobody else gets an answer.
_MOST_KEYS = 16
_LONGEST_KEY = 1024  # bytes; RSA of 4096 bits has 725 in this form


class Authorizer(TokenAuthorizerBase):  # type: ignore[misc]
    """Takes requests of those who are admitted, and answers of the owner's side: nobody else keeps the DHT."""

    def __init__(self, key: RSAPrivateKey, credential: bytes, admission: Admission) -> None:
        super().__init__(key)
        self.admission = admission
        self._own = AccessToken(public_key=key.get_public_key().to_bytes(), signature=credential)

    async def get_token(self) -> AccessToken:
        """This peer's own."""
        return self._own

    def does_token_need_refreshing(self, access_token: AccessToken) -> bool:
        """Never: it lasts as long as the invitation."""
        return False

    def is_token_valid(self, access_token: AccessToken) -> bool:
        """Whether its holder was invited; asked of both sides, and more is asked of each below."""
        try:
            return self._holder(access_token, self.admission.invited(access_token.signature, time.time())) is not None
        except (UntrustedError, ValueError):
            return False

    async def validate_request(self, request: Any) -> bool:
        """Whether to answer."""
        if len(getattr(request, "keys", ())) > _MOST_KEYS:
            return False
        if not await super().validate_request(request):
            return False
        member = self._member(request.auth.client_access_token)
        if member is None or not member.trusted:
            # Not into the routing tables: others would ask it for records.
            request.ClearField("peer")
        if member is None:
            _keep_who_is_out(request)
        return True

    async def validate_response(self, response: Any, request: Any) -> bool:
        """Whether to believe it."""
        member = self._member(response.auth.service_access_token)
        return member is not None and member.trusted and bool(await super().validate_response(response, request))

    def _member(self, token: AccessToken) -> Member | None:
        try:
            return self._holder(token, self.admission.introduce(token.signature))
        except (UntrustedError, ValueError):
            return None

    def _holder(self, token: AccessToken, member: Member) -> Member | None:
        if len(token.public_key) > _LONGEST_KEY or _der_of_ssh(token.public_key) != member.public_key:
            return None
        return member


def _keep_who_is_out(request: Any) -> None:
    """Reduce a request to the lists of those who are out: a peer that is on one may ask for nothing else.

    Not a refusal: hivemind would take this node for dead and ask it no more, and the peer would wait for ever.
    """
    if isinstance(request, dht_pb2.FindRequest):
        request.keys[:] = [key if key in (hashed(REVOKED), hashed(BANNED)) else _NOTHING for key in request.keys]
    for field in ("keys", "subkeys", "values", "expiration_time", "in_cache"):
        if isinstance(request, dht_pb2.StoreRequest):
            request.ClearField(field)


@dataclass(frozen=True)
class Identity:
    """A peer's key, in a file as libp2p's daemon wants it, and what the peer may do with it."""

    path: Path
    key: Any
    kept: bool
    """The file outlives the peer, so that it comes back under the same address."""
    own: Pass
    """What the run's owner allows this peer."""
    admission: Admission

    @property
    def peer_id(self) -> str:
        """As an address has it."""
        return peer_id_of(der_of(self.key))

    @property
    def subkey(self) -> bytes:
        """Under this subkey of a record only this peer can write."""
        return bytes(base58.b58decode(self.peer_id))

    @property
    def credential(self) -> bytes:
        """What this peer shows to others."""
        return credential(self.own, der_of(self.key))

    def validators(self) -> list[Any]:
        """For every DHT node."""
        return [SignedRecords(self.key, self.credential, self.admission)]

    def authorizer(self) -> Authorizer:
        """For every DHT node."""
        return Authorizer(self.key, self.credential, self.admission)


@contextmanager
def identity(path: Path | None, own: Pass, admission: Admission) -> Iterator[Identity]:
    """The identity in ``path``, made if it does not exist; without a path a new one that vanishes with the peer.

    Raises UserError when the file cannot be written or holds no key.
    """
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        file = Path(folder) / "identity" if path is None else path.expanduser().absolute()
        try:
            if not file.exists():
                made = Path(folder) / "made"
                P2P.generate_identity(str(made))
                fileio.write(file, fileio.read_bytes(made), private=True)
            key = RSAPrivateKey.__new__(RSAPrivateKey)
            key.__setstate__({"_private_key": crypto_pb2.PrivateKey.FromString(fileio.read_bytes(file)).data})
        except OSError as error:
            raise UserError(
                f"Cannot use the identity {file}.",
                why=f"{error.strerror}.",
                fix="Give --identity a file that you may write.",
            ) from None
        except Exception as error:  # protobuf and cryptography have exceptions of their own
            raise UserError(
                f"{file} holds no identity.",
                why=str(error) or type(error).__name__,
                fix="Give --identity the file of an earlier peer, or one that does not exist yet.",
            ) from None
        yield Identity(file, key, path is not None, own, admission)


# What a node's process must not take or leave behind. hivemind's nodes keep every record that is valid, and read as
# many as somebody sends; of many they refuse all as soon as one of them is not valid.

# A round, and three more in which nobody has heard of a peer, are shorter.
_LONGEST_NEWS = 3600.0


def bound_node() -> None:
    """Bound the records that this process keeps and reads. Call it before the node starts; there is one in a process.

    Records of progress must not outlast an hour: whoever floods them gives up their place by then. Every program that
    the process starts through asyncio is killed when it dies: hivemind starts libp2p's daemon so, and has no hook.
    """
    validate, store = DHTProtocol._validate_record, DHTLocalStorage.store_subkey
    progress = DHTID.generate(source=PROGRESS)

    def store_bounded(self: Any, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        if key == progress and expiration_time > time.time() + _LONGEST_NEWS:
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


# How much the averager's process takes of a call: how many a peer may open, how long it may be silent, and say at once.
#
# hivemind's streams wait for ever for the first word, for the rest of a message, and for somebody to read the
# answers; and they make room for a message of whatever length its first eight bytes announce. All that before anybody
# is asked who they are, so it is open to whoever reaches the port.

# Of one peer at once. An honest one looks for a group, sends its parts and fetches a state; and may do so anew while
# what it has given up is still being closed.
MOST_CALLS = 8
# A part is 256 kB, the list of a full group 1 MB.
LONGEST_MESSAGE = 1 << 21
FIRST_SECONDS = 10.0
# For the rest of a message that has begun, and for the other side to take an answer: 8 kB/s for the longest part.
REST_SECONDS = 30.0


def bound_calls() -> None:
    """Call it in the averager's process before it listens."""
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
        if size > LONGEST_MESSAGE:
            raise asyncio.IncompleteReadError(b"", size)
        # Between messages there may be silence, as long as a search for a group lasts.
        limit = None if size == 1 and self._limit == REST_SECONDS else self._limit
        try:
            found = await asyncio.wait_for(self._reader.readexactly(size), limit)
        except asyncio.TimeoutError:
            raise asyncio.IncompleteReadError(b"", size) from None
        self._limit = REST_SECONDS
        return found


class Writer:
    """What hivemind uses of a stream's writer."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.write, self.close = writer.write, writer.close

    async def drain(self) -> None:
        """Raises TimeoutError when nobody takes what was written."""
        await asyncio.wait_for(self._writer.drain(), REST_SECONDS)
