"""Exchange of a group: send, reduce, take the averages.

It overrides hivemind's all-reduce; `trainkit.swarm.network.averager` decides who may take part.
"""

import asyncio
import math
import statistics
import struct
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import compress
from typing import Any, AsyncIterator, NamedTuple  # noqa: UP035 - by it hivemind tells streams from messages

import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import AllreduceException, BannedException
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.proto.averaging_pb2 import AveragingData
from hivemind.utils.asyncio import achain, aiter_with_timeout, anext, as_aiter
from torch import Tensor

from trainkit.swarm.protocol.codecs import LEVELS, PART, Codec, decode, encode
from trainkit.swarm.protocol.outer_step import ExchangeOutcome
from trainkit.swarm.trust.screening import KnownSenders, Screen


def shares(bandwidths: Sequence[float | None], reduces: Sequence[bool]) -> tuple[float, ...]:
    """Return how much of the vector each peer reduces: in proportion to its bandwidth, the median where it is not
    known.

    Raises ValueError if nobody reduces.
    """
    usual = statistics.median([*filter(None, compress(bandwidths, reduces))] or [1.0])
    usable = list[float]()
    for rate, is_reducer in zip(bandwidths, reduces, strict=True):
        known = usual if rate is None else rate
        usable.append(known * is_reducer)
    if not any(usable):
        raise ValueError("nobody in the group can average")
    return tuple(value / sum(usable) for value in usable)


@dataclass(frozen=True)
class Sending:
    """Terms of a peer's part in an exchange, besides the vector."""

    weights: Sequence[float]
    """Weight of each part; 0 leaves it out."""
    codec: Codec
    """Codec of this peer's parts."""
    codec_back: Codec
    """Codec of the averages; the same on all peers."""
    delicate: int
    """Values from here on (BatchNorm's statistics) are never coarser than fp16."""

    def codec_of(self, part: int, values: int, codec: Codec) -> Codec:
        """The codec of a part of so many values, where ``codec`` is that of most."""
        if codec in LEVELS and part * PART + values > self.delicate:
            return "fp16"
        return codec


class Averaged(NamedTuple):
    """Result of an exchange, by the averager's process; the average itself is in shared memory."""

    rates: dict[str, float]
    """Peer id -> samples per second, by its own word, of every member of the group."""
    drifted: bool
    """This peer has other weights than the owner's side."""
    outcome: ExchangeOutcome


# In an answer: how many contributions are in the average, and how many were announced.
_COUNTS = struct.Struct("<HH")


class _Average(NamedTuple):
    """A part as it goes back to everybody."""

    message: Any
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
            own_parts: this peer's own, as views of the whole vector, which become the averages.
            write: a part's index and average as a message.
        """
        self._own = own_parts
        self._senders = set(range(senders))
        self._screen = screen
        self._write = write
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
        self._index = index
        self._left_out = 0
        self._missing = self._senders - self._failed
        self._arrived: dict[int, Tensor] = {}
        self._weights: dict[int, float] = {}
        if index == len(self._own):
            self.finished.set()

    def _check(self) -> None:
        """Average as soon as nobody is missing."""
        while not (self._missing or self.finished.is_set()):
            own = self._own[self._index]
            counts = (len(self._arrived), len(self._senders) - self._left_out)
            message = runtime_pb2.Tensor()
            if self._arrived:
                averaged = self._screen.average(int(own.storage_offset()), self._arrived, self._weights, own)
                message = self._write(self._index, averaged)
                own.copy_(read_part(message, own.numel()))
            else:
                own.zero_()
            self.averages[self._index].set_result(_Average(message, counts))
            self._next(self._index + 1)


class Exchange(AllReduceRunner):  # type: ignore[misc]
    """One exchange of a group: send, reduce, take the averages; whoever is late is left out.

    hivemind's butterfly all-reduce, with these differences:

    - The average itself goes back, written once, and everybody uses what was written, the reducer too. So all peers
      get the very same bits (hivemind sends every peer its own difference from the average, rounded).
    - A sender may leave parts out (weight 0, no bytes) and gets their averages all the same.
    - A sender for whose parts the others have waited ``sender_timeout`` seconds in total is left out of the rest. It
      too gets every average, and is told which of its parts are in them.
    - The vector itself becomes the average, part by part, where hivemind makes two more. Of one that fails, too.
    - Everything is counted.
    """

    def __init__(self, *, sending: Sending, limits: KnownSenders, **runner: Any) -> None:
        super().__init__(**runner)
        self.tensor_part_container.return_deltas = False
        self.tensor_part_container.iterate_output_tensors = self._all_parts
        self._sending = sending
        senders = list(map(str, self.sender_peer_ids))
        self.screen = Screen(senders, limits, sending.delicate)
        by_peer = self.tensor_part_container.num_parts_by_peer
        own_parts = self.parts_for_local_averaging
        self.tensor_part_reducer = _Reducer(own_parts, len(senders), self.screen, self._write_average)
        self._first = [sum(by_peer[:index]) for index in range(len(by_peer))]
        self._own_first = self._first[self.ordered_peer_ids.index(self.peer_id)]
        self._parts = [(0, len(senders), False)] * sum(by_peer)
        """For each: how many contributions are in its average, how many were announced, and whether this peer's is in
        it."""
        self._bytes = [0] * sum(by_peer)
        self._waited: dict[PeerID, float] = {}
        self._up = self._down = self._timed = 0
        self.received = Counter[str]()
        """Received as a reducer: sender's id -> bytes of its parts that have arrived here."""

    def outcome(self) -> ExchangeOutcome:
        """Return what the exchange came to, once it is over."""
        by_peer = zip(self.ordered_peer_ids, self.tensor_part_container.num_parts_by_peer, strict=True)
        received, expected, counted = zip(*self._parts, strict=True)
        return ExchangeOutcome(
            received=received, expected=expected, counted=counted,
            reducers=tuple(str(peer) for peer, parts in by_peer for _ in range(parts)),
            late=tuple(sorted(map(str, self.banned_senders))), bytes_up=self._up, bytes_down=self._down,
            timed_bytes=self._timed, timed_seconds=max(self._waited.values(), default=0.0),
        )  # fmt: skip

    # As a sender.

    async def _communicate_with_peer(self, peer_id: PeerID) -> None:
        peer_index = self.ordered_peer_ids.index(peer_id)
        first = self._first[peer_index]
        if peer_id == self.peer_id:
            sender = self.sender_peer_ids.index(peer_id)
            for index, part in enumerate(self.parts_for_local_averaging):
                weight = self._sending.weights[first + index]
                average = await self.tensor_part_reducer.add(sender, part, weight)
                self._take(peer_index, index, part, average.counts, counted=weight > 0)
            return
        parts = self.tensor_part_container.get_raw_input_parts(peer_index)
        over = asyncio.Event()
        try:
            stream = await self._get_peer_stub(peer_id).rpc_aggregate_part(self._messages(first, parts, over))
            answers = aiter_with_timeout(stream, self.reducer_timeout)
            for index, part in enumerate(parts):
                answer = await anext(answers)
                counts = _COUNTS.unpack(answer.group_id)  # which a refusal has not
                if counts[0]:
                    part.copy_(read_part(answer.tensor_part, part.numel()))
                self._down += len(answer.tensor_part.buffer)
                if answer.weight > 0:
                    self._waited[peer_id] = answer.weight
                    self._timed += self._bytes[first + index] if index else 0
                elif self._sending.weights[first + index] > 0:
                    over.set()  # left out: what has not been sent would be for nothing
                self._take(peer_index, index, part, counts, counted=answer.weight > 0)
        except BaseException:
            self.tensor_part_container.register_failed_reducer(peer_index)
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
                message.code = averaging_pb2.PART_FOR_AVERAGING
                message.group_id = self.group_id
            if weight > 0:
                codec = self._sending.codec_of(place, part.numel(), self._sending.codec)
                message.tensor_part.CopyFrom(written_part(part, codec))
                self._bytes[place] = len(message.tensor_part.buffer)
                self._up += self._bytes[place]
            yield message

    def _take(self, peer_index: int, index: int, part: Tensor, counts: tuple[int, int], *, counted: bool) -> None:
        self._parts[self._first[peer_index] + index] = (*counts, counted)
        self.tensor_part_container.register_processed_part(peer_index, index, part)

    async def _all_parts(self) -> AsyncIterator[Tensor]:
        """Wait until all averages are there, in the vector itself."""
        container = self.tensor_part_container
        for peer_index, number in enumerate(container.num_parts_by_peer):
            while container._outputs_registered_by_peer[peer_index] < number:
                container._output_part_available[peer_index].clear()
                await container._output_part_available[peer_index].wait()
                if container.finished.is_set():
                    raise AllreduceException("It was ended.")
        for tensor in container.local_tensors:
            yield tensor

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
                    code=averaging_pb2.AVERAGED_PART, group_id=_COUNTS.pack(*average.counts),
                    tensor_part=average.message, weight=arrived.get(index, 0.0),
                )  # fmt: skip
        finally:
            taking.cancel()

    async def _take_from(
        self, sender: PeerID, stream: AsyncIterator[Any], arrived: dict[int, float], over: asyncio.Event
    ) -> None:
        """Reduce what comes from ``sender``; ``arrived``: part -> seconds that it has been waited for until then.

        While others are waited for its next parts arrive unseen, so that this time is not its own.
        """
        name = str(sender)
        place = self.sender_peer_ids.index(sender)
        clock = asyncio.get_running_loop().time
        waited = 1e-6
        taken = 0
        coming: asyncio.Future[Any] = asyncio.Future()
        try:
            try:
                with suppress(BannedException, StopAsyncIteration):  # late from the start, or gone
                    for index, own in enumerate(self.parts_for_local_averaging):
                        began = clock()
                        coming = asyncio.ensure_future(anext(stream))
                        await asyncio.wait({coming}, timeout=max(0.0, self.sender_timeout - waited))
                        if not coming.done():
                            break
                        message = coming.result()
                        waited += clock() - began
                        self._down += len(message.tensor_part.buffer)
                        self.received[name] += len(message.tensor_part.buffer)
                        part = torch.zeros(0)  # of nothing the screen drops the sender, and says so
                        has_weight = 0.0 < message.weight < math.inf
                        if has_weight:
                            arrived[index] = waited
                            with suppress(ValueError):
                                part = read_part(message.tensor_part, own.numel())
                        await self.tensor_part_reducer.add(place, part, message.weight if has_weight else 0.0)
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
        codec = self._sending.codec_of(self._own_first + index, averaged.numel(), self._sending.codec_back)
        message = written_part(averaged, codec)
        # The others fetch it while this peer goes on.
        self._up += len(message.buffer) * len(self.active_senders - {self.peer_id})
        return message


def written_part(part: Tensor, codec: Codec) -> Any:
    """A part as a message."""
    return runtime_pb2.Tensor(dtype=codec, buffer=encode(part, codec))


def read_part(message: Any, values: int) -> Tensor:
    """The ``values`` numbers of a part. Raises ValueError for anything else."""
    return decode(message.buffer, message.dtype, values)
