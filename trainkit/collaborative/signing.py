"""What is signed in a swarm, and how: Ed25519 (RFC 8032) over exact bytes, each signature for one purpose.

A message carries the bytes that were signed, so nobody has to write a text anew in the very same form to check it. The
purpose is part of what is signed: an invitation's signature is none of a state's digest.
"""

from __future__ import annotations

from collections.abc import Sequence

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

KEY_SIZE = 32
SIGNATURE_SIZE = 64


class UntrustedError(Exception):
    """What a stranger sent is not what it says. The text says why, in words that are safe to print."""


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
    """Whether ``signature`` was made with the private half of ``public``, for this purpose and this content."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, _message(purpose, content))
    except (InvalidSignature, ValueError):
        return False
    return True


def _message(purpose: str, content: bytes) -> bytes:
    return pack([b"trainkit", purpose.encode(), content])


def pack(parts: Sequence[bytes]) -> bytes:
    """Several parts in one, each behind its length."""
    return b"".join(len(part).to_bytes(4, "big") + part for part in parts)


def unpack(data: bytes, count: int) -> list[bytes]:
    """The ``count`` parts of `pack`.

    Raises UntrustedError when something is missing or left over.
    """
    parts, at = [], 0
    for _ in range(count):
        size = int.from_bytes(data[at : at + 4], "big")
        if at + 4 + size > len(data):
            raise UntrustedError("it is cut short")
        parts.append(data[at + 4 : at + 4 + size])
        at += 4 + size
    if at != len(data):
        raise UntrustedError("it is longer than it says")
    return parts
