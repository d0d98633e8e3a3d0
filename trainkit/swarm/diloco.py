"""What the peers of a run have in common, how it is cut and written, and how they agree on it.

All peers cut the vector that they average into the same parts. A part arrives or does not; a peer with a slow link
sends some parts in one round and others in the next.

They agree by DiLoCo (arXiv 2311.08105): every peer trains on its own for a round, then they average what was learned.

A peer's *pseudo-gradient* is how far its weights have moved in a round, against their direction. The peers average
theirs, weighted by samples, and each makes the same step of SGD with Nesterov momentum from the weights that they had
in common.

Two things may be late, and neither stops anybody (compare the overlapped and the partial exchanges of Streaming DiLoCo,
arXiv 2501.18512, and eager updates, arXiv 2502.12996):

- The average of a round may arrive while the next round is being trained. The common weights then step as they would
  have, from the same numbers on every peer; and the model, which has moved on from where the round ended, is moved by
  the difference: its own contribution is taken back, the common step is added, what it has learned since stays.
- A contribution may be left out, whole or in parts: for want of a group, of time, or of bandwidth. The model follows
  the common step and keeps what it has learned besides, so that this becomes part of a later contribution. After k
  rounds that is a sum of k moves, each made close to the common weights of its time, because the model has followed
  them; it enters as their mean, with the samples of all k rounds as its weight, and so is no longer than others'.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

Codec = Literal["none", "fp16", "8bit", "4bit"]

CODECS: tuple[Codec, ...] = ("none", "fp16", "8bit", "4bit")
"""From the finest to the coarsest."""
PART = 1 << 16
"""Values in a part. All peers cut the vector alike, whatever codec they use."""
BLOCK = 512
"""Values that share one scale, in 8 and 4 bit."""
LEVELS = {"8bit": 127, "4bit": 7}
"""A value is one of so many steps on each side of zero."""
_LARGEST_HALF = float(torch.finfo(torch.float16).max)


def num_parts(values: int) -> int:
    """Parts of a vector of ``values`` numbers."""
    return -(-values // PART)


def cuts(values: int) -> Iterator[slice]:
    """Where the parts are, in order."""
    return (slice(first, min(first + PART, values)) for first in range(0, values, PART))


def halves(part: slice, size: int) -> tuple[slice, slice]:
    """What lies before position ``size`` of a part, and what from there on; either may be empty."""
    return slice(part.start, min(part.stop, size)), slice(max(part.start, size), part.stop)


def encoded_bytes(values: int, codec: Codec) -> int:
    """Bytes of ``values`` numbers."""
    if codec in LEVELS:
        return (values if codec == "8bit" else -(-values // 2)) + 4 * -(-values // BLOCK)
    return values * (2 if codec == "fp16" else 4)


# hivemind's 8 bit codecs have one codebook for half a million values, in which layers of different scale spoil each
# other (an error of 11 to 39 % of the vector's length; here 1.2 %, in a third of the time), and which numpy 2.4
# cannot read back. Here every 512 values have their own scale, as in block-wise quantization (Dettmers et al.,
# arXiv 2110.02861), which costs 0.8 % more bytes. In 4 bit the error is 14 %: see `diloco.OuterState.give`.


def encode(part: Tensor, codec: Codec) -> bytes:
    """``part``, a flat float32 vector on the CPU. Equal parts give equal bytes."""
    if most := LEVELS.get(codec):
        blocks = pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True) / most
        # A block of zeros has scale 0: divided by the smallest number there is, it stays zero.
        levels = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        levels = levels.view(-1)[: part.numel()]
        if codec == "4bit":
            pairs = pad(levels + most, (0, levels.numel() % 2)).view(-1, 2).view(torch.uint8)
            levels = pairs[:, 0] * 16 + pairs[:, 1]
        return bytes(scales.numpy().tobytes() + levels.numpy().tobytes())
    exact = part.clamp(-_LARGEST_HALF, _LARGEST_HALF).half() if codec == "fp16" else part
    return bytes(exact.numpy().tobytes())


def decode(data: bytes, codec: str, values: int) -> Tensor:
    """The ``values`` numbers in ``data``, as float32. The bytes come from others and are only ever read as numbers.

    Raises ValueError for an unknown codec and for another number of values.
    """
    if codec not in CODECS:
        raise ValueError("unknown codec")
    if len(data) != encoded_bytes(values, codec):
        raise ValueError(f"{len(data)} bytes instead of {encoded_bytes(values, codec)}")
    if codec not in LEVELS:
        return torch.from_numpy(np.frombuffer(data, np.float16 if codec == "fp16" else np.float32).copy()).float()
    blocks = -(-values // BLOCK)
    scales = torch.from_numpy(np.frombuffer(data, np.float32, blocks).copy())
    read = np.frombuffer(data, np.int8 if codec == "8bit" else np.uint8, offset=4 * blocks)
    if codec == "4bit":
        read = (np.stack([read >> 4, read & 15], axis=1).reshape(-1)[:values]).astype(np.int8) - LEVELS[codec]
    levels = torch.from_numpy(read.copy()).float()
    return (pad(levels, (0, -values % BLOCK)).view(-1, BLOCK) * scales[:, None]).view(-1)[:values].clone()


def rounded(part: Tensor) -> Tensor:
    """``part`` as it arrives in 4 bit, float32."""
    return decode(encode(part.float(), "4bit"), "4bit", part.numel())


def misrounded(told: Tensor, exact: Tensor) -> Tensor:
    """By how much each value of ``told``, a part, differs from what ``exact`` may become in 4 bit.

    A value halfway between two levels may become either: on another machine it is a little more, or less.
    """
    most = pad(exact, (0, -exact.numel() % BLOCK)).view(-1, BLOCK).abs().amax(dim=1).repeat_interleave(BLOCK)
    steps = (most[: exact.numel()] / LEVELS["4bit"]).clamp_min(torch.finfo(torch.float32).tiny)
    nearest = (told / steps).round() * steps
    return (told - nearest).abs() + ((exact - nearest).abs() - steps / 2).clamp_min(0.0)


@dataclass(frozen=True)
class Outcome:
    """What an exchange came to, for one peer of the group. One entry for each part, in the order of the vector."""

    received: tuple[int, ...] = ()
    """Contributions in the average that has arrived here; 0: none has, and the vector holds this peer's own part."""
    expected: tuple[int, ...] = ()
    """Contributions that peers had announced."""
    counted: tuple[bool, ...] = ()
    """This peer's own part is in the average."""
    reducers: tuple[str, ...] = ()
    """Id of the peer that has averaged the part."""
    late: tuple[str, ...] = ()
    """Ids of the peers that were left out here, with the parts that they had not sent in time."""
    bytes_up: int = 0
    bytes_down: int = 0
    """Of the parts, sent and received, as a sender and as a reducer. Not counted: what TCP and libp2p add, the search
    for a group, the DHT, and the state for newcomers."""
    timed_bytes: int = 0
    """Bytes of this peer's own parts that were counted, without the first that a reducer got."""
    timed_seconds: float = 0.0
    """How long a reducer waited for those parts; of several reducers the longest."""
    unfinished: bool = False
    """It was not over in time, and nothing is known of it."""

    @property
    def sources(self) -> set[str]:
        """Ids of the peers whose averages have arrived."""
        return {peer for peer, count in zip(self.reducers, self.received, strict=True) if count}

    def refusing(self, peers: Collection[str], average: Tensor, own: Tensor) -> Outcome:
        """As if the averages of these peers had not arrived: there ``average`` becomes this peer's ``own`` again."""
        received, counted = list(self.received), list(self.counted)
        for place, (part, peer) in enumerate(zip(cuts(average.numel()), self.reducers, strict=True)):
            if peer in peers:
                average[part] = own[part]
                received[place], counted[place] = 0, False
        return replace(self, received=tuple(received), counted=tuple(counted))


# Numbers that peers compare in each round, to see whether they still train the same model.
PROBE_SIZE = 256


@dataclass(frozen=True)
class Given:
    """What a peer puts into the exchange of a round."""

    vector: Tensor
    """Pseudo-gradients, the mean of what is in it; then buffers as they are."""
    weights: tuple[float, ...]
    """Samples behind each part; 0: there is nothing in it."""
    moved: Tensor
    """The way that the model has gone from the common weights, against its direction, as far as ``vector`` says it."""
    sound: bool
    """Otherwise nothing of it has a say, and the model starts anew from the common weights."""
    rest: Tensor = field(default_factory=lambda: torch.zeros(1))
    """What ``vector`` does not say of the way, see `OuterState.give`."""

    @property
    def usable(self) -> bool:
        """There is something to average."""
        return any(self.weights)


@dataclass(frozen=True)
class Average:
    """What the exchange of a round has come to for a peer."""

    vector: Tensor
    """Of what the peers gave."""
    next_round: int
    arrived: Sequence[bool]
    """Parts of ``vector`` that are there."""
    counted: Sequence[bool]
    """Parts of what this peer gave that are in an average."""


# Rounds that a contribution weighs at most: reducers do not believe everything.
_MOST_ROUNDS = 4


class OuterState:
    """Weights ``theta``, the ``momentum`` by which they move, and the number of the next round.

    Flat float32 vectors on the CPU. BatchNorm's running statistics, if any, lie behind the parameters in ``theta``;
    they are averaged as they are.
    """

    def __init__(self, model: nn.Module, *, lr: float, momentum: float) -> None:
        self.model, self.lr, self.mu = model, lr, momentum
        self.params = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.num_parameters = sum(parameter.numel() for parameter in self.params)
        self.lock = threading.Lock()  # hivemind reads the state from a thread of its own
        self.theta = flatten(self._tensors())
        self.momentum = torch.zeros(self.num_parameters)
        # Of each part: samples and rounds of this peer that are in no average yet.
        self._samples, self._rounds = [0.0] * num_parts(self.theta.numel()), [0] * num_parts(self.theta.numel())
        self.round = 0
        self.version = 0
        """Grows whenever the model is given other weights from here: copies of it are then out of date."""
        self.apart = -10
        """The last round in which this peer has gone another way than the others, who take over its state then."""
        self.before_change: Callable[[], None] = lambda: None
        """Called before the common weights change, and the model with them."""

    def give(self, samples: int, codec: Codec = "none") -> Given:
        """This peer's contribution to the round that ends now, in which it has trained on ``samples``.

        In 4 bit it is rounded here. The rest stays in the model, as a part that was left out does, and so it is in what
        is given in the next round (error feedback).
        """
        vector, size = flatten(self._tensors()), self.num_parameters
        if not torch.isfinite(vector).all():
            return self.nothing()
        moved = self.theta[:size] - vector[:size]
        if samples:
            self._samples = [held + samples for held in self._samples]
            self._rounds = [rounds + 1 for rounds in self._rounds]
        vector[:size] = moved
        rest = torch.zeros(size if codec == "4bit" else 1)
        for part, rounds in zip(cuts(vector.numel()), self._rounds, strict=True):
            own, times = halves(part, size)[0], max(1, rounds)
            vector[own] /= times
            if codec == "4bit" and own == part:  # with buffers in it a part is sent in fp16
                told = rounded(vector[part])
                rest[part] = (vector[part] - told) * times
                vector[part] = told
        shares = (min(1.0, _MOST_ROUNDS / max(1, rounds)) for rounds in self._rounds)
        weights = tuple(held * share for held, share in zip(self._samples, shares, strict=True))
        return Given(vector, weights, moved - rest, sound=True, rest=rest)

    def stepped(self, average: Average) -> tuple[Tensor, Tensor]:
        """Weights and momentum as the outer update makes them, which changes nothing here."""
        size, theta, momentum = self.num_parameters, self.theta.clone(), self.momentum.clone()
        for part, is_there in zip(cuts(theta.numel()), average.arrived, strict=True):
            if is_there:
                weights, buffers = halves(part, size)
                gradient, moving = average.vector[weights], momentum[weights]
                moving.mul_(self.mu).add_(gradient)
                theta[weights] -= self.lr * (gradient + self.mu * moving)
                theta[buffers] = average.vector[buffers]
        return theta, momentum

    def step(self, average: Average, given: Given, *, trained_on: bool = False) -> None:
        """The outer update, and the model goes on from it.

        Of parts that have not arrived the common weights stay as they are; what was not counted stays in the model,
        for a later round.
        """
        size, before, (theta, momentum) = self.num_parameters, self.theta.clone(), self.stepped(average)
        self.before_change()
        with self.lock:
            self.theta.copy_(theta)
            self.momentum.copy_(momentum)
            self.round = average.next_round
        taken = given.moved.clone()
        for number, (part, is_in) in enumerate(zip(cuts(size), average.counted, strict=False)):
            if is_in:
                self._samples[number], self._rounds[number] = 0.0, 0
            else:
                taken[part] = 0.0
        if not given.sound:
            self.forget()
        elif trained_on:
            self._move(self.theta[:size] - before[:size] + taken)
        else:
            self.into_model()
            if given.rest.any() or not all(average.counted):
                self._move(taken - given.moved - given.rest)

    def undo(self, moved: Tensor) -> None:
        """Take back by what somebody has moved averages: what came of it, and what momentum is still to make of it."""
        way, self.apart = self.lr / (1.0 - self.mu) * moved, self.round
        with self.lock:
            self.theta[: self.num_parameters] += way
        self._move(way)

    @torch.no_grad()
    def _move(self, way: Tensor) -> None:
        """Move the model's parameters; its running statistics follow by themselves."""
        for tensor, part in unflattened(way, self.params):
            tensor.add_(part.to(tensor.device, tensor.dtype))
        self.version += 1

    def forget(self) -> None:
        """Drop what is in no average yet: the model is as the peers have it in common."""
        self.before_change()
        self._samples, self._rounds = [0.0] * len(self._samples), [0] * len(self._samples)
        self.into_model()

    def nothing(self) -> Given:
        """What a peer puts into the exchange of a round that has come to no good, or was none."""
        moved = torch.zeros(self.num_parameters)
        weights = (0.0,) * num_parts(self.theta.numel())
        return Given(torch.cat([moved, self.theta[self.num_parameters :]]), weights, moved, sound=False)

    def probe(self) -> Tensor:
        """A few sums over all weights, alike on peers that have the same; other sums in each round, so that a
        peer that gives away other weights cannot know for long which differences stay unseen."""
        return probe_of(self.theta, self.round)

    @contextmanager
    def in_model(self, theta: Tensor | None = None) -> Iterator[None]:
        """The model as the peers have it in common, to validate or save it, or with ``theta`` in place of that;
        afterwards it is this peer's again."""
        own = [tensor.detach().clone() for tensor in self._tensors()]
        self.into_model(theta)
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, value in zip(self._tensors(), own, strict=True):
                    tensor.copy_(value)
            self.version += 1

    def copy(self) -> tuple[int, Tensor, Tensor]:
        """Round, weights and momentum as they were at one moment."""
        with self.lock:
            return self.round, self.theta.clone(), self.momentum.clone()

    @torch.no_grad()
    def into_model(self, theta: Tensor | None = None) -> None:
        """Copy the common weights into the model, or ``theta``."""
        for tensor, part in unflattened(self.theta if theta is None else theta, self._tensors()):
            tensor.copy_(part)
        self.version += 1

    def _tensors(self) -> list[Tensor]:
        # Asked anew each time: moving a model to a GPU keeps its parameters and replaces its buffers.
        return [*self.params, *(buffer for buffer in self.model.buffers() if buffer.is_floating_point())]

    def load(self, theta: Tensor, momentum: Tensor, round_index: int) -> None:
        """Go on from another peer's state, or from a checkpoint.

        Raises ValueError when it does not fit or is not finite.
        """
        if theta.shape != self.theta.shape or momentum.shape != self.momentum.shape:
            raise ValueError(f"it has {theta.numel()} weights instead of {self.theta.numel()}")
        if not (torch.isfinite(theta).all() and torch.isfinite(momentum).all()):
            raise ValueError("it is not finite")
        self.before_change()
        with self.lock:
            self.theta.copy_(theta)
            self.momentum.copy_(momentum)
            self.round = round_index
        self.forget()


def probe_of(theta: Tensor, seed: int, size: int = PROBE_SIZE) -> Tensor:
    """What `OuterState.probe` says of those weights in the round ``seed``; as long as they are, give or take."""
    rows, generator = -(-theta.numel() // size), torch.Generator().manual_seed(seed)
    signs = torch.randint(2, (rows,), generator=generator).float() * 2 - 1
    return pad(theta, (0, rows * size - theta.numel())).view(size, rows) @ signs


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One float32 vector on the CPU."""
    parts = [tensor.detach().float().reshape(-1) for tensor in tensors]
    return torch.cat(parts).cpu() if parts else torch.zeros(0)


def unflattened(vector: Tensor, like: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each of the tensors with its part of the vector, which is seen in its shape; the vector may go on behind them."""
    sizes = [tensor.numel() for tensor in like]
    parts = torch.split(vector[: sum(sizes)], sizes)
    return ((tensor, part.view_as(tensor)) for tensor, part in zip(like, parts, strict=True))
