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
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from typing import Any, AsyncIterator  # noqa: UP035 - hivemind: a stream

import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import Matchmaking, MatchmakingException
from hivemind.compression import NoCompression
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2
from hivemind.proto.averaging_pb2 import AveragingData, DownloadData, DownloadRequest, JoinRequest, MessageFromLeader
from hivemind.utils.asyncio import aiter_with_timeout, anext, enter_asynchronously
from hivemind.utils.mpfuture import MPFuture
from torch import Tensor

from trainkit.swarm.identity.admission import Board, Guard, remember
from trainkit.swarm.identity.invitations import Pass
from trainkit.swarm.network import exchange, processes, states
from trainkit.swarm.network.bounds import bound_calls
from trainkit.swarm.network.exchange import Averaged, Exchange, Sending
from trainkit.swarm.network.groups import Groups, GuardedMatchmaking
from trainkit.swarm.network.states import State
from trainkit.swarm.protocol.codecs import CODECS, PART, Codec, num_parts
from trainkit.swarm.protocol.messages import NOTHING, read_gathered
from trainkit.swarm.protocol.outer_step import PROBE_SIZE, OuterState
from trainkit.swarm.trust import accounts
from trainkit.swarm.trust.accounts import Shown, Told
from trainkit.swarm.trust.auditor import ANSWER, Accounts, AuditAnswer, Heard, LibraryStanding, most_given
from trainkit.swarm.trust.reducers import has_drifted
from trainkit.swarm.trust.screening import Findings, KnownSenders, Moves, Screen, voices_of

# After a peer was given the state it gets none for as long as that has taken, and at least so long.
_FETCH_SECONDS = 0.5
# An owner that has not answered an account for so long does not want to see anything.
_ACCOUNT_SECONDS = 20.0
# A state is given back in so many seconds, and by a link with so many bytes per second.
_GIVE_SECONDS = 120.0
_SLOW_LINK = 2.5e5
# Of what is shown, pieces that are under way at a time: what waits in the buffers of a slow link goes before its parts.
_PIECES_UNDER_WAY = 8
# Who is a stranger to a peer that has just come back may be known so much later.
_INTRODUCED_SECONDS = 12.0

_Parts = AsyncIterator[AveragingData]


class Averager(DecentralizedAverager):  # type: ignore[misc]
    """hivemind's averager, for members only. Its class name is part of the protocol between peers.

    It lives in a process of its own; what is `processes.asked` of it is for the peer's own.
    """

    def __init__(
        self, common: OuterState, guard: Guard, own: Pass, run_id: str, codec: Codec, batch: int, **options: Any
    ) -> None:
        self.common = common
        self.guard = guard
        self.own = own
        self.run_id = run_id
        self.codec = codec
        values = common.theta.numel()
        self._sizes = [values, common.momentum.numel()]
        self.plan = torch.zeros(1 + num_parts(values), dtype=torch.float64).share_memory_()
        """The codec of this peer's parts, then each part's weight."""
        self.probe = torch.zeros(PROBE_SIZE).share_memory_()
        """Sums of this peer's weights, see `OuterState.probe`."""
        self._found: list[Findings] = []
        self._shown, self._tell_shown = multiprocessing.Pipe(duplex=False)
        self._to_show, self._show = multiprocessing.Pipe(duplex=False)
        self._showing = asyncio.Lock()
        self._on_its_way = 0
        """Work that was shown, and that the peer's own process has not looked at."""
        self._over: Any = None
        """In the peer's own process: the last account, until all that was wanted of it has been shown."""
        self._one_shows = threading.Lock()
        self.known = Board()
        """``verified``: what peers have certainly trained on in a round, and who does not count, see `KnownSenders`;
        ``differ``: whose other libraries train otherwise; ``passed``: whose last audit was true. On a board, for the
        averager's process does not wait for the rest of a message that comes in several pieces, as of 16 KiB, and dies
        of it."""
        self.known.write(verified={}, differ=[], passed=[])
        self._accounts = Accounts(batch, values)
        self.standing: LibraryStanding = "tried"
        """In the peer's own process: what the owner has said last of one with other libraries than the run."""
        self._arriving: asyncio.Future[Mapping[str, Mapping[int, Any]]] | None = None
        """Contributions of the peers that were drawn last, once it has arrived; None: nobody was."""
        self.fetched = torch.zeros(1, dtype=torch.float64).share_memory_()
        """Share of the state that has arrived here, of the one that is fetched."""
        self.own_state = states.OwnState(common, own, run_id)
        self._given: State | None = None
        self._wanted = math.inf
        self._taking = asyncio.Lock()
        self._screen: Screen | None = None
        """Screen of the last round, with what each has put into it."""
        self._moves = Moves(common.num_parameters)
        self.groups = Groups(guard)
        self._may_fetch: dict[str, float] = {}
        """Peer -> when it may fetch the state again."""
        # Parts are cut alike by all peers, and written by `trainkit.swarm.network.exchange`.
        options |= {"compression": NoCompression(), "state_compression": NoCompression(), "part_size_bytes": 4 * PART}
        super().__init__([torch.zeros(values)], guard.dht, **options)

    # In the peer's own process.

    def account(self, to: str, told: Told, upload: float | None = None) -> None:
        """Tell the owner of a round, and show what it then wants to see, while this peer goes on.

        ``upload``: bytes per second that this peer can send, where that is known.
        """
        asked: Any = MPFuture()
        account = told.account.model_dump_json().encode()
        pace = states.PIECE / (accounts.SHARE_TO_SHOW * (upload or math.inf))
        self._over = MPFuture()
        self._outer_pipe.send(("_account", [asked, self._over], {"to": to, "account": account, "pace": pace}))

        def show() -> None:
            with suppress(FutureTimeoutError, OSError):
                answer: AuditAnswer = asked.result(2 * self._answer_seconds)
                self.standing = answer.standing or self.standing
                if answer.wanted or answer.parts:
                    with self._one_shows:
                        self._show.send_bytes(told.show(answer.wanted, answer.parts))

        threading.Thread(target=show, daemon=True).start()

    def shown(self) -> Shown | None:
        """Return what a peer has shown since the last call."""
        shown: Shown | None = self._shown.recv() if self._shown.poll() else None
        return shown and shown._replace(data=self._shown.recv_bytes())

    @property
    def is_showing(self) -> bool:
        """Not all that the owner may want to see of the last round has been shown."""
        return self._over is not None and not self._over.done()

    def note_used(self) -> None:
        """The last average has become part of the weights."""
        self._outer_pipe.send(("_note_used", [], {}))

    def get_current_state(self) -> tuple[dict[str, Any], list[Tensor], None]:
        """The state, and this peer's signature that it is the run's."""
        signed, tensors = self.own_state.copy()
        return {"digest": signed}, tensors, None

    # In the averager's process.

    def run(self) -> None:
        processes.become_helper(self._parent_pid)
        self.common.give_up()
        bound_calls()
        super().run()

    @property
    def _matchmaking(self) -> GuardedMatchmaking:
        """The search for groups. hivemind sets one of its own as it starts, in whose place there is a guarded one."""
        return self._search

    @_matchmaking.setter
    def _matchmaking(self, made: Matchmaking) -> None:
        processes.hold_tasks()
        options = {**self.matchmaking_kwargs, "client_mode": self.client_mode, "groups": self.groups}
        self._search = GuardedMatchmaking(self._p2p, self.schema_hash, self.dht, **options)

    async def _answer(self, asked: Any, work: str, /, *of: Any, **by_name: Any) -> None:
        asked.set_result(await getattr(type(self), work).__wrapped__(self, *of, **by_name))

    @processes.asked
    async def draw(self, drawn: Mapping[str, bool], round_index: int) -> None:
        """Have those peers show their work of the round that ends, see `Accounts.draw`."""
        self._accounts.draw(drawn, round_index)
        if self._arriving is not None:
            self._arriving.cancel()
        self._arriving = asyncio.get_running_loop().create_future() if drawn else None

    @processes.asked
    async def heard(self) -> Heard:
        """See `Accounts.heard`."""
        return self._accounts.heard()

    @processes.asked
    async def awaited(self) -> int:
        """Return how much peers have yet to show, see `Accounts.awaited`."""
        return self._accounts.awaited + self._on_its_way

    @processes.asked
    async def findings(self) -> list[Findings]:
        """Return those of the rounds since the last call."""
        found = self._found
        self._found = []
        return found

    async def _account(self, asked: Any, over: Any, **how: Any) -> None:
        try:
            await self._give_account(asked, **how)
        finally:
            over.set_result(None)

    async def _give_account(self, asked: Any, *, to: str, account: bytes, pace: float) -> None:
        stub = self.get_stub(self._p2p, PeerID.from_base58(to), namespace=self.prefix)
        answer = AuditAnswer()
        with suppress(Exception):  # of libp2p: the owner is away, or this peer is out
            stream = aiter_with_timeout(await stub.rpc_account(DownloadData(metadata=account)), self._answer_seconds)
            answer = ANSWER.validate_json((await anext(stream)).metadata)
        asked.set_result(answer)
        if not (answer.wanted or answer.parts):
            return
        data = await asyncio.to_thread(self._to_show.recv_bytes)
        free = asyncio.Semaphore(_PIECES_UNDER_WAY)

        async def paced() -> AsyncIterator[DownloadData]:
            for piece in states.pieces(data):
                await free.acquire()
                while self._running_groups:  # others wait for what this peer gives
                    await asyncio.sleep(0.1)
                yield piece
                await asyncio.sleep(pace)

        with suppress(Exception):
            async for _ in await stub.rpc_show(paced()):
                free.release()

    @property
    def _answer_seconds(self) -> float:
        """For which an answer to an account, or a piece of what is shown, is waited for."""
        return float(_ACCOUNT_SECONDS + self._allreduce_timeout)

    @processes.asked
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
            await asyncio.to_thread(self._moves.add, self._screen.moved())

    @processes.asked
    async def taken_back(self, peer: str) -> Tensor | None:
        """Return by what a peer has moved the averages that were used, once; None if that is not known."""
        return self._moves.take(peer)

    @processes.asked
    async def give_back(self, peer: str, proof: bytes = b"") -> None:
        """Give the state to a peer that has come back with an earlier one, if it wants it.

        ``proof``: what the owner's side has said of it; without it this peer says so.
        """

        with suppress(Exception):  # of libp2p, or of a peer that wants none
            stub = self.get_stub(self._p2p, PeerID.from_base58(peer), namespace=self.prefix)
            await stub.rpc_give_back(self._own_state(proof), timeout=self._give_seconds)

    async def _own_state(self, proof: bytes = b"") -> AsyncIterator[DownloadData]:
        """Yield the state in pieces, with ``proof`` or this peer's own signature."""
        metadata, tensors, _ = await self._get_current_state_from_host_process()
        if proof:
            metadata = self.serializer.dumps({"digest": proof})
        for tensor in tensors:
            for piece in states.pieces(memoryview(tensor.numpy()).cast("B"), metadata):
                yield piece
                metadata = b""

    @property
    def _give_seconds(self) -> float:
        """For which a state may be given back."""
        return _GIVE_SECONDS + 4 * sum(self._sizes) / _SLOW_LINK

    @processes.asked
    async def given_back(self, newer_than: float) -> State | None:
        """The state that somebody has given back by now; until the next call another one, of a later round than that,
        is taken. Infinity: none."""
        self._wanted = newer_than
        found = self._given
        self._given = None
        return found

    async def _step(self, **options: Any) -> None:
        # What came of it is in its control; hivemind raises it once more, where nobody waits for it.
        with suppress(Exception):
            await super()._step(**options)

    async def rpc_join_group(self, request: JoinRequest, context: P2PContext) -> AsyncIterator[MessageFromLeader]:
        """A peer wants to average with this one."""
        if not await self.groups.welcomes(request, str(context.remote_id), self._matchmaking.current_followers):
            yield MessageFromLeader(code=averaging_pb2.PROTOCOL_VIOLATION)
            return
        async for message in super().rpc_join_group(request, context):
            if request.client_mode and message.code == averaging_pb2.BEGIN_ALLREDUCE:
                await asyncio.sleep(0.0)  # those who reduce are told first: all others need them
                message = self.groups.shortened(message, context.remote_id)
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
        peer = str(context.remote_id)
        began = time.monotonic()
        if not self.allow_state_sharing or await self.guard.member(peer) is None:
            return
        if self._may_fetch.get(peer, 0.0) > began:  # asked last: meanwhile it may have called again
            return
        remember(self._may_fetch, peer, math.inf)
        try:
            async for message in self._own_state():
                yield message
        finally:
            now = time.monotonic()
            remember(self._may_fetch, peer, now + max(_FETCH_SECONDS, now - began))

    async def rpc_account(self, request: DownloadData, context: P2PContext) -> AsyncIterator[DownloadData]:
        """A peer says what it has done in a round, and is told what to show of it."""
        peer = str(context.remote_id)
        wanted = None
        # Nobody is looked up for this: whom an owner that has come back does not know yet was a stranger for a while.
        if self.guard.admission.admitted(peer) is not None:
            wanted = self._accounts.hear(peer, request.metadata)
        parts: tuple[int, ...] = ()
        arriving = self._arriving
        if wanted is not None and arriving is not None:
            await asyncio.wait({arriving})
            if arriving.cancelled():  # the exchange was not over in time: nobody knows what it has given
                self._accounts.excuse(peer)
                wanted = None
            else:
                parts = self._accounts.ask_for_parts(peer, arriving.result().get(peer, {}))
        known = self.known.read()
        standing: LibraryStanding = "tried"
        if peer in known["differ"]:
            standing = "differs"
        elif known["verified"].get(peer):
            standing = "counts"
        yield DownloadData(metadata=json.dumps(AuditAnswer(wanted or (), parts, standing)).encode())

    async def rpc_show(self, stream: AsyncIterator[DownloadData], context: P2PContext) -> AsyncIterator[DownloadData]:
        """A peer shows what it was asked for."""
        asked = self._accounts.take(str(context.remote_id))
        data = bytearray()
        if asked is None:
            return
        async for message in aiter_with_timeout(stream, self._answer_seconds):
            data += message.tensor_part.buffer
            if len(data) > accounts.most_bytes(self.common.theta.numel()):
                return
            yield DownloadData()
        self._accounts.excuse(asked.peer)
        self._on_its_way += 1
        # Also if the peer has gone meanwhile: half of it would spoil what comes next.
        await asyncio.shield(asyncio.create_task(self._pass_on(asked, data)))
        yield DownloadData()

    async def _pass_on(self, shown: Shown, data: bytearray) -> None:
        try:
            async with self._showing:  # one after the other: it may take a round until this peer looks
                await asyncio.to_thread(self._tell_shown.send, shown)
                await asyncio.to_thread(self._tell_shown.send_bytes, data)  # as it is, and not as a copy
        finally:
            self._on_its_way -= 1

    async def rpc_give_back(self, stream: AsyncIterator[DownloadData], context: P2PContext) -> DownloadRequest:
        """A peer has a later state than this one, which has come back; answered once this one has taken it."""
        until = time.monotonic() + _INTRODUCED_SECONDS
        while await self.guard.member(str(context.remote_id)) is None:  # its credential may be on its way
            if time.monotonic() > until:
                return DownloadRequest()
            await asyncio.sleep(1.0)
        if self._taking.locked():
            return DownloadRequest()
        async with self._taking:
            until = time.monotonic() + self._give_seconds
            reading = self._read_state(stream, newer_than=self._wanted)
            self._given = await asyncio.wait_for(reading, self._give_seconds)
            while self._given is not None and time.monotonic() < until:
                await asyncio.sleep(0.1)
            self._given = None
        return DownloadRequest()

    async def _load_state_from_peers(self, future: Any, timeout: float | None = None) -> None:
        """The first state of a donor that the owner's side has signed, see `read_state`; None if nobody gives one.

        hivemind asks first whoever says that it comes first, and takes its answer, however long.
        """
        state = None

        def note(share: float) -> None:
            if future.cancelled():
                raise ValueError("nobody waits for it any more")
            self.fetched[0] = share

        try:
            key = f"{self._matchmaking.group_key_manager.prefix}.all_averagers"
            record, _ = await self.dht.get(key, latest=True, return_future=True) or ({}, None)
            for peer in await states.in_order(record, str(self.peer_id), self.guard.member):
                if future.cancelled():
                    break
                with suppress(Exception):  # of libp2p, or of a donor that gives something else: then the next
                    stub = self.get_stub(self._p2p, peer, namespace=self.prefix)
                    state = await self._read_state(await stub.rpc_download_state(DownloadRequest()), note=note)
                    break
        finally:
            with suppress(Exception):  # nobody waits for it any more
                future.set_result(state)

    async def _read_state(self, stream: AsyncIterator[DownloadData], **how: Any) -> State:
        pieces = aiter_with_timeout(stream, self.next_chunk_timeout)
        return await states.read_state(pieces, self._sizes, self.guard.admission, self.run_id, **how)

    async def _aggregate_with_group(self, group_info: GroupInfo, min_vector_size: int, **options: Any) -> Averaged:
        """hivemind's, but for how the members' words are read, and for `Exchange` and the screen in it."""
        # Garbage is read alike by all, and stops nobody.
        group = {
            str(peer): read_gathered(data) or NOTHING
            for peer, data in zip(group_info.peer_ids, group_info.gathered, strict=True)
        }
        own_id = str(self.peer_id)
        modes = tuple(AveragingMode(member.mode) for member in group.values())
        draw = self._arriving
        if draw is not None and draw.done():
            draw = None
        codec, *weights = self.plan.tolist()
        self._screen = None
        role = self.own.grant.role
        try:
            reduces = [mode != AveragingMode.CLIENT for mode in modes]
            self.groups.reducers = sum(reduces)
            members = {peer: await self.guard.member(peer) for peer in group}
            known = {peer: member for peer, member in members.items() if member is not None}
            trusted = frozenset(peer for peer, member in known.items() if member.trusted) | {own_id}
            owners = frozenset(peer for peer, member in known.items() if member.role == "owner")
            known_of = self.known.read()
            probes = {peer: said.probe for peer, said in group.items() if said.probe}
            drifted = has_drifted(self.probe.numpy().tobytes(), probes, known.get, role=role, own_id=own_id)
            async with enter_asynchronously(self.get_tensors()) as tensors:
                limits = KnownSenders(
                    trusted=trusted, owners=owners, voices=voices_of(known), own=own_id,
                    verified=known_of["verified"], stated=self._accounts.stated, keeps=role == "owner",
                    drawn={*self._accounts.drawn} if draw is not None else (), passed={*known_of["passed"]},
                    most_given=most_given(self.common.theta.numel()),
                )  # fmt: skip
                runner = Exchange(
                    p2p=self._p2p, servicer_type=type(self), prefix=self.prefix, tensors=tensors, modes=modes,
                    group_id=group_info.group_id, ordered_peer_ids=group_info.peer_ids, limits=limits,
                    peer_fractions=exchange.shares([member.bandwidth for member in group.values()], reduces),
                    sending=Sending(weights, CODECS[int(codec)], self.codec, self.common.num_parameters), **options,
                )  # fmt: skip
                self._running_groups[group_info.group_id].set_result(runner)
                async for _ in runner:
                    pass
                self._report(runner, draw)
            return Averaged({peer: said.rate for peer, said in group.items()}, drifted, runner.outcome())
        except Exception as error:
            raise MatchmakingException(f"Unable to run All-Reduce: {error}") from error

    def _report(self, runner: Exchange, draw: asyncio.Future[Any] | None) -> None:
        """Tell the peer's own process what came of a round.

        ``draw``: what was arriving when it began. One that ends late must not be taken for the next: its peer would
        have given then what it has not trained now.
        """
        members = tuple(map(str, runner.ordered_peer_ids))
        outcome = runner.outcome()
        # Without the average of a reducer nobody learns anything in its parts, for as long as it is one.
        silent = {peer for peer, count in zip(outcome.reducers, outcome.received, strict=True) if not count}
        self.groups.lateness.note(members, {*map(str, runner.banned_senders), *silent}, runner.received.keys())
        verdicts = (*runner.screen.verdicts(), *self.groups.refused.values())
        known = self.guard.admission.names()
        names = {peer: known[peer] for peer in (*members, *self.groups.refused) if peer in known}
        self._screen = runner.screen
        self._accounts.received = runner.received
        if draw is not None and not draw.done():
            draw.set_result(runner.screen.given)
            self._accounts.took_part(members)
        self._found.append(Findings(members, verdicts, runner.screen.counted(), runner.received, names))
        self.groups.refused = {}
