"""One exchange of a group, in the averager's process: send, reduce, take the averages; who is late is left out.

hivemind's butterfly all-reduce (`AllReduceRunner`), with these differences:

- What goes back is the average itself, written once, and everybody uses what was written, the reducer too. So all
  peers get the very same bits (hivemind sends every peer its own difference from the average, rounded).
- A sender may leave parts out (weight 0, no bytes) and gets their averages all the same.
- A sender for whose parts the others have waited ``patience`` seconds in all is left out of the rest. It too gets every
  average, and is told which of its parts are in them.
- Everything is counted.
"""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import AllreduceException, BannedException
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import achain, aiter_with_timeout, anext, as_aiter
from torch import Tensor

from trainkit.collaborative.codecs import decode, encode
from trainkit.collaborative.exchanged import Outcome
from trainkit.collaborative.parts import Codec, Sending

# In an answer: how many contributions are in the average, and how many were announced.
_COUNTS = struct.Struct("<HH")


@dataclass(frozen=True)
class _Average:
    """A part as it goes back to everybody."""

    message: Any
    values: Tensor
    counts: tuple[int, int]


class Exchange(AllReduceRunner):  # type: ignore[misc]
    """One run of the protocol; see the module."""

    def __init__(self, *, sending: Sending, **runner: Any) -> None:
        super().__init__(**runner)
        self.tensor_part_container.return_deltas = False
        self._sending = sending
        by_peer = self.tensor_part_container.num_parts_by_peer
        self._first = [sum(by_peer[:index]) for index in range(len(by_peer))]
        self._own_first = self._first[self.ordered_peer_ids.index(self.peer_id)]
        self._reducers = [
            str(peer) for peer, many in zip(self.ordered_peer_ids, by_peer, strict=True) for _ in range(many)
        ]
        count, own = sum(by_peer), len(self.parts_for_local_averaging)
        # As a reducer.
        self._averages: list[asyncio.Future[_Average]] = [asyncio.Future() for _ in range(own)]
        self._counted, self._left_out = [0] * own, [0] * own
        # As a sender.
        self._counts = [(0, len(self.sender_peer_ids))] * count
        self._mine = [False] * count
        self._waited: dict[PeerID, float] = {}
        self._bytes = [0] * count
        self._up = self._down = self._timed = 0
        self.received: dict[str, int] = {}
        """As a reducer: sender's id -> bytes of its parts that have arrived here."""

    def outcome(self) -> Outcome:
        """What it came to, once it is over."""
        return Outcome(
            received=tuple(received for received, _ in self._counts),
            expected=tuple(expected for _, expected in self._counts),
            counted=tuple(self._mine),
            reducers=tuple(self._reducers),
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
            sender_index = self.sender_peer_ids.index(peer_id)
            for index, part in enumerate(self.parts_for_local_averaging):
                weight = self._sending.weights[first + index]
                average = await self._reduce(sender_index, index, part, weight)
                self._take(peer_index, index, average.values, average.counts, counted=weight > 0)
            return
        parts = container.get_raw_input_parts(peer_index)
        over = asyncio.Event()
        try:
            stream = await self._get_peer_stub(peer_id).rpc_aggregate_part(self._messages(first, parts, over))
            answers = aiter_with_timeout(stream, self.reducer_timeout)
            for index, part in enumerate(parts):
                answer = await anext(answers)
                if answer.code != averaging_pb2.AVERAGED_PART:
                    raise AllreduceException(f"{peer_id} sent {averaging_pb2.MessageCode.Name(answer.code)}")
                counts = _COUNTS.unpack(answer.group_id)
                values = _read(answer.tensor_part, part.numel()) if counts[0] else part
                self._down += len(answer.tensor_part.buffer)
                counted = answer.weight > 0
                if counted:
                    self._waited[peer_id] = answer.weight
                    self._timed += self._bytes[first + index] if index else 0
                elif self._sending.weights[first + index] > 0:
                    over.set()  # left out: what has not been sent would be for nothing
                self._take(peer_index, index, values, counts, counted=counted)
        except BaseException:
            container.register_failed_reducer(peer_index)
            raise
        finally:
            over.set()

    async def _messages(self, first: int, parts: Sequence[Tensor], over: asyncio.Event) -> AsyncIterator[Any]:
        for index, part in enumerate(parts):
            if over.is_set():
                return
            weight = self._sending.weights[first + index]
            message = averaging_pb2.AveragingData(weight=weight)
            if index == 0:
                message.code, message.group_id = averaging_pb2.PART_FOR_AVERAGING, self.group_id
            if weight > 0:
                codec = self._sending.codec_of(first + index, self._sending.codec)
                message.tensor_part.CopyFrom(_written(part, codec))
                self._bytes[first + index] = len(message.tensor_part.buffer)
                self._up += self._bytes[first + index]
            yield message

    def _take(self, peer_index: int, index: int, values: Tensor, counts: tuple[int, int], *, counted: bool) -> None:
        number = self._first[peer_index] + index
        self._counts[number], self._mine[number] = counts, counted
        self.tensor_part_container.register_processed_part(peer_index, index, values)

    # As a reducer.

    async def rpc_aggregate_part(self, stream: AsyncIterator[Any], context: P2PContext) -> AsyncIterator[Any]:
        """Take a sender's parts, and give it the averages of all."""
        sender = context.remote_id
        request = await anext(stream)
        reason = self._check_reasons_to_reject(request, context)
        # Who has called already would be counted twice, in the place of somebody who is slower.
        if reason is not None or request.code != averaging_pb2.PART_FOR_AVERAGING or sender in self.active_senders:
            yield reason or averaging_pb2.AveragingData(code=averaging_pb2.PROTOCOL_VIOLATION)
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
            for index, future in enumerate(self._averages):
                average = await asyncio.shield(future)  # others wait for it too
                yield averaging_pb2.AveragingData(
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
        sender_index = self.sender_peer_ids.index(sender)
        clock, waited, taken = asyncio.get_running_loop().time, 1e-6, 0
        coming: asyncio.Future[Any] | None = None
        try:
            with suppress(BannedException, StopAsyncIteration):  # late from the start, or gone
                for index, own in enumerate(self.parts_for_local_averaging):
                    began, coming = clock(), asyncio.ensure_future(anext(stream))
                    await asyncio.wait({coming}, timeout=max(0.0, self.sender_timeout - waited))
                    if not coming.done():
                        break
                    message = coming.result()
                    waited += clock() - began
                    self._down += len(message.tensor_part.buffer)
                    self.received[str(sender)] = self.received.get(str(sender), 0) + len(message.tensor_part.buffer)
                    weight = message.weight if 0.0 < message.weight < math.inf else 0.0
                    part = _read_if_possible(message.tensor_part, own.numel()) if weight else torch.zeros_like(own)
                    if weight:
                        arrived[index] = waited
                    await self._reduce(sender_index, index, part, weight)
                    taken += 1
            if taken < len(self.parts_for_local_averaging):
                await self._ban_sender(sender)
            over.set()
            # What still comes is read, or libp2p's side would wait for ever for somebody to do so.
            with suppress(Exception):
                if coming is not None:
                    await coming
                async for _ in stream:
                    pass
        finally:
            over.set()
            if coming is not None:
                coming.cancel()
            if taken < len(self.parts_for_local_averaging):
                await self._ban_sender(sender)

    async def _reduce(self, sender_index: int, index: int, part: Tensor, weight: float) -> _Average:
        """Add a part, and wait for its average."""
        if self.sender_peer_ids[sender_index] in self.banned_senders:
            raise BannedException(f"sender {sender_index} is left out")
        counter = self._counted if weight > 0 else self._left_out
        counter[index] += 1
        averaged = await self.tensor_part_reducer.accumulate_part(sender_index, index, part, weight=weight)
        future = self._averages[index]
        if not future.done():  # the first of those that have waited for it
            future.set_result(self._coded(index, averaged))
        return future.result()

    def _coded(self, index: int, averaged: Tensor) -> _Average:
        counts = (self._counted[index], len(self.sender_peer_ids) - self._left_out[index])
        if counts[0] == 0:
            return _Average(runtime_pb2.Tensor(), torch.zeros_like(averaged), counts)
        sending = self._sending
        others = len(self.active_senders - {self.peer_id})
        message = _written(averaged, sending.codec_of(self._own_first + index, sending.codec_back))
        self._up += len(message.buffer) * others  # they fetch it while this peer goes on
        return _Average(message, _read(message, averaged.numel()), counts)

    async def _ban_sender(self, peer_id: PeerID) -> None:
        await super()._ban_sender(peer_id)
        if len(self.banned_senders) == len(self.sender_peer_ids):  # of an anchor, which sends nothing itself
            for index, future in enumerate(self._averages):
                if not future.done():
                    future.set_result(self._coded(index, torch.zeros(0)))
            self.tensor_part_reducer.finalize()

    def finalize(self, *, cancel: bool = False, exception: BaseException | None = None) -> None:
        """End it; who still waits for an average is told that there is none."""
        super().finalize(cancel=cancel, exception=exception)
        for future in self._averages:
            future.cancel()


def _written(part: Tensor, codec: Codec) -> Any:
    return runtime_pb2.Tensor(dtype=codec, buffer=encode(part, codec))


def _read(message: Any, values: int) -> Tensor:
    return decode(message.buffer, message.dtype, values)


def _read_if_possible(message: Any, values: int) -> Tensor:
    """Of what is not as agreed nothing: the screen drops whoever has sent it, and says so."""
    try:
        return _read(message, values)
    except ValueError:
        return torch.zeros(0)
