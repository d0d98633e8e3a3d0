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
from dataclasses import dataclass
from typing import Any

from google.protobuf.wrappers_pb2 import StringValue  # type: ignore[import-untyped]
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.auth import AuthRole, AuthRPCWrapper

from trainkit import reading
from trainkit.collaborative import address, upload, wall_clock
from trainkit.collaborative.home import known_of
from trainkit.collaborative.reachability import worth_dialling

_HANDLER = "trainkit.dial_back"
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


async def serve(dht: Any, node: Any) -> None:
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

    await node.p2p.add_protobuf_handler(_HANDLER, answer, StringValue)
    await upload.serve(dht, node)
    await wall_clock.serve(node)


async def ask(dht: Any, node: Any, *, of: Sequence[str]) -> Seen:
    """Have one of the peers at these addresses dial this one back; the first that answers."""
    own = [str(item) for item in await node.p2p.get_visible_maddrs(latest=True)]
    request = StringValue(value=json.dumps([item.rpartition("/p2p/")[0] for item in own][:8]))
    for item in of:
        peer, began = PeerID.from_base58(address.peer_of(item)), time.time()
        with suppress(Exception):  # gone, or another version: the next one
            answer = await asyncio.wait_for(
                node.p2p.call_protobuf_handler(peer, _HANDLER, request, StringValue), _ASK_SECONDS
            )
            said = reading.parse(answer.value[:_LONGEST])
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
    await serve(dht, node)


def _asked(text: str) -> list[str]:
    try:
        found = reading.parse(text[:_LONGEST])
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
