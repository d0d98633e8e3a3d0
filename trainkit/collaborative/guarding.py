"""hivemind's averager behind a door: who may ask it for what, and a screen before it averages.

hivemind asks nobody who they are: any process that reaches an averager may join its groups, reduce for others and
download its state. libp2p proves the id of whoever asks; what that id may do is `Admission`'s answer.
"""

from __future__ import annotations

import multiprocessing
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, AsyncIterator  # noqa: UP035 - by this very type hivemind tells streams from messages

import hivemind.averaging.averager
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2

from trainkit.collaborative.admission import Admission, Member
from trainkit.collaborative.gathered import CLIENT, NOTHING, Gathered, read_gathered
from trainkit.collaborative.invitation import GUESTS
from trainkit.collaborative.reducer import install_screen
from trainkit.collaborative.screening import Limits, Screen, Verdict

# Peers that average together; beyond that a reducer would do nothing else.
_LARGEST_GROUP = 256
# The others wait for whoever is late as long as for anybody, in every round. Who is late too often in a row, of which a
# round in which nothing at all has come counts double, is not let into a group for so long; then twice as long.
_MOST_LATE, _BENCH_SECONDS, _LONGEST_BENCH = 6, 30.0, 600.0
_MOST_REMEMBERED = 1000
# After a peer was given the state it gets none for as long as that has taken, and at least so long.
_FETCH_SECONDS = 0.5
# Refusals that are told of a round; a stranger can cause as many as it likes.
_MOST_REFUSALS = 32


@dataclass(frozen=True)
class Findings:
    """What a reducer has found out about its group in one round."""

    members: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    counted: Mapping[str, float] = field(default_factory=dict)
    """Samples of each member that are in the average."""
    received: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each member's parts that have arrived here."""
    names: Mapping[str, str] = field(default_factory=dict)
    """By which each member was invited."""


class GuardedAverager(DecentralizedAverager):  # type: ignore[misc]
    """Lives in a process of its own; `expect` and `findings` are for the peer's own process."""

    def __init__(self, *args: Any, admission: Admission | None, num_parameters: int, **options: Any) -> None:
        self._admission, self._num_parameters = admission, num_parameters
        self._found, self._tell = multiprocessing.Pipe(duplex=False)
        self._possible: Mapping[str, float] = {}
        self._banned: frozenset[str] = frozenset()
        self._refused: dict[str, Verdict] = {}
        self._late: dict[str, tuple[int, float]] = {}
        """Peer -> how often in a row it was late, and when it may come again."""
        self._fetching: set[str] = set()
        self._fetched: dict[str, float] = {}
        """Peer -> when it may fetch the state again."""
        super().__init__(*args, **options)

    # In the peer's own process.

    def expect(self, possible: Mapping[str, float]) -> None:
        """What peers can have trained on in this round, see `Limits`."""
        self._outer_pipe.send(("_expect", [], {"possible": dict(possible)}))

    def findings(self) -> list[Findings]:
        """Those of the rounds since it was last asked."""
        found = []
        while self._found.poll():
            found.append(self._found.recv())
        return found

    # In the averager's process.

    def run(self) -> None:
        # hivemind's averager makes it itself, and has no hook; this process has nothing else that makes one.
        hivemind.averaging.averager.Matchmaking = partial(_Matchmaking, averager=self)
        super().run()

    async def _expect(self, possible: dict[str, float]) -> None:
        self._possible = possible

    async def may_lead(self, peer: PeerID) -> bool:
        """Whether that peer may gather a group: it then divides the work."""
        return await self._is_trusted(peer)

    async def rpc_join_group(
        self, request: averaging_pb2.JoinRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.MessageFromLeader]:
        """A peer wants to average with this one."""
        if not await self._welcomes(request, context.remote_id):
            yield averaging_pb2.MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        async for message in super().rpc_join_group(request, context):
            yield message

    async def rpc_aggregate_part(
        self, stream: AsyncIterator[averaging_pb2.AveragingData], context: P2PContext
    ) -> AsyncIterator[averaging_pb2.AveragingData]:
        """A peer sends its part."""
        if not await self._admits(context.remote_id):
            yield averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        async for message in super().rpc_aggregate_part(stream, context):
            yield message

    async def rpc_download_state(
        self, request: averaging_pb2.DownloadRequest, context: P2PContext
    ) -> AsyncIterator[averaging_pb2.DownloadData]:
        """A peer wants to start from this one's state."""
        peer = str(context.remote_id)
        if not await self._admits(context.remote_id) or not self.may_fetch(peer):
            return
        self._fetching.add(peer)
        began = time.monotonic()
        try:
            async for message in super().rpc_download_state(request, context):
                yield message
        finally:
            self._fetching.discard(peer)
            now = time.monotonic()
            _keep(self._fetched, peer, now + max(_FETCH_SECONDS, now - began))

    def may_fetch(self, peer: str) -> bool:
        """Whether that peer gets the state now: once at a time, and not all of the time."""
        return peer not in self._fetching and self._fetched.get(peer, 0.0) <= time.monotonic()

    def read_group(self, group: GroupInfo) -> dict[PeerID, Gathered]:
        """What its members have said of themselves; garbage is read alike by all, and stops nobody."""
        return {peer: read_gathered(data) or NOTHING for peer, data in zip(group.peer_ids, group.gathered, strict=True)}

    async def screen(self, runner: AllReduceRunner) -> Screen:
        """Put a screen into an all-reduce that has not begun."""
        known: dict[str, Member] = {}
        for peer in runner.sender_peer_ids:
            if self._admission is not None and (member := await self._look_up(self._admission, peer)) is not None:
                known[str(peer)] = member
        trusted = {peer for peer, member in known.items() if member.trusted} | {str(self.peer_id)}
        limits = Limits(frozenset(trusted), self._possible, voices_of(known))
        return install_screen(runner, limits, self._num_parameters)

    def report(self, runner: AllReduceRunner, screen: Screen, received: Mapping[str, int]) -> None:
        """Tell the peer's own process what came of a round."""
        members = tuple(map(str, runner.ordered_peer_ids))
        self.note_late(members, set(map(str, runner.banned_senders)), received.keys())
        verdicts = {verdict.peer: verdict for verdict in screen.verdicts()}
        found = (*verdicts.values(), *self._refused.values())
        known = self._admission.admitted if self._admission is not None else lambda peer: None
        names = {peer: member.name for peer in (*members, *self._refused) if (member := known(peer)) is not None}
        self._tell.send(Findings(members, found, screen.counted(), received, names))
        self._refused = {}

    def note_late(self, members: Iterable[str], late: Collection[str], arrived: Collection[str]) -> None:
        """Who has been in a group, who of them was late, and of whom anything has arrived."""
        for peer in members:
            times, _ = self._late.pop(peer, (0, 0.0))
            if peer in late:
                times += 1 if peer in arrived else 2
                over = min(times - _MOST_LATE, 10)
                pause = min(_BENCH_SECONDS * 2.0**over, _LONGEST_BENCH) if over >= 0 else 0.0
                _keep(self._late, peer, (times, time.monotonic() + pause))

    def is_benched(self, peer: str) -> bool:
        """Whether the group goes on without that peer for a while."""
        return self._late.get(peer, (0, 0.0))[1] > time.monotonic()

    async def _welcomes(self, request: averaging_pb2.JoinRequest, peer: PeerID) -> bool:
        if not await self._admits(peer) or len(self._matchmaking.current_followers) >= _LARGEST_GROUP:
            return False
        if self.is_benched(str(peer)):
            return False
        gathered = read_gathered(request.gather)
        if gathered is None:
            why = "sent something unreadable about itself"
        elif gathered.mode != CLIENT and not await self._is_trusted(peer):
            why = "wants to average for others, and is not of the owner's side"
        else:
            return True
        if len(self._refused) < _MOST_REFUSALS:
            self._refused[str(peer)] = Verdict(str(peer), "dropped", why)
        return False

    async def _admits(self, peer: PeerID) -> bool:
        return self._admission is None or await self._look_up(self._admission, peer) is not None

    async def _is_trusted(self, peer: PeerID) -> bool:
        if self._admission is None:
            return True
        member = await self._look_up(self._admission, peer)
        return member is not None and member.trusted

    async def _look_up(self, admission: Admission, peer: PeerID) -> Member | None:
        """Who that is, by what it keeps in the DHT. Asked anew each time: it may have been banned since."""
        return admission.admitted(str(peer))


def _keep(found: dict[str, Any], peer: str, value: Any) -> None:
    """Remember it, and not too many: of who comes after, the first to come is forgotten."""
    found[peer] = value
    if len(found) > _MOST_REMEMBERED:
        del found[next(iter(found))]


def voices_of(members: Mapping[str, Member]) -> dict[str, float]:
    """What each counts for where a majority decides: those of one invitation share a voice.

    Not the owner's side; nor guests, who have one invitation for many: that may fall into any hands.
    """
    shared = {
        peer: member.invitation for peer, member in members.items() if not (member.trusted or member.name == GUESTS)
    }
    many = Counter(shared.values())
    return {peer: 1.0 / many[invitation] for peer, invitation in shared.items()}


class _Matchmaking(Matchmaking):  # type: ignore[misc]
    """Follows only those who may lead."""

    def __init__(self, *args: Any, averager: GuardedAverager, **options: Any) -> None:
        self._averager = averager
        super().__init__(*args, **options)

    async def _request_join_group(self, leader: PeerID) -> GroupInfo | None:
        if not await self._averager.may_lead(leader):
            return None
        return await super()._request_join_group(leader)
