"""Up to 1,000 peers look for a group: hivemind's matchmaking, with the kit's guard, bounds and words, in one process.

In the place of libp2p are calls between objects, and in the place of the DHT is a dictionary. A message is written and
read as on a wire; it takes `LATENCY`, `COST` of the one core of whoever writes or reads it, and its bytes go one after
the other through a link of `LINK`. The clock is the event loop's: it stands still while this process computes, so that
nothing depends on how busy the machine is. All else is what an averager's process runs.
"""

import asyncio
import os
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from hivemind.averaging import matchmaking
from hivemind.averaging.group_info import GroupInfo
from hivemind.p2p import PeerID
from hivemind.proto.averaging_pb2 import JoinRequest, MessageFromLeader
from hivemind.utils import MSGPackSerializer, ValueWithExpiration, timed_storage

from tests.benchmarks.measuring import Figure, Table
from trainkit.config.schema import CollaborativeConfig
from trainkit.swarm.identity.admission import Admission, Guard, peer_id_of, peer_key
from trainkit.swarm.identity.invitations import Key, Role, grant
from trainkit.swarm.network.averager import Averager
from trainkit.swarm.network.groups import Groups, GuardedMatchmaking
from trainkit.swarm.peer.link import GRACE
from trainkit.swarm.peer.rounds import search_seconds
from trainkit.swarm.protocol.messages import CLIENT, NODE, read_gathered
from trainkit.swarm.protocol.outer_step import PROBE_SIZE

ROUNDS = 3
SWARMS = ((64, 1), (256, 1), (256, 4), (1000, 4), (1000, 8))
"""Peers, and how many of them are of the owner's side."""
CONFIG, SPREAD = CollaborativeConfig(), 0.5
"""Of the run; seconds of the update after which a peer begins to look for a group."""
LATENCY, COST, LINK = 0.03, 1e-3, 12.5e6
"""Seconds of a message on its way; of a core, to write or read it; bytes a second."""
HEAD = ("peers", "of them reduce", "in the owner's group", "in other groups", "in none", "found", "a peer's messages",
        "the leader sends", "CPU")  # fmt: skip


def measure(rounds: int = ROUNDS) -> Sequence[Figure | Table]:
    """The table, of the last of so many rounds."""
    return [Table(HEAD, [row(peers, reducers, rounds) for peers, reducers in SWARMS])]


def row(peers: int, reducers: int, rounds: int) -> list[str]:
    """Of a swarm."""
    loop = _Loop()
    for module in (matchmaking, timed_storage):
        module.get_dht_time = loop.time
    try:
        return loop.run_until_complete(_swarm(peers, reducers, rounds))
    finally:
        for task in (left := asyncio.all_tasks(loop)):  # hivemind lets go of tasks that wait
            task.cancel()
        loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        loop.close()
        for module in (matchmaking, timed_storage):
            module.get_dht_time = time.time


class _Loop(asyncio.SelectorEventLoop):
    """Where there is nothing to do, it is at once as late as something is to be done."""

    def __init__(self) -> None:
        self._now = time.time()
        super().__init__()
        self._clock_resolution = 1e-6  # seconds since 1970 are no finer
        selector: Any = self._selector  # type: ignore[attr-defined]
        look = selector.select

        def select(timeout: float | None) -> Any:
            assert timeout is not None, "all wait for one another"
            self._now += timeout
            return look(0)

        selector.select = select

    def time(self) -> float:
        return self._now


def _now() -> float:
    return asyncio.get_running_loop().time()


@dataclass
class _Wire:
    """What all peers share."""

    records: dict[str, dict[bytes, ValueWithExpiration[Any]]] = field(default_factory=dict)
    """Of the DHT: key -> subkey -> value."""
    averagers: dict[PeerID, Any] = field(default_factory=dict)
    busy: dict[tuple[PeerID, str], float] = field(default_factory=lambda: defaultdict(float))
    """Until when a peer's core, or its link, is."""
    messages: Counter[PeerID] = field(default_factory=Counter)
    """Of each peer, sent to others and to the DHT."""
    sent: Counter[PeerID] = field(default_factory=Counter)
    """Bytes to other peers."""

    async def takes(self, peer: PeerID, what: str, seconds: float) -> None:
        """Keep a peer's core or link busy, when it has done what was there before."""
        self.busy[peer, what] = max(_now(), self.busy[peer, what]) + seconds
        await asyncio.sleep(self.busy[peer, what] - _now())

    async def carry(self, by: PeerID, to: PeerID, message: Any) -> Any:
        """A message from one peer to another, as it arrives."""
        data = message.SerializeToString()
        self.messages[by] += 1
        self.sent[by] += len(data)
        await self.takes(by, "core", COST)
        await self.takes(by, "link", len(data) / LINK)
        await asyncio.sleep(LATENCY)
        await self.takes(to, "core", COST)
        return type(message).FromString(data)


@dataclass
class _Node:
    """A peer's DHT."""

    peer_id: PeerID
    wire: _Wire

    async def get(self, key: str, **options: Any) -> ValueWithExpiration[Any] | None:
        self.wire.messages[self.peer_id] += 1
        await asyncio.sleep(2 * LATENCY)
        now, found = _now(), self.wire.records.get(key, {})
        fresh = {subkey: value for subkey, value in found.items() if value.expiration_time > now}
        return ValueWithExpiration(fresh, now) if fresh else None

    async def store(self, key: str, subkey: bytes, value: Any, expiration_time: float, **options: Any) -> bool:
        self.wire.messages[self.peer_id] += 1
        await asyncio.sleep(2 * LATENCY)
        self.wire.records.setdefault(key, {})[subkey] = ValueWithExpiration(value, expiration_time)
        return True


class _Direct(Averager):
    """An averager without a process, whose calls reach the others directly."""

    def __init__(self, wire: _Wire, owner: Key, role: Role) -> None:
        own, public_key = grant(owner, "run", "peer", role, time.time() + 3600.0), os.urandom(294)
        peer = PeerID.from_base58(peer_id_of(public_key))
        self.dht, self.role, self._parent_pid = _Node(peer, wire), role, -1
        self.guard = Guard(self.dht, Admission(owner.public))
        self.groups = Groups(self.guard)
        p2p, is_client = SimpleNamespace(peer_id=peer, wire=wire), role == "volunteer"
        self._search = GuardedMatchmaking(
            p2p, b"schema", self.dht, servicer_type=_Direct, prefix="run_common", target_group_size=None,
            min_group_size=2, min_matchmaking_time=CONFIG.matchmaking_seconds, request_timeout=1.0,
            client_mode=is_client, groups=self.groups,
        )  # fmt: skip
        about = {"shares": not is_client, "rate": 100.0, "probe": b"" if is_client else os.urandom(4 * PROBE_SIZE)}
        mode = CLIENT if is_client else NODE
        self.says = MSGPackSerializer.dumps([None, mode, MSGPackSerializer.dumps(about)])
        wire.averagers[peer] = self
        credential = ValueWithExpiration(own.state("peer", public_key), time.time() + 3600.0)
        wire.records[peer_key(str(peer))] = {peer.to_bytes(): credential}

    @classmethod
    def get_stub(cls, p2p: Any, peer: PeerID, *, namespace: str | None = None) -> Any:
        wire, own = p2p.wire, p2p.peer_id

        async def serve(request: JoinRequest, answers: asyncio.Queue[Any]) -> None:
            leader, context = wire.averagers[peer], SimpleNamespace(remote_id=own)
            async for message in leader.rpc_join_group(request, context):  # it goes on while they are under way
                answers.put_nowait(asyncio.ensure_future(wire.carry(peer, own, message)))

        async def call(request: JoinRequest) -> AsyncIterator[MessageFromLeader]:
            answers: asyncio.Queue[Any] = asyncio.Queue()
            return read(asyncio.ensure_future(serve(await wire.carry(own, peer, request), answers)), answers)

        async def read(serving: asyncio.Future[None], answers: asyncio.Queue[Any]) -> AsyncIterator[MessageFromLeader]:
            try:
                while True:
                    yield await (await answers.get())
            finally:
                serving.cancel()  # as when the stream is closed

        return SimpleNamespace(rpc_join_group=call)

    async def found(self, boundary: float) -> tuple[GroupInfo | None, float]:
        """This peer's group of a round, and how long after the end of the round it was there."""
        known, calls_out = len(self.dht.wire.averagers), self.role == "volunteer"
        begins = boundary - search_seconds(CONFIG, known, calls_out=calls_out) + random.uniform(0.0, SPREAD)
        await asyncio.sleep(max(0.0, begins - _now()))
        end = boundary + GRACE
        # Of hivemind's StepControl, which belongs to two processes, what matchmaking asks.
        step = SimpleNamespace(
            scheduled_time=boundary, deadline=end, data_for_gather=self.says,
            get_timeout=lambda: max(0.0, end - _now()),
        )  # fmt: skip
        group = await self._matchmaking.look_for_group(step)
        if group and self.role != "volunteer":  # as `_aggregate_with_group` does
            words = map(read_gathered, group.gathered)
            self.groups.reducers = sum(said is not None and said.mode != CLIENT for said in words)
        return group, _now() - boundary


async def _swarm(peers: int, reducers: int, rounds: int) -> list[str]:
    """A row."""
    wire, owner = _Wire(), Key.generate()
    roles: list[Role] = ["owner", *["reducer"] * (reducers - 1), *["volunteer"] * (peers - reducers)]  # type: ignore[list-item]
    averagers = [_Direct(wire, owner, role) for role in roles]
    for _ in range(rounds):
        wire.messages.clear()
        wire.sent.clear()
        used, boundary = time.process_time(), _now() + CONFIG.round_seconds
        found = await asyncio.gather(*(averager.found(boundary) for averager in averagers))
        used = time.process_time() - used
    groups = [group.group_id if group else None for group, _ in found]
    sizes = Counter(groups)
    nowhere, own = sizes.pop(None, 0), sizes.pop(groups[0], 0) if groups[0] else 0
    took = [seconds for group, seconds in found if group]
    return [
        str(peers), str(reducers), str(own), ", ".join(map(str, sorted(sizes.values(), reverse=True))) or "0",
        str(nowhere), f"{statistics.median(took):.1f} s (up to {max(took):.1f})",
        f"{statistics.median(wire.messages[one.peer_id] for one in averagers):.0f} "
        f"(up to {max(wire.messages.values()):,})",
        f"{max(wire.sent.values()) / 1e6:.1f} MB", f"{used:.1f} s",
    ]  # fmt: skip
