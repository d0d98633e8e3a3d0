"""Inside the DHT's own process: how much this peer can send in a second, seen by sending it to one of the swarm.

What is sent is a few messages of zeros, of which the other one says how long they were. They go the way of everything
that peers send each other, libp2p's encryption included, so that the figure is what an exchange can have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.wrappers_pb2 import BytesValue, Int64Value  # type: ignore[import-untyped]
from hivemind.p2p import P2PContext, PeerID

from trainkit.collaborative import address

_HANDLER = "trainkit.upload"
# Of one message; the largest that libp2p's daemon takes at all is four times that.
SIZES = (1 << 16, 1 << 18, 1 << 20)
# A message that takes so long has told enough.
_ENOUGH_SECONDS = 0.5
# The slowest link that is measured: 64 KiB in this time.
_SLOWEST_SECONDS = 10.0
# What is taken within an hour of one peer, and of all: more would be a load, and no measurement.
_OF_ONE, _OF_ALL = 16 << 20, 1 << 30


@dataclass(frozen=True)
class Uploaded:
    """What was measured."""

    rate: float
    """Bytes per second; of a fast link the least that it can be. 0: it could not be measured."""
    to: str = ""
    """The peer to which it was sent; empty if nobody has answered."""


@dataclass
class Allowance:
    """What peers have sent within the hour."""

    began: float
    sent: dict[str, int] = field(default_factory=dict)

    def takes(self, peer: str, size: int, now: float) -> bool:
        """Whether so much more may come from ``peer``; it is then counted."""
        if now - self.began > 3600.0:
            self.began, self.sent = now, {}
        own = self.sent.get(peer, 0) + size
        if size > SIZES[-1] or own > _OF_ONE or sum(self.sent.values()) + size > _OF_ALL:
            return False
        self.sent[peer] = own
        return True


async def serve(dht: Any, node: Any) -> None:
    """From now on take what members send to measure their link."""
    allowance = Allowance(time.monotonic())

    async def answer(request: BytesValue, context: P2PContext) -> Int64Value:
        peer, size = str(context.remote_id), len(request.value)
        if node.protocol.authorizer.admission.admitted(peer) is None:
            raise RuntimeError("not invited")
        if not allowance.takes(peer, size, time.monotonic()):
            raise RuntimeError("too much")
        return Int64Value(value=size)

    await node.p2p.add_protobuf_handler(_HANDLER, answer, BytesValue)


async def measure(dht: Any, node: Any, *, to: Sequence[str], enough: float) -> Uploaded:
    """Send to the first of the peers at these addresses that takes it.

    Args:
        enough: bytes per second; a link of which that much is known is not measured further.
    """
    for name in dict.fromkeys(map(address.peer_of, to)):
        peer, rate = PeerID.from_base58(name), 0.0

        async def send(size: int, peer: PeerID = peer) -> float:
            began = time.perf_counter()
            call = node.p2p.call_protobuf_handler(peer, _HANDLER, BytesValue(value=bytes(size)), Int64Value)
            taken = await asyncio.wait_for(call, _SLOWEST_SECONDS)
            return time.perf_counter() - began if taken.value == size else float("inf")

        with suppress(Exception):  # gone, or another version: the next one, or what is known by then
            # A message of nothing takes as long as the way there and back; the first one also opens the connection.
            there_and_back = min([await send(0), await send(0)])
            for size in SIZES:
                took = await send(size)
                rate = size / max(took - there_and_back, 1e-3)  # a link gives the first bytes away: the largest counts
                if took >= _ENOUGH_SECONDS or rate >= enough:
                    break
        if rate:
            return Uploaded(rate, str(peer))
    return Uploaded(0.0)
