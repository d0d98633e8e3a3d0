"""Proofs of who may ask and write what: a peer's identity, signed records, and requests to the DHT.

An address ends with the id of a peer, and that id is the hash of the peer's public key: libp2p lets nobody else answer
there. What the peer may do beyond that its pass says, which comes from the run's owner (see `invitations`).
"""

from __future__ import annotations

import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any

import base58
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.p2p import P2P
from hivemind.proto import crypto_pb2, dht_pb2
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils import MSGPackSerializer, auth, crypto

from trainkit.common import fileio
from trainkit.common.errors import UserError
from trainkit.swarm.identity import admission
from trainkit.swarm.identity.admission import Admission, Member
from trainkit.swarm.identity.invitations import Pass, UntrustedError, pack, unpack
from trainkit.swarm.protocol import messages
from trainkit.swarm.protocol.messages import BANNED, CREDITS, MANIFEST, PROGRESS, REVOKED, PeerProgress

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
        self._identity = identity
        self._subkey = _subkey(identity.peer_id)

    def sign_value(self, record: DHTRecord) -> bytes:
        """The value as others take it, if it lies where this peer may write."""
        if record.subkey != self._subkey:
            return bytes(record.value)
        signature = self._identity.key.sign(_content(record, record.value))
        return pack([record.value, self._identity.credential, signature])

    def validate(self, record: DHTRecord) -> bool:
        """Return whether its writer has signed it, is admitted, and may write it, and the value has the shape of its
        key.

        Never raises: hivemind would take the node that has sent a bad record for a dead one.
        """
        try:
            value, credential, signature = unpack(record.value, 3)
            longest, shape = _SHAPES.get(record.key, (_LONGEST_VALUE, None))
            if len(value) > longest:
                return False
            writer = self._identity.admission.invited(credential, record.expiration_time)
            if record.subkey != _subkey(writer.peer_id) or not _may_write(record.key, writer):
                return False
            if not _public_key(writer.public_key).verify(_content(record, value), signature):
                return False
            if shape is None:
                return True
            told = shape.validate_python(MSGPackSerializer.loads(value))
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
        raise UntrustedError("it is not an RSA key")
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
        """Return whether its holder was invited; asked of both sides, and more is asked of each below."""
        return _holder(access_token, partial(self.admission.invited, until=time.time())) is not None

    async def validate_request(self, request: Any) -> bool:
        """Return whether to answer."""
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
        """Return whether to believe it."""
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
    """Bytes of the file."""
    key: Any = field(repr=False)
    kept: bool
    """The file outlives the peer, so that it comes back under the same address."""
    own: Pass
    """Permission by the run's owner for this peer."""
    admission: Admission

    @cached_property
    def public_key(self) -> bytes:
        """The public half of the key, in DER (SubjectPublicKeyInfo)."""
        return _in_der(self.key._private_key.public_key())

    @property
    def peer_id(self) -> str:
        """Id that an address ends with."""
        return admission.peer_id_of(self.public_key)

    @property
    def subkey(self) -> bytes:
        """Under this subkey of a record only this peer can write."""
        return bytes(base58.b58decode(self.peer_id))

    @cached_property
    def credential(self) -> bytes:
        """Return what this peer shows to others: its key, under its invitation."""
        return self.own.state("peer", self.public_key)


@contextmanager
def identity(path: Path | None, own: Pass) -> Iterator[Identity]:
    """The identity in ``path``, made if it does not exist; without a path a new one, whose file is gone afterwards.

    Raises UserError when the file cannot be written or holds no key.
    """
    with tempfile.TemporaryDirectory(prefix="trainkit-") as folder:
        file = (path or Path(folder) / "identity").expanduser().absolute()
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
            fix = "Give --identity the file of an earlier peer, or a new file that you can write."
            raise UserError(f"Cannot use the identity {file}.", why=why, fix=fix) from None
        yield Identity(file, content, key, path is not None, own, Admission(own.grant.owner))
