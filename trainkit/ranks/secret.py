"""The secret of a run: whoever does not know it is no rank of it.

It comes in the environment variable TRAINKIT_SECRET, which whoever starts the ranks sets, and is never written down.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field

from trainkit.errors import UserError

VARIABLE = "TRAINKIT_SECRET"
SHORTEST = 16
"""Characters. What is sealed with a secret can be seen by strangers, who may try all short ones in peace."""


class ForgedError(Exception):
    """What was read was not written by one who knows the secret."""


@dataclass(frozen=True)
class Secret:
    """What the ranks of one run know and nobody else; the empty one is known to everybody."""

    text: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        if self.text and len(self.text) < SHORTEST:
            raise UserError(
                f"The run's secret is too short: {len(self.text)} characters.",
                why=f"A stranger could guess it; {SHORTEST} characters are the least.",
                fix='Make one with `python -c "import secrets; print(secrets.token_urlsafe())"`.',
            )

    def __bool__(self) -> bool:
        return bool(self.text)

    @classmethod
    def generate(cls) -> Secret:
        """A new one, of 256 random bits."""
        return cls(secrets.token_urlsafe(32))

    @classmethod
    def from_mapping(cls, env: Mapping[str, str]) -> Secret:
        """That of ``env``, as a rule os.environ; the empty one if there is none."""
        return cls(env.get(VARIABLE, "").strip())

    def name(self, purpose: str) -> str:
        """A name for ``purpose`` that only who knows the secret can tell: HMAC-SHA256, in hex."""
        return self._mac(b"name", purpose.encode()).hex()

    def seal(self, purpose: str, value: bytes) -> bytes:
        """``value`` with a mark that only who knows the secret can make."""
        return self._mac(b"value", purpose.encode(), value) + value

    def unseal(self, purpose: str, sealed: bytes) -> bytes:
        """The value that was sealed for ``purpose``.

        Raises ForgedError when it was sealed with another secret, for another purpose, or not at all.
        """
        mark, value = sealed[:32], sealed[32:]
        if not hmac.compare_digest(mark, self._mac(b"value", purpose.encode(), value)):
            raise ForgedError(purpose)
        return value

    def _mac(self, *parts: bytes) -> bytes:
        # Each part with its length: ("ab", "c") must not be ("a", "bc").
        message = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
        return hmac.new(self.text.encode(), message, hashlib.sha256).digest()


NO_SECRET = Secret()
"""Of a single process, and of ranks that were started by hand without one."""
