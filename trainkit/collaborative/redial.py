"""Inside the DHT's own process: find peers again that this node has lost.

hivemind forgets a peer that does not answer, and a node that has forgotten everybody stays alone for ever. libp2p dials
an address again when it is asked to, sooner or later: after each failure it waits longer, 6 s at first, 5 minutes at
most. So it is only asked to where somebody listens by now; else whoever comes back would not be seen for minutes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from hivemind.p2p import PeerID
from hivemind.utils.multiaddr import Multiaddr

from trainkit.collaborative import address

_DIAL_SECONDS = 6.0
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
        await asyncio.wait_for(node.p2p._client.connect(peer, [machine]), _DIAL_SECONDS)
    return await node.protocol.call_ping(peer) is not None


async def _listens(item: str) -> bool:
    _, _, host, _, port, *_ = item.split("/")
    with suppress(OSError, asyncio.TimeoutError):
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), _TCP_SECONDS)
        writer.close()
        return True
    return False
