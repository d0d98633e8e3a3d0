"""What time it is in the swarm, told to anybody: whose clock is off is refused before it can ask for anything else.

hivemind takes what was signed more than a minute ago, or will be, for forged, and does not say so.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from trainkit.collaborative import address
from trainkit.errors import UserError

_HANDLER = "trainkit.time"
_TCP_SECONDS, _START_SECONDS, _ASK_SECONDS = 2.0, 8.0, 5.0
# hivemind starts no node whose clock is further off.
_MOST_SECONDS = 3.0


def wrong_clock() -> UserError:
    """This machine's clock and the swarm's differ."""
    return UserError(
        "The clock of this machine differs from the swarm's by more than three seconds.",
        why="Rounds end by the clock, so the peers' clocks must agree.",
        fix="Set it: `timedatectl set-ntp true`, or ask the administrator.",
    )


async def serve(node: Any) -> None:
    """From now on tell the time."""
    from google.protobuf.wrappers_pb2 import DoubleValue  # type: ignore[import-untyped]

    async def answer(request: Any, context: Any) -> Any:
        return DoubleValue(value=time.time())

    await node.p2p.add_protobuf_handler(_HANDLER, answer, DoubleValue)


async def is_off(peers: Sequence[str]) -> bool:
    """Whether one of the peers at these addresses has another time; False if none of them tells."""
    from google.protobuf.wrappers_pb2 import DoubleValue
    from hivemind.p2p import P2P, PeerID

    there = [item for item in peers if await asyncio.to_thread(_listens, item)]
    if not there:
        return False
    # A daemon that did not come through may end when nobody waits for it any more, which asyncio would remark.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    with suppress(Exception):  # of libp2p's daemon, in many words: then the clock is not known to be wrong
        options = {"dht_mode": "client", "auto_nat": False, "nat_port_map": False, "startup_timeout": _START_SECONDS}
        asker = await asyncio.wait_for(P2P.create(initial_peers=there, **options), _START_SECONDS + 2.0)
        try:
            for name in dict.fromkeys(map(address.peer_of, there)):
                asked = asker.call_protobuf_handler(PeerID.from_base58(name), _HANDLER, DoubleValue(), DoubleValue)
                began = time.time()
                told = (await asyncio.wait_for(asked, _ASK_SECONDS)).value
                return not began - _MOST_SECONDS <= told <= time.time() + _MOST_SECONDS
        finally:
            await asker.shutdown()
    return False


def _listens(item: str) -> bool:
    _, _, host, _, port, *_ = item.split("/")
    try:
        socket.create_connection((host, int(port)), timeout=_TCP_SECONDS).close()
    except OSError:
        return False
    return True
