"""What the ranks of one job hand each other that nobody else may read: sealed with the run's secret.

A meeting of ranks keeps strangers from writing, not from reading: its store speaks in the clear.
"""

from __future__ import annotations

import os

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from trainkit.ranks.secret import ForgedError, Secret

_NONCE = 12  # bytes; ChaCha20-Poly1305, RFC 8439


def hide(secret: Secret, purpose: str, text: str) -> bytes:
    """``text`` for those who know ``secret``."""
    nonce = os.urandom(_NONCE)
    return nonce + _cipher(secret, purpose).encrypt(nonce, text.encode(), None)


def reveal(secret: Secret, purpose: str, hidden: bytes) -> str:
    """What `hide` was given. Raises ForgedError when it was hidden with another secret or for another purpose."""
    try:
        return _cipher(secret, purpose).decrypt(hidden[:_NONCE], hidden[_NONCE:], None).decode()
    except (InvalidTag, ValueError) as error:
        raise ForgedError(purpose) from error


def _cipher(secret: Secret, purpose: str) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(bytes.fromhex(secret.name(f"key to hide {purpose}")))
