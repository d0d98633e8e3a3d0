"""The time of day that peers must share."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from trainkit.common.errors import UserError
from trainkit.swarm.network import processes
from trainkit.swarm.network.processes import daemon_at, listens
from trainkit.swarm.protocol.addresses import peer_of

_TIME_HANDLER = "trainkit.time"
_START_SECONDS = 8.0
_ASK_SECONDS = 5.0
# hivemind starts no node whose clock is further off, and takes what was signed more than a minute ago, or will be, for
# forged; it does not say so. So the time is told to anybody.
_MOST_SECONDS = 3.0
MOST_APART = 1.0
"""Seconds by which peers' clocks may differ. With 1.5 every second round finds no others, with 2.5 none does, as if the
others were gone: nobody would know why."""


def wrong_clock(how: str = "differs from the swarm's by more than three seconds") -> UserError:
    """This machine's clock and the swarm's differ."""
    why = "Rounds end by the clock, so the peers' clocks must agree."
    fix = "Set the clock: `timedatectl set-ntp true`, or ask the administrator."
    return UserError(f"The clock of this machine {how}.", why=why, fix=fix)


def _steady() -> float:
    # On Linux also while the machine sleeps.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class WallClock:
    """Notices when somebody, or NTP, sets this machine's clock."""

    def __init__(self, now: Callable[[], float] = time.time, steady: Callable[[], float] = _steady) -> None:
        self._now = now
        self._steady = steady
        self._offset = now() - steady()

    def jumped(self) -> float:
        """Seconds by which it was set forward since the last call, negative if back; 0 for what no peer minds."""
        before = self._offset
        offset = self._now() - self._steady()
        if abs(offset - before) <= MOST_APART / 2:
            return 0.0
        self._offset = offset
        return offset - before


async def serve_wall_clock(node: Any) -> None:
    """From now on tell the time."""
    from google.protobuf.wrappers_pb2 import DoubleValue  # type: ignore[import-untyped]

    async def answer(request: Any, context: Any) -> Any:
        return DoubleValue(value=time.time())

    await node.p2p.add_protobuf_handler(_TIME_HANDLER, answer, DoubleValue)


def require_same_time(dht: Any, peers: Sequence[str]) -> bool:
    """Compare clocks with the peers at these addresses, by a `SwarmDHT`. False if none of them tells the time.

    Raises UserError when this machine's is off.
    """
    ahead: float | None = dht.in_dht(partial(_ahead, of=tuple(peers)), _ASK_SECONDS, None)
    if ahead is not None and abs(ahead) > MOST_APART:
        raise wrong_clock(f"is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the swarm's")
    return ahead is not None


async def _ahead(dht: Any, node: Any, *, of: Sequence[str]) -> float | None:
    """Seconds by which this machine's clock is ahead at least, by the first that answers; None if none does."""
    for name in dict.fromkeys(map(peer_of, of)):
        with suppress(Exception):  # gone: the next one
            return await _ahead_of(node.p2p, name)
    return None


async def _ahead_of(p2p: Any, name: str) -> float:
    from google.protobuf.wrappers_pb2 import DoubleValue
    from hivemind.p2p import PeerID

    began = time.time()
    answer = p2p.call_protobuf_handler(PeerID.from_base58(name), _TIME_HANDLER, DoubleValue(), DoubleValue)
    told = (await asyncio.wait_for(answer, processes.at_load(_ASK_SECONDS))).value
    return ahead_by(began, told, time.time())


def ahead_by(began: float, told: float, over: float) -> float:
    """Seconds by which a clock is ahead for certain, of all that it can be; negative if it is behind.

    Args:
        began: when a question was sent, by this clock; ``told``: the other's answer; ``over``: when that arrived.
    """
    return max(began - told, 0.0) or min(over - told, 0.0)


async def is_off(peers: Sequence[str]) -> bool:
    """Return whether one of the peers at these addresses has another time; False if none of them tells."""
    there = [item for item in peers if await listens(item)]
    # A daemon that did not come through may end when nobody waits for it any more, which asyncio would remark.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    with suppress(Exception):  # of libp2p's daemon, in many words: then the clock is not known to be wrong
        if there:
            async with daemon_at(there, _START_SECONDS) as p2p:
                return abs(await _ahead_of(p2p, peer_of(there[0]))) > _MOST_SECONDS
    return False
