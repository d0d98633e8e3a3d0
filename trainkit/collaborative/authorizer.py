"""hivemind's hook for access to the DHT: each request and each answer carries the credential of who sends it.

Whoever has none reads nothing and writes nothing; who is out by now may still ask why. hivemind's protocol (its issue
253) signs every message with the peer's key and refuses repeated ones; ours is only what counts as a token.
"""

from __future__ import annotations

import time
from functools import lru_cache
from typing import Any

from cryptography.hazmat.primitives import serialization
from hivemind.dht.routing import DHTID
from hivemind.proto import dht_pb2
from hivemind.proto.auth_pb2 import AccessToken
from hivemind.utils.auth import TokenAuthorizerBase
from hivemind.utils.crypto import RSAPrivateKey

from trainkit.collaborative.admission import Admission, Member
from trainkit.collaborative.signed_records import BANNED, REVOKED, hashed
from trainkit.collaborative.signing import UntrustedError

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
            _leave_who_is_out(request)
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
        if len(token.public_key) > _LONGEST_KEY or _der(token.public_key) != member.public_key:
            return None
        return member


def _leave_who_is_out(request: Any) -> None:
    """Leave of a request what those may ask who are out: the lists that say so. Nothing else is there for them.

    Not a refusal: hivemind would take this node for dead and ask it no more, and they would wait for ever.
    """
    if isinstance(request, dht_pb2.FindRequest):
        request.keys[:] = [key if key in (hashed(REVOKED), hashed(BANNED)) else _NOTHING for key in request.keys]
    for field in ("keys", "subkeys", "values", "expiration_time", "in_cache"):
        if isinstance(request, dht_pb2.StoreRequest):
            request.ClearField(field)


@lru_cache(maxsize=1024)
def _der(ssh: bytes) -> bytes:
    return bytes(
        serialization.load_ssh_public_key(ssh).public_bytes(
            serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
        )
    )
