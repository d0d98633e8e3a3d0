"""Groups of peers that average together: who may lead and join, and who hears of whom."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Sized
from typing import Any

from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import PeerID
from hivemind.proto.averaging_pb2 import JoinRequest, MessageFromLeader

from trainkit.swarm.identity.admission import Guard, remember
from trainkit.swarm.protocol.messages import CLIENT, NOTHING, read_gathered
from trainkit.swarm.trust.screening import Verdict

# Peers that average together, for each that reduces; with more it would do nothing else.
_LARGEST_GROUP = 256
# Who only calls out is told of those who reduce, and of so many others, by whom it knows how fast they are: the words
# of all to all are 72 MB in a group of 256.
_MOST_TOLD = 16
# Refusals to report of a round; a stranger can cause as many as it likes.
_MOST_REFUSALS = 32


class GuardedMatchmaking(Matchmaking):  # type: ignore[misc]
    """Follows only those who may lead: a leader divides the work."""

    def __init__(self, *args: Any, groups: Groups, **options: Any) -> None:
        self._groups = groups
        super().__init__(*args, **options)

    async def _request_join_group(self, leader: PeerID) -> GroupInfo | None:
        found: GroupInfo | None = None
        if await self._groups.follows(str(leader)):
            found = await super()._request_join_group(leader)
        return found


class Groups:
    """The groups of one averager."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self.lateness = Lateness()
        self.refused: dict[str, Verdict] = {}
        """Peers that were not let in since the last round, and why."""
        self.reducers = 1
        """In the last group."""
        self._told = b"", frozenset[bytes]()
        """A group, and those of its members of whom all are told."""

    def shortened(self, message: MessageFromLeader, to: PeerID) -> MessageFromLeader:
        """Return what a leader says, without most of the peers with whom one that only calls out has nothing to do."""
        members = list(zip(message.ordered_peer_ids, message.gathered, strict=True))
        if self._told[0] != message.group_id:
            calls_out = [peer for peer, said in members if (read_gathered(said) or NOTHING).mode == CLIENT]
            self._told = message.group_id, frozenset(message.ordered_peer_ids) - set(calls_out[_MOST_TOLD:])
        peers, words = zip(*(one for one in members if one[0] in self._told[1] or one[0] == to.to_bytes()), strict=True)
        return MessageFromLeader(code=message.code, group_id=message.group_id, ordered_peer_ids=peers, gathered=words)

    async def follows(self, leader: str) -> bool:
        """Return whether that peer may lead this one."""
        return not self.lateness.is_benched(leader) and await self._guard.trusts(leader)

    async def welcomes(self, request: JoinRequest, peer: str, followers: Sized) -> bool:
        """Return whether a peer may join the group that has these followers by now."""
        if await self._guard.member(peer) is None or self.lateness.is_benched(peer):
            return False
        gathered = read_gathered(request.gather)
        is_full = len(followers) >= _LARGEST_GROUP * self.reducers
        if is_full and (gathered is None or gathered.mode == CLIENT):
            return False
        if gathered is None:
            why = "sent something unreadable about itself"
        elif gathered.mode != CLIENT and not await self._guard.trusts(peer):
            why = "offers to average for others without being trusted by the owner"
        else:
            return True
        if len(self.refused) < _MOST_REFUSALS:
            self.refused[peer] = Verdict(peer, "dropped", why)
        return False


_MOST_LATE = 6
_BENCH_SECONDS = 30.0
_LONGEST_BENCH_SECONDS = 600.0


class Lateness:
    """Record of how often in a row each peer was late, and when it may come again.

    The others wait for a late peer in every round. A peer that is late too often in a row, or whose averages do not
    come, where a round in which nothing at all has come counts double, is not let into a group for some time; then for
    twice as long.
    """

    def __init__(self) -> None:
        self._late: dict[str, tuple[int, float]] = {}

    def note(self, members: Iterable[str], late: Collection[str], arrived: Collection[str]) -> None:
        """Note the members of a group, which of them were late, and of which anything has arrived."""
        for peer in members:
            times, _ = self._late.pop(peer, (0, 0.0))
            if peer in late:
                times += 1 + (peer not in arrived)
                pause = 0.0
                if times >= _MOST_LATE:
                    pause = min(_BENCH_SECONDS * 2.0 ** min(times - _MOST_LATE, 10), _LONGEST_BENCH_SECONDS)
                remember(self._late, peer, (times, time.monotonic() + pause))

    def is_benched(self, peer: str) -> bool:
        """Return whether the group goes on without that peer for a while."""
        return self._late.get(peer, (0, 0.0))[1] > time.monotonic()
