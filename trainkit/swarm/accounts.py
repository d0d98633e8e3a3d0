"""What a peer commits itself to in each round, and shows when it is asked: see `trainkit.swarm.replay`.

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
import math
import random
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from torch import Tensor, nn

from trainkit.checkpoint.state import moments_of, plain_name, unwrapped, weights_of
from trainkit.swarm.admission import remember
from trainkit.swarm.diloco import PART, OuterState, cuts, num_parts, probe_of
from trainkit.training.build import TrainState

# Between snapshots, in a round; and bytes of those of a round, which take a second to be hashed.
_STRETCHES = 16
_MOST_BYTES = 1 << 30
# Of a volunteer's time; those where a round ends, or the common weights move, come on top.
_SHARE_FOR_SNAPSHOTS = 0.01
# The weight itself, and what AdamW remembers of it; other optimizers remember less.
_VALUES_A_WEIGHT = 3
_LONGEST_CHAIN, _LONGEST_ACCOUNT = 32, 1 << 14
# Of a snapshot there are four times so many sums: of its weights, of what its optimizer remembers, of squares that it
# remembers, which are much smaller, and of the common weights that it goes on from. They say how far it is, give or
# take a fifth.
_SUMS = 12
WEIGHTS, _MOMENTS, THETA = 0, 1, 3
# The share of audits that go by the updates that are claimed, not by how far they lead; that look at how the common
# weights were followed, at least; and that look at a leap: else one that was trained would distract from the rest of
# the round.
_BY_UPDATES, _OF_MOVES, _OF_LEAPS = 0.4, 0.2, 0.5
# How many times further than usual, in squares, is a leap. Real honest peers came to more than 5 in 27 of 539 rounds of
# six updates, and to more than 10 in three; who went as far sideways at once as in a round otherwise to 5 to 70 in two
# rounds of three. And of how many stretches that is said.
_LEAP, _LEAST_STRETCHES = 5.0, 3
# Of that so much is even; and how much is left after a round of how unevenly a peer has moved.
_EVEN, _LEFT = 2.0, 0.85
MOST_AUDITED = 1000
"""Peers of whom is remembered what an audit needs."""
ROUNDS_TO_SHOW = 3
# Of its link that a peer spends on it; parts that it is asked for, if it cannot show all in time; and rounds that it
# has at most to show one snapshot.
SHARE_TO_SHOW, _PARTS_TO_SHOW, _MOST_ROUNDS_TO_SHOW = 0.5, 2, 60
_MOST_PARTS = num_parts(_MOST_BYTES // 4)
TINY = 1e-30
"""Nothing is divided by less."""
_LARGEST = 1e12


class Link(NamedTuple):
    """A snapshot as its owner commits itself to it."""

    position: Annotated[int, Field(ge=0, le=1 << 50)]
    """Updates before it."""
    base: Annotated[int, Field(ge=0, le=1 << 50)]
    """The common weights that the model goes on from are those before this round."""
    weights: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Digest."""
    moments: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """Digest of what the optimizer remembers."""


class Account(BaseModel):
    """What a volunteer says about a round."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    round: Annotated[int, Field(ge=0, le=1 << 50)]
    links: Annotated[list[Link], Field(min_length=1, max_length=_LONGEST_CHAIN)]
    """The first one is the last one of the round before."""
    precision: Annotated[str, Field(max_length=8)]
    micro_batch_size: Annotated[int, Field(ge=1, le=1 << 20)]
    is_slow: bool = False
    """Its link is: it shows few parts of its last weights, and a snapshot in many rounds, see `is_too_slow`."""
    sums: Annotated[str, Field(max_length=22 * _SUMS * _LONGEST_CHAIN)]
    """Of each snapshot, see `sums_of`: float32 [links, 4, _SUMS], in Base64."""

    def where(self) -> Tensor:
        """The sums as numbers. Raises ValueError for anything else."""
        found = torch.frombuffer(bytearray(base64.b64decode(self.sums, validate=True)), dtype=torch.float32)
        if len(found) != len(self.links) * 4 * _SUMS or not bool((found.abs() < _LARGEST).all()):
            raise ValueError("no sums of the snapshots")
        return found.view(-1, 4, _SUMS).double()


def read_account(data: bytes) -> Account | None:
    """What a peer has sent; None for anything else."""
    if len(data) <= _LONGEST_ACCOUNT:
        with suppress(ValueError):
            account = Account.model_validate_json(data)
            account.where()
            return account
    return None


def num_stretches(values: int) -> int:
    """Into how many a round is cut of a model with so many values; 0: its snapshots would be too large."""
    return max(0, min(_STRETCHES, _MOST_BYTES // (4 * _VALUES_A_WEIGHT * values) - 2))


def most_bytes(values: int) -> int:
    """What a peer may show at once: a snapshot, or the weights of three; and those that it has given."""
    return 4 * values * (_VALUES_A_WEIGHT + 1) + (1 << 22)


def is_too_slow(upload: float | None, values: int, round_seconds: float) -> bool:
    """Whether a peer that can send so many bytes per second cannot show in time what may be asked for."""
    return upload is not None and most_bytes(values) > upload * SHARE_TO_SHOW * ROUNDS_TO_SHOW * round_seconds


def digest_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


NO_MOMENTS = digest_of_tensors({})


def copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}


@dataclass(frozen=True)
class Snapshot:
    link: Link
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    theta: Tensor
    """The common weights that it goes on from, without buffers."""
    digests: bytes = b""
    """Those of the weights, see `digests_of`."""


def parameters_of(model: nn.Module, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Those among the weights, without buffers."""
    named = unwrapped(model).named_parameters()
    return [weights[plain_name(name)].float().view(-1) for name, own in named if own.requires_grad]


def digests_of(model: nn.Module, weights: Mapping[str, Tensor]) -> bytes:
    """SHA-256 of each part of the parameters, as parts are given, and of all other weights. Their own digest stands for
    the weights, so that a part can be shown without the others."""
    vector = torch.cat(parameters_of(model, weights))
    named = {plain_name(name) for name, _ in unwrapped(model).named_parameters()}
    others = digest_of_tensors({name: value for name, value in weights.items() if name not in named})
    return b"".join(map(digest_of_part, map(vector.__getitem__, cuts(len(vector))))) + bytes.fromhex(others)


def digest_of_part(part: Tensor) -> bytes:
    return hashlib.sha256(part.numpy().data).digest()


def summed_in(model: nn.Module, snapshot: Snapshot) -> list[list[Tensor]]:
    """What an account has sums of."""
    moments = [(name, value.float().view(-1)) for name, value in sorted(snapshot.moments.items()) if value.dim()]
    squares, others = ([value for name, value in moments if ("sq" in name.rpartition(".")[2]) == is_one]
                       for is_one in (True, False))  # fmt: skip
    return [[torch.cat(parameters_of(model, snapshot.weights))], others, squares, [snapshot.theta]]


def sums_of(links: Sequence[Link], summed: Sequence[Iterable[Tensor]]) -> Tensor:
    """Random sums of each, [..., _SUMS]: by signs that nobody knows before all digests are known, and the same for all,
    so that differences of sums are sums of differences."""
    digest = hashlib.sha256("".join(link.weights + link.moments for link in links).encode()).digest()
    totals, seed = torch.zeros(len(summed), _SUMS), int.from_bytes(digest[:7], "big")
    for total, tensors in zip(totals, summed, strict=True):
        for number, tensor in enumerate(tensors):
            total += probe_of(tensor, seed + number, _SUMS)
    return totals


@dataclass(frozen=True)
class Told:
    """What a peer says after a round, and can show of it."""

    model: nn.Module
    account: Account
    snapshots: Sequence[Snapshot]
    rates: Mapping[int, float]
    """Learning rate of the update at each position."""

    def show(self, wanted: Sequence[int], parts: Sequence[int]) -> bytes:
        """As a safetensors file in memory: one snapshot and the rates of the updates that follow it, or the weights of
        several; ``parts`` of the last one, and the digests of all."""
        last, links, tensors = self.snapshots[-1], self.account.links, dict[str, Tensor]()
        if parts:
            places = list(cuts(len(vector := torch.cat(parameters_of(self.model, last.weights)))))
            tensors |= {f"part.{part}": vector[places[part]] for part in parts}
            tensors["digests"] = torch.frombuffer(bytearray(last.digests), dtype=torch.uint8)
        for index in wanted:
            tensors |= {f"{index}.weights.{name}": value for name, value in self.snapshots[index].weights.items()}
        if len(wanted) == 1:
            (index,) = wanted
            updates = range(links[index].position, links[index + 1].position)
            tensors["rates"] = torch.tensor([self.rates[position] for position in updates], dtype=torch.float64)
            tensors |= {f"{index}.moments.{name}": value for name, value in self.snapshots[index].moments.items()}
        return bytes(safetensors.torch.save(tensors))


class Journal:
    """A peer's snapshots of the round that it trains.

    Args:
        seconds: between two of them, at least.
    """

    def __init__(self, state: TrainState, common: OuterState, seconds: float) -> None:
        self._state, self._common, self._seconds = state, common, seconds
        self._kept: list[Snapshot] = []
        self._rates: dict[int, float] = {}
        self._position, self._due = 0, 0.0
        self._known = (-1, -1)
        """Position and version of the newest snapshot."""
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
        self._known, state = now, self._state
        weights, moments = copies(weights_of(state.model)), copies(moments_of(state.model, state.optimizer))
        digests = digests_of(state.model, weights)
        link = Link(self._position, self._common.round, hashlib.sha256(digests).hexdigest(), digest_of_tensors(moments))
        theta = self._common.theta[: self._common.num_parameters]
        kept = self._kept[-1].theta if self._kept else None
        theta = kept if kept is not None and torch.equal(kept, theta) else theta.clone()
        self._kept.append(Snapshot(link, weights, moments, theta, digests))

    def close(self, round_index: int, *, is_slow: bool = False) -> Told | None:
        """The round is over; None where there is nothing to tell."""
        self.note()
        state, snapshots, rates = self._state, self._kept, self._rates
        self._kept, self._rates = self._kept[-1:], {}
        if len(snapshots) > _LONGEST_CHAIN:
            return None
        links = [snapshot.link for snapshot in snapshots]
        sums = torch.stack([sums_of(links, summed_in(state.model, one)) for one in snapshots])
        account = Account(
            round=round_index,
            links=links,
            precision=state.precision.name,
            micro_batch_size=state.micro_batch_size,
            is_slow=is_slow,
            sums=base64.b64encode(sums.numpy().tobytes()).decode(),
        )
        return Told(state.model, account, snapshots, rates)


Standing = Literal["counts", "tried", "differs"]
"""Of a peer with other libraries than the run: an audit has agreed; none has, yet; they train otherwise."""
_Wanted = tuple[Annotated[int, Field(ge=0, lt=_LONGEST_CHAIN)], ...]
_Parts = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=_MOST_PARTS)]


class Answer(NamedTuple):
    """What the owner says to an account."""

    wanted: _Wanted = ()
    """Snapshots that it wants to see."""
    parts: _Parts = ()
    """The same of the last one."""
    standing: Standing | Literal[""] = ""


ANSWER = TypeAdapter(Answer)


class Shown(NamedTuple):
    """What a peer was asked for, and has shown."""

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
    """Those of the last one."""
    data: bytes = b""

    @property
    def has_moved(self) -> bool:
        """It is to be seen how the peer has followed the common weights, not how it has trained."""
        return len(self.wanted) > 1


class _Owed(NamedTuple):
    """What a peer is about to be asked for, or has to show."""

    allowed: int = ROUNDS_TO_SHOW
    """So many rounds."""
    rounds: int = 0

    @property
    def is_long(self) -> bool:
        """It is a snapshot over a slow link."""
        return self.allowed > ROUNDS_TO_SHOW


class Heard(NamedTuple):
    """What the owner learns of accounts before each round."""

    owing: Collection[str]
    """Who is showing something, or is about to."""
    behind: int
    """So many of them whose links are not slow."""
    refused: Collection[str]
    """Who has not shown it in time, and is not asked any more."""
    uneven: Mapping[str, float]
    """How unevenly each peer has moved in one of the last rounds."""


class Accounts:
    """Hears accounts, and says what has to be shown, and by whom; in the averager's process.

    Args:
        batch: samples of an update.
        values: of the model.
    """

    def __init__(self, batch: int, values: int = 0) -> None:
        self._batch, self._values = batch, values
        self.stated: dict[str, float] = {}
        """Samples of each peer's last account."""
        self.received: Mapping[str, int] = {}
        """Bytes of each peer's parts that have arrived in the last round."""
        self.drawn: dict[str, bool] = {}
        """Whom the owner wants an account of; and whether some of that is to be trained again."""
        self._round = -1
        self._told, self._present = set[str](), set[str]()
        """Of those who are drawn: whose account has come, and who has averaged in that round."""
        self.asked: dict[str, Shown] = {}
        """What peers have yet to show, without that."""
        self._owed: dict[str, _Owed] = {}
        self._uneven: dict[str, float] = {}
        self._last: dict[str, Account] = {}

    def draw(self, drawn: Mapping[str, bool], round_index: int) -> None:
        """A round ends. Want accounts of it from those who are drawn, and to train some of it again, or only see what
        came of it."""
        self.drawn, self._round = {**drawn}, round_index
        self._told, self._present = set(), set()
        self._owed |= dict.fromkeys(drawn, _Owed())

    def took_part(self, members: Iterable[str]) -> None:
        """These have averaged in the round that was drawn for."""
        self._present |= {*members}

    def heard(self) -> Heard:
        """Ask once in each round, before `draw`."""
        excused = self.drawn.keys() - self._present - self._told  # they were not there
        self.drawn = {}
        owed = {peer: one._replace(rounds=one.rounds + 1) for peer, one in self._owed.items() if peer not in excused}
        self._owed = {peer: one for peer, one in owed.items() if one.rounds <= one.allowed}
        self.asked = {peer: shown for peer, shown in self.asked.items() if peer in self._owed}
        behind = sum(not one.is_long for one in self._owed.values())
        return Heard([*self._owed], behind, [*(owed.keys() - self._owed.keys())], self._uneven)

    def take(self, peer: str) -> Shown | None:
        """What that peer was asked for, and begins to show."""
        return self.asked.pop(peer, None)

    def excuse(self, peer: str) -> None:
        """It has shown all, or need not."""
        self.asked.pop(peer, None)
        self._owed.pop(peer, None)

    def hear(self, peer: str, data: bytes) -> tuple[int, ...] | None:
        """Which snapshots the peer has to show, besides what it has given; None if it was not drawn."""
        account = read_account(data)
        if account is None:
            return None
        last, begins, ends = self._last.get(peer), account.links[0], account.links[-1]
        before = last if last is not None and last.links[-1] == begins else None  # rounds may be missed meanwhile
        remember(self._last, peer, account, MOST_AUDITED)
        remember(self.stated, peer, float(self._batch * max(0, ends.position - begins.position)), MOST_AUDITED)
        far = ratios_in(account)
        uneven = float((far - _EVEN).clamp_min(0.0).sum())
        remember(self._uneven, peer, max(uneven, _LEFT * self._uneven.get(peer, 0.0)), MOST_AUDITED)
        if last is not None and before is None and begins.moments != NO_MOMENTS:
            return None  # nobody vouches for what its optimizer remembers: that is as if it had said nothing
        if account.round != self._round or peer not in self.drawn.keys() - self._told:
            return None
        self._told.add(peer)
        wanted = self._wanted(account, far) if self.drawn[peer] else ()
        self.asked[peer] = Shown(peer, account, before, wanted, {})
        if account.is_slow and wanted:
            self._owed[peer] = _Owed(self._rounds_for(peer))
        return wanted

    def _wanted(self, account: Account, far: Tensor) -> tuple[int, ...]:
        """Snapshots by which it can be seen how a peer has trained, or how it has followed the common weights."""
        if account.is_slow and any(one.is_long for one in self._owed.values()):
            return ()  # slow peers show theirs one after the other
        updates = [end.position - start.position for start, end in pairwise(account.links)]
        trained, moved = ([place for place, number in enumerate(updates) if (number > 0) == is_one]
                          for is_one in (True, False))  # fmt: skip
        share = max(_OF_MOVES, len(moved) / max(1, len(updates)))
        is_move = bool(moved) and (not trained or random.SystemRandom().random() < share)
        if far.max() > _LEAP and random.SystemRandom().random() < _OF_LEAPS:
            chosen = int(far.argmax())
            is_move = chosen in moved
        elif places := moved if is_move else trained:
            chosen = self._chosen(places, updates, far)
        else:
            return ()
        return tuple(dict.fromkeys((chosen, chosen + 1, 0))) if is_move else (chosen,)

    def _rounds_for(self, peer: str) -> int:
        """For a snapshot a slow peer has as long as it takes with the link by which its parts have come: these within a
        quarter of a round, and half of the link is for what is shown."""
        under_way = math.ceil(4 * _VALUES_A_WEIGHT * self._values / max(1, 2 * self.received.get(peer, 0)))
        return min(ROUNDS_TO_SHOW + under_way, _MOST_ROUNDS_TO_SHOW)

    def ask_for_parts(self, peer: str, given: Mapping[int, Any]) -> tuple[int, ...]:
        """Which parts of its last weights the peer has to show, when it has given all: else it could give the others as
        it likes.

        Args:
            given: position -> what it has given there.
        """
        shown, positions = self.asked[peer], list(given)
        if shown.account.is_slow:
            positions = random.SystemRandom().sample(positions, min(_PARTS_TO_SHOW, len(positions)))
        parts = tuple(position // PART for position in positions)
        if not (shown.wanted or parts):  # it has nothing to show
            self.excuse(peer)
            return ()
        self.asked[peer] = shown._replace(parts=parts, given={position: given[position] for position in positions})
        return parts

    @staticmethod
    def _chosen(places: Sequence[int], updates: Sequence[int], far: Tensor) -> int:
        """One of the places: the likelier the further the peer has moved there, in squares of what `ratios_in` says;
        or the more updates are claimed there, few of them as often as the average."""
        by_updates = torch.tensor([updates[place] for place in places]).double()
        by_updates = by_updates.clamp_min(max(1.0, float(by_updates.mean())))
        by_length = far[list(places)].square()
        weights = by_updates / by_updates.sum() * _BY_UPDATES
        weights += by_length / by_length.sum().clamp_min(TINY) * (1 - _BY_UPDATES)
        (place,) = random.SystemRandom().choices(places, weights.tolist())
        return place


def ratios_in(account: Account) -> Tensor:
    """How many times further than usual in that round, in squares, a peer has moved after each snapshot, by its own
    account; zeros where that cannot be said.

    That is in proportion to the updates: of weights, or of what the optimizer remembers. Where there are none, the
    weights are to move as the common ones do, but for what was contributed.
    """
    where = account.where()
    steps, weights, theta = where.diff(dim=0), where[:, WEIGHTS], where[:, THETA]
    updates = torch.tensor([end.position - start.position for start, end in pairwise(account.links)])
    trained, squares = updates > 0, steps[:, [WEIGHTS, _MOMENTS]].square().sum(2)
    ratios = torch.zeros(max(1, len(updates)), dtype=torch.float64)
    if int(trained.sum()) < _LEAST_STRETCHES:
        return ratios
    each = squares[trained] / updates[trained, None]
    ratios[trained] = (each / each.median(0).values.clamp_min(TINY)).amax(1)
    own = steps[:, WEIGHTS] - steps[:, THETA]
    ways = torch.stack([own, own + weights[0] - theta[0], weights[1:] - theta[1:]])  # none counted, all, given up
    usual = squares[trained, 0].median().clamp_min(TINY)
    if not account.is_slow:  # of whose contribution some parts are counted, and others not
        ratios[~trained] = (ways.square().sum(2).amin(0) / usual)[~trained]
    return ratios
