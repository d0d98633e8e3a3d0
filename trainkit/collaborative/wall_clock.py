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
from functools import partial
from typing import Any

from trainkit.collaborative import address
from trainkit.collaborative.processes import private_sockets
from trainkit.errors import UserError

_HANDLER = "trainkit.time"
_TCP_SECONDS, _START_SECONDS, _ASK_SECONDS = 2.0, 8.0, 5.0
# hivemind starts no node whose clock is further off.
_MOST_SECONDS = 3.0
MOST_APART = 1.0
"""Seconds by which peers' clocks may differ. With 1.5 every second round finds no others, with 2.5 none does, as if the
others were gone: nobody would know why."""
_TIMES = 3


def wrong_clock(ahead: float | None = None) -> UserError:
    """This machine's clock and the swarm's differ, by so much if that is known."""
    how = "differs from the swarm's by more than three seconds"
    if ahead is not None:
        how = f"is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the swarm's"
    return UserError(
        f"The clock of this machine {how}.",
        why="Rounds end by the clock, so the peers' clocks must agree.",
        fix="Set it: `timedatectl set-ntp true`, or ask the administrator.",
    )


async def serve(node: Any) -> None:
    """From now on tell the time."""
    from google.protobuf.wrappers_pb2 import DoubleValue  # type: ignore[import-untyped]

    async def answer(request: Any, context: Any) -> Any:
        return DoubleValue(value=time.time())

    await node.p2p.add_protobuf_handler(_HANDLER, answer, DoubleValue)


def require_same_time(dht: Any, peers: Sequence[str]) -> None:
    """Ask the peers at these addresses what time it is.

    Args:
        dht: the peer's `SwarmDHT`.

    Raises UserError when this machine's clock is off; nothing happens when nobody says.
    """
    ahead = dht.in_dht(partial(_ahead, of=tuple(peers)), _ASK_SECONDS, None)
    if ahead is not None and abs(ahead) > MOST_APART:
        raise wrong_clock(ahead)


async def _ahead(dht: Any, node: Any, *, of: Sequence[str]) -> float | None:
    """Seconds by which this machine's clock is ahead at least, by the first that answers."""
    from google.protobuf.wrappers_pb2 import DoubleValue
    from hivemind.p2p import PeerID

    for name in dict.fromkeys(map(address.peer_of, of)):
        asked = []
        with suppress(Exception):  # gone: the next one
            for _ in range(_TIMES):
                began = time.time()
                answer = node.p2p.call_protobuf_handler(PeerID.from_base58(name), _HANDLER, DoubleValue(), DoubleValue)
                told = (await asyncio.wait_for(answer, _ASK_SECONDS)).value
                asked.append((began, told, time.time()))
        if asked:
            return ahead_by(asked)
    return None


def ahead_by(asked: Sequence[tuple[float, float, float]]) -> float:
    """Seconds by which a clock is ahead for certain, of all that it can be; negative if it is behind.

    Args:
        asked: when a question was sent, by this clock, the other's answer, and when that arrived.
    """
    least, most = max(began - told for began, told, _ in asked), min(over - told for _, told, over in asked)
    return least if least > 0.0 else min(most, 0.0)


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
        with private_sockets():
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
