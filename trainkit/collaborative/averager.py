"""hivemind's averager as a peer uses it: its subclass, and the process in which it lives."""

from __future__ import annotations

import signal
import statistics
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from hivemind.averaging.allreduce import AveragingMode
from hivemind.averaging.group_info import GroupInfo
from hivemind.averaging.matchmaking import MatchmakingException
from hivemind.compression import NoCompression
from hivemind.p2p import PeerID
from hivemind.proto import averaging_pb2
from hivemind.utils.asyncio import aiter_with_timeout, as_aiter, azip, enter_asynchronously
from torch import Tensor

from trainkit.collaborative import processes
from trainkit.collaborative.admission import Admission, Member
from trainkit.collaborative.calls import bound_calls
from trainkit.collaborative.common import CommonState
from trainkit.collaborative.dht import SwarmDHT
from trainkit.collaborative.digests import digest_of, sign_digest
from trainkit.collaborative.donors import State, in_order, read_state
from trainkit.collaborative.exchange import Exchange
from trainkit.collaborative.exchanged import Outcome
from trainkit.collaborative.gathered import Gathered
from trainkit.collaborative.guard import Guard
from trainkit.collaborative.guarding import GuardedAverager
from trainkit.collaborative.invitation import Pass
from trainkit.collaborative.judging import has_drifted, reference_among
from trainkit.collaborative.parts import CODECS, PART, Codec, Sending, num_parts
from trainkit.config.schema import CollaborativeConfig

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
        """Of the first who gives one that the owner's side has signed, see `donors`; None if nobody does."""
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
        # Parts are cut alike by all peers, and written by `codecs`.
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
