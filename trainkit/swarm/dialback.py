"""Inside the DHT's own process: can others reach this peer? Ask somebody who is in the swarm to dial it.

A peer that only believes that it can be reached spoils rounds: it is made a reducer, and nobody's part arrives. So it
begins as one that only calls out, and becomes a full member of the DHT once somebody has dialled it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from google.protobuf.wrappers_pb2 import BytesValue, Int64Value, StringValue  # type: ignore[import-untyped]
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.auth import AuthRole, AuthRPCWrapper
from hivemind.utils.multiaddr import Multiaddr

from trainkit import fileio
from trainkit.swarm import address
from trainkit.swarm.address import known_of, worth_dialling

# Inside the DHT's own process: how much this peer can send in a second, seen by sending it to one of the swarm.
#
# What is sent is a few messages of zeros, of which the other one says how long they were. They go the way of
# everything that peers send each other, libp2p's encryption included, so that the figure is what an exchange can
# have.

_UPLOAD_HANDLER = "trainkit.upload"
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


async def serve_upload(dht: Any, node: Any) -> None:
    """From now on take what members send to measure their link."""
    allowance = Allowance(time.monotonic())

    async def answer(request: BytesValue, context: P2PContext) -> Int64Value:
        peer, size = str(context.remote_id), len(request.value)
        if node.protocol.authorizer.admission.admitted(peer) is None:
            raise RuntimeError("not invited")
        if not allowance.takes(peer, size, time.monotonic()):
            raise RuntimeError("too much")
        return Int64Value(value=size)

    await node.p2p.add_protobuf_handler(_UPLOAD_HANDLER, answer, BytesValue)


async def measure(dht: Any, node: Any, *, to: Sequence[str], enough: float) -> Uploaded:
    """Send to the first of the peers at these addresses that takes it.

    Args:
        enough: bytes per second; a link of which that much is known is not measured further.
    """
    for name in dict.fromkeys(map(address.peer_of, to)):
        peer, rate = PeerID.from_base58(name), 0.0

        async def send(size: int, peer: PeerID = peer) -> float:
            began = time.perf_counter()
            call = node.p2p.call_protobuf_handler(peer, _UPLOAD_HANDLER, BytesValue(value=bytes(size)), Int64Value)
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


_DIALBACK_HANDLER = "trainkit.dial_back"
_LONGEST = 4000
# libp2p's own dialling takes up to 5 s; then a daemon has to be started for it.
_DIAL_SECONDS = 10.0
_ASK_SECONDS = 50.0
_AT_A_TIME, _MOST_WAITING = 2, 16


@dataclass(frozen=True)
class Seen:
    """What another peer has seen of this one."""

    by: str
    """Its id; empty if nobody has answered."""
    ip: str = ""
    """From where this peer's connection comes to it."""
    reached: tuple[str, ...] = ()
    """Addresses at which it has reached this peer."""
    tried: tuple[str, ...] = ()
    clock: float = 0.0
    """How far its clock is ahead of this machine's, in seconds."""


async def serve_dialback(dht: Any, node: Any) -> None:
    """From now on dial back whoever asks, and do for others what else a peer does that can be reached."""
    some_at_a_time = asyncio.Semaphore(_AT_A_TIME)
    waiting: set[str] = set()

    async def answer(request: StringValue, context: P2PContext) -> StringValue:
        now, peer = time.time(), str(context.remote_id)
        if node.protocol.authorizer.admission.admitted(peer) is None:
            raise RuntimeError("not invited")
        if peer in waiting or len(waiting) >= _MOST_WAITING:  # or strangers would have this machine do nothing else
            raise RuntimeError("busy")
        waiting.add(peer)
        try:
            ip = await _ip_of(node, context.remote_id)
            tried = worth_dialling(_asked(request.value), ip)
            async with some_at_a_time:
                reached = [item for item in tried if await _reaches(f"{item}/p2p/{peer}")]
        finally:
            waiting.discard(peer)
        return StringValue(value=json.dumps({"time": now, "ip": ip, "tried": tried, "reached": reached}))

    await node.p2p.add_protobuf_handler(_DIALBACK_HANDLER, answer, StringValue)
    await serve_upload(dht, node)
    await address.serve_wall_clock(node)


async def ask(dht: Any, node: Any, *, of: Sequence[str]) -> Seen:
    """Have one of the peers at these addresses dial this one back; the first that answers."""
    own = [str(item) for item in await node.p2p.get_visible_maddrs(latest=True)]
    request = StringValue(value=json.dumps([item.rpartition("/p2p/")[0] for item in own][:8]))
    for item in of:
        peer, began = PeerID.from_base58(address.peer_of(item)), time.time()
        with suppress(Exception):  # gone, or another version: the next one
            answer = await asyncio.wait_for(
                node.p2p.call_protobuf_handler(peer, _DIALBACK_HANDLER, request, StringValue), _ASK_SECONDS
            )
            said = fileio.parse(answer.value[:_LONGEST])
            return Seen(
                by=str(peer),
                ip=str(said["ip"])[:64],
                reached=known_of([f"{one}/p2p/{node.peer_id}" for one in said["reached"]]),
                tried=known_of([f"{one}/p2p/{node.peer_id}" for one in said["tried"]]),
                clock=float(said["time"]) - began,
            )
    return Seen(by="")


async def reached(dht: Any, node: Any, *, at: Sequence[str]) -> list[str]:
    """Those of the addresses, at most eight, at which the peer that they name answers."""
    tried = at[:8]
    answers = await asyncio.gather(*(_reaches(item) for item in tried))
    return [item for item, answer in zip(tried, answers, strict=True) if answer]


async def become_member(dht: Any, node: Any) -> None:
    """Of a node that has only called out, make one that answers, as if it had been started so."""
    protocol = node.protocol
    protocol.client_mode = False
    protocol.node_info = dht_pb2.NodeInfo(node_id=node.node_id.to_bytes())
    wrapper = AuthRPCWrapper(protocol, AuthRole.SERVICER, protocol.authorizer)
    await protocol.add_p2p_handlers(protocol.p2p, wrapper)
    await node.find_nearest_nodes([node.node_id])  # whoever is asked learns of it
    await serve_dialback(dht, node)


def _asked(text: str) -> list[str]:
    try:
        found = fileio.parse(text[:_LONGEST])
    except ValueError:
        return []
    return [str(item)[:200] for item in found[:8]] if isinstance(found, list) else []


async def _ip_of(node: Any, peer: PeerID) -> str:
    for info in await node.p2p.list_peers():
        if info.peer_id == peer:
            for item in map(str, info.addrs):
                parts = item.split("/")
                if len(parts) > 2 and parts[1] in ("ip4", "ip6"):
                    return parts[2]
    return ""


async def _reaches(item: str) -> bool:
    """Whether a libp2p daemon that knows nobody yet comes through to the peer, and finds its key there."""
    try:
        probe = await asyncio.wait_for(
            P2P.create(
                initial_peers=[item],
                dht_mode="client",
                auto_nat=False,
                nat_port_map=False,
                startup_timeout=_DIAL_SECONDS,
            ),
            _DIAL_SECONDS + 2.0,
        )
    except Exception:
        return False
    await probe.shutdown()
    return True


# Inside the DHT's own process: find peers again that this node has lost.
#
# hivemind forgets a peer that does not answer, and a node that has forgotten everybody stays alone for ever. libp2p
# dials an address again when it is asked to, sooner or later: after each failure it waits longer, 6 s at first, 5
# minutes at most. So it is only asked to where somebody listens by now; else whoever comes back would not be seen for
# minutes.

_REDIAL_SECONDS = 6.0
_TCP_SECONDS = 3.0


async def redial(dht: Any, node: Any, *, addresses: Sequence[str]) -> int:
    """Connect to each of the peers and take those that answer into the routing table; how many do."""
    answers = await asyncio.gather(*(_answers(node, item) for item in addresses))
    if any(answers):
        await node.find_nearest_nodes([node.node_id])  # and by them everybody else
    return sum(answers)


async def _answers(node: Any, item: str) -> bool:
    peer = PeerID.from_base58(address.peer_of(item))
    if peer == node.peer_id:
        return False
    if not await _listens(item):
        return False
    machine = Multiaddr(item.rpartition("/p2p/")[0])
    with suppress(Exception):  # refused, unreachable, or too early to ask again: the ping says what matters
        await asyncio.wait_for(node.p2p._client.connect(peer, [machine]), _REDIAL_SECONDS)
    return await node.protocol.call_ping(peer) is not None


async def _listens(item: str) -> bool:
    _, _, host, _, port, *_ = item.split("/")
    with suppress(OSError, asyncio.TimeoutError):
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), _TCP_SECONDS)
        writer.close()
        return True
    return False
