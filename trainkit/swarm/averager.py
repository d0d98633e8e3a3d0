"""hivemind's averager as a peer uses it: its subclass, and the process in which it lives."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import multiprocessing
import random
import signal
import statistics
import threading
import time
from collections import Counter
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, AsyncIterator  # noqa: UP035 - by this very type hivemind tells streams from messages

import hivemind.averaging.averager
import msgpack
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AllReduceRunner, AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking, MatchmakingException
from hivemind.compression import NoCompression
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import aiter_with_timeout, as_aiter, azip, enter_asynchronously
from torch import Tensor

from trainkit import fileio
from trainkit.config.schema import CollaborativeConfig
from trainkit.swarm import processes
from trainkit.swarm.access import peer_key
from trainkit.swarm.admission import Admission, Member
from trainkit.swarm.dht import SwarmDHT, introduced
from trainkit.swarm.exchange import (
    CLIENT,
    NOTHING,
    Exchange,
    Gathered,
    Outcome,
    bound_calls,
    install_screen,
    read_gathered,
)
from trainkit.swarm.invitations import GUESTS, Pass, Role, UntrustedError
from trainkit.swarm.link import CODECS, PART, Codec, Sending, num_parts
from trainkit.swarm.robust import Limits, Screen, Verdict
from trainkit.swarm.sync_diloco import PROBE_SIZE, CommonState, Given

# Which state is the run's: a digest of the common weights, signed by the owner's side.
#
# Whoever takes over a state computes its digest anew. So it matters neither who handed it over nor how old that peer
# says it is: a state counts if one of the owner's side has signed it, for this run and for the round that it claims.


@dataclass(frozen=True)
class Digest:
    """What was signed about a state."""

    run_id: str
    """Of this start of the run: the state of an earlier one is none of this one's."""
    round: int
    """The round that begins with this state."""
    sha256: str
    """Of the weights and the momentum, see `sha256_of`."""


def sha256_of(tensors: Iterable[memoryview]) -> str:
    """Of several buffers in their order, each with its length in bytes; in hex."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.nbytes.to_bytes(8, "big"))
        found.update(tensor)
    return found.hexdigest()


def digest_of(run_id: str, round_index: int, tensors: Iterable[Any]) -> Digest:
    """Of a state, as torch has it on the CPU."""
    return Digest(run_id, round_index, sha256_of(memoryview(tensor.numpy()).cast("B") for tensor in tensors))


def sign_digest(own: Pass, digest: Digest) -> bytes:
    """The digest as a statement."""
    return own.state("state", json.dumps([digest.run_id, digest.round, digest.sha256]).encode())


def read_digest(admission: Admission, statement: bytes, *, run_id: str, now: float | None = None) -> Digest:
    """What the owner's side says about a state.

    Raises UntrustedError when a volunteer or a stranger has signed it, or it belongs to another run.
    """
    found = admission.read(statement, "state", now=now)
    if found.grant.role == "volunteer":
        raise UntrustedError("a volunteer does not say which state is the run's")
    try:
        digest = Digest(*fileio.parse(found.content))
    except (ValueError, TypeError, RecursionError) as error:
        raise UntrustedError("it is no digest") from error
    if type(digest.round) is not int or digest.round < 0 or not isinstance(digest.sha256, str):
        raise UntrustedError("it is no digest")
    if digest.run_id != run_id:
        raise UntrustedError("it is the digest of another run")
    return digest


# From whom a peer takes over the state of the run: the owner first, then those whom the owner trusts.
#
# hivemind asks first whoever says that it comes first, takes its answer, however long, and lets the caller see
# whether it is one. Here a donor's pass says what it is, and what it gives is read as it comes; if it is not what one
# of the owner's side has signed, the next one is asked.

State = tuple[Digest, list[Tensor]]
"""What was signed, and the tensors: weights and momentum."""
_LONGEST_METADATA = 16_384


async def in_order(found: object, own_id: str, look_up: Callable[[str], Awaitable[Member | None]]) -> list[PeerID]:
    """Whom to ask for the state, in this order; of equals any first.

    Args:
        found: the DHT's record of those who give it away, by peer.
        own_id: of this peer, who is not asked.
        look_up: who a peer is; None: nobody.
    """
    known: list[tuple[bool, float, PeerID]] = []
    for subkey, told in found.items() if isinstance(found, dict) else ():
        if getattr(told, "value", None) is None or not isinstance(subkey, bytes):
            continue  # it does not any more
        with suppress(ValueError):
            peer = PeerID(subkey)
            member = None if str(peer) == own_id else await look_up(str(peer))
            if member is not None and member.trusted:
                known.append((member.role != "owner", random.random(), peer))
    return [peer for *_, peer in sorted(known, key=lambda item: item[:2])]


async def read_state(messages: AsyncIterable[Any], sizes: Sequence[int], admission: Admission, run_id: str) -> State:
    """A state as it comes from a donor.

    Args:
        messages: hivemind's, each with a piece of a tensor.
        sizes: values of each tensor.

    Raises ValueError when it is too long or another number of values, UntrustedError when nobody of the owner's side
    has signed it.
    """
    most, metadata, tensor = sum(sizes) * 4, b"", -1
    buffers = [bytearray() for _ in sizes]
    async for message in messages:
        metadata = message.metadata or metadata
        tensor += bool(message.tensor_part.dtype)  # which only the first piece of a tensor has
        most -= len(message.tensor_part.buffer)
        if most < 0 or not 0 <= tensor < len(sizes) or len(metadata) > _LONGEST_METADATA:
            raise ValueError("it is longer than the state of this run")
        buffers[tensor] += message.tensor_part.buffer
    if [len(buffer) for buffer in buffers] != [4 * size for size in sizes]:
        raise ValueError("it is shorter than the state of this run")
    tensors = [torch.frombuffer(buffer, dtype=torch.float32) for buffer in buffers]
    try:
        told = msgpack.unpackb(metadata, raw=False, strict_map_key=True, max_ext_len=0)["digest"]
    except (KeyError, TypeError, msgpack.UnpackException, RecursionError) as error:
        raise ValueError("nobody has signed it") from error
    if not isinstance(told, bytes):
        raise ValueError("nobody has signed it")
    signed = read_digest(admission, told, run_id=run_id)
    if digest_of(signed.run_id, signed.round, tensors) != signed:
        raise ValueError("it is not what was signed")
    return signed, tensors


# In the averager's process: who is it that asks to average, or for the state?
#
# hivemind's averager answers everybody who reaches it. libp2p proves the id of whoever asks; the credential of that
# id is in the DHT, where it is looked up once.

_LOOK_SECONDS = 3.0
# Strangers are not looked up again for so long; so many of them are remembered.
_STRANGER_SECONDS = 5.0
_MOST_STRANGERS = 1000


class Guard:
    """Knows the members that have asked."""

    def __init__(self, dht: Any, admission: Admission) -> None:
        self._dht, self.admission = dht, admission
        self._strangers: dict[str, float] = {}

    async def member(self, peer_id: str) -> Member | None:
        """The member of that id; None for a stranger, and for whom the run does not want any more."""
        if (known := self.admission.admitted(peer_id)) is not None:
            return known
        now = time.monotonic()
        if now - self._strangers.get(peer_id, float("-inf")) < _STRANGER_SECONDS:
            return None
        try:
            asked = self._dht.get(peer_key(peer_id), latest=False, return_future=True)
            found = introduced(self.admission, peer_id, await asyncio.wait_for(asked, _LOOK_SECONDS))
        except (asyncio.TimeoutError, OSError):
            found = None
        if found is None:
            if len(self._strangers) >= _MOST_STRANGERS:
                self._strangers.clear()
            self._strangers[peer_id] = now
        return found


# hivemind's averager behind a door: who may ask it for what, and a screen before it averages.
#
# hivemind asks nobody who they are: any process that reaches an averager may join its groups, reduce for others and
# download its state. libp2p proves the id of whoever asks; what that id may do is `Admission`'s answer.

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


# Whether an average may be used, and whether this peer still trains what the others train.

# An average more than so many times longer than this peer's own pseudo-gradient is refused.
_LARGEST_RATIO = 10.0
# Where a round's way is so many times longer than the last one's, and its loss as many times higher, it has collapsed.
_COLLAPSE = 10.0
_MOST_PASSED_OVER = 3
# Of a round; what was done in less says little about a whole one.
_LEAST_TRAINED = 0.05
# Below this a loss may rise as it likes: nothing is told wrong yet.
_LOW_LOSS = 1e-3
# Relative distance beyond which a peer takes over the state of the owner's side. Rounding to fp16 gives about 1e-5.
_DRIFT = 1e-3


def objection(average: Tensor, num_parameters: int, usual: float) -> str:
    """Why ``average`` must not be used; empty if it may. ``usual``: length of a pseudo-gradient here; 0: not known."""
    if not bool(torch.isfinite(average).all()):
        return "the average is not finite"
    norm = float(average[:num_parameters].norm())
    if usual > 0.0 and norm > _LARGEST_RATIO * usual:
        return f"the average is {norm / usual:.0f} times longer than usual"
    return ""


@dataclass
class OwnRounds:
    """Judges each round of this peer by the one before.

    AdamW at a high rate can collapse once the loss is nearly zero: its second moments decay faster than they follow the
    gradients, until one update throws the weights anywhere (Bai et al., arXiv 2506.04805; tests/benchmarks/README.md).
    Reducers leave out whoever is many times longer than the others; but of two peers the owner's is what the other is
    measured by, and its collapse was everybody's.

    Length alone says nothing: who has waited for a compiler makes one update in a round, and hundreds in the next.
    After a collapse AdamW's first moment can lead away from the common weights once more; but so many rounds in a row
    are passed over at most, so that nobody is stuck.
    """

    _length: float = 0.0
    _loss: float = 0.0
    _passed_over: int = 0
    """In a row."""

    def give(self, common: CommonState, samples: int, trained: float, loss: float | None) -> Given:
        """This peer's contribution to a round, as `CommonState.give`; nothing, where it has collapsed.

        Args:
            trained: the share of the round in which it did.
            loss: of the round; None: not to be judged by.
        """
        given = common.give(samples)
        if not given.usable or loss is None:
            return given
        why = self._objection(whole(float(given.vector[: common.num_parameters].norm()), trained), loss)
        return common.nothing(why) if why else given

    def _objection(self, length: float, loss: float) -> str:
        """Why a round must not count in which the weights have moved so far; empty if it may."""
        collapsed = (
            0.0 < _COLLAPSE * self._length < length
            and loss > _COLLAPSE * max(self._loss, _LOW_LOSS)
            and self._passed_over < _MOST_PASSED_OVER
        )
        if collapsed:
            self._passed_over += 1
            return f"its loss rose from {self._loss:.2g} to {loss:.2g}"
        self._length, self._loss, self._passed_over = length, loss, 0
        return ""


def whole(length: float, trained: float) -> float:
    """How far a peer would have moved in a whole round that has moved so far in a share of one."""
    return length / max(trained, _LEAST_TRAINED)


def reference_among(trusted: Iterable[Member], role: Role, own_id: str) -> str | None:
    """With whose weights a peer compares its own: the owner's; without the owner, of the first of its side by id.

    None if it is itself the one that others compare with; what it has trained counts, whatever anybody says.
    """
    first = min(trusted, key=lambda member: (member.role != "owner", member.peer_id), default=None)
    return None if first is None or role == "owner" or first.peer_id == own_id else first.peer_id


def has_drifted(probe: object, own: Tensor) -> bool:
    """Whether this peer's ``own`` probe is no longer that of the peer which has sent ``probe``."""
    if not isinstance(probe, bytes) or len(probe) != 4 * PROBE_SIZE:
        return False
    theirs = torch.frombuffer(bytearray(probe), dtype=torch.float32)
    return not float((theirs - own).norm()) <= _DRIFT * float(own.norm())  # also for not-a-number


def finite(value: float | None) -> float | None:
    """``value``, or None if it is none that can be told."""
    return value if value is not None and math.isfinite(value) else None


def number(value: Any) -> float:
    """A finite number, or 0."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def first_line(error: BaseException) -> str:
    """Why something failed, in few words."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]


# A round has failed if no group is found within so many seconds after its end.
GRACE = 2.0
# The others wait for a peer's parts for this share of a round, all in all.
_PATIENCE = 0.25


def exchange_seconds(config: CollaborativeConfig) -> float:
    """How long an exchange may take: until the search for the next one begins."""
    return max(GRACE, config.round_seconds - config.matchmaking_seconds)


def patience(config: CollaborativeConfig) -> float:
    """How long the others wait in an exchange for the parts of a peer that is slow to send them."""
    return min(_PATIENCE * config.round_seconds, exchange_seconds(config) / 2)


class _Averager(GuardedAverager):
    """hivemind's averager, for members only. Its class name is part of the protocol between peers."""

    common: CommonState
    codec: Codec
    plan: Tensor
    """In shared memory: the codec of this peer's parts, then each part's weight."""
    own: Pass
    guard: Guard
    run_id: str

    def run(self) -> None:
        processes.become_helper(self._parent_pid)
        bound_calls()
        super().run()

    async def _step(self, **options: Any) -> None:
        # What came of it is in its control; hivemind raises it once more, where nobody waits for it.
        with suppress(Exception):
            await super()._step(**options)

    def get_current_state(self) -> tuple[dict[str, Any], tuple[Tensor, Tensor], None]:
        """In the peer's own process: the state, and the word of this peer that it is the run's."""
        round_index, *tensors = self.common.copy()
        theta, momentum = tensors
        return {"digest": sign_digest(self.own, digest_of(self.run_id, round_index, tensors))}, (theta, momentum), None

    async def _load_state_from_peers(self, future: Any, timeout: float | None = None) -> None:
        """Of the first who gives one that the owner's side has signed, see `read_state`; None if nobody does."""
        found = None
        try:
            found = await self._state_of_others()
        finally:
            with suppress(Exception):  # nobody waits for it any more
                future.set_result(found)

    async def _state_of_others(self) -> State | None:
        key = f"{self._matchmaking.group_key_manager.prefix}.all_averagers"
        told, _ = await self.dht.get(key, latest=True, return_future=True) or ({}, None)
        sizes = [self.common.theta.numel(), self.common.momentum.numel()]
        for peer in await in_order(told, str(self.peer_id), self.guard.member):
            with suppress(Exception):  # of libp2p, or of a donor that gives something else: then the next
                stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
                stream = await stub.rpc_download_state(averaging_pb2.DownloadRequest())
                messages = aiter_with_timeout(stream, timeout=self.next_chunk_timeout)
                return await read_state(messages, sizes, self.guard.admission, self.run_id)
        return None

    async def _look_up(self, admission: Admission, peer: PeerID) -> Member | None:
        return await self.guard.member(str(peer))

    async def _has_strayed(self, group: Mapping[PeerID, Gathered]) -> bool:
        """Whether this peer's weights are others than those of the owner's side in the group."""
        own = group[self.peer_id].about.probe
        known = [await self.guard.member(str(peer)) for peer, told in group.items() if told.about.shares]
        trusted = [member for member in known if member is not None and member.trusted]
        reference = reference_among(trusted, self.own.grant.role, str(self.peer_id))
        if reference is None or not own:
            return False
        theirs = {str(peer): told.about.probe for peer, told in group.items()}
        return has_drifted(theirs[reference], torch.frombuffer(bytearray(own), dtype=torch.float32))

    async def _aggregate_with_group(
        self, group_info: GroupInfo, min_vector_size: int, **options: Any
    ) -> tuple[dict[Any, Any], Outcome]:
        """hivemind's, but for how what the members say is read, and for `Exchange` and the screen in it."""
        group = self.read_group(group_info)
        modes = tuple(AveragingMode(member.mode) for member in group.values())
        codec, *weights = self.plan.tolist()
        if self.common.same_weights and await self._has_strayed(group):
            weights = [0.0] * len(weights)
        try:
            reduces = [mode != AveragingMode.CLIENT for mode in modes]
            async with enter_asynchronously(self.get_tensors()) as tensors:
                runner = Exchange(
                    p2p=self._p2p,
                    servicer_type=type(self),
                    prefix=self.prefix,
                    tensors=tensors,
                    group_id=group_info.group_id,
                    ordered_peer_ids=group_info.peer_ids,
                    peer_fractions=shares([member.bandwidth for member in group.values()], reduces),
                    modes=modes,
                    sending=Sending(weights, CODECS[int(codec)], self.codec, self.common.num_parameters),
                    **options,
                )
                screen = await self.screen(runner)
                self._running_groups[group_info.group_id].set_result(runner)
                async for tensor, average in azip(as_aiter(*tensors), runner):
                    tensor.copy_(average)
                self.report(runner, screen, runner.received)
            return {peer: member.about.model_dump() for peer, member in group.items()}, runner.outcome()
        except Exception as error:
            raise MatchmakingException(f"Unable to run All-Reduce: {error}") from error


def shares(bandwidths: Sequence[float | None], reduces: Sequence[bool]) -> tuple[float, ...]:
    """How much of the vector each peer reduces: in proportion to what it can send, if it has said so.

    Raises ValueError if nobody reduces.
    """
    said = [
        min(max(0.0, float(value)), 1e12) if isinstance(value, int | float) and value == value else None
        for value in bandwidths
    ]
    known = [value for value, does in zip(said, reduces, strict=True) if does and value]
    usual = statistics.median(known) if known else 1.0
    found = [(usual if value is None else value) * does for value, does in zip(said, reduces, strict=True)]
    if not any(found):
        raise ValueError("nobody in the group can reduce")
    return tuple(value / sum(found) for value in found)


@contextmanager
def open_averager(dht: SwarmDHT, common: CommonState, config: CollaborativeConfig, run_id: str) -> Iterator[Any]:
    """Start the averager; on leaving, end its process.

    Open it before the first use of CUDA: the process is forked.
    """
    client = dht.client_mode
    interrupt = signal.getsignal(signal.SIGINT)
    averager = _Averager(
        [torch.zeros_like(common.theta)],
        dht.node,
        start=False,
        prefix=f"{run_id}_common",
        min_matchmaking_time=config.matchmaking_seconds,
        request_timeout=min(1.0, config.matchmaking_seconds / 2),
        # Parts are cut alike by all peers, and written by `trainkit.swarm.exchange`.
        compression=NoCompression(),
        part_size_bytes=4 * PART,
        state_compression=NoCompression(),
        client_mode=client,
        allow_state_sharing=False,
        allreduce_timeout=exchange_seconds(config),
        sender_timeout=patience(config),
        reducer_timeout=exchange_seconds(config),
        next_chunk_timeout=min(10.0, max(1.0, config.round_seconds / 4)),
        shutdown_timeout=2.0,
        daemon=True,
        admission=dht.admission,
        num_parameters=common.num_parameters,
    )
    averager.common, averager.codec = common, config.compression
    averager.plan = torch.zeros(1 + num_parts(common.theta.numel()), dtype=torch.float64)
    averager.plan.share_memory_()
    averager.own, averager.run_id = dht.own, run_id
    averager.guard = Guard(dht.node, dht.admission)
    try:
        with processes.private_sockets():
            averager.run_in_background(await_ready=True, timeout=30.0)
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, interrupt)  # hivemind has switched Ctrl-C off in this process
        yield averager
    finally:
        mine = processes.family(averager.pid)
        with suppress(OSError, ValueError):
            averager.shutdown()
        processes.end(mine)
