"""Weights that the peers of a run have in common, and the step by which they agree on the next ones.

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

import mmap
import operator
import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from tempfile import TemporaryFile

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trainkit.swarm.protocol.codecs import Codec, cuts, halves, num_parts, rounded


@dataclass(frozen=True)
class ExchangeOutcome:
    """Outcome of an exchange for one peer of the group. One entry for each part, in the order of the vector."""

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
    """Bytes of the parts, sent and received, as a sender and as a reducer. Not counted: what TCP and libp2p add, the
    search for a group, the DHT, and the state for newcomers.
    """
    timed_bytes: int = 0
    """Bytes of this peer's own parts that were counted, without the first that a reducer got."""
    timed_seconds: float = 0.0
    """Time that a reducer waited for those parts; of several reducers the longest."""
    unfinished: bool = False
    """It was not over in time, and nothing is known of it."""

    @property
    def sources(self) -> set[str]:
        """Ids of the peers whose averages have arrived."""
        return {peer for peer, count in zip(self.reducers, self.received, strict=True) if count}

    def refusing(self, peers: Collection[str], average: Tensor, own: Tensor) -> ExchangeOutcome:
        """Return the outcome as if the averages of these peers had not arrived: there ``average`` becomes this peer's
        ``own`` again.
        """
        used = [peer not in peers for peer in self.reducers]
        for part, is_used in zip(cuts(average.numel()), used, strict=True):
            if not is_used:
                average[part] = own[part]
        received = tuple(map(operator.mul, self.received, used))
        return replace(self, received=received, counted=tuple(map(operator.and_, self.counted, used)))


# Numbers that peers compare in each round, to see whether they still train the same model.
PROBE_SIZE = 256


@dataclass(frozen=True)
class OwnPart:
    """Contribution of a peer to the exchange of a round."""

    vector: Tensor
    """Pseudo-gradients, the mean of what is in it; then buffers as they are."""
    weights: tuple[float, ...]
    """Samples behind each part; 0: there is nothing in it."""
    moved: Tensor
    """The way that the model has gone from the common weights, against its direction, as far as ``vector`` says it; a
    view of that where it is the same."""
    sound: bool
    """Otherwise nothing of it has a say, and the model starts anew from the common weights."""
    rest: Tensor = field(default_factory=lambda: torch.zeros(1))
    """Rest of the way that ``vector`` does not say, see `OuterState.give`."""

    @property
    def usable(self) -> bool:
        """There is something to average."""
        return any(self.weights)


@dataclass(frozen=True)
class Average:
    """Average that the exchange of a round has come to for a peer."""

    vector: Tensor
    """Average of what the peers gave."""
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
        self.model = model
        self.lr = lr
        self.mu = momentum
        self.params = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self.num_parameters = sum(parameter.numel() for parameter in self.params)
        self.lock = threading.RLock()  # hivemind reads the state from a thread of its own
        self.theta = flatten(self._tensors())
        self.momentum = torch.zeros(self.num_parameters)
        self._waiting = torch.zeros(num_parts(self.theta.numel()), 2, dtype=torch.float64)
        """For each part, the samples and rounds of this peer that are in no average yet."""
        self.round = 0
        self.changes = 0
        """Number of changes of the common weights so far."""
        self.version = 0
        """Grows whenever the model is given other weights from here: copies of it are then out of date."""
        self.apart = -10
        """The last round in which this peer has gone another way than the others, who take over its state then."""
        self.before_change: Callable[[], None] = lambda: None
        """Called before the common weights change, and the model with them."""

    def give(self, samples: int, codec: Codec = "none") -> OwnPart:
        """This peer's contribution to the round that ends now, in which it has trained on ``samples``.

        In 4 bit it is rounded here. The rest stays in the model, as a part that was left out does, and so it is in what
        is given in the next round (error feedback).
        """
        vector = flatten(self._tensors())
        size = self.num_parameters
        if not is_finite(vector):
            return self.nothing()
        moved = torch.sub(self.theta[:size], vector[:size], out=vector[:size])
        if samples:
            self._waiting += torch.tensor([samples, 1.0])
        held = self._waiting[:, 0]
        rounds = self._waiting[:, 1].clamp_min(1.0)
        if codec == "4bit" or rounds.max() > 1.0:
            moved = moved.clone()
        rest = torch.zeros(size if codec == "4bit" else 1)
        for part, times in zip(cuts(vector.numel()), rounds.tolist(), strict=True):
            own = halves(part, size)[0]
            vector[own] /= times
            if codec == "4bit" and own == part:  # with buffers in it a part is sent in fp16
                told = rounded(vector[part])
                rest[part] = (vector[part] - told) * times
                vector[part] = told
        weights = tuple((held * (_MOST_ROUNDS / rounds).clamp_max(1.0)).tolist())
        return OwnPart(vector, weights, moved.sub_(rest), sound=True, rest=rest)

    def stepped(self, average: Average) -> Tensor:
        """Weights as the outer update makes them, which changes nothing here."""
        theta = self.theta.clone()
        for part, is_there in zip(cuts(theta.numel()), average.arrived, strict=True):
            if is_there:
                moving = self.momentum[halves(part, self.num_parameters)[0]].clone()
                self._update(part, average.vector, theta, moving)
        return theta

    def step(self, average: Average, given: OwnPart, *, trained_on: bool = False) -> None:
        """The outer update, and the model goes on from it.

        Of parts that have not arrived the common weights stay as they are; what was not counted stays in the model,
        for a later round. All of it is done part by part: whole vectors would be six more copies of the weights.
        ``given`` is used up.
        """
        size = self.num_parameters
        way = given.moved
        parts = zip(cuts(self.theta.numel()), average.arrived, average.counted, strict=True)
        self.before_change()
        with self.lock:
            for number, (part, is_there, is_in) in enumerate(parts):
                own = halves(part, size)[0]
                before = self.theta[own].clone()
                if is_there:
                    self._update(part, average.vector, self.theta, self.momentum[own])
                moved = given.moved[own]
                taken = moved if is_in else torch.zeros_like(moved)
                if is_in and part.start < size:
                    self._waiting[number] = 0.0
                if trained_on:
                    way[own] = self.theta[own] - before + taken
                else:
                    way[own] = taken - moved - (given.rest[own] if given.rest.numel() == size else given.rest)
            self.round = average.next_round
            self.changes += 1
        if not given.sound:
            self.forget()
        elif trained_on:
            self._move(way)
        else:
            self.into_model()
            if given.rest.any() or not all(average.counted):
                self._move(way)

    def _update(self, part: slice, average: Tensor, theta: Tensor, moving: Tensor) -> None:
        """Make the outer update of a part of ``theta``; ``moving``: the momentum of its weights."""
        weights, buffers = halves(part, self.num_parameters)
        gradient = average[weights]
        moving.mul_(self.mu).add_(gradient)
        theta[weights] -= self.lr * (gradient + self.mu * moving)
        theta[buffers] = average[buffers]

    def undo(self, moved: Tensor) -> None:
        """Take back by what somebody has moved averages: what came of it, and what momentum is still to make of it."""
        way = self.lr / (1.0 - self.mu) * moved
        self.apart = self.round
        with self.lock:
            self.theta[: self.num_parameters] += way
            self.changes += 1
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
        self._waiting.zero_()
        self.into_model()

    def nothing(self) -> OwnPart:
        """Return what a peer puts into the exchange of a round that has come to no good, or was none."""
        moved = torch.zeros(self.num_parameters)
        weights = (0.0,) * num_parts(self.theta.numel())
        return OwnPart(torch.cat([moved, self.theta[self.num_parameters :]]), weights, moved, sound=False)

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

    def give_up(self) -> None:
        """Free all of it: a process that was forked would keep it as it was then."""
        for tensor in (*self.model.parameters(), *self.model.buffers(), self.theta, self.momentum):
            if tensor.untyped_storage().resizable():
                tensor.untyped_storage().resize_(0)

    def _tensors(self) -> list[Tensor]:
        # Asked anew each time: moving a model to a GPU keeps its parameters and replaces its buffers.
        return [*self.params, *(buffer for buffer in self.model.buffers() if buffer.is_floating_point())]

    def load(self, theta: Tensor, momentum: Tensor, round_index: int) -> None:
        """Go on from another peer's state, or from a checkpoint.

        Raises ValueError when it does not fit or is not finite.
        """
        if theta.shape != self.theta.shape or momentum.shape != self.momentum.shape:
            raise ValueError(f"it has {theta.numel()} weights instead of {self.theta.numel()}")
        if not (is_finite(theta) and is_finite(momentum)):
            raise ValueError("it is not finite")
        self._become(theta, momentum, round_index)
        self.forget()

    def _become(self, theta: Tensor, momentum: Tensor, round_index: int) -> None:
        self.before_change()
        with self.lock:
            self.theta.copy_(theta)
            self.momentum.copy_(momentum)
            self.round = round_index
            self.changes += 1


def probe_of(theta: Tensor, seed: int, size: int = PROBE_SIZE) -> Tensor:
    """Return what `OuterState.probe` says of those weights in the round ``seed``; as long as they are, give or take."""
    rows = -(-theta.numel() // size)
    signs = torch.randint(2, (rows,), generator=torch.Generator().manual_seed(seed)).float() * 2 - 1
    return pad(theta, (0, rows * size - theta.numel())).view(size, rows) @ signs


def is_finite(vector: Tensor) -> bool:
    """Return whether all of it is; part by part, for torch makes two more vectors to find that out."""
    return all(bool(torch.isfinite(vector[part]).all()) for part in cuts(vector.numel()))


# Smaller ones are no burden, and are looked at more often.
_WORTH_A_FILE = 1 << 24


def on_disk(size: int) -> mmap.mmap | bytearray:
    """So many bytes, zeros, in a file that has no name: they need no memory while nobody looks at them. In memory, if
    they are few or the disk is full."""
    if size >= _WORTH_A_FILE:
        with suppress(OSError), TemporaryFile() as file:
            os.posix_fallocate(file.fileno(), 0, size)  # else a disk that is full later would end this process
            return mmap.mmap(file.fileno(), size)
    return bytearray(size)


def drop(data: mmap.mmap | bytearray) -> None:
    """Leave what is `on_disk` to the disk until it is looked at again."""
    if isinstance(data, mmap.mmap):
        data.madvise(mmap.MADV_DONTNEED)


def put_away(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copies, which are `on_disk`."""
    starts = [0]
    for value in tensors.values():
        starts.append(starts[-1] + -(-value.nbytes // 64) * 64)
    data = on_disk(starts[-1])
    copies = dict[str, Tensor]()
    for start, (name, value) in zip(starts, tensors.items(), strict=False):
        copies[name] = torch.empty(value.shape, dtype=value.dtype)
        if value.numel():
            place = torch.frombuffer(data, dtype=value.dtype, count=value.numel(), offset=start)
            copies[name] = place.view(value.shape).copy_(value.detach())
    drop(data)
    return copies


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """One float32 vector on the CPU."""
    parts = [tensor.detach().float().reshape(-1) for tensor in tensors]
    return torch.cat(parts).cpu() if parts else torch.zeros(0)


def unflattened(vector: Tensor, like: Sequence[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
    """Each of the tensors with its part of the vector, which is seen in its shape; the vector may go on behind them."""
    first = 0
    for tensor in like:
        yield tensor, vector[first : first + tensor.numel()].view_as(tensor)
        first += tensor.numel()
