"""Accounts of peers, to which they commit themselves in each round: see `trainkit.swarm.trust.replay`.

It keeps *snapshots* of its model and optimizer, a few in each round, and tells of them by their digests in an *account*
of the round. Snapshots are those of proof-of-learning (Jia et al., arXiv 2103.05633), which has them checked where the
weights have moved most. So an account also says where each snapshot is, in a few random sums of it, which follow from
all digests: nobody can choose weights by them. Where it says that more has moved, there it is asked more often; whoever
moves unevenly is drawn more often; and who makes a leap look small must say of snapshots that they are elsewhere than
they are.
"""

import base64
import hashlib
import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from trainkit.checkpoint.state import moments_of, plain_name, unwrapped, weights_of
from trainkit.swarm.protocol.codecs import COARSE_PART, coarse, coarse_squares, cuts, exact, exact_squares
from trainkit.swarm.protocol.outer_step import OuterState, flatten, probe_of, put_away, unflattened
from trainkit.training.train_state import TrainState

# Between snapshots, in a round: at most, and of a large model at least; and bytes of those of a round.
_STRETCHES = 16
_LEAST_STRETCHES_KEPT = 4
_MOST_BYTES = 1 << 30
# The weight itself, and what AdamW remembers of it; other optimizers remember less.
VALUES_A_WEIGHT = 3
# Of a large model, of whose layers slices are summed, each time others: one part in so many.
_SLICES = 16
# Of a snapshot there are four times so many sums: of its weights, of what its optimizer remembers, of squares that it
# remembers, which are much smaller, and of the common weights that it goes on from. They say how far it is, give or
# take a fifth.
SUMS = 12
WEIGHTS = 0
MOMENTS = 1
THETA = 3
TINY = 1e-30
"""Nothing is divided by less."""


class Commitment(NamedTuple):
    """A snapshot as its owner commits itself to it."""

    position: Annotated[int, Field(ge=0, le=1 << 50)]
    """Updates before it."""
    base: Annotated[int, Field(ge=0, le=1 << 50)]
    """The common weights that the model goes on from are those before this round."""
    weights: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Digest."""
    moments: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Digest of what the optimizer remembers."""


def is_large(values: int) -> bool:
    """Return whether snapshots of a model with so many values are kept and shown in 8 bit, and summed in slices."""
    return 4 * VALUES_A_WEIGHT * values * (_STRETCHES + 2) > _MOST_BYTES


def snapshot_bytes(values: int) -> int:
    """Bytes of a snapshot, or of the weights of three."""
    return VALUES_A_WEIGHT * values * (1 if is_large(values) else 4)


def num_stretches(values: int) -> int:
    """Into how many a round is cut."""
    return max(_LEAST_STRETCHES_KEPT, min(_STRETCHES, _MOST_BYTES // snapshot_bytes(values) - 2))


def most_bytes(values: int) -> int:
    """Return what a peer may show at once: a snapshot, or the weights of three; and those that it has given."""
    return snapshot_bytes(values) * 4 // 3 + values // 32 + (1 << 22)


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


NO_MOMENTS = digest_of_tensors({})


@dataclass(frozen=True)
class Snapshot:
    link: Commitment
    weights: Mapping[str, Tensor]
    """For a large model, the change since ``theta``, in 8 bit, and all that is not trained."""
    moments: Mapping[str, Tensor]
    """In 8 bit for a large model."""
    theta: Tensor
    """The common weights that it goes on from, without buffers."""
    digests: bytes = b""
    """Digests of the weights, see `digests_of`."""


_LEARNED = ":learned"  # no parameter has such a name


class Summed(NamedTuple):
    """A vector of a snapshot."""

    values: int
    part: Callable[[slice], Tensor]


def whole(tensor: Tensor) -> Summed:
    return Summed(tensor.numel(), lambda part: flatten([tensor.reshape(-1)[part]]))


def trained_in(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, in their order."""
    return {plain_name(name): own for name, own in unwrapped(model).named_parameters() if own.requires_grad}


def parameters_of(model: nn.Module, weights: Mapping[str, Tensor]) -> Tensor:
    """Return the parameters among the weights as a vector, without buffers."""
    return flatten([weights[name] for name in trained_in(model)])


def weights_in(model: nn.Module, snapshot: Snapshot) -> dict[str, Tensor]:
    """Return the weights of a snapshot. Raises ValueError, LookupError or TypeError for anything else."""
    weights = dict(snapshot.weights)
    if _LEARNED in weights:
        vector = snapshot.theta.clone()
        learned = weights.pop(_LEARNED)
        for place in cuts(len(vector)):
            vector[place] += exact(learned, place)
        named = trained_in(model)
        for name, (_, part) in zip(named, unflattened(vector, [*named.values()]), strict=True):
            weights[name] = part
    return weights


def learned_in(model: nn.Module, snapshot: Snapshot) -> Summed:
    """Return how far a snapshot is from the common weights that it goes on from."""
    if _LEARNED in snapshot.weights:
        return Summed(len(snapshot.theta), partial(exact, snapshot.weights[_LEARNED]))
    return whole(parameters_of(model, snapshot.weights).sub_(snapshot.theta))


class Moments(Mapping[str, Tensor]):
    """Memory of the optimizer in a snapshot, each tensor made when it is looked at. Raises ValueError for other bytes.

    Args:
        like: that of an optimizer of this model.
    """

    def __init__(self, snapshot: Snapshot, like: Mapping[str, Tensor]) -> None:
        self._snapshot = snapshot
        self._like = like

    def __iter__(self) -> Iterator[str]:
        return iter(self._snapshot.moments)

    def __len__(self) -> int:
        return len(self._snapshot.moments)

    def __getitem__(self, name: str) -> Tensor:
        kept = self._snapshot.moments[name]
        own = self._like.get(name)
        if _LEARNED in self._snapshot.weights and own is not None and _is_packed(own):
            return _exact_of(name)(kept, slice(0, own.numel())).view_as(own).to(own.dtype)
        return kept.clone()


def _is_packed(value: Tensor) -> bool:
    return value.dim() > 0 and value.is_floating_point()


def _is_square(name: str) -> bool:
    return "sq" in name.rpartition(".")[2]


def _exact_of(name: str) -> Callable[[Tensor, slice], Tensor]:
    return exact_squares if _is_square(name) else exact


def parts_of(model: nn.Module, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Return the parameters in parts, as they are given; of a large model in 8 bit."""
    if _LEARNED in weights:
        return [*weights[_LEARNED].split(COARSE_PART)]
    vector = parameters_of(model, weights)
    return [vector[part] for part in cuts(len(vector))]


def digests_of(model: nn.Module, weights: Mapping[str, Tensor]) -> bytes:
    """SHA-256 of each part of the parameters, and of all other weights. Their own digest stands for the weights, so
    that a part can be shown without the others."""
    named = {*trained_in(model), _LEARNED}
    others = digest_of_tensors({name: value for name, value in weights.items() if name not in named})
    return b"".join(map(digest_of_part, parts_of(model, weights))) + bytes.fromhex(others)


def digest_of_part(part: Tensor) -> bytes:
    return hashlib.sha256(part.numpy().data).digest()


def summed_in(model: nn.Module, snapshot: Snapshot, like: Mapping[str, Tensor]) -> list[list[Summed]]:
    """Return what an account has sums of; ``like``: what an optimizer of this model remembers."""
    theta = snapshot.theta
    learned = learned_in(model, snapshot)
    vector = Summed(len(theta), lambda part: theta[part] + learned.part(part))
    others, squares = list[Summed](), list[Summed]()
    for name, kept in sorted(snapshot.moments.items()):
        own = like.get(name, kept)
        if not own.dim():
            continue
        one = whole(kept)
        if _LEARNED in snapshot.weights and _is_packed(own):
            one = Summed(own.numel(), partial(_exact_of(name), kept))
        (squares if _is_square(name) else others).append(one)
    return [[vector], others, squares, [whole(theta)]]


def sums_of(links: Sequence[Commitment], summed: Sequence[Iterable[Summed]], *, large: bool) -> Tensor:
    """Random sums of each, [..., SUMS]: by signs that nobody knows before all digests are known, and the same for all,
    so that differences of sums are sums of differences.

    Of a ``large`` model slices of each layer are summed, which nobody knows before, either.
    """
    totals = torch.zeros(len(summed), SUMS)
    digests = "".join(link.weights + link.moments for link in links)
    seed = int.from_bytes(hashlib.sha256(digests.encode()).digest()[:7], "big")
    for total, tensors in zip(totals, summed, strict=True):
        for number, (values, part) in enumerate(tensors):
            for place in drawn_slices(values, seed + number) if large else [slice(0, values)]:
                total += probe_of(part(place), seed + number + place.start, SUMS)
    return totals


def drawn_slices(values: int, seed: int) -> list[slice]:
    """Return one part in sixteen of a vector, drawn by a seed; of each at least one."""
    places = list(cuts(values))
    return random.Random(seed).sample(places, -(-len(places) // _SLICES))


# Of a volunteer's time; those where a round ends, or the common weights move, come on top.
_SHARE_FOR_SNAPSHOTS = 0.01
LONGEST_CHAIN = 32
_LONGEST_ACCOUNT = 1 << 14
# Of fewer stretches it is not said which is a leap.
_LEAST_STRETCHES = 3
ROUNDS_TO_SHOW = 3
"""For which a peer is waited for that is to show something."""
SHARE_TO_SHOW = 0.5
"""Share of its link that a peer spends on it."""
_LARGEST = 1e12


class Account(BaseModel):
    """Account of a volunteer of one round."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    round: Annotated[int, Field(ge=0, le=1 << 50)]
    links: Annotated[list[Commitment], Field(min_length=1, max_length=LONGEST_CHAIN)]
    """The first one is the last one of the round before."""
    precision: Annotated[str, Field(max_length=8)]
    micro_batch_size: Annotated[int, Field(ge=1, le=1 << 20)]
    is_slow: bool = False
    """Its link is: it shows few parts of its last weights, and a snapshot in many rounds, see `is_too_slow`."""
    sums: Annotated[str, Field(max_length=22 * SUMS * LONGEST_CHAIN)]
    """Sums of each snapshot, see `sums_of`: float32 [links, 4, SUMS], in Base64."""

    def where(self) -> Tensor:
        """The sums as numbers. Raises ValueError for anything else."""
        found = torch.frombuffer(bytearray(base64.b64decode(self.sums, validate=True)), dtype=torch.float32)
        if len(found) != len(self.links) * 4 * SUMS or not bool((found.abs() < _LARGEST).all()):
            raise ValueError("no sums of the snapshots")
        return found.view(-1, 4, SUMS).double()


def read_account(data: bytes) -> Account | None:
    """Return what a peer has sent; None for anything else."""
    if len(data) <= _LONGEST_ACCOUNT:
        with suppress(ValueError):
            account = Account.model_validate_json(data)
            account.where()
            return account
    return None


def is_too_slow(upload: float | None, values: int, round_seconds: float) -> bool:
    """Return whether a peer that can send so many bytes per second cannot show in time what may be asked for."""
    return upload is not None and most_bytes(values) > upload * SHARE_TO_SHOW * ROUNDS_TO_SHOW * round_seconds


@dataclass(frozen=True)
class Told:
    """Account of a peer after a round, and what it can show of it."""

    model: nn.Module
    account: Account
    snapshots: Sequence[Snapshot]
    rates: Mapping[int, float]
    """Learning rate of the update at each position."""

    def show(self, wanted: Sequence[int], parts: Sequence[int]) -> bytes:
        """Return a safetensors file in memory: one snapshot and the rates of the updates that follow it, or the weights
        of several; ``parts`` of the last one, and the digests of all.
        """
        last = self.snapshots[-1]
        tensors = dict[str, Tensor]()
        if parts:
            own = parts_of(self.model, last.weights)
            tensors |= {f"part.{part}": own[part] for part in parts}
            tensors["digests"] = torch.frombuffer(bytearray(last.digests), dtype=torch.uint8)
        for index in wanted:
            snapshot = self.snapshots[index]
            tensors |= {f"{index}.weights.{name}": value for name, value in snapshot.weights.items()}
            if len(wanted) == 1:
                updates = range(snapshot.link.position, self.account.links[index + 1].position)
                tensors["rates"] = torch.tensor([self.rates[position] for position in updates], dtype=torch.float64)
                tensors |= {f"{index}.moments.{name}": value for name, value in snapshot.moments.items()}
        return bytes(safetensors.torch.save(tensors))


class Shown(NamedTuple):
    """Request to a peer, and what it has shown."""

    peer: str
    account: Account
    before: Account | None
    """The one before, if this one goes on from it."""
    wanted: Sequence[int]
    """One snapshot, from which the next one is to follow; or two between which the common weights have moved, and the
    first one of the round; or none."""
    given: Mapping[int, Any]
    """Position -> what the peer has given there, an array."""
    parts: Sequence[int] = ()
    """Parts of the last one."""
    data: bytes = b""

    @property
    def has_moved(self) -> bool:
        """It is to be seen how the peer has followed the common weights, not how it has trained."""
        return len(self.wanted) > 1


class Journal:
    """A peer's snapshots of the round that it trains.

    Args:
        seconds: between two of them, at least.
    """

    def __init__(self, state: TrainState, common: OuterState, seconds: float) -> None:
        self._state = state
        self._common = common
        self._seconds = seconds
        self._kept: list[Snapshot] = []
        self._rates: dict[int, float] = {}
        self._position = 0
        self._is_large = is_large(common.theta.numel())
        self._due = 0.0
        self._known = (-1, -1)
        """Position and version of the newest snapshot."""
        self._theta_of = -1
        """Number of the change after which the common weights were copied last."""
        self._theta = torch.empty(0)
        common.before_change = self.note

    def before_update(self, position: int, lr: float, now: float) -> None:
        """The update at ``position`` of the data comes next."""
        self._position = position
        if now >= self._due or self._known[1] != self._common.version:
            began = time.monotonic()
            self.note()
            self._due = now + max(self._seconds, (time.monotonic() - began) / _SHARE_FOR_SNAPSHOTS)
        self._rates[position] = lr
        self._position = position + 1

    def note(self) -> None:
        """Take a snapshot, if anything has changed since the last one."""
        if self._known == (now := (self._position, self._common.version)):
            return
        self._known = now
        model = self._state.model
        last = self._kept[-1] if self._kept else None
        common = self._common
        theta = common.theta[: common.num_parameters]
        if self._theta_of != common.changes:
            self._theta_of = common.changes
            self._theta = put_away({"": theta})[""]
        weights = {name: value.detach().cpu() for name, value in weights_of(model).items()}
        if self._is_large:
            learned = coarse(parameters_of(model, weights).sub_(theta))
            weights = {_LEARNED: learned} | {name: weights[name] for name in weights.keys() - trained_in(model).keys()}
        if self._is_large and last is not None and last.link.position == self._position:  # only the weights have moved
            moments, digest = last.moments, last.link.moments
        else:
            moments = self._moments()
            digest = digest_of_tensors(moments)
            moments = put_away(moments)
        digests = digests_of(model, weights)
        link = Commitment(self._position, common.round, hashlib.sha256(digests).hexdigest(), digest)
        self._kept.append(Snapshot(link, put_away(weights), moments, self._theta, digests))

    def _moments(self) -> Mapping[str, Tensor]:
        kept = dict[str, Tensor]()
        for name, value in moments_of(self._state.model, self._state.optimizer).items():
            kept[name] = value.detach().cpu()
            if self._is_large and _is_packed(value):
                pack = coarse_squares if _is_square(name) else coarse
                kept[name] = pack(kept[name].float().reshape(-1))
        return kept

    def close(self, round_index: int, *, is_slow: bool = False) -> Told | None:
        """The round is over; None where there is nothing to tell."""
        self.note()
        state = self._state
        snapshots = self._kept
        rates = self._rates
        self._kept = self._kept[-1:]
        self._rates = {}
        if len(snapshots) > LONGEST_CHAIN:
            return None
        links = [snapshot.link for snapshot in snapshots]
        like = moments_of(state.model, state.optimizer)
        summed = (summed_in(state.model, snapshot, like) for snapshot in snapshots)
        sums = torch.stack([sums_of(links, each, large=self._is_large) for each in summed])
        account = Account(
            round=round_index, links=links, precision=state.precision.name, micro_batch_size=state.micro_batch_size,
            is_slow=is_slow, sums=base64.b64encode(sums.numpy().tobytes()).decode(),
        )  # fmt: skip
        return Told(state.model, account, snapshots, rates)


def ratios_in(account: Account) -> Tensor:
    """Return how many times further than usual in that round, in squares, a peer has moved after each snapshot, by its
    own account; zeros where that cannot be said.

    That is in proportion to the updates: of weights, or of what the optimizer remembers. Where there are none, the
    weights are to move as the common ones do, but for what was contributed.
    """
    where = account.where()
    steps = where.diff(dim=0)
    learned = where[:, WEIGHTS] - where[:, THETA]
    updates = torch.tensor([end.position - start.position for start, end in pairwise(account.links)])
    trained = updates > 0
    squares = steps[:, [WEIGHTS, MOMENTS]].square().sum(2)
    ratios = torch.zeros(max(1, len(updates)), dtype=torch.float64)
    if int(trained.sum()) < _LEAST_STRETCHES:
        return ratios
    each = squares[trained] / updates[trained, None]
    ratios[trained] = (each / each.median(0).values.clamp_min(TINY)).amax(1)
    own = learned.diff(dim=0)
    ways = torch.stack([own, own + learned[0], learned[1:]])  # none counted, all, given up
    usual = squares[trained, 0].median().clamp_min(TINY)
    if not account.is_slow:  # of whose contribution some parts are counted, and others not
        ratios[~trained] = (ways.square().sum(2).amin(0) / usual)[~trained]
    return ratios
