"""All that this kit overrides in hivemind's processes: how a group exchanges, and who may join, ask and lead.

hivemind asks nobody who they are: any process that reaches an averager may join its groups, reduce for others and
download its state. libp2p proves the id of a peer that asks; `Admission` says what that id may do. A state counts,
whoever hands it over, if one of the owner's side has signed it for this run and the round that it claims.
"""

import asyncio
import hashlib
import json
import math
import multiprocessing
import random
import struct
import threading
import time
from collections.abc import AsyncIterable, Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, AsyncIterator, NamedTuple  # noqa: UP035 - by it hivemind tells streams from messages

import hivemind.averaging.averager
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AllReduceRunner, AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking, MatchmakingException
from hivemind.averaging.partition import BannedException
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.proto.averaging_pb2 import AveragingData, DownloadData, DownloadRequest, JoinRequest, MessageFromLeader
from hivemind.utils.asyncio import achain, aiter_with_timeout, anext, as_aiter, azip, enter_asynchronously
from hivemind.utils.mpfuture import MPFuture
from pydantic import Field, TypeAdapter
from torch import Tensor

from trainkit.swarm import processes
from trainkit.swarm.access import bound_calls, bound_node
from trainkit.swarm.admission import Admission, Guard, Member, remember
from trainkit.swarm.invitations import Pass, UntrustedError, parsed
from trainkit.swarm.link import CODECS, Codec, Outcome, Sending, decode, encode, num_parts, shares
from trainkit.swarm.messages import CLIENT, NOTHING, plain_msgpack, read_gathered
from trainkit.swarm.replay import Accounts, Shown, Told, most_bytes, read_wanted
from trainkit.swarm.robust import MOST_KEPT, Findings, Limits, Screen, Verdict, has_drifted, voices_of
from trainkit.swarm.sync import CommonState

_LONGEST_METADATA = 16_384
# Peers that average together; beyond that a reducer would do nothing else.
_LARGEST_GROUP = 256
# The others wait for a late peer in every round. A peer that is late too often in a row, where a round in which nothing
# at all has come counts double, is not let into a group for so long; then for twice as long.
_MOST_LATE, _BENCH_SECONDS, _LONGEST_BENCH = 6, 30.0, 600.0
_MOST_REMEMBERED = 1000
# After a peer was given the state it gets none for as long as that has taken, and at least so long.
_FETCH_SECONDS = 0.5
# An owner that has not answered an account for so long does not want to see anything.
_ACCOUNT_SECONDS = 20.0
# A state is given back, and work is shown, in pieces of so many bytes; a state in so many seconds.
_PIECE, _GIVE_SECONDS = 1 << 16, 120.0
# Refusals to report of a round; a stranger can cause as many as it likes.
_MOST_REFUSALS = 32
# Peers in a message to the averager's process: it does not wait for the rest of one that comes in several pieces, as of
# 16 KiB, and dies of it.
_AT_ONCE = 100


class Digest(NamedTuple):
    """What was signed about a state."""

    run_id: str
    """Of this start of the run: the state of an earlier one is none of this one's."""
    round: Annotated[int, Field(ge=0)]
    """The round that begins with this state."""
    sha256: str
    """Of the weights and the momentum, in hex."""


_DIGEST = TypeAdapter(Digest)
State = tuple[Digest, list[Tensor]]
"""What was signed, and the tensors: weights and momentum."""


def digest_of(run_id: str, round_index: int, tensors: Iterable[Tensor]) -> Digest:
    """The digest of tensors on the CPU in their order, each with its length in bytes."""
    digest = hashlib.sha256()
    for tensor in tensors:
        data: Any = tensor.numpy()
        digest.update(data.nbytes.to_bytes(8, "big"))
        digest.update(data)
    return Digest(run_id, round_index, digest.hexdigest())


def sign_digest(own: Pass, digest: Digest) -> bytes:
    """The digest as a statement."""
    return own.state("state", json.dumps(digest).encode())


def read_digest(admission: Admission, statement: bytes, *, run_id: str) -> Digest:
    """What the owner's side says about a state.

    Raises UntrustedError when a volunteer or a stranger has signed it, or it belongs to another run.
    """
    signed = admission.read(statement, "state")
    if signed.grant.role == "volunteer":
        raise UntrustedError("a volunteer does not say which state is the run's")
    digest = parsed(_DIGEST, signed.content, "digest")
    if digest.run_id != run_id:
        raise UntrustedError("it is the digest of another run")
    return digest


async def in_order(
    record: Mapping[bytes, Any], own_id: str, look_up: Callable[[str], Awaitable[Member | None]]
) -> list[PeerID]:
    """Whom to ask for the state: the owner first, then any of its side. What donors say of themselves does not count.

    Args:
        record: of the DHT, of those who give it away, by peer; its validators have checked who has written each.
        own_id: of this peer, who is not asked.
        look_up: who a peer is; None: nobody.
    """
    donors: dict[PeerID, tuple[bool, float]] = {}
    for subkey, entry in record.items():
        peer = PeerID(subkey)
        member = None if str(peer) == own_id else await look_up(str(peer))
        if member is not None and member.trusted and entry.value is not None:  # None: it does no longer
            donors[peer] = member.role != "owner", random.random()
    return sorted(donors, key=lambda peer: donors[peer])


async def read_state(
    messages: AsyncIterable[Any], sizes: Sequence[int], admission: Admission, run_id: str, *, newer_than: float = -1
) -> State:
    """Read a state as it comes from a donor.

    Args:
        messages: hivemind's, each with a piece of a tensor, one after the other; the first also with the signature.
        sizes: values of each tensor.
        newer_than: the state must be of a later round.

    Raises ValueError when it is too long or another number of values, or too old; UntrustedError when nobody of the
    owner's side has signed it.
    """
    most, buffer, signed = sum(sizes) * 4, bytearray(), None
    async for message in messages:
        if signed is None and (signed := _signed(message.metadata, admission, run_id)).round <= newer_than:
            raise ValueError("it is of no later round")
        buffer += message.tensor_part.buffer
        if len(buffer) > most:
            raise ValueError("it is longer than the state of this run")
    if signed is None or len(buffer) < most:
        raise ValueError("it is shorter than the state of this run")
    tensors = list(torch.frombuffer(buffer, dtype=torch.float32).split(list(sizes)))
    if digest_of(signed.run_id, signed.round, tensors) != signed:
        raise ValueError("it is not what was signed")
    return signed, tensors


def _signed(metadata: bytes, admission: Admission, run_id: str) -> Digest:
    told = plain_msgpack(metadata) if len(metadata) <= _LONGEST_METADATA else None
    if not (isinstance(told, dict) and isinstance(told.get("digest"), bytes)):
        raise ValueError("nobody has signed it")
    return read_digest(admission, told["digest"], run_id=run_id)


# In an answer: how many contributions are in the average, and how many were announced.
_COUNTS = struct.Struct("<HH")


_Parts = AsyncIterator[AveragingData]


class _Average(NamedTuple):
    """A part as it goes back to everybody."""

    message: Any
    values: Tensor
    counts: tuple[int, int]


class _Reducer:
    """Keeps the senders' values of a part until all are there, and averages what passes the screen.

    Every sender waits for the average of a part before it gives the next. So all are at the same part, but those that
    have failed.
    """

    def __init__(
        self, own_parts: Sequence[Tensor], senders: int, screen: Screen, write: Callable[[int, Tensor], Any]
    ) -> None:
        """
        Args:
            own_parts: this peer's own, as views of the whole vector.
            write: a part's index and average as a message.
        """
        self._own, self._senders, self._screen, self._write = own_parts, set(range(senders)), screen, write
        self.averages: list[asyncio.Future[_Average]] = [asyncio.Future() for _ in own_parts]
        self.finished = asyncio.Event()
        self._failed: set[int] = set()
        self._next(0)

    async def add(self, sender: int, part: Tensor, weight: float) -> _Average:
        """Take a sender's next part, wait for the others' of it, return the average."""
        if sender in self._failed:
            raise BannedException(f"sender {sender} is left out")
        # Kept as it is, whatever it is: it counts as arrived, or the others would wait for a sender that lies. Without
        # weight the sender has left it out, see `Exchange`: there is nothing to judge.
        if weight > 0.0:
            self._arrived[sender], self._weights[sender] = part, weight
        else:
            self._left_out += 1
        average = self.averages[self._index]
        self._missing.discard(sender)
        self._check()
        return await asyncio.shield(average)  # others wait for it too

    def on_sender_failed(self, sender: int) -> None:
        """Do without what a sender has not given yet."""
        self._failed.add(sender)
        self._missing.discard(sender)
        self._check()

    def finalize(self) -> None:
        """End it; who still waits for an average is told that there is none."""
        for average in self.averages:
            average.cancel()
        self.finished.set()

    def _next(self, index: int) -> None:
        self._index, self._left_out, self._missing = index, 0, self._senders - self._failed
        self._arrived: dict[int, Tensor] = {}
        self._weights: dict[int, float] = {}
        if index == len(self._own):
            self.finished.set()

    def _check(self) -> None:
        """Average as soon as nobody is missing."""
        while not (self._missing or self.finished.is_set()):
            own, counts = self._own[self._index], (len(self._arrived), len(self._senders) - self._left_out)
            message, values = runtime_pb2.Tensor(), torch.zeros_like(own)
            if self._arrived:
                averaged = self._screen.average(int(own.storage_offset()), self._arrived, self._weights, own)
                message = self._write(self._index, averaged)
                values = read_part(message, own.numel())
            self.averages[self._index].set_result(_Average(message, values, counts))
            self._next(self._index + 1)


class Exchange(AllReduceRunner):  # type: ignore[misc]
    """One exchange of a group: send, reduce, take the averages; whoever is late is left out.

    hivemind's butterfly all-reduce, with these differences:

    - The average itself goes back, written once, and everybody uses what was written, the reducer too. So all peers
      get the very same bits (hivemind sends every peer its own difference from the average, rounded).
    - A sender may leave parts out (weight 0, no bytes) and gets their averages all the same.
    - A sender for whose parts the others have waited ``sender_timeout`` seconds in total is left out of the rest. It
      too gets every average, and is told which of its parts are in them.
    - Everything is counted.
    """

    def __init__(self, *, sending: Sending, limits: Limits, **runner: Any) -> None:
        super().__init__(**runner)
        self.tensor_part_container.return_deltas = False
        self._sending = sending
        senders = [str(peer) for peer in self.sender_peer_ids]
        self.screen = Screen(senders, limits, sending.delicate)
        own_parts, by_peer = self.parts_for_local_averaging, self.tensor_part_container.num_parts_by_peer
        self.tensor_part_reducer = _Reducer(own_parts, len(senders), self.screen, self._write_average)
        self._first = [sum(by_peer[:index]) for index in range(len(by_peer))]
        self._own_first = self._first[self.ordered_peer_ids.index(self.peer_id)]
        self._parts = [(0, len(senders), False)] * sum(by_peer)
        """Of each: how many contributions are in its average, how many were announced, and whether this peer's is in
        it."""
        self._bytes = [0] * sum(by_peer)
        self._waited: dict[PeerID, float] = {}
        self._up = self._down = self._timed = 0
        self.received: dict[str, int] = {}
        """As a reducer: sender's id -> bytes of its parts that have arrived here."""

    def outcome(self) -> Outcome:
        """What the exchange came to, once it is over."""
        by_peer = zip(self.ordered_peer_ids, self.tensor_part_container.num_parts_by_peer, strict=True)
        received, expected, counted = zip(*self._parts, strict=True)
        return Outcome(
            received=received,
            expected=expected,
            counted=counted,
            reducers=tuple(str(peer) for peer, parts in by_peer for _ in range(parts)),
            late=tuple(sorted(map(str, self.banned_senders))),
            bytes_up=self._up,
            bytes_down=self._down,
            timed_bytes=self._timed,
            timed_seconds=max(self._waited.values(), default=0.0),
        )

    # As a sender.

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        peer_index = self.ordered_peer_ids.index(peer_id)
        first, container = self._first[peer_index], self.tensor_part_container
        if peer_id == self.peer_id:
            sender = self.sender_peer_ids.index(peer_id)
            for index, part in enumerate(self.parts_for_local_averaging):
                weight = self._sending.weights[first + index]
                average = await self.tensor_part_reducer.add(sender, part, weight)
                self._take(peer_index, index, average.values, average.counts, counted=weight > 0)
            return
        parts = container.get_raw_input_parts(peer_index)
        over = asyncio.Event()
        try:
            stream = await self._get_peer_stub(peer_id).rpc_aggregate_part(self._messages(first, parts, over))
            answers = aiter_with_timeout(stream, self.reducer_timeout)
            for index, part in enumerate(parts):
                answer = await anext(answers)
                counts = _COUNTS.unpack(answer.group_id)  # which a refusal has not
                values = read_part(answer.tensor_part, part.numel()) if counts[0] else part
                self._down += len(answer.tensor_part.buffer)
                if answer.weight > 0:
                    self._waited[peer_id] = answer.weight
                    self._timed += self._bytes[first + index] if index else 0
                elif self._sending.weights[first + index] > 0:
                    over.set()  # left out: what has not been sent would be for nothing
                self._take(peer_index, index, values, counts, counted=answer.weight > 0)
        except BaseException:
            container.register_failed_reducer(peer_index)
            raise
        finally:
            over.set()

    async def _messages(self, first: int, parts: Sequence[Tensor], over: asyncio.Event) -> AsyncIterator[Any]:
        for place, part in enumerate(parts, first):
            if over.is_set():
                return
            weight = self._sending.weights[place]
            message = AveragingData(weight=weight)
            if place == first:
                message.code, message.group_id = averaging_pb2.PART_FOR_AVERAGING, self.group_id
            if weight > 0:
                message.tensor_part.CopyFrom(written_part(part, self._sending.codec_of(place, self._sending.codec)))
                self._bytes[place] = len(message.tensor_part.buffer)
                self._up += self._bytes[place]
            yield message

    def _take(self, peer_index: int, index: int, values: Tensor, counts: tuple[int, int], *, counted: bool) -> None:
        place = self._first[peer_index] + index
        self._parts[place] = (*counts, counted)
        self.tensor_part_container.register_processed_part(peer_index, index, values)

    # As a reducer.

    async def rpc_aggregate_part(self, stream: AsyncIterator[Any], context: P2PContext) -> AsyncIterator[Any]:
        """Take a sender's parts, and give it the averages of all."""
        sender = context.remote_id
        request = await anext(stream)
        # Who has called already would be counted twice, in the place of somebody who is slower.
        if self._check_reasons_to_reject(request, context) is not None or sender in self.active_senders:
            yield AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        self.active_senders.add(sender)
        if len(self.active_senders) == len(self.sender_peer_ids):
            self.all_senders_started.set()
        arrived: dict[int, float] = {}
        over = asyncio.Event()
        taking = asyncio.create_task(self._take_from(sender, achain(as_aiter(request), stream), arrived, over))
        try:
            if self.should_delay_results(sender):
                await over.wait()  # its link has one thing to do at a time
            for index, future in enumerate(self.tensor_part_reducer.averages):
                average = await asyncio.shield(future)
                yield AveragingData(
                    code=averaging_pb2.AVERAGED_PART,
                    group_id=_COUNTS.pack(*average.counts),
                    tensor_part=average.message,
                    weight=arrived.get(index, 0.0),
                )
        finally:
            taking.cancel()

    async def _take_from(
        self, sender: PeerID, stream: AsyncIterator[Any], arrived: dict[int, float], over: asyncio.Event
    ) -> None:
        """Reduce what comes from ``sender``; ``arrived``: part -> seconds that it has been waited for until then.

        While others are waited for its next parts arrive unseen, so that this time is not its own.
        """
        name, place = str(sender), self.sender_peer_ids.index(sender)
        clock, waited, taken = asyncio.get_running_loop().time, 1e-6, 0
        coming: asyncio.Future[Any] = asyncio.Future()
        try:
            try:
                with suppress(BannedException, StopAsyncIteration):  # late from the start, or gone
                    for index, own in enumerate(self.parts_for_local_averaging):
                        began, coming = clock(), asyncio.ensure_future(anext(stream))
                        await asyncio.wait({coming}, timeout=max(0.0, self.sender_timeout - waited))
                        if not coming.done():
                            break
                        message = coming.result()
                        waited += clock() - began
                        size = len(message.tensor_part.buffer)
                        self._down += size
                        self.received[name] = self.received.get(name, 0) + size
                        weight = message.weight if 0.0 < message.weight < math.inf else 0.0
                        part = torch.zeros(0)  # of nothing the screen drops the sender, and says so
                        if weight:
                            arrived[index] = waited
                            with suppress(ValueError):
                                part = read_part(message.tensor_part, own.numel())
                        await self.tensor_part_reducer.add(place, part, weight)
                        taken += 1
            finally:
                over.set()
                if taken < len(self.parts_for_local_averaging):
                    await self._ban_sender(sender)
            # What still comes is read, or libp2p's side would wait for ever for somebody to do so.
            with suppress(Exception):
                await coming
                async for _ in stream:
                    pass
        finally:
            coming.cancel()

    def _write_average(self, index: int, averaged: Tensor) -> Any:
        message = written_part(averaged, self._sending.codec_of(self._own_first + index, self._sending.codec_back))
        # The others fetch it while this peer goes on.
        self._up += len(message.buffer) * len(self.active_senders - {self.peer_id})
        return message


def written_part(part: Tensor, codec: Codec) -> Any:
    """A part as a message."""
    return runtime_pb2.Tensor(dtype=codec, buffer=encode(part, codec))


def read_part(message: Any, values: int) -> Tensor:
    """The ``values`` numbers of a part. Raises ValueError for anything else."""
    return decode(message.buffer, message.dtype, values)


def _become_helper(parent: int) -> None:
    """Call first in a process of hivemind's."""
    processes.become_helper(parent)
    asyncio.create_task = partial(_held, asyncio.create_task, set())


def _held(create: Callable[..., Any], tasks: set[Any], *work: Any, **options: Any) -> Any:
    """A task that lives until it is done.

    asyncio itself holds tasks weakly, and hivemind does what its peer asks in tasks that it does not hold either: the
    garbage collector ended one that waited, and the peer was never answered.
    """
    task = create(*work, **options)
    tasks.add(task)
    task.add_done_callback(tasks.discard)
    return task


class _Matchmaking(Matchmaking):  # type: ignore[misc]
    """Follows only those who may lead: a leader divides the work."""

    def __init__(self, *args: Any, guard: Guard, **options: Any) -> None:
        self._guard = guard
        super().__init__(*args, **options)

    async def _request_join_group(self, leader: PeerID) -> GroupInfo | None:
        return await super()._request_join_group(leader) if await self._guard.trusts(str(leader)) else None


class Averaged(NamedTuple):
    """What the averager's process returns of an exchange; the average itself is in shared memory."""

    rates: dict[str, float]
    """Peer id -> samples per second, by its own word, of every member of the group."""
    drifted: bool
    """This peer has other weights than the owner's side."""
    outcome: Outcome


class _Averager(DecentralizedAverager):  # type: ignore[misc]
    """hivemind's averager, for members only. Its class name is part of the protocol between peers.

    It lives in a process of its own; what asks it, `expect` to `given_back`, is for the peer's own.
    """

    def __init__(self, common: CommonState, guard: Guard, own: Pass, run_id: str, codec: Codec, **options: Any) -> None:
        self.common, self.guard, self.own, self.run_id, self.codec = common, guard, own, run_id, codec
        values = common.theta.numel()
        self.plan = torch.zeros(1 + num_parts(values), dtype=torch.float64).share_memory_()
        """The codec of this peer's parts, then each part's weight."""
        self._found, self._tell = multiprocessing.Pipe(duplex=False)
        self._shown, self._tell_shown = multiprocessing.Pipe(duplex=False)
        self._to_show, self._show = multiprocessing.Pipe(duplex=False)
        self._showing, self._one_shows = asyncio.Lock(), threading.Lock()
        self._possible: Mapping[str, float] = {}
        self._verified: Mapping[str, float] = {}
        self._accounts = Accounts()
        self._arrived: Mapping[int, Any] = {}
        """What the peer that was drawn has given."""
        self._is_drawn = False
        """It is drawn for the exchange that comes next."""
        self._refused: dict[str, Verdict] = {}
        self._proof = b""
        """In the peer's own process: what the owner's side has said of the state that it gives back."""
        self._given: State | None = None
        self._wanted, self._taking = math.inf, asyncio.Lock()
        self._screen: Screen | None = None
        """Of the last round, with what each has put into it."""
        self._moved: dict[str, Tensor] = {}
        """Peer -> by what it has moved the averages that were used."""
        self._taken_back = torch.zeros(common.num_parameters if own.grant.role == "owner" else 0).share_memory_()
        self._late: dict[str, tuple[int, float]] = {}
        """Peer -> how often in a row it was late, and when it may come again."""
        self._may_fetch: dict[str, float] = {}
        """Peer -> when it may fetch the state again."""
        super().__init__([torch.zeros(values)], guard.dht, **options)

    # In the peer's own process.

    def expect(self, possible: Mapping[str, float], verified: Mapping[str, float]) -> None:
        """Say what peers can have trained on in this round, and what they have without doubt, see `Limits`."""
        known = list(possible.items())
        for first in range(0, max(1, len(known)), _AT_ONCE):
            some = dict(known[first : first + _AT_ONCE])
            told = {"possible": some, "verified": {peer: verified[peer] for peer in some if peer in verified}}
            self._outer_pipe.send(("_expect", [], {**told, "anew": not first}))

    def draw(self, peer: str, round_index: int, trains: bool) -> None:
        """Have that peer show its work of the round that ends, see `Accounts.draw`; empty: nobody has to."""
        self._outer_pipe.send(("_draw", [], {"peer": peer, "round_index": round_index, "trains": trains}))

    def account(self, to: str, told: Told) -> None:
        """Tell the owner of a round, and show what it then wants to see, while this peer goes on."""
        asked: Any = MPFuture()
        self._outer_pipe.send(("_account", [], {"to": to, "account": told.account, "asked": asked}))

        def show() -> None:
            with suppress(FutureTimeoutError, OSError):
                if wanted := asked.result(2 * _ACCOUNT_SECONDS):
                    with self._one_shows:
                        self._show.send_bytes(told.show(wanted))

        threading.Thread(target=show, daemon=True).start()

    def shown(self) -> Shown | None:
        """What the peer that was drawn has shown since the last call."""
        return self._shown.recv() if self._shown.poll() else None

    def findings(self) -> list[Findings]:
        """Those of the rounds since the last call."""
        found = []
        while self._found.poll():
            found.append(self._found.recv())
        return found

    def alone(self, peer: str) -> Tensor | None:
        """The last average, in what this peer has reduced as `Screen.alone` makes it; None if that is not known."""
        return self._averaged_tensors[0].clone() if self._ask("_alone", peer=peer) else None

    def note_used(self) -> None:
        """The last average has become part of the weights."""
        self._outer_pipe.send(("_note_used", [], {}))

    def taken_back(self, peer: str) -> Tensor | None:
        """By what a peer has moved the averages that were used, once; None if that is not known."""
        return self._taken_back.clone() if self._ask("_take_back", peer=peer) else None

    def get_current_state(self) -> tuple[dict[str, Any], tuple[Tensor, ...], None]:
        """The state, and this peer's signature that it is the run's."""
        round_index, *tensors = self.common.copy()
        proof = self._proof or sign_digest(self.own, digest_of(self.run_id, round_index, tensors))
        return {"digest": proof}, tuple(tensors), None

    def give_back(self, peer: str, proof: bytes = b"") -> None:
        """Give the state to a peer that has come back with an earlier one, if it wants it.

        ``proof``: what the owner's side has said of it; without it this peer says so.
        """
        self._proof = proof
        self._ask("_give_back", peer=peer)
        self._proof = b""

    def given_back(self, newer_than: float) -> State | None:
        """The state that somebody has given back by now; until the next call another one, of a later round than that,
        is taken. Infinity: none."""
        found: State | None = self._ask("_given_back", newer_than=newer_than)
        return found

    def _ask(self, method: str, **what: Any) -> Any:
        asked: Any = MPFuture()
        self._outer_pipe.send((method, [], {**what, "asked": asked}))
        return processes.answer_of(asked, "averager", self.pid)

    # In the averager's process.

    def run(self) -> None:
        _become_helper(self._parent_pid)
        bound_calls()
        # hivemind's averager makes it itself, and has no hook; this process has nothing else that makes one.
        hivemind.averaging.averager.Matchmaking = partial(_Matchmaking, guard=self.guard)
        super().run()

    async def _expect(self, possible: dict[str, float], verified: dict[str, float], anew: bool) -> None:
        self._possible = possible if anew else {**self._possible, **possible}
        self._verified = verified if anew else {**self._verified, **verified}

    async def _draw(self, peer: str, round_index: int, trains: bool) -> None:
        self._is_drawn = bool(peer)
        if peer:
            self._accounts.draw(peer, round_index, trains)
            self._arrived = {}

    async def _account(self, to: str, account: bytes, asked: Any) -> None:
        stub, wanted = self.get_stub(self._p2p, PeerID.from_base58(to), namespace=self.prefix), tuple[int, ...]()
        with suppress(Exception):  # of libp2p: the owner is away, or this peer is out
            stream = await stub.rpc_account(DownloadData(metadata=account))
            wanted = read_wanted((await anext(aiter_with_timeout(stream, _ACCOUNT_SECONDS))).metadata)
        asked.set_result(wanted)
        if wanted:
            data = await asyncio.get_running_loop().run_in_executor(None, self._to_show.recv_bytes)
            with suppress(Exception):
                pieces = (data[first : first + _PIECE] for first in range(0, len(data), _PIECE))
                stream = await stub.rpc_show(
                    as_aiter(*(DownloadData(tensor_part=runtime_pb2.Tensor(buffer=piece)) for piece in pieces))
                )
                await anext(stream)

    async def _alone(self, peer: str, asked: Any) -> None:
        found = self._screen.alone(peer) if self._screen is not None else []
        for position, values in found:
            self._averaged_tensors[0][position : position + len(values)] = values
        asked.set_result(bool(found))

    async def _note_used(self) -> None:
        if self._screen is not None:
            await asyncio.get_running_loop().run_in_executor(None, self._add_moved, self._screen)

    def _add_moved(self, screen: Screen) -> None:
        size = self.common.num_parameters
        for peer, position, by in screen.moved():
            known = self._moved[peer] if peer in self._moved else torch.zeros(size)
            known[position : position + len(by)] += by
            remember(self._moved, peer, known, MOST_KEPT // (4 * size))

    async def _take_back(self, peer: str, asked: Any) -> None:
        if (moved := self._moved.pop(peer, None)) is not None:
            self._taken_back.copy_(moved)
        asked.set_result(moved is not None)

    async def _give_back(self, peer: str, asked: Any) -> None:
        async def pieces() -> AsyncIterator[DownloadData]:
            metadata, tensors, _ = await self._get_current_state_from_host_process()
            for data in (memoryview(tensor.numpy()).cast("B") for tensor in tensors):
                for place in range(0, len(data), _PIECE):
                    piece = runtime_pb2.Tensor(buffer=bytes(data[place : place + _PIECE]))
                    yield DownloadData(tensor_part=piece, metadata=metadata)
                    metadata = b""

        with suppress(Exception):  # of libp2p, or of a peer that wants none
            stub = self.get_stub(self._p2p, PeerID.from_base58(peer), namespace=self.prefix)
            await stub.rpc_give_back(pieces(), timeout=_GIVE_SECONDS)
        asked.set_result(None)

    async def _given_back(self, newer_than: float, asked: Any) -> None:
        self._wanted, found, self._given = newer_than, self._given, None
        asked.set_result(found)

    async def _step(self, **options: Any) -> None:
        # What came of it is in its control; hivemind raises it once more, where nobody waits for it.
        with suppress(Exception):
            await super()._step(**options)

    async def rpc_join_group(self, request: JoinRequest, context: P2PContext) -> AsyncIterator[MessageFromLeader]:
        """A peer wants to average with this one."""
        if not await self._welcomes(request, str(context.remote_id)):
            yield MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        async for message in super().rpc_join_group(request, context):
            yield message

    async def rpc_aggregate_part(self, stream: _Parts, context: P2PContext) -> _Parts:
        """A peer sends its part."""
        if await self.guard.member(str(context.remote_id)) is None:
            yield AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        async for message in super().rpc_aggregate_part(stream, context):
            yield message

    async def rpc_download_state(self, request: DownloadRequest, context: P2PContext) -> AsyncIterator[DownloadData]:
        """A peer wants to start from this one's state: it gets it once at a time, and not all of the time."""
        peer, began = str(context.remote_id), time.monotonic()
        if await self.guard.member(peer) is None or self._may_fetch.get(peer, 0.0) > began:
            return
        remember(self._may_fetch, peer, math.inf, _MOST_REMEMBERED)
        try:
            async for message in super().rpc_download_state(request, context):
                yield message
        finally:
            now = time.monotonic()
            remember(self._may_fetch, peer, now + max(_FETCH_SECONDS, now - began), _MOST_REMEMBERED)

    async def rpc_account(self, request: DownloadData, context: P2PContext) -> AsyncIterator[DownloadData]:
        """A peer says what it has done in a round, and is told what to show of it."""
        peer = str(context.remote_id)
        # Nobody is looked up for this: whom an owner that has come back does not know yet was a stranger for a while.
        is_member = self.guard.admission.admitted(peer) is not None
        wanted = self._accounts.hear(peer, request.metadata) if is_member else ()
        yield DownloadData(metadata=json.dumps(wanted).encode())

    async def rpc_show(self, stream: AsyncIterator[DownloadData], context: P2PContext) -> AsyncIterator[DownloadData]:
        """A peer shows what it was asked for."""
        asked, data = self._accounts.asked, bytearray()
        if asked is None or asked.peer != str(context.remote_id):
            return
        self._accounts.asked, most = None, most_bytes(self.common.theta.numel())
        async for message in aiter_with_timeout(stream, timeout=self.next_chunk_timeout):
            data += message.tensor_part.buffer
            if len(data) > most:
                return
        while self._is_drawn:  # who shows early shows beside what it has yet to give
            await asyncio.sleep(0.1)
        shown = asked._replace(data=bytes(data), given=self._arrived)
        async with self._showing:  # one after the other: it may take a round until this peer looks
            await asyncio.get_running_loop().run_in_executor(None, self._tell_shown.send, shown)
        yield DownloadData()

    async def rpc_give_back(self, stream: AsyncIterator[DownloadData], context: P2PContext) -> DownloadRequest:
        """A peer has a later state than this one, which has come back; answered once this one has taken it."""
        if self._taking.locked() or await self.guard.member(str(context.remote_id)) is None:
            return DownloadRequest()
        async with self._taking:
            messages, admission = aiter_with_timeout(stream, self.next_chunk_timeout), self.guard.admission
            sizes, began = [self.common.theta.numel(), self.common.momentum.numel()], time.monotonic()
            reading = read_state(messages, sizes, admission, self.run_id, newer_than=self._wanted)
            self._given = await asyncio.wait_for(reading, _GIVE_SECONDS)
            while self._given is not None and time.monotonic() < began + _GIVE_SECONDS:
                await asyncio.sleep(0.1)
            self._given = None
        return DownloadRequest()

    async def _welcomes(self, request: averaging_pb2.JoinRequest, peer: str) -> bool:
        is_full = len(self._matchmaking.current_followers) >= _LARGEST_GROUP
        if await self.guard.member(peer) is None or is_full or self.is_benched(peer):
            return False
        gathered = read_gathered(request.gather)
        if gathered is None:
            why = "sent something unreadable about itself"
        elif gathered.mode != CLIENT and not await self.guard.trusts(peer):
            why = "wants to average for others, and is not of the owner's side"
        else:
            return True
        if len(self._refused) < _MOST_REFUSALS:
            self._refused[peer] = Verdict(peer, "dropped", why)
        return False

    def note_late(self, members: Iterable[str], late: Collection[str], arrived: Collection[str]) -> None:
        """Note the members of a group, which of them were late, and of which anything has arrived."""
        for peer in members:
            times, _ = self._late.pop(peer, (0, 0.0))
            if peer in late:
                times += 1 if peer in arrived else 2
                over = min(times - _MOST_LATE, 10)
                pause = min(_BENCH_SECONDS * 2.0**over, _LONGEST_BENCH) if over >= 0 else 0.0
                remember(self._late, peer, (times, time.monotonic() + pause), _MOST_REMEMBERED)

    def is_benched(self, peer: str) -> bool:
        """Whether the group goes on without that peer for a while."""
        return self._late.get(peer, (0, 0.0))[1] > time.monotonic()

    async def _load_state_from_peers(self, future: Any, timeout: float | None = None) -> None:
        """The first state of a donor that the owner's side has signed, see `read_state`; None if nobody gives one.

        hivemind asks first whoever says that it comes first, and takes its answer, however long.
        """
        state = None
        try:
            key = f"{self._matchmaking.group_key_manager.prefix}.all_averagers"
            record, _ = await self.dht.get(key, latest=True, return_future=True) or ({}, None)
            sizes = [self.common.theta.numel(), self.common.momentum.numel()]
            for peer in await in_order(record, str(self.peer_id), self.guard.member):
                with suppress(Exception):  # of libp2p, or of a donor that gives something else: then the next
                    stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
                    stream = await stub.rpc_download_state(DownloadRequest())
                    messages = aiter_with_timeout(stream, timeout=self.next_chunk_timeout)
                    state = await read_state(messages, sizes, self.guard.admission, self.run_id)
                    break
        finally:
            with suppress(Exception):  # nobody waits for it any more
                future.set_result(state)

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **options: Any) -> Averaged:
        """hivemind's, but for how the members' words are read, and for `Exchange` and the screen in it."""
        # Garbage is read alike by all, and stops nobody.
        read = (read_gathered(data) or NOTHING for data in group_info.gathered)
        group = dict(zip(map(str, group_info.peer_ids), read, strict=True))
        own_id, modes = str(self.peer_id), tuple(AveragingMode(member.mode) for member in group.values())
        codec, *weights = self.plan.tolist()
        self._screen, keeps = None, self.own.grant.role == "owner" and not self.common.same_weights
        try:
            reduces = [mode != AveragingMode.CLIENT for mode in modes]
            known = {peer: member for peer in group if (member := await self.guard.member(peer)) is not None}
            probes = {peer: member.probe for peer, member in group.items() if member.shares}
            drifted = has_drifted(group[own_id].probe, probes, known.get, role=self.own.grant.role, own_id=own_id)
            if drifted and self.common.same_weights:
                weights = [0.0] * len(weights)
            trusted = {peer for peer, member in known.items() if member.trusted} | {own_id}
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
                    limits=Limits(
                        frozenset(trusted),
                        self._possible,
                        voices_of(known),
                        own_id,
                        keeps,
                        self._verified,
                        self._accounts.drawn if self._is_drawn else "",
                    ),
                    **options,
                )
                self._running_groups[group_info.group_id].set_result(runner)
                async for tensor, average in azip(as_aiter(*tensors), runner):
                    tensor.copy_(average)
                self._report(runner)
            return Averaged({peer: member.rate for peer, member in group.items()}, drifted, runner.outcome())
        except Exception as error:
            raise MatchmakingException(f"Unable to run All-Reduce: {error}") from error
        finally:
            self._is_drawn = False

    def _report(self, runner: Exchange) -> None:
        """Tell the peer's own process what came of a round."""
        members = tuple(map(str, runner.ordered_peer_ids))
        self.note_late(members, set(map(str, runner.banned_senders)), runner.received.keys())
        verdicts = (*runner.screen.verdicts(), *self._refused.values())
        known = self.guard.admission.admitted
        names = {peer: member.name for peer in (*members, *self._refused) if (member := known(peer)) is not None}
        self._screen = runner.screen
        if self._is_drawn:
            self._arrived = runner.screen.given
        self._tell.send(Findings(members, verdicts, runner.screen.counted(), runner.received, names))
        self._refused = {}


class DHT(hivemind.DHT):  # type: ignore[misc]
    """hivemind's node of the DHT, in a process of its own that is bounded and ends with its peer."""

    def run_coroutine(self, coro: Any, return_future: bool = False) -> Any:
        """As hivemind's, which waits for ever for the answer of a process that has died. Raises RunFailedError."""
        future = super().run_coroutine(coro, return_future=True)
        return future if return_future else processes.answer_of(future, "node of the DHT", self.pid)

    def run(self) -> None:
        _become_helper(self._parent_pid)
        bound_node()
        super().run()
