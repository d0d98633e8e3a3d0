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
from collections import Counter
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import msgpack
import numpy as np
import torch
from hivemind.averaging.allreduce import AllReduceRunner
from hivemind.averaging.partition import AllreduceException, BannedException, TensorPartReducer
from hivemind.p2p import P2P, P2PContext, PeerID
from hivemind.proto import averaging_pb2, runtime_pb2
from hivemind.utils.asyncio import achain, aiter_with_timeout, anext, as_aiter
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor
from torch.nn.functional import pad

from trainkit.swarm.link import BLOCK, CODECS, Codec, Sending, cuts, encoded_bytes
from trainkit.swarm.robust import Limits, Screen

# What an exchange came to, for one peer of the group.


@dataclass(frozen=True)
class Outcome:
    """What an exchange came to, for one peer of the group. One entry a part, in the order of the vector."""

    received: tuple[int, ...]
    """Contributions in the average that has arrived here; 0: none has, and the vector holds this peer's own part."""
    expected: tuple[int, ...]
    """Contributions that peers had announced."""
    counted: tuple[bool, ...]
    """This peer's own part is in the average."""
    reducers: tuple[str, ...]
    """Id of the peer that has averaged it."""
    late: tuple[str, ...]
    """Ids of the peers that were left out here, with what they had not sent in time."""
    bytes_up: int
    bytes_down: int
    """Of the parts, sent and received, as a sender and as a reducer. Not counted: what TCP and libp2p add, the search
    for a group, the DHT, and the state for newcomers."""
    timed_bytes: int
    """Bytes of this peer's own parts that were counted, without the first that a reducer got."""
    timed_seconds: float
    """How long a reducer waited for those; of several the longest."""

    def arrived_from(self) -> tuple[str, ...]:
        """Who has averaged each part; empty where no average has arrived."""
        return tuple(peer if count else "" for peer, count in zip(self.reducers, self.received, strict=True))

    def refusing(self, peers: Collection[str], average: Tensor, own: Tensor) -> Outcome:
        """As if the averages of these peers had not arrived: there ``average`` becomes this peer's ``own`` again."""
        for part, peer in zip(cuts(average.numel()), self.reducers, strict=True):
            if peer in peers:
                average[part] = own[part]
        out = [peer in peers for peer in self.reducers]
        received = tuple(0 if gone else count for gone, count in zip(out, self.received, strict=True))
        counted = tuple(is_in and not gone for gone, is_in in zip(out, self.counted, strict=True))
        return replace(self, received=received, counted=counted)

    def in_short(self) -> dict[str, Any]:
        """What a round's record says of it."""
        return {
            "parts": sum(self.received),
            "expected": sum(self.expected),
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "late": self.late,
        }


# How a part of a vector is written for the way to another peer: none, fp16, or 8 bit.
#
# hivemind's 8 bit codecs have one codebook for half a million values, in which layers of different scale spoil each
# other (an error of 11 to 39 % of the vector's length; here 1.2 %, in a third of the time), and which numpy 2.4
# cannot read back. Here every 512 values have a scale of their own, as in block-wise quantization (Dettmers et al.,
# arXiv 2110.02861), which costs 0.8 % more bytes. What comes from others is never larger than the part that is
# expected, and its bytes are only ever taken for numbers.

_LARGEST_HALF = float(torch.finfo(torch.float16).max)


def encode(part: Tensor, codec: Codec) -> bytes:
    """``part``, a flat float32 vector on the CPU. Equal parts give equal bytes."""
    if codec == "8bit":
        blocks = pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True) / 127.0
        # A block of zeros has scale 0: divided by the smallest number there is, it stays zero.
        levels = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        return bytes(scales.numpy().tobytes() + levels.view(-1)[: part.numel()].numpy().tobytes())
    exact = part.clamp(-_LARGEST_HALF, _LARGEST_HALF).half() if codec == "fp16" else part
    return bytes(exact.numpy().tobytes())


def decode(data: bytes, codec: str, values: int) -> Tensor:
    """The ``values`` numbers in ``data``, as float32.

    Raises ValueError when there is no such codec, or there is another number of them.
    """
    if codec not in CODECS:
        raise ValueError("unknown codec")
    if len(data) != encoded_bytes(values, codec):
        raise ValueError(f"{len(data)} bytes instead of {encoded_bytes(values, codec)}")
    if codec == "8bit":
        blocks = -(-values // BLOCK)
        scales = _numbers(data[: 4 * blocks], np.float32)
        levels = pad(_numbers(data[4 * blocks :], np.int8).float(), (0, -values % BLOCK)).view(-1, BLOCK)
        return (levels * scales[:, None]).view(-1)[:values].clone()
    return _numbers(data, np.float16 if codec == "fp16" else np.float32).float()


def _numbers(data: bytes, kind: type[np.generic]) -> Tensor:
    return torch.from_numpy(np.frombuffer(data, dtype=kind).copy())


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


# hivemind's all-reduce with a reducer that screens what it is sent before it averages.


class ScreeningReducer(TensorPartReducer):  # type: ignore[misc]
    """Keeps what the senders have sent of a part until all of it is there, and averages what passes the screen."""

    def __init__(self, own_parts: Sequence[Tensor], num_senders: int, screen: Screen) -> None:
        """
        Args:
            own_parts: this peer's own, as views of the whole vector.
        """
        self._own, self._screen = own_parts, screen
        self._arrived: dict[int, Tensor] = {}
        self._weights: dict[int, float] = {}
        super().__init__(tuple(part.shape for part in own_parts), num_senders)

    async def accumulate_part(
        self, sender_index: int, part_index: int, tensor_part: Tensor, weight: float = 1.0
    ) -> Tensor:
        """Take a part, wait for the others' of it, return the average."""
        # hivemind says so by assertions, which would take a sender's mistake for ours.
        if not (0 <= sender_index < self.num_senders and 0 <= part_index < self.num_parts):
            raise BannedException(f"sender {sender_index} has sent a part {part_index} that does not exist")
        self.num_parts_received[sender_index] += 1
        while part_index > self.current_part_index:
            finished = asyncio.ensure_future(self.finished.wait())
            await asyncio.wait({self.current_part_future, finished}, return_when=asyncio.FIRST_COMPLETED)
            finished.cancel()
            if self.finished.is_set():
                raise AllreduceException("the averaging is over")
        if self.sender_failed_after[sender_index] != float("inf"):
            raise BannedException(f"sender {sender_index} has failed before")
        future = self.current_part_future
        # Kept as it is, whatever it is: it counts as arrived, or the others would wait for a sender that lies. Without
        # weight the sender has left it out, see `exchange`: there is nothing to judge.
        if weight != 0.0:
            self._arrived[sender_index], self._weights[sender_index] = tensor_part, weight
        self.current_part_accumulated_from += 1
        self.check_current_part_finished()
        average: Tensor = await future
        return average

    def check_current_part_finished(self) -> None:
        """Average as soon as nobody is missing."""
        if self.current_part_accumulated_from == self.num_current_senders:
            own = self._own[self.current_part_index]
            average = torch.zeros_like(own)
            if self._arrived:
                average = self._screen.average(int(own.storage_offset()), self._arrived, self._weights, own)
            self._arrived, self._weights = {}, {}
            self.current_part_future.set_result(average)
            self.reset_accumulators()


def install_screen(runner: AllReduceRunner, limits: Limits, num_parameters: int) -> Screen:
    """Let this peer's part of the vector in an all-reduce, that has not begun, be averaged by a `ScreeningReducer`."""
    screen = Screen([str(peer) for peer in runner.sender_peer_ids], limits, num_parameters)
    runner.tensor_part_reducer = ScreeningReducer(runner.parts_for_local_averaging, len(runner.sender_peer_ids), screen)
    return screen


# What a peer tells its group before they average, read as from a stranger.
#
# hivemind takes it as it comes: one peer that sends garbage ends the round for all, in every round.

# What is known today takes 1.2 kB.
_LONGEST = 4096
Mode = Literal[0, 1, 2]
NODE: Mode = 0
CLIENT: Mode = 1
AUX: Mode = 2
"""hivemind's ``AveragingMode``: averages for others and trains; only trains; only averages for others."""

Rate = Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)]


class About(BaseModel):
    """What a peer says about itself; fields of later versions are passed over."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    rate: Rate = 0.0
    """Samples per second in this round."""
    shares: bool = False
    """Gives away its state."""
    probe: Annotated[bytes, Field(max_length=1024)] = b""


@dataclass(frozen=True)
class Gathered:
    """What hivemind needs of a peer, and what the peer says."""

    bandwidth: float | None
    mode: Mode
    about: About


NOTHING = Gathered(None, CLIENT, About())
"""Of who sends garbage: a peer of which nothing is wanted."""


def read_gathered(data: bytes) -> Gathered | None:
    """What ``data`` says; None if it is not what a peer of ours sends."""
    if len(data) > _LONGEST:
        return None
    try:
        bandwidth, mode, about = _unpacked(data)
        if bandwidth is not None and not (isinstance(bandwidth, int | float) and 0.0 <= bandwidth <= 1e12):
            return None
        if type(mode) is not int or mode not in (NODE, CLIENT, AUX):
            return None
        return Gathered(bandwidth, mode, About.model_validate(_unpacked(about)))
    except (ValueError, TypeError, ValidationError, msgpack.UnpackException, RecursionError):
        return None


def _unpacked(data: bytes) -> Any:
    """MessagePack's plain types only: hivemind's serializer also makes objects of its own from it."""
    return msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0)


# How much the averager's process takes of a call: who may open how many, how long they may be silent, and say at
# once.
#
# hivemind's streams wait for ever for the first word, for the rest of a message, and for somebody to read the
# answers; and they make room for a message of whatever length its first eight bytes announce. All that before anybody
# is asked who they are, so that it is open to whoever reaches the port.

# Of one peer at once. An honest one looks for a group, sends its parts and fetches a state; and may do so anew while
# what it has given up is still being closed.
MOST_CALLS = 8
# A part is 256 kB, the list of a full group 1 MB.
LONGEST_MESSAGE = 1 << 21
FIRST_SECONDS = 10.0
# For the rest of a message that has begun, and for the other side to take an answer: 8 kB/s for the longest part.
REST_SECONDS = 30.0


def bound_calls() -> None:
    """Call it in the averager's process before it listens."""
    add = P2P.add_binary_stream_handler
    calls: Counter[str] = Counter()

    async def add_bounded(self: Any, name: str, handler: Any, balanced: bool = False) -> None:
        async def bounded(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = str(info.peer_id)
            if calls[peer] >= MOST_CALLS:
                writer.close()
                return
            calls[peer] += 1
            try:
                await handler(info, Reader(reader), Writer(writer))
            finally:
                calls[peer] -= 1
                if not calls[peer]:
                    del calls[peer]

        await add(self, name, bounded, balanced=balanced)

    P2P.add_binary_stream_handler = add_bounded


class Reader:
    """What hivemind uses of a stream's reader. To it whoever says too much or too little has hung up."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader, self._limit = reader, FIRST_SECONDS

    async def readexactly(self, size: int) -> bytes:
        """As asyncio's: a message's mark (one byte), its length (eight), or the message."""
        if size > LONGEST_MESSAGE:
            raise asyncio.IncompleteReadError(b"", size)
        # Between messages there may be silence, as long as a search for a group lasts.
        limit = None if size == 1 and self._limit == REST_SECONDS else self._limit
        try:
            found = await asyncio.wait_for(self._reader.readexactly(size), limit)
        except asyncio.TimeoutError:
            raise asyncio.IncompleteReadError(b"", size) from None
        self._limit = REST_SECONDS
        return found


class Writer:
    """What hivemind uses of a stream's writer."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def write(self, data: bytes) -> None:
        """As asyncio's."""
        self._writer.write(data)

    async def drain(self) -> None:
        """Raises TimeoutError when nobody takes what was written."""
        await asyncio.wait_for(self._writer.drain(), REST_SECONDS)

    def close(self) -> None:
        """As asyncio's."""
        self._writer.close()
