"""Records in the DHT carry who wrote them: nobody is admitted by the DHT that the run's owner has not admitted.

Every record, hivemind's own for matchmaking included, lies under the peer id of its writer and holds the value, the
writer's credential, and a signature by the key that the peer id is the hash of. Whoever stores or reads it checks all
of that alone. What a record may be depends on the writer's role: a volunteer tells of itself and of nothing else.

The answer depends on the record and the owner's key only, not on the time or on who was revoked meanwhile: of many
records under one key hivemind refuses all as soon as it refuses one, so that those who store and those who read must
agree. Who was revoked cannot store (see `authorizer`), and what it has stored expires.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any

import base58
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey as _RSA
from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer
from hivemind.utils.crypto import RSAPrivateKey, RSAPublicKey

from trainkit.collaborative.admission import Admission, peer_id_of
from trainkit.collaborative.signing import UntrustedError, pack, unpack

MANIFEST, PROGRESS = "trainkit_manifest", "trainkit_progress"
CREDITS, REVOKED, BANNED = "trainkit_credits", "trainkit_revoked", "trainkit_banned"

_LONGEST_VALUE = 8192
_LONGEST = {MANIFEST: 1 << 17, CREDITS: 1 << 16, REVOKED: 1 << 16, BANNED: 1 << 16}


def peer_key(peer_id: str) -> str:
    """Where a peer keeps its credential."""
    return f"trainkit_peer_{peer_id}"


class SignedRecords(RecordValidatorBase):  # type: ignore[misc]
    """Signs what this peer stores, and refuses what was not signed by its writer."""

    def __init__(self, key: RSAPrivateKey, credential: bytes, admission: Admission) -> None:
        self._key, self._credential, self._admission = key, credential, admission
        self._subkey = _subkey(peer_id_of(der_of(key)))
        # hivemind keeps only the hash of a key.
        self._longest = {hashed(name): size for name, size in _LONGEST.items()}
        self._by_owner, self._by_all = {hashed(MANIFEST), hashed(CREDITS)}, {hashed(PROGRESS)}

    @property
    def priority(self) -> int:
        """Before those that read the value."""
        return 10

    def sign_value(self, record: DHTRecord) -> bytes:
        """The value as others take it, if it lies where this peer may write."""
        if record.subkey != self._subkey:
            return bytes(record.value)
        signature = self._key.sign(_content(record, record.value))
        return pack([record.value, self._credential, signature])

    def validate(self, record: DHTRecord) -> bool:
        """Whether its writer has signed it, is admitted, and may write it. Never raises: hivemind would take the
        node that has sent a bad record for a dead one."""
        try:
            value, credential, signature = unpack(record.value, 3)
            if len(value) > self._longest.get(record.key, _LONGEST_VALUE):
                return False
            writer = self._admission.invited(credential, record.expiration_time)
            if record.subkey != _subkey(writer.peer_id) or not self._may_write(record.key, writer.role, writer.peer_id):
                return False
            return bool(_public_key(writer.public_key).verify(_content(record, value), signature))
        except (UntrustedError, ValueError, TypeError):
            return False

    def strip_value(self, record: DHTRecord) -> bytes:
        """The value as it was before `sign_value`."""
        return unpack(record.value, 3)[0]

    def merge_with(self, other: RecordValidatorBase) -> bool:
        """There is one in a node."""
        return isinstance(other, SignedRecords)

    def _may_write(self, key: bytes, role: str, peer_id: str) -> bool:
        if key in self._by_owner:
            return role == "owner"
        if key in self._by_all or key == hashed(peer_key(peer_id)):
            return True
        # Who reduces and who gives its state away, by hivemind's records; and the lists of those who are out.
        return role != "volunteer"


def der_of(key: RSAPrivateKey) -> bytes:
    """The public half of a libp2p key, in DER (SubjectPublicKeyInfo)."""
    return bytes(
        key._private_key.public_key().public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )


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
