"""What a volunteer commits itself to in each round, and shows when it is asked: see `trainkit.swarm.replay`.

It keeps *snapshots* of its model and optimizer, a few in each round, and tells of them by their digests in an *account*
of the round. Snapshots are those of proof-of-learning (Jia et al., arXiv 2103.05633), which has them checked where the
weights have moved most. So an account also says where each snapshot is, in a few random sums of it, which follow from
all digests: nobody can choose weights by them. Where it says that more has moved, there it is asked more often; whoever
moves unevenly is drawn more often; who has moved much further somewhere than is usual in its round is asked at once;
and who makes a leap look small must say of snapshots that they are elsewhere than they are.
"""

import hashlib
import json
import math
import random
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from torch import Tensor, nn

from trainkit.checkpoint.state import Entry, moments_of, plain_name, weights_of, write
from trainkit.swarm.admission import remember
from trainkit.swarm.link import PART, cuts
from trainkit.swarm.sync import OuterState, probe_of
from trainkit.training.build import TrainState

# Between snapshots, in a round; and bytes of those of a round, which take a second to be hashed.
_STRETCHES = 16
_MOST_BYTES = 1 << 30
# Of a volunteer's time; those where a round ends, or the common weights move, come on top.
_SHARE_FOR_SNAPSHOTS = 0.01
# Of an update's sum of squares and the like there are two values a weight, of some optimizers one.
_VALUES_A_WEIGHT = 3
_LONGEST_CHAIN, _LONGEST_ACCOUNT = 40, 1 << 14
_SUMS = 8  # of a snapshot
# The share of audits that go by the updates that are claimed, not by how far they lead.
_BY_UPDATES = 0.25
# How many times further than usual, in squares, is a leap. Real honest peers came to more than 5 in 27 of 539 rounds of
# six updates, and to more than 10 in three; who went as far sideways at once as in a round otherwise to 5 to 70 in two
# rounds of three. And of how many stretches that is said.
_LEAP, _LEAST_STRETCHES = 5.0, 3
# Who has leapt so far does not count until it has shown how, which takes peers with slow links some rounds.
_LARGE_LEAP = 10.0
# Of that so much is even; and how much is left after a round of how unevenly a peer has moved.
_EVEN, _LEFT = 2.0, 0.85
_MOST_OWED = 8
MOST_AUDITED = 1000
"""Peers of whom is remembered what an audit needs."""
ROUNDS_TO_SHOW = 3
# Of its link that a peer spends on it; parts that it is asked for, if it cannot show all in time; and rounds that it
# has at most to show one snapshot.
SHARE_TO_SHOW, _PARTS_TO_SHOW, _MOST_ROUNDS_TO_SHOW = 0.5, 2, 60
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
    """Its link is: it shows parts of its weights, and one snapshot in many rounds, see `is_too_slow`."""
    sums: Annotated[str, Field(max_length=24 * _SUMS * _LONGEST_CHAIN, pattern="^([0-9a-f]{2})*$")]
    """Of each snapshot's weights, what its optimizer remembers, and the common weights that it goes on from: float32
    [links, 3, _SUMS], in hex."""

    def where(self) -> Tensor:
        """The sums as numbers. Raises ValueError for anything else."""
        found = torch.frombuffer(bytearray.fromhex(self.sums), dtype=torch.float32)
        if len(found) != len(self.links) * 3 * _SUMS or not bool((found.abs() < _LARGEST).all()):
            raise ValueError("no sums of the snapshots")
        return found.view(-1, 3, _SUMS).double()


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
    """What a peer may show at once: two snapshots, and the weights of four more."""
    return 4 * values * (2 * _VALUES_A_WEIGHT + 2 + 4) + (1 << 22)


def is_too_slow(upload: float | None, values: int, round_seconds: float) -> bool:
    """Whether a peer that can send so many bytes per second cannot show in time what may be asked for."""
    return upload is not None and most_bytes(values) > upload * SHARE_TO_SHOW * ROUNDS_TO_SHOW * round_seconds


def is_last_alone(account: Account, wanted: Sequence[int]) -> bool:
    """Only what the peer has given is looked at, and not how it has trained."""
    return [*wanted] == [len(account.links) - 1]


def with_moments(account: Account, wanted: Sequence[int]) -> Sequence[int]:
    """The snapshots that are shown with what the optimizer remembers."""
    if is_last_alone(account, wanted) or (account.is_slow and len(wanted) > 1):
        return ()
    return wanted[:2]


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
    named = model.named_parameters()
    return [weights[plain_name(name)].float().view(-1) for name, own in named if own.requires_grad]


def digests_of(model: nn.Module, weights: Mapping[str, Tensor]) -> bytes:
    """SHA-256 of each part of the parameters, as parts are given, and of all other weights. Their own digest stands for
    the weights, so that a part can be shown without the others."""
    vector, named = torch.cat(parameters_of(model, weights)), {plain_name(name) for name, _ in model.named_parameters()}
    others = digest_of_tensors({name: value for name, value in weights.items() if name not in named})
    return b"".join(map(digest_of_part, map(vector.__getitem__, cuts(len(vector))))) + bytes.fromhex(others)


def digest_of_part(part: Tensor) -> bytes:
    return hashlib.sha256(part.numpy().data).digest()


def _remembered(moments: Mapping[str, Tensor]) -> list[Tensor]:
    return [value.float().view(-1) for _, value in sorted(moments.items()) if value.dim()]


def summed_parts(model: nn.Module, snapshot: Snapshot) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What an account has sums of; those of weights and common weights are of the same signs."""
    return [torch.cat(parameters_of(model, snapshot.weights))], _remembered(snapshot.moments), [snapshot.theta]


def sums_of(links: Sequence[Link], tensors: Iterable[Tensor]) -> Tensor:
    """Where they are, by signs that nobody knows before all digests are known."""
    digest = hashlib.sha256("".join(link.weights + link.moments for link in links).encode()).digest()
    total, seed = torch.zeros(_SUMS), int.from_bytes(digest[:7], "big")
    for number, tensor in enumerate(tensors):
        total += probe_of(tensor, seed + number, _SUMS)
    return total


@dataclass(frozen=True)
class _Round:
    """What a peer can show of a round."""

    model: nn.Module
    account: Account
    snapshots: Sequence[Snapshot]
    rates: Mapping[int, float]
    """Learning rate of the update at each position."""

    def show(self, wanted: Sequence[int], parts: Sequence[int] = ()) -> bytes:
        """What is wanted of snapshots; of who has a slow link, instead of the last one ``parts`` of it, and all of its
        digests. As a safetensors file in memory."""
        last, links = self.snapshots[-1], self.account.links
        if self.account.is_slow and is_last_alone(self.account, wanted):
            places = list(cuts(len(vector := torch.cat(parameters_of(self.model, last.weights)))))
            tensors = {str(part): vector[places[part]] for part in parts}
            return _safetensors(tensors | {"digests": torch.frombuffer(bytearray(last.digests), dtype=torch.uint8)})
        whole = with_moments(self.account, wanted)
        updates = range(links[whole[0]].position, links[whole[0] + 1].position) if whole else ()
        tensors = {"rates": torch.tensor([self.rates[position] for position in updates], dtype=torch.float64)}
        for index in wanted:
            shown = self.snapshots[index]
            tensors |= {f"{index}.weights.{name}": value for name, value in shown.weights.items()}
            if index in whole:
                tensors |= {f"{index}.moments.{name}": value for name, value in shown.moments.items()}
        return _safetensors(tensors)


def _safetensors(tensors: Mapping[str, Tensor]) -> bytes:
    out = bytearray()
    write(out.extend, [Entry.of(name, v.dtype, v.shape) for name, v in tensors.items()], lambda e: tensors[e.name])
    return bytes(out)


class Told(NamedTuple):
    """What a volunteer says after a round, and how it shows snapshots, or parts of the last one."""

    account: bytes
    show: Callable[[Sequence[int], Sequence[int]], bytes]


class Journal:
    """A volunteer's snapshots of the round that it trains.

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
        sums = [sums_of(links, part) for one in snapshots for part in summed_parts(state.model, one)]
        account = Account(
            round=round_index,
            links=links,
            precision=state.precision.name,
            micro_batch_size=state.micro_batch_size,
            is_slow=is_slow,
            sums=torch.stack(sums).numpy().tobytes().hex(),
        )
        return Told(account.model_dump_json().encode(), _Round(state.model, account, snapshots, rates).show)


Standing = Literal["counts", "tried", "differs"]
"""Of a peer with other libraries than the run: an audit has agreed; none has, yet; they train otherwise."""
_Wanted = tuple[Annotated[int, Field(ge=0, lt=_LONGEST_CHAIN)], ...]
_Parts = Annotated[tuple[Annotated[int, Field(ge=0)], ...], Field(max_length=_PARTS_TO_SHOW)]


class Answer(NamedTuple):
    """What the owner says to an account."""

    wanted: _Wanted = ()
    """Snapshots that it wants to see."""
    parts: _Parts = ()
    """The parts of the last one that are enough."""
    standing: Standing | Literal[""] = ""


_ANSWER = TypeAdapter(Answer)


def read_answer(data: bytes) -> Answer:
    """Raises ValueError for anything else."""
    return _ANSWER.validate_json(data)


class Shown(NamedTuple):
    """What the peer that was drawn has shown."""

    peer: str
    account: Account
    wanted: Sequence[int]
    """Two neighbours, the last one, the first, and two neighbours more; or the last one alone. Of who has a slow link
    the last one, in parts; or another one, with all; or two neighbours and the first one."""
    data: bytes
    goes_on: bool
    """It goes on from the last round's account; else it may have forgotten what it has done."""
    given: Mapping[int, Any]
    """Position -> what it has given there, an array, as far as this peer has reduced it."""
    parts: Sequence[int] = ()
    """Of the last one, where the peer cannot show more."""
    is_owed: bool = False
    """It has rounds to show it, and may have given something else meanwhile."""
    moved: int = -1
    """Between this one and the next the common weights have moved; -1: they have not."""


class _Owed(NamedTuple):
    """What a peer has been asked for that takes some rounds."""

    allowed: int
    """So many rounds."""
    counts: int
    """For so many of them it counts."""
    has_leapt: bool
    rounds: int = 0


class Heard(NamedTuple):
    """What the owner learns of accounts before each round."""

    owing: Collection[str]
    """Who is showing something, or is about to."""
    late: Collection[str]
    """Those of them who do not count until they have."""
    refused: Mapping[str, bool]
    """Who has not shown it in time, and is not asked any more; and whether it had leapt."""
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
        self.drawn, self._round, self._trains, self._asks_for_leaps = "", -1, False, False
        self.asked: dict[str, Shown] = {}
        """What peers have yet to show, without that."""
        self._owed: dict[str, _Owed] = {}
        self._uneven: dict[str, float] = {}
        self._ends: dict[str, tuple[int, Link]] = {}
        """Of each peer the last account's round, and where it has ended."""

    def draw(self, peer: str, round_index: int, trains: bool, asks_for_leaps: bool) -> None:
        """A round ends. Want an account of it from ``peer``, if that is one; and to train some of it again, or only see
        what came of it. ``asks_for_leaps``: there is time for that, too."""
        if peer:
            self.drawn, self._round, self._trains = peer, round_index, trains
        kept = (one for one, shown in self.asked.items() if shown.is_owed or (one == self.drawn and not peer))
        self.asked = {one: self.asked[one] for one in kept}
        self._asks_for_leaps = asks_for_leaps

    def heard(self) -> Heard:
        """Ask once in each round."""
        owed = {peer: one._replace(rounds=one.rounds + 1) for peer, one in self._owed.items()}
        refused = {peer: one.has_leapt for peer, one in owed.items() if one.rounds > one.allowed}
        self._owed = {peer: one for peer, one in owed.items() if peer not in refused}
        self.asked = {one: shown for one, shown in self.asked.items() if one not in refused}
        late = [peer for peer, one in self._owed.items() if one.rounds > one.counts]
        return Heard([*self._owed], late, refused, self._uneven)

    def take(self, peer: str) -> Shown | None:
        """What that peer was asked for, and begins to show."""
        return self.asked.pop(peer, None)

    def shown(self, peer: str) -> None:
        """It has shown all."""
        self._owed.pop(peer, None)

    def hear(self, peer: str, data: bytes) -> tuple[int, ...]:
        """Which snapshots the peer has to show; nothing, if none."""
        account = read_account(data)
        if account is None:
            return ()
        before, begins, ends = self._ends.get(peer), account.links[0], account.links[-1]
        remember(self._ends, peer, (account.round, ends), MOST_AUDITED)
        remember(self.stated, peer, float(self._batch * max(0, ends.position - begins.position)), MOST_AUDITED)
        goes_on = before in (None, (account.round - 1, begins))
        # Else nobody vouches for what its optimizer remembers: that is as if it had said nothing.
        is_vouched_for = goes_on or begins.moments == NO_MOMENTS
        is_drawn, leap, far = (peer, account.round) == (self.drawn, self._round), -1, ratios_in(account)
        uneven = float((far - _EVEN).clamp_min(0.0).sum())
        remember(self._uneven, peer, max(uneven, _LEFT * self._uneven.get(peer, 0.0)), MOST_AUDITED)
        trains = is_drawn and self._trains
        if (self._asks_for_leaps or trains) and far.max() > (_LARGE_LEAP if account.is_slow else _LEAP):
            leap = int(far.argmax())
        is_asked = is_drawn or (leap >= 0 and goes_on and len(self._owed) < _MOST_OWED)
        if not is_vouched_for or peer in self.asked or peer in self._owed or not is_asked:
            return ()
        last = len(account.links) - 1
        moved, wanted = (-1, (last,)) if not last or (leap < 0 and not trains) else self._wanted(account, leap)
        is_owed = not is_drawn or (account.is_slow and wanted != (last,))
        self.asked[peer] = Shown(peer, account, wanted, b"", goes_on, {}, is_owed=is_owed, moved=moved)
        if is_owed:
            self._owed[peer] = self._time_for(peer, float(far[leap]) if leap >= 0 else 0.0, is_slow=account.is_slow)
        return wanted

    def _wanted(self, account: Account, leap: int) -> tuple[int, tuple[int, ...]]:
        """Snapshots by which it can be seen how a peer has trained, and at which of them the common weights have moved;
        -1: at none."""
        last, first, moved = len(account.links) - 1, -1, -1
        updates = [end.position - start.position for start, end in pairwise(account.links)]
        moves = account.where()[:, :2].diff(dim=0).square().sum(2)
        if trained := [place for place, number in enumerate(updates) if number > 0]:
            first = leap if leap in trained else self._chosen(trained, updates, moves)
        if others := [place for place, number in enumerate(updates) if number <= 0]:
            moved = leap if leap in others else self._chosen(others, [0] * last, moves)
        if account.is_slow:
            if leap < 0 and any(not one.has_leapt for one in self._owed.values()):
                return -1, (last,)  # slow peers show theirs one after the other
            if first >= 0 and (moved < 0 or leap >= 0 or random.SystemRandom().random() < 0.5):
                return -1, (first,)
            return moved, tuple(dict.fromkeys((moved, moved + 1, 0)))
        pairs = [place for one in (first, moved) if one >= 0 for place in (one, one + 1)]
        return moved, tuple(dict.fromkeys((*pairs[:2], last, 0, *pairs[2:])))

    def _time_for(self, peer: str, leap: float, *, is_slow: bool) -> _Owed:
        """For a snapshot a slow peer has as long as it takes with the link by which its parts have come: these within a
        quarter of a round, and half of the link is for what is shown."""
        allowed = ROUNDS_TO_SHOW
        if is_slow:
            allowed += math.ceil(4 * _VALUES_A_WEIGHT * self._values / max(1, 2 * self.received.get(peer, 0)))
        allowed = min(allowed, _MOST_ROUNDS_TO_SHOW)
        return _Owed(allowed, 1 if leap > _LARGE_LEAP else allowed, has_leapt=leap > 0.0)

    def ask_for_parts(self, given: Collection[int]) -> tuple[int, ...]:
        """Which parts the peer has to show that cannot show more. Ask when it has given all: else it could give the
        others as it likes.

        Args:
            given: where the parts begin that it has given.
        """
        known = [position // PART for position in given]
        parts = tuple(random.SystemRandom().sample(known, min(_PARTS_TO_SHOW, len(known))))
        if self.drawn in self.asked:
            self.asked[self.drawn] = self.asked[self.drawn]._replace(parts=parts)
        return parts

    @staticmethod
    def _chosen(places: Sequence[int], updates: Sequence[int], far: Tensor) -> int:
        """One of the places, the likelier the further weights and optimizer have moved there, and the more updates are
        claimed there."""
        some, moved = torch.tensor([updates[place] for place in places]).double(), far[list(places)]
        some = some.clamp_min(max(1.0, float(some.mean())))  # few of them as often as the average
        share = (moved / moved.sum(0).clamp_min(TINY)).mean(1)
        weights = _BY_UPDATES * some / some.sum() + (1 - _BY_UPDATES) * share
        (place,) = random.SystemRandom().choices(places, weights.tolist())
        return place


def ratios_in(account: Account) -> Tensor:
    """How many times further than usual in that round, in squares, a peer has moved after each snapshot, by its own
    account; zeros where that cannot be said.

    That is in proportion to the updates: of weights, or of what the optimizer remembers. Where there are none, the
    weights are to move as the common ones do, but for what was contributed.
    """
    where = account.where()
    steps, weights, theta = where.diff(dim=0), where[:, 0], where[:, 2]
    updates = torch.tensor([end.position - start.position for start, end in pairwise(account.links)])
    trained, squares = updates > 0, steps.square().sum(2)[:, :2]
    ratios = torch.zeros(max(1, len(updates)), dtype=torch.float64)
    if int(trained.sum()) < _LEAST_STRETCHES:
        return ratios
    each = squares[trained] / updates[trained, None]
    ratios[trained] = (each / each.median(0).values.clamp_min(TINY)).amax(1)
    own = steps[:, 0] - steps[:, 2]
    ways = torch.stack([own, own + weights[0] - theta[0], weights[1:] - theta[1:]])  # none counted, all, given up
    usual = squares[trained, 0].median().clamp_min(TINY)
    if not account.is_slow:  # of whose contribution some parts are counted, and others not
        ratios[~trained] = (ways.square().sum(2).amin(0) / usual)[~trained]
    return ratios
