"""Somebody who was invited and floods the DHT: ``python -m tests.swarm.flooder TOKEN SECONDS``.

It asks for the run's records as everybody does. Then it stores, for so many seconds each: records of peers that it has
made up, each with a key of its own, under its own invitation; values of 1 MB; requests whose nonce, which a node has to
remember, is 1 MB. At last it stores again what others had signed when it came. It prints as JSON how many records were
taken, of how many.
"""

import asyncio
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from itertools import count
from pathlib import Path
from typing import Any

from trainkit.swarm import processes

processes.require_hivemind()

from cryptography.hazmat.primitives.asymmetric import rsa  # noqa: E402
from hivemind.dht.node import DHTNode  # noqa: E402
from hivemind.dht.protocol import DHTProtocol  # noqa: E402
from hivemind.dht.storage import DictionaryDHTValue  # noqa: E402
from hivemind.dht.validation import CompositeValidator, DHTRecord  # noqa: E402
from hivemind.p2p import PeerID  # noqa: E402
from hivemind.proto import dht_pb2  # noqa: E402
from hivemind.utils import MSGPackSerializer, crypto  # noqa: E402

from trainkit.swarm import access  # noqa: E402
from trainkit.swarm.access import Authorizer, Identity, SignedRecords, hashed  # noqa: E402
from trainkit.swarm.address import peer_of  # noqa: E402
from trainkit.swarm.admission import peer_key, with_token  # noqa: E402
from trainkit.swarm.messages import MANIFEST, PROGRESS, PeerProgress  # noqa: E402

_MB = 1 << 20


def made_up(own: Any, admission: Any) -> Iterator[Identity]:
    """Identities without end. A new RSA key takes long: these have the same primes, and exponents of their own."""
    n = rsa.generate_private_key(65537, 1024).private_numbers()
    phi = (n.p - 1) * (n.q - 1)
    for e in (e for e in count(65537, 2) if math.gcd(e, phi) == 1):
        d = pow(e, -1, phi)
        numbers = rsa.RSAPrivateNumbers(
            n.p, n.q, d, d % (n.p - 1), d % (n.q - 1), n.iqmp, rsa.RSAPublicNumbers(e, n.public_numbers.n)
        )
        key = crypto.RSAPrivateKey.__new__(crypto.RSAPrivateKey)
        key._private_key = numbers.private_key(unsafe_skip_rsa_key_validation=True)
        yield Identity(Path(), b"", key, False, own, admission)


def signed(identity: Identity, key: str, value: Any, seconds: float) -> dict[str, Any]:
    """One record, as a request has it."""
    until = min(time.time() + seconds, identity.own.grant.expires - 1.0)
    parts = hashed(key), MSGPackSerializer.dumps(identity.subkey), MSGPackSerializer.dumps(value), until
    told = CompositeValidator([SignedRecords(identity)]).sign_value(DHTRecord(*parts))
    return {"keys": parts[0], "subkeys": parts[1], "values": told, "expiration_time": until, "in_cache": False}


class Remembered(Authorizer):
    """Signs requests with a nonce of 1 MB."""

    async def sign_request(self, request: Any, service_public_key: Any) -> None:
        await super().sign_request(request, service_public_key)
        request.auth.nonce, request.auth.signature = bytes(8) + request.auth.nonce + bytes(_MB), b""
        request.auth.signature = self._local_private_key.sign(request.SerializeToString())


class Flood:
    """Stores at one node, as fast as that takes it."""

    def __init__(self, node: Any, peer: PeerID, identity: Identity) -> None:
        self.node, self.peer, self.identity = node, peer, identity

    async def store(self, *records: dict[str, Any]) -> list[bool]:
        request = dht_pb2.StoreRequest(**{field: [one[field] for one in records] for field in records[0]})
        try:
            answer = await self.node.protocol.get_stub(self.peer).rpc_store(request, timeout=5.0)
        except Exception:  # refused, or it is at its end
            return [False] * len(records)
        return list(answer.store_ok) if answer is not None else [False] * len(records)

    async def lasting(self, seconds: float, make: Callable[[], list[dict[str, Any]]]) -> list[int]:
        taken, tried, until = 0, 0, time.monotonic() + seconds

        async def one() -> None:
            nonlocal taken, tried
            while time.monotonic() < until:
                records = make()
                taken, tried = taken + sum(await self.store(*records)), tried + len(records)

        await asyncio.gather(*(one() for _ in range(8)))
        return [taken, tried]


async def flood(token: str, seconds: float) -> dict[str, Any]:
    entry = with_token(token)
    admission = entry.admission()
    with access.identity(None, entry.own, admission) as me:
        node = await DHTNode.create(
            initial_peers=list(entry.addresses), client_mode=True, host_maddrs=["/ip4/127.0.0.1/tcp/0"],
            identity_path=str(me.path), check_if_identity_free=False, nat_port_map=False, cache_locally=False,
            record_validator=CompositeValidator([SignedRecords(me)]), authorizer=Authorizer(me),
        )  # fmt: skip
        run = Flood(node, PeerID.from_base58(peer_of(entry.addresses[0])), me)
        keys = [hashed(MANIFEST), hashed(PROGRESS)]
        answer = await node.protocol.get_stub(run.peer).rpc_find(dht_pb2.FindRequest(keys=keys), timeout=20.0)
        old = [
            {"keys": key, "subkeys": MSGPackSerializer.dumps(subkey), "values": value, "expiration_time": until,
             "in_cache": False}
            for key, result in zip(keys, answer.results, strict=True) if result.value
            for subkey, (value, until) in MSGPackSerializer.loads(result.value).items()
        ]  # fmt: skip
        others = made_up(entry.own, admission)

        def of_strangers() -> list[dict[str, Any]]:
            some, told = [next(others) for _ in range(8)], asdict(PeerProgress("x", 0, 64, 10.0, 0.5, 2, time.time()))
            credentials = [signed(one, peer_key(one.peer_id), one.credential, 3500.0) for one in some]
            return [*credentials, *(signed(one, PROGRESS, told, 3500.0) for one in some)]

        found: dict[str, Any] = {"made up": await run.lasting(seconds, of_strangers)}
        large = signed(me, PROGRESS, {"name": "x", "more": bytes(_MB)}, 600.0)
        found["1 MB"] = await run.lasting(seconds, lambda: [large] * 3)
        copies = DictionaryDHTValue()
        for index in range(100_000):
            copies.store(index.to_bytes(4, "big"), b"x", time.time() + 60.0)
        entries = {**large, "subkeys": DHTProtocol.IS_DICTIONARY, "values": MSGPackSerializer.dumps(copies)}
        found["100,000 at once"] = await run.lasting(seconds, lambda: [entries])
        node.protocol.authorizer = Remembered(me)
        small = signed(me, peer_key(me.peer_id), me.credential, 600.0)
        found["nonces of 1 MB"] = await run.lasting(seconds, lambda: [small])
        node.protocol.authorizer = Authorizer(me)
        found["old"] = [sum(await run.store(*old)), len(old)]
        await node.shutdown()
    return found


if __name__ == "__main__":
    print(json.dumps(asyncio.run(flood(sys.argv[1], float(sys.argv[2])))), flush=True)
