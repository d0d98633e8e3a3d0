"""Who a peer is, and what it may write: its identity, its pass, and the shape of records.

An address ends with the id of a peer, and that id is the hash of the peer's public key: libp2p lets nobody else answer
there. What the peer may do beyond that its pass says, which comes from the run's owner (see `invitation`).
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import base58
from hivemind.dht.schema import SchemaValidator
from hivemind.p2p import P2P
from hivemind.proto import crypto_pb2
from hivemind.utils.crypto import RSAPrivateKey
from pydantic import v1

from trainkit import reading
from trainkit.collaborative.admission import Admission, credential, peer_id_of
from trainkit.collaborative.authorizer import Authorizer
from trainkit.collaborative.invitation import Pass
from trainkit.collaborative.messages import progress_of
from trainkit.collaborative.signed_records import SignedRecords, der_of
from trainkit.errors import UserError
from trainkit.records import files

_Text = v1.constr(strict=True, max_length=128)
_Count = v1.conint(strict=True, ge=0, le=1 << 50)
_Peer = v1.conbytes(strict=True, min_length=34, max_length=34)


class _ManifestRecord(v1.BaseModel):
    """What the creator publishes about the run."""

    protocol: _Count  # type: ignore[valid-type]
    run_id: _Text  # type: ignore[valid-type]
    name: _Text  # type: ignore[valid-type]
    config: v1.constr(strict=True, max_length=100_000)  # type: ignore[valid-type]
    first_round: _Count  # type: ignore[valid-type]
    owner: v1.constr(strict=True, regex="^[0-9a-f]{64}$")  # type: ignore[valid-type]
    # Who builds a model by these must not run out of memory: a plausible one has no more.
    num_classes: v1.conint(strict=True, ge=1, le=1 << 20)  # type: ignore[valid-type]
    in_chans: v1.conint(strict=True, ge=1, le=1024)  # type: ignore[valid-type]
    image_size: v1.conint(strict=True, ge=1, le=1 << 14)  # type: ignore[valid-type]
    open_run: v1.StrictBool
    facts: dict[v1.StrictStr, v1.constr(strict=True, max_length=500)]  # type: ignore[valid-type]
    stopped: v1.StrictBool


class _ProgressRecord:
    """What every peer publishes about itself, once a round: whatever can be read as such."""

    @classmethod
    def __get_validators__(cls) -> Iterator[Any]:
        yield cls._readable

    @staticmethod
    def _readable(value: object) -> object:
        if progress_of(value) is None:
            raise ValueError("no progress")
        return value


class _CreditsRecord(v1.BaseModel):
    """Who has contributed how much, by the account of whoever answers for the run: name, rounds, samples, seconds,
    bytes."""

    # Types are looked at by who reads them: a tuple here would be no list any more, and refused as another value.
    rows: v1.conlist(v1.conlist(Any, min_items=5, max_items=5), max_items=200)  # type: ignore[valid-type]


class _Records(v1.BaseModel):
    trainkit_manifest: dict[_Peer, _ManifestRecord]  # type: ignore[valid-type]
    trainkit_progress: dict[_Peer, _ProgressRecord]  # type: ignore[valid-type]
    trainkit_credits: dict[_Peer, _CreditsRecord]  # type: ignore[valid-type]
    trainkit_revoked: dict[_Peer, v1.StrictBytes]  # type: ignore[valid-type]
    trainkit_banned: dict[_Peer, v1.StrictBytes]  # type: ignore[valid-type]


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
        schema = SchemaValidator(_Records, allow_extra_keys=True)
        return [schema, SignedRecords(self.key, self.credential, self.admission)]

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
                files.write(file, reading.read_bytes(made), private=True)
            key = RSAPrivateKey.__new__(RSAPrivateKey)
            key.__setstate__({"_private_key": crypto_pb2.PrivateKey.FromString(reading.read_bytes(file)).data})
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
