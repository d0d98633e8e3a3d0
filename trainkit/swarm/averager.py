"""hivemind's processes as this kit runs them: who may join a group, ask and lead, and what a peer's own process asks.

hivemind asks nobody who they are: any process that reaches an averager may join its groups, reduce for others and
download its state. libp2p proves the id of a peer that asks; `Admission` says what that id may do.
"""

import asyncio
import json
import math
import multiprocessing
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from functools import partial, update_wrapper
from typing import Any, AsyncIterator, Concatenate, NamedTuple, ParamSpec, TypeVar  # noqa: UP035 - hivemind: a stream

import hivemind.averaging.averager
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking, MatchmakingException
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.proto.averaging_pb2 import AveragingData, DownloadData, DownloadRequest, JoinRequest, MessageFromLeader
from hivemind.utils.asyncio import aiter_with_timeout, anext, as_aiter, azip, enter_asynchronously
from hivemind.utils.mpfuture import MPFuture
from torch import Tensor

from trainkit.swarm import accounts, processes
from trainkit.swarm.access import bound_calls, bound_node
from trainkit.swarm.accounts import Accounts, Answer, Heard, Shown, Standing, Told
from trainkit.swarm.admission import Board, Guard, remember
from trainkit.swarm.diloco import CODECS, PROBE_SIZE, Codec, Outcome, OuterState, num_parts
from trainkit.swarm.exchange import Exchange, Sending, State, digest_of, in_order, read_state, shares, sign_digest
from trainkit.swarm.invitations import Pass
from trainkit.swarm.messages import CLIENT, NOTHING, read_gathered
from trainkit.swarm.robust import MOST_KEPT, Findings, Limits, Screen, Verdict, has_drifted, voices_of

# Peers that average together, for each that reduces; with more it would do nothing else.
_LARGEST_GROUP = 256
# Who only calls out is told of those who reduce, and of so many others, by whom it knows how fast they are: the words
# of all to all are 72 MB in a group of 256.
_MOST_TOLD = 16
# The others wait for a late peer in every round. A peer that is late too often in a row, or whose averages do not come,
# where a round in which nothing at all has come counts double, is not let into a group for so long; then for twice as
# long.
_MOST_LATE, _BENCH_SECONDS, _LONGEST_BENCH = 6, 30.0, 600.0
_MOST_REMEMBERED = 1000
# After a peer was given the state it gets none for as long as that has taken, and at least so long.
_FETCH_SECONDS = 0.5
# An owner that has not answered an account for so long does not want to see anything.
_ACCOUNT_SECONDS = 20.0
# A state is given back, and work is shown, in pieces of so many bytes; a state in so many seconds.
_PIECE, _GIVE_SECONDS = 1 << 16, 120.0
# Of what is shown, pieces that are under way at a time: what waits in the buffers of a slow link goes before its parts.
_PIECES_UNDER_WAY = 8
# Who is a stranger to a peer that has just come back may be known so much later.
_INTRODUCED_SECONDS = 12.0
# Refusals to report of a round; a stranger can cause as many as it likes.
_MOST_REFUSALS = 32
# Of what a peer has moved in a round, half is taken back in any case, and of the other half so much is left after each
# further round: training makes up for some of it, see docs/tried.md.
_FRESH = 0.8

_Parts = AsyncIterator[AveragingData]
P = ParamSpec("P")
T = TypeVar("T")


def _asked(work: Callable[Concatenate[Any, P], Awaitable[T]]) -> Callable[Concatenate[Any, P], T]:
    """What the averager's process does, for the peer's own to call and wait for."""

    def ask(averager: Any, /, *of: P.args, **by_name: P.kwargs) -> T:
        answer: Any = MPFuture()
        averager._outer_pipe.send(("_answer", [answer, work.__name__, *of], by_name))
        found: T = processes.answer_of(answer, "averager", averager.pid)
        return found

    update_wrapper(ask, work)
    return ask


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

    def __init__(self, *args: Any, guard: Guard, is_benched: Callable[[str], bool], **options: Any) -> None:
        self._guard, self._is_benched = guard, is_benched
        super().__init__(*args, **options)

    async def _request_join_group(self, leader: PeerID) -> GroupInfo | None:
        may_lead = not self._is_benched(str(leader)) and await self._guard.trusts(str(leader))
        return await super()._request_join_group(leader) if may_lead else None


class Averaged(NamedTuple):
    """What the averager's process returns of an exchange; the average itself is in shared memory."""

    rates: dict[str, float]
    """Peer id -> samples per second, by its own word, of every member of the group."""
    drifted: bool
    """This peer has other weights than the owner's side."""
    outcome: Outcome


class _Averager(DecentralizedAverager):  # type: ignore[misc]
    """hivemind's averager, for members only. Its class name is part of the protocol between peers.

    It lives in a process of its own; what is `_asked` of it is for the peer's own.
    """

    def __init__(
        self, common: OuterState, guard: Guard, own: Pass, run_id: str, codec: Codec, batch: int, **options: Any
    ) -> None:
        self.common, self.guard, self.own, self.run_id, self.codec = common, guard, own, run_id, codec
        values = common.theta.numel()
        self.plan = torch.zeros(1 + num_parts(values), dtype=torch.float64).share_memory_()
        """The codec of this peer's parts, then each part's weight."""
        self.probe = torch.zeros(PROBE_SIZE).share_memory_()
        """Of this peer's weights, see `OuterState.probe`."""
        self._found: list[Findings] = []
        self._shown, self._tell_shown = multiprocessing.Pipe(duplex=False)
        self._to_show, self._show = multiprocessing.Pipe(duplex=False)
        self._showing, self._one_shows = asyncio.Lock(), threading.Lock()
        self.known = Board()
        """``verified``: what peers have trained on without doubt in a round, and who does not count, see `Limits`;
        ``differ``: whose other libraries train otherwise. On a board, for the averager's process does not wait for the
        rest of a message that comes in several pieces, as of 16 KiB, and dies of it."""
        self.known.write(verified={}, differ=[])
        self._accounts = Accounts(batch, values)
        self.standing: Standing = "tried"
        """In the peer's own process: what the owner has said last of one with other libraries than the run."""
        self._arriving: asyncio.Future[Mapping[str, Mapping[int, Any]]] | None = None
        """What the peers that were drawn last give, once it has arrived; None: nobody was."""
        self._refused: dict[str, Verdict] = {}
        self._given: State | None = None
        self._wanted, self._taking = math.inf, asyncio.Lock()
        self._screen: Screen | None = None
        """Of the last round, with what each has put into it."""
        self._moved: dict[str, Tensor] = {}
        """Peer -> by what it has moved the averages that were used, and what is fresh of it, [2, values]."""
        self._late: dict[str, tuple[int, float]] = {}
        """Peer -> how often in a row it was late, and when it may come again."""
        self._may_fetch: dict[str, float] = {}
        """Peer -> when it may fetch the state again."""
        self._reducers = 1
        """In the last group."""
        self._told = b"", frozenset[bytes]()
        """A group, and those of its members of whom all are told."""
        super().__init__([torch.zeros(values)], guard.dht, **options)

    # In the peer's own process.

    def account(self, to: str, told: Told, upload: float | None = None) -> None:
        """Tell the owner of a round, and show what it then wants to see, while this peer goes on.

        ``upload``: bytes per second that this peer can send, where that is known.
        """
        asked: Any = MPFuture()
        account = told.account.model_dump_json().encode()
        pace = _PIECE / (accounts.SHARE_TO_SHOW * upload) if upload else 0.0
        self._outer_pipe.send(("_account", [], {"to": to, "account": account, "pace": pace, "asked": asked}))

        def show() -> None:
            with suppress(FutureTimeoutError, OSError):
                answer: Answer = asked.result(2 * self._answer_seconds)
                self.standing = answer.standing or self.standing
                if answer.wanted or answer.parts:
                    with self._one_shows:
                        self._show.send_bytes(told.show(answer.wanted, answer.parts))

        threading.Thread(target=show, daemon=True).start()

    def shown(self) -> Shown | None:
        """What a peer has shown since the last call."""
        return self._shown.recv() if self._shown.poll() else None

    def note_used(self) -> None:
        """The last average has become part of the weights."""
        self._outer_pipe.send(("_note_used", [], {}))

    def get_current_state(self) -> tuple[dict[str, Any], tuple[Tensor, ...], None]:
        """The state, and this peer's signature that it is the run's."""
        round_index, *tensors = self.common.copy()
        return {"digest": sign_digest(self.own, digest_of(self.run_id, round_index, tensors))}, tuple(tensors), None

    # In the averager's process.

    def run(self) -> None:
        _become_helper(self._parent_pid)
        bound_calls()
        # hivemind's averager makes it itself, and has no hook; this process has nothing else that makes one.
        hivemind.averaging.averager.Matchmaking = partial(_Matchmaking, guard=self.guard, is_benched=self.is_benched)
        super().run()

    async def _answer(self, asked: Any, work: str, /, *of: Any, **by_name: Any) -> None:
        asked.set_result(await getattr(type(self), work).__wrapped__(self, *of, **by_name))

    @_asked
    async def draw(self, drawn: Mapping[str, bool], round_index: int) -> None:
        """Have those peers show their work of the round that ends, see `Accounts.draw`."""
        self._accounts.draw(drawn, round_index)
        if self._arriving is not None:
            self._arriving.cancel()
        self._arriving = asyncio.get_running_loop().create_future() if drawn else None

    @_asked
    async def heard(self) -> Heard:
        """See `Accounts.heard`."""
        return self._accounts.heard()

    @_asked
    async def findings(self) -> list[Findings]:
        """Those of the rounds since the last call."""
        found, self._found = self._found, []
        return found

    async def _account(self, to: str, account: bytes, pace: float, asked: Any) -> None:
        stub = self.get_stub(self._p2p, PeerID.from_base58(to), namespace=self.prefix)
        answer = Answer()
        with suppress(Exception):  # of libp2p: the owner is away, or this peer is out
            stream = aiter_with_timeout(await stub.rpc_account(DownloadData(metadata=account)), self._answer_seconds)
            answer = accounts.ANSWER.validate_json((await anext(stream)).metadata)
        asked.set_result(answer)
        if answer.wanted or answer.parts:
            data, free = await asyncio.to_thread(self._to_show.recv_bytes), asyncio.Semaphore(_PIECES_UNDER_WAY)

            async def pieces() -> AsyncIterator[DownloadData]:
                for first in range(0, len(data), _PIECE):
                    await free.acquire()
                    while self._running_groups:  # others wait for what this peer gives
                        await asyncio.sleep(0.1)
                    yield DownloadData(tensor_part=runtime_pb2.Tensor(buffer=data[first : first + _PIECE]))
                    await asyncio.sleep(pace)

            with suppress(Exception):
                async for _ in await stub.rpc_show(pieces()):
                    free.release()

    @property
    def _answer_seconds(self) -> float:
        """For which an answer to an account, or a piece of what is shown, is waited for."""
        return float(_ACCOUNT_SECONDS + self._allreduce_timeout)

    @_asked
    async def alone(self, peer: str) -> Tensor | None:
        """The last average, in what this peer has reduced as `Screen.alone` makes it; None if that is not known."""
        if self._screen is None or not (found := self._screen.alone(peer)):
            return None
        average: Tensor = self._averaged_tensors[0].clone()
        for position, values in found:
            average[position : position + len(values)] = values
        return average

    async def _note_used(self) -> None:
        if self._screen is not None:
            await asyncio.to_thread(self._add_moved, self._screen)

    def _add_moved(self, screen: Screen) -> None:
        size = self.common.num_parameters
        for known in list(self._moved.values()):  # in a thread, while others are taken back
            known[1] *= _FRESH
        for peer, position, by in screen.moved():
            known = self._moved[peer] if peer in self._moved else torch.zeros(2, size)
            known[:, position : position + len(by)] += by
            remember(self._moved, peer, known, MOST_KEPT // (8 * size))

    @_asked
    async def taken_back(self, peer: str) -> Tensor | None:
        """By what a peer has moved the averages that were used, once; None if that is not known."""
        moved = self._moved.pop(peer, None)
        return None if moved is None else moved.mean(0)

    @_asked
    async def give_back(self, peer: str, proof: bytes = b"") -> None:
        """Give the state to a peer that has come back with an earlier one, if it wants it.

        ``proof``: what the owner's side has said of it; without it this peer says so.
        """

        async def pieces() -> AsyncIterator[DownloadData]:
            metadata, tensors, _ = await self._get_current_state_from_host_process()
            if proof:
                metadata = self.serializer.dumps({"digest": proof})
            for data in (memoryview(tensor.numpy()).cast("B") for tensor in tensors):
                for place in range(0, len(data), _PIECE):
                    piece = runtime_pb2.Tensor(buffer=bytes(data[place : place + _PIECE]))
                    yield DownloadData(tensor_part=piece, metadata=metadata)
                    metadata = b""

        with suppress(Exception):  # of libp2p, or of a peer that wants none
            stub = self.get_stub(self._p2p, PeerID.from_base58(peer), namespace=self.prefix)
            await stub.rpc_give_back(pieces(), timeout=_GIVE_SECONDS)

    @_asked
    async def given_back(self, newer_than: float) -> State | None:
        """The state that somebody has given back by now; until the next call another one, of a later round than that,
        is taken. Infinity: none."""
        self._wanted, found, self._given = newer_than, self._given, None
        return found

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
            if request.client_mode and message.code == averaging_pb2.BEGIN_ALLREDUCE:
                await asyncio.sleep(0.0)  # those who reduce are told first: all others need them
                message = self._shortened(message, context.remote_id)
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
        wanted = self._accounts.hear(peer, request.metadata) if is_member else None
        parts, arriving = tuple[int, ...](), self._arriving
        if wanted is not None and arriving is not None:
            await asyncio.wait({arriving})
            if arriving.cancelled():  # the exchange was not over in time: nobody knows what it has given
                self._accounts.excuse(peer)
                wanted = None
            else:
                parts = self._accounts.ask_for_parts(peer, arriving.result().get(peer, {}))
        known = self.known.read()
        standing: Standing = "counts" if known["verified"].get(peer) else "tried"
        answer = Answer(wanted or (), parts, "differs" if peer in known["differ"] else standing)
        yield DownloadData(metadata=json.dumps(answer).encode())

    async def rpc_show(self, stream: AsyncIterator[DownloadData], context: P2PContext) -> AsyncIterator[DownloadData]:
        """A peer shows what it was asked for."""
        asked, data = self._accounts.take(str(context.remote_id)), bytearray()
        if asked is None:
            return
        most = accounts.most_bytes(self.common.theta.numel())
        async for message in aiter_with_timeout(stream, self._answer_seconds):
            data += message.tensor_part.buffer
            if len(data) > most:
                return
            yield DownloadData()
        self._accounts.excuse(asked.peer)
        # Also if the peer has gone meanwhile: half of it would spoil what comes next.
        await asyncio.shield(asyncio.create_task(self._pass_on(asked._replace(data=bytes(data)))))
        yield DownloadData()

    async def _pass_on(self, shown: Shown) -> None:
        async with self._showing:  # one after the other: it may take a round until this peer looks
            await asyncio.to_thread(self._tell_shown.send, shown)

    async def rpc_give_back(self, stream: AsyncIterator[DownloadData], context: P2PContext) -> DownloadRequest:
        """A peer has a later state than this one, which has come back; answered once this one has taken it."""
        peer, until = str(context.remote_id), time.monotonic() + _INTRODUCED_SECONDS
        while await self.guard.member(peer) is None:  # its credential may be on its way
            if time.monotonic() > until:
                return DownloadRequest()
            await asyncio.sleep(1.0)
        if self._taking.locked():
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

    def _shortened(self, message: MessageFromLeader, to: PeerID) -> MessageFromLeader:
        """What a leader says, without most of the peers with whom one that only calls out has nothing to do."""
        members = list(zip(message.ordered_peer_ids, message.gathered, strict=True))
        if self._told[0] != message.group_id:
            calls_out = [peer for peer, said in members if (read_gathered(said) or NOTHING).mode == CLIENT]
            self._told = message.group_id, frozenset(message.ordered_peer_ids) - set(calls_out[_MOST_TOLD:])
        peers, words = zip(*(one for one in members if one[0] in self._told[1] or one[0] == to.to_bytes()), strict=True)
        return MessageFromLeader(code=message.code, group_id=message.group_id, ordered_peer_ids=peers, gathered=words)

    async def _welcomes(self, request: averaging_pb2.JoinRequest, peer: str) -> bool:
        if await self.guard.member(peer) is None or self.is_benched(peer):
            return False
        gathered = read_gathered(request.gather)
        is_full = len(self._matchmaking.current_followers) >= _LARGEST_GROUP * self._reducers
        if is_full and (gathered is None or gathered.mode == CLIENT):
            return False
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
        draw = self._arriving if self._arriving is not None and not self._arriving.done() else None
        codec, *weights = self.plan.tolist()
        self._screen, keeps = None, self.own.grant.role == "owner"
        try:
            reduces = [mode != AveragingMode.CLIENT for mode in modes]
            self._reducers = sum(reduces)
            known = {peer: member for peer in group if (member := await self.guard.member(peer)) is not None}
            probes = {peer: member.probe for peer, member in group.items() if member.probe}
            own_probe = self.probe.numpy().tobytes()
            drifted = has_drifted(own_probe, probes, known.get, role=self.own.grant.role, own_id=own_id)
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
                        trusted=frozenset(trusted),
                        owners=frozenset(peer for peer, member in known.items() if member.role == "owner"),
                        verified=self.known.read()["verified"],
                        voices=voices_of(known),
                        own=own_id,
                        keeps=keeps,
                        drawn={*self._accounts.drawn} if draw is not None else (),
                        stated=self._accounts.stated,
                    ),
                    **options,
                )
                self._running_groups[group_info.group_id].set_result(runner)
                async for tensor, average in azip(as_aiter(*tensors), runner):
                    tensor.copy_(average)
                self._report(runner, draw)
            return Averaged({peer: member.rate for peer, member in group.items()}, drifted, runner.outcome())
        except Exception as error:
            raise MatchmakingException(f"Unable to run All-Reduce: {error}") from error

    def _report(self, runner: Exchange, draw: asyncio.Future[Any] | None) -> None:
        """Tell the peer's own process what came of a round.

        ``draw``: what was arriving when it began. One that ends late must not be taken for the next: its peer would
        have given then what it has not trained now.
        """
        members, outcome = tuple(map(str, runner.ordered_peer_ids)), runner.outcome()
        # Without the average of a reducer nobody learns anything in its parts, for as long as it is one.
        silent = {peer for peer, count in zip(outcome.reducers, outcome.received, strict=True) if not count}
        self.note_late(members, {*map(str, runner.banned_senders), *silent}, runner.received.keys())
        verdicts = (*runner.screen.verdicts(), *self._refused.values())
        known = self.guard.admission.admitted
        names = {peer: member.name for peer in (*members, *self._refused) if (member := known(peer)) is not None}
        self._screen, self._accounts.received = runner.screen, runner.received
        if draw is not None and not draw.done():
            draw.set_result(runner.screen.given)
            self._accounts.took_part(members)
        self._found.append(Findings(members, verdicts, runner.screen.counted(), runner.received, names))
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
