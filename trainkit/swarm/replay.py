"""Audits by replay: the owner trains a stretch of a volunteer's round once more, and compares.

Training is a function of weights, optimizer, order of the data and learning rates. So a volunteer keeps *snapshots* of
its model and optimizer, a few in each round, and commits itself to them by their digests in an *account* of the round.
Only then the owner says which of them it wants to see, of the peer that it has drawn before the round's exchange and
has told nobody: two neighbours, two between which the common weights have moved, and those at which the contributions
of this round and of the one before were made. It checks four things:

- What the peer has given is how far its last snapshot is from the common weights.
- Updates lead from the first neighbour to the second.
- Where the common weights have moved, they have moved the model as they should.
- The round goes on where the one before ended, or with an optimizer that knows nothing yet.

Whoever gives something else than it has trained is caught by every audit. Snapshots are those of proof-of-learning (Jia
et al., arXiv 2103.05633), which has them checked where the weights have moved most. So an account also says where each
snapshot is, in a few random sums of it, which follow from all digests: nobody can choose weights by them. Where it says
that more has moved, there it is asked more often; and who makes a leap look small must say of most snapshots that they
are elsewhere than they are.

Who trains by the same settings on like hardware gets the very same bits; other numbers of threads, micro batches and
number formats get others (docs/security.md has what was measured). What passes is compared by the length of the
difference, over that of what was trained.
"""

import hashlib
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Annotated, Any, Literal, NamedTuple

import safetensors.torch
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from safetensors import SafetensorError
from torch import Tensor, nn

from trainkit.checkpoint.state import Entry, Held, load_moments, load_weights, moments_of, plain_name, weights_of, write
from trainkit.data.base import derive_seed
from trainkit.errors import TrainkitError
from trainkit.swarm.admission import remember
from trainkit.swarm.link import cuts, misrounded, rounded
from trainkit.swarm.robust import Verdict
from trainkit.swarm.sync import OuterState, probe_of
from trainkit.training.build import TrainState
from trainkit.training.precision import Precision
from trainkit.training.update import Updater

# Between snapshots, in a round; and bytes of those of a round, which take a second to be hashed.
_STRETCHES = 16
_MOST_BYTES = 1 << 30
# Of a volunteer's time; those where a round ends, or the common weights move, come on top.
_SHARE_FOR_SNAPSHOTS = 0.01
# Of an update's sum of squares and the like there are two values a weight, of some optimizers one.
_VALUES_A_WEIGHT = 3
# Of its time that the owner gives to audits at most.
_SHARE_FOR_AUDITS = 0.05
_LONGEST_CHAIN, _LONGEST_ACCOUNT = 40, 1 << 14
# Sums of a snapshot, and by how much of its length they may be off.
_SUMS, _OFF = 8, 1e-4
# The share of audits that go by the updates that are claimed, not by how far they lead.
_BY_UPDATES = 0.25
_MOST_PEERS = 1000
# Of what was trained, by which a replay may differ in any case; and so many times as far as it leads to begin with
# weights that are off by this share of them: in the same number format, and in another one (what bf16 rounds by: honest
# peers are then off by half of what may be, and those who turn labels by twice that).
_ALIKE, _AS_FAR = 0.02, 4.0
_NOISE, _OTHER_NOISE = 1e-6, 2e-3
# Of what was learned, by which a contribution may differ, which was rounded on its way; the same of what 4 bit make of
# that, which is known; and how much longer it may be.
_ROUNDED, _MISROUNDED, _LONGER = 0.1, 0.04, 1.1
_HALF = 2.0**-24  # the smallest number of fp16
# The same of a model that has followed the common weights; and of the common weights, which are rounded as well.
_MOVED, _ROUNDING = 0.01, 1e-6
# Messages get lost: so many audits in a row may come to nothing. And so many must be passed for a speed to be known.
_MOST_IN_VAIN, _LEAST_PASSED = 3, 2
_ROUNDS_TO_SHOW = 3
_SUSPECTED = 0.5
"""Of rounds: one that has failed an audit is asked again, for most cheats are found once in many rounds only."""
_CLEARED = 10
"""Audits passed, after which one that has failed is forgotten."""
_TINY, _LARGEST = 1e-30, 1e12
_ONCE = "it counts when it has passed one; the next time it is banned"
_BY_LIBRARIES = "it may be its other libraries, with which it does not count yet"
"""What follows for who was found false."""
_EVERYWHERE = ("fp32", "bf16")
"""Number formats that every device has."""


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


def _digest(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name, value in sorted(tensors.items()):
        digest.update(json.dumps([name, str(value.dtype), list(value.shape)]).encode())
        digest.update(value.contiguous().view(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


_NO_MOMENTS = _digest({})


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: value.detach().to("cpu", copy=True) for name, value in tensors.items()}


@dataclass(frozen=True)
class _Snapshot:
    link: Link
    weights: Mapping[str, Tensor]
    moments: Mapping[str, Tensor]
    theta: Tensor
    """The common weights that it goes on from, without buffers."""


def _parameters(model: nn.Module, weights: Mapping[str, Tensor]) -> list[Tensor]:
    """Those among the weights, without buffers."""
    named = model.named_parameters()
    return [weights[plain_name(name)].float().view(-1) for name, own in named if own.requires_grad]


def _remembered(moments: Mapping[str, Tensor]) -> list[Tensor]:
    return [value.float().view(-1) for _, value in sorted(moments.items()) if value.dim()]


def _parts(model: nn.Module, snapshot: _Snapshot) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """What an account has sums of."""
    return _parameters(model, snapshot.weights), _remembered(snapshot.moments), [snapshot.theta]


def _sums(links: Sequence[Link], tensors: Iterable[Tensor]) -> Tensor:
    """Where they are, by signs that nobody knows before all digests are known."""
    digest = hashlib.sha256("".join(link.weights + link.moments for link in links).encode()).digest()
    total, seed = torch.zeros(_SUMS), int.from_bytes(digest[:7], "big")
    for number, tensor in enumerate(tensors):
        total += probe_of(tensor, seed + number, _SUMS)
    return total


@dataclass(frozen=True)
class _Round:
    """What a peer can show of a round."""

    snapshots: Sequence[_Snapshot]
    rates: Mapping[int, float]
    """Learning rate of the update at each position."""

    def show(self, wanted: Sequence[int]) -> bytes:
        """Their weights and, of the first two, which are neighbours, all; as a safetensors file in memory."""
        pair = [self.snapshots[index].link.position for index in wanted[:2]]
        rates = [self.rates[position] for position in range(*pair)] if wanted[1:] else []
        tensors = {"rates": torch.tensor(rates, dtype=torch.float64)}
        for place, index in enumerate(wanted):
            shown = self.snapshots[index]
            tensors |= {f"{index}.weights.{name}": value for name, value in shown.weights.items()}
            if wanted[1:] and place < 2:
                tensors |= {f"{index}.moments.{name}": value for name, value in shown.moments.items()}
        out = bytearray()
        write(out.extend, [Entry.of(name, v.dtype, v.shape) for name, v in tensors.items()], lambda e: tensors[e.name])
        return bytes(out)


class Told(NamedTuple):
    """What a volunteer says after a round, and how it shows snapshots."""

    account: bytes
    show: Callable[[Sequence[int]], bytes]


class Journal:
    """A volunteer's snapshots of the round that it trains.

    Args:
        seconds: between two of them, at least.
    """

    def __init__(self, state: TrainState, common: OuterState, seconds: float) -> None:
        self._state, self._common, self._seconds = state, common, seconds
        self._kept: list[_Snapshot] = []
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
        weights, moments = _copies(weights_of(state.model)), _copies(moments_of(state.model, state.optimizer))
        link = Link(self._position, self._common.round, _digest(weights), _digest(moments))
        theta = self._common.theta[: self._common.num_parameters]
        kept = self._kept[-1].theta if self._kept else None
        theta = kept if kept is not None and torch.equal(kept, theta) else theta.clone()
        self._kept.append(_Snapshot(link, weights, moments, theta))

    def close(self, round_index: int) -> Told | None:
        """The round is over; None where there is nothing to tell."""
        self.note()
        last = _Round(self._kept, self._rates)
        self._kept, self._rates = self._kept[-1:], {}
        if len(last.snapshots) > _LONGEST_CHAIN:
            return None
        state, links = self._state, [snapshot.link for snapshot in last.snapshots]
        sums = [_sums(links, part) for one in last.snapshots for part in _parts(state.model, one)]
        account = Account(
            round=round_index,
            links=links,
            precision=state.precision.name,
            micro_batch_size=state.micro_batch_size,
            sums=torch.stack(sums).numpy().tobytes().hex(),
        )
        return Told(account.model_dump_json().encode(), last.show)


Standing = Literal["counts", "tried", "differs"]
"""Of a peer with other libraries than the run: an audit has agreed; none has, yet; they train otherwise."""
_Wanted = tuple[Annotated[int, Field(ge=0, lt=_LONGEST_CHAIN)], ...]


def read_answer(data: bytes) -> tuple[_Wanted, Standing]:
    """Which snapshots the owner wants to see, and what it says of the peer. Raises ValueError for anything else."""
    return TypeAdapter(tuple[_Wanted, Standing]).validate_json(data)


class Shown(NamedTuple):
    """What the peer that was drawn has shown."""

    peer: str
    account: Account
    wanted: Sequence[int]
    """Two neighbours, the last one, the first, and two neighbours more; or the last one alone."""
    data: bytes
    goes_on: bool
    """It goes on from the last round's account; else it may have forgotten what it has done."""
    given: Mapping[int, Any]
    """Position -> what it has given there, an array, as far as this peer has reduced it."""
    moved: int = -1
    """Between this one and the next the common weights have moved; -1: they have not."""


class Accounts:
    """Hears accounts, and asks the peer that was drawn for what it has to show; in the averager's process.

    ``batch``: samples of an update.
    """

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self.stated: dict[str, float] = {}
        """Samples of each peer's last account."""
        self.drawn, self._round, self._trains = "", -1, False
        self.asked: Shown | None = None
        """What the peer has yet to show, without that."""
        self._ends: dict[str, tuple[int, Link]] = {}
        """Of each peer the last account's round, and where it has ended."""

    def draw(self, peer: str, round_index: int, trains: bool) -> None:
        """Want an account of that round from ``peer``; and to train some of it again, or only see what came of it."""
        self.drawn, self._round, self._trains, self.asked = peer, round_index, trains, None

    def hear(self, peer: str, data: bytes) -> tuple[int, ...]:
        """Which snapshots the peer has to show; nothing, if none."""
        account = read_account(data)
        if account is None:
            return ()
        before, begins, ends = self._ends.get(peer), account.links[0], account.links[-1]
        remember(self._ends, peer, (account.round, ends), _MOST_PEERS)
        remember(self.stated, peer, float(self._batch * max(0, ends.position - begins.position)), _MOST_PEERS)
        goes_on = before in (None, (account.round - 1, begins))
        # Else nobody vouches for what its optimizer remembers: that is as if it had said nothing.
        is_vouched_for = goes_on or begins.moments == _NO_MOMENTS
        if not is_vouched_for or self.asked or (peer, account.round) != (self.drawn, self._round):
            return ()
        last, first, moved = len(account.links) - 1, -1, -1
        wanted: tuple[int, ...] = (last,)
        if last and self._trains:
            updates = [end.position - start.position for start, end in pairwise(account.links)]
            far = account.where()[:, :2].diff(dim=0).square().sum(2)
            if trained := [place for place, number in enumerate(updates) if number > 0]:
                first = self._chosen(trained, updates, far)
            if others := [place for place, number in enumerate(updates) if number <= 0]:
                moved = self._chosen(others, [0] * last, far)
            pairs = [place for one in (first, moved) if one >= 0 for place in (one, one + 1)]
            wanted = tuple(dict.fromkeys((*pairs[:2], last, 0, *pairs[2:])))
        self.asked = Shown(peer, account, wanted, b"", goes_on, {}, moved)
        return wanted

    @staticmethod
    def _chosen(places: Sequence[int], updates: Sequence[int], far: Tensor) -> int:
        """One of the places, the likelier the further weights and optimizer have moved there, and the more updates are
        claimed there."""
        some, moved = torch.tensor([updates[place] for place in places]).double(), far[list(places)]
        some = some.clamp_min(max(1.0, float(some.mean())))  # few of them as often as the average
        share = (moved / moved.sum(0).clamp_min(_TINY)).mean(1)
        weights = _BY_UPDATES * some / some.sum() + (1 - _BY_UPDATES) * share
        (place,) = random.SystemRandom().choices(places, weights.tolist())
        return place


class _Inconclusive(Exception):
    """Nothing can be said, for this reason."""


class _Otherwise(Exception):
    """It is false, for this reason; of a peer with other libraries, those may be to blame."""


class _Unable(Exception):
    """This machine cannot say anything, and the peer is not to blame."""


@dataclass
class Auditor:
    """The owner's: whom to draw, and whether what a peer shows is true.

    Args:
        state: the model for this rank alone.
        seed_of: a peer's order of the data.
        rates: the lowest and the highest learning rate that a peer can have used for a round.
        seconds: that one audit may take.
    """

    state: TrainState
    common: OuterState
    seed_of: Callable[[str], int]
    rates: Callable[[int], tuple[float, float]]
    seconds: float
    verified: dict[str, float] = field(default_factory=dict, init=False)
    """Samples of a round that a peer has trained on beyond doubt."""
    differ: dict[str, int] = field(default_factory=dict, init=False)
    """Whose libraries train otherwise, and since which round that is known."""
    _tried: dict[str, bool] = field(default_factory=dict, init=False)
    """Whether a peer has other libraries than the run."""
    _strange: dict[str, None] = field(default_factory=dict, init=False)
    """Whose libraries have trained otherwise once."""
    _agreed: dict[str, None] = field(default_factory=dict, init=False)
    """Whose updates, made again here, have led to the same."""
    _passed: Counter[str] = field(default_factory=Counter, init=False)
    _times: Counter[str] = field(default_factory=Counter, init=False)
    """Audits in a row of which nothing came."""
    _suspects: dict[str, int] = field(default_factory=dict, init=False)
    """Who has failed one audit, as an honest peer may whose network fails in the midst of a round; and how many it has
    passed since."""
    _thetas: dict[int, Tensor] = field(default_factory=dict, init=False)
    _drawn: tuple[str, int] = field(default=("", -1), init=False)
    _free_at: float = field(default=0.0, init=False)

    @property
    def unproven(self) -> set[str]:
        """Who has shown nothing too often, or something false, and does not count until it has passed an audit; or has
        other libraries, until some of its updates were made again."""
        in_vain = {peer for peer, times in self._times.items() if times >= _MOST_IN_VAIN}
        accused = {peer for peer, passed in self._suspects.items() if not passed}
        tried = {peer for peer, is_tried in self._tried.items() if is_tried}
        return in_vain | accused | (tried - self._agreed.keys())

    def hear(self, tried: Mapping[str, bool]) -> None:
        """Who says that it has other libraries. Its first word counts: else who is caught would plead them."""
        for peer in tried.keys() - self._tried.keys():
            remember(self._tried, peer, tried[peer], _MOST_PEERS)

    def draw(self, volunteers: Iterable[str], round_index: int) -> tuple[str, bool]:
        """The peer to ask about the round that ends, or nobody; and whether some of it is to be trained again, for
        which there is not always time. Call it once in each round, before the exchange."""
        remember(self._thetas, self.common.round, self.common.theta.clone(), 4)
        known = sorted(volunteers)
        if not known or self._drawn[0]:
            return "", False
        chance = random.SystemRandom()
        suspects = [peer for peer in known if peer in self._suspects and chance.random() < _SUSPECTED]
        self._drawn = chance.choice(suspects or known), round_index
        return self._drawn[0], time.monotonic() >= self._free_at

    def overdue(self, members: Collection[str], round_index: int) -> Verdict | None:
        """The round is over, with these in the group: what to say of the peer that was drawn, if it keeps silent."""
        peer, drawn = self._drawn
        if not peer or (round_index < drawn + _ROUNDS_TO_SHOW and (peer in members or round_index > drawn)):
            return None
        self._drawn = "", -1
        return self._in_vain(peer, "has shown nothing") if round_index > drawn else None

    def _in_vain(self, peer: str, why: str) -> Verdict:
        self._times[peer] += 1
        if self._times[peer] < _MOST_IN_VAIN:
            return Verdict(peer, "audited", why)
        return Verdict(peer, "left out", f"{why}; after {_MOST_IN_VAIN} such audits it counts when it has passed one")

    def audit(self, shown: Shown) -> Verdict | None:
        """Look at what a peer has shown: "audited" if it is true, or nothing can be said.

        None: it is what the peer has given, and nothing was trained again.
        """
        peer, began, by_libraries = shown.peer, time.monotonic(), False
        self._drawn = "", -1
        try:
            why = self._falsehood(shown)
        except _Otherwise as reason:
            # Who is told to leave, and does not, pleads its libraries in vain.
            until = self.differ.get(peer, math.inf) + _ROUNDS_TO_SHOW
            by_libraries = self._tried.get(peer, False) and peer not in self._agreed and shown.account.round <= until
            why = str(reason)
        except _Unable as reason:
            return Verdict(peer, "audited", str(reason))
        except _Inconclusive as reason:
            return self._in_vain(peer, str(reason))
        finally:
            now = time.monotonic()
            self._free_at = max(self._free_at, now + (now - began) / _SHARE_FOR_AUDITS)
        if why:
            self.verified.pop(peer, None)
            if by_libraries:
                if peer in self._strange:
                    remember(self.differ, peer, self.differ.get(peer, shown.account.round), _MOST_PEERS)
                remember(self._strange, peer, None, _MOST_PEERS)
                return Verdict(peer, "left out", f"{why}; {_BY_LIBRARIES}")
            if peer in self._suspects:
                return Verdict(peer, "dropped", why)
            remember(self._suspects, peer, 0, _MOST_PEERS)
            return Verdict(peer, "left out", f"{why}; {_ONCE}")
        self._times.pop(peer, None)
        if peer in self._suspects:
            self._suspects[peer] += 1
            if self._suspects[peer] >= _CLEARED:
                del self._suspects[peer]
        if len(shown.wanted) == 1:
            return None
        self._passed[peer] += 1
        if self._passed[peer] >= _LEAST_PASSED:
            links = shown.account.links
            samples = (links[-1].position - links[0].position) * self.state.config.train.global_batch_size
            remember(self.verified, peer, float(samples), _MOST_PEERS)
        return Verdict(peer, "audited", f"true, as was seen in {now - began:.2f} s")

    def _falsehood(self, shown: Shown) -> str:
        """Why it is false; empty if it is true. Raises `_Inconclusive` and `_Unable`."""
        links, last = shown.account.links, len(shown.account.links) - 1
        try:
            found, rates = self._read(shown)
        except (SafetensorError, LookupError, ValueError) as error:
            return f"has shown something else than it had committed itself to: {error}"[:200]
        vectors = {index: self._vector(snapshot) for index, snapshot in found.items()}
        learned = {index: vectors[index] - snapshot.theta for index, snapshot in found.items()}
        length = float(learned[last].norm())
        off = {index: self._off(shown.account, index, snapshot) for index, snapshot in found.items()}
        _require_same(found[last], off[last][2], length)
        if why := misgiven(shown.given, learned[last]):
            return why
        if len(shown.wanted) == 1:
            return ""
        for index, snapshot in found.items():
            _require_same(snapshot, off[index][2], length)
            if not max(off[index][: 1 + (index in shown.wanted[:2])]) <= _OFF:
                return "has said that it was elsewhere than it was"
        if not shown.goes_on and not float(learned[0].norm()) <= _MOVED * length:
            raise _Inconclusive("has begun anew with other weights than the run's")
        if (moved := shown.moved) >= 0:
            theta = found[moved + 1].theta
            if links[moved].moments != links[moved + 1].moments:
                return "has changed its optimizer without an update"
            if why := misled(vectors[moved + 1] - theta, learned[moved], learned[0], float(theta.norm())):
                return why
        first, second = shown.wanted[:2]
        if first == moved:
            return ""
        if not (why := self._retrained(shown, found[first], found[second], rates)):
            remember(self._agreed, shown.peer, None, _MOST_PEERS)
            self.differ.pop(shown.peer, None)
        return why

    def _read(self, shown: Shown) -> tuple[dict[int, _Snapshot], Tensor]:
        """The snapshots, and the learning rates between the first two.

        Raises SafetensorError, LookupError or ValueError for what is not what the peer has committed itself to, or no
        state of this model and optimizer.
        """
        tensors, own = safetensors.torch.load(shown.data), self.state
        found = dict[int, _Snapshot]()
        for place, index in enumerate(shown.wanted):
            link = shown.account.links[index]
            weights, moments = (_under(tensors, f"{index}.{what}.") for what in ("weights", "moments"))
            _require_committed("weights", weights, link.weights, weights_of(own.model))
            if place < 2 and len(shown.wanted) > 1 and (moments or link.moments != _NO_MOMENTS):
                _require_committed("optimizer", moments, link.moments, moments_of(own.model, own.optimizer))
            found[index] = _Snapshot(link, weights, moments, self._theta(link.base))
        if (rates := tensors["rates"]).dtype != torch.float64 or rates.dim() != 1:
            raise ValueError("no learning rates")
        return found, rates

    def _theta(self, base: int) -> Tensor:
        """The common weights before that round, without buffers."""
        if base not in self._thetas:
            raise _Inconclusive("went on from other rounds' weights")
        return self._thetas[base][: self.common.num_parameters]

    def _off(self, account: Account, index: int, snapshot: _Snapshot) -> list[float]:
        """By how much of their lengths weights, optimizer and common weights are elsewhere than the account says."""
        both = zip(_parts(self.state.model, snapshot), account.where()[index], strict=True)
        pairs = [(part, float((_sums(account.links, part) - said).norm())) for part, said in both]
        return [error / max(sum(float(one.norm()) for one in part), _TINY) for part, error in pairs]

    def _vector(self, snapshot: _Snapshot) -> Tensor:
        return torch.cat(_parameters(self.state.model, snapshot.weights))

    def _retrained(self, shown: Shown, start: _Snapshot, end: _Snapshot, rates: Tensor) -> str:
        """Train from one snapshot to the next; what does not agree."""
        lowest, highest = self.rates(shown.account.round)
        is_right = (rates >= lowest / _LONGER) & (rates <= highest * _LONGER)
        if len(rates) != end.link.position - start.link.position or not bool(is_right.all()):
            return "has trained with other learning rates than the run's"
        if self.state.config.train.global_batch_size % shown.account.micro_batch_size:
            return f"has trained in micro batches of {shown.account.micro_batch_size}, which the run cannot have"
        try:
            replica, seed = self._replica(shown.account), self.seed_of(shown.peer)
            ours = _trained(replica, start, rates, seed, self.seconds / 2)
            if (error := self._apart(end, ours, start)) <= _ALIKE:
                return ""
            # How far rounding leads in these updates: the same from weights that are off by that.
            is_same = replica.precision.name == shown.account.precision and not replica.precision.scales_loss
            noise = _NOISE if is_same else _OTHER_NOISE
            noisy = _trained(replica, start, rates, seed, self.seconds / 2, noise=noise)
        except (ArithmeticError, LookupError, OSError, RuntimeError, TrainkitError, TypeError, ValueError) as problem:
            raise _Unable(f"could not be trained again here: {(str(problem) or repr(problem))[:200]}") from problem
        finally:
            Precision(self.state.precision.name, self.state.dist)  # it sets torch's switches as they were
        if error <= _AS_FAR * self._apart(noisy, ours, start):
            return ""
        found = f"its {len(rates)} updates, made again, lead elsewhere by {100 * error:.0f} %"
        raise _Otherwise(f"has not trained so: {found}")

    def _apart(self, one: _Snapshot, other: _Snapshot, start: _Snapshot) -> float:
        """By how much of their length two ways from ``start`` differ, or what their optimizers remember."""
        before, there, here = (self._vector(snapshot) for snapshot in (start, one, other))
        errors = [distance(there - before, here - before)]
        if one.moments.keys() != other.moments.keys():
            return math.inf
        for kind in {name.rpartition(".")[2] for name in other.moments}:
            pairs = [
                (one.moments[name].float().view(-1), value.float().view(-1))
                for name, value in other.moments.items()
                if name.rpartition(".")[2] == kind and value.dim()
            ]
            if pairs:
                errors.append(distance(*map(torch.cat, zip(*pairs, strict=True))))
        return max(errors) if all(error >= 0.0 for error in errors) else math.inf  # also for not-a-number

    def _replica(self, account: Account) -> TrainState:
        """The model once more, as that peer trains it."""
        own = self.state
        precision = account.precision if account.precision in _EVERYWHERE else own.precision.name
        train = own.config.train.model_copy(update={"micro_batch_size": account.micro_batch_size})
        model = deepcopy(own.model)
        config, precise = own.config.model_copy(update={"train": train}), Precision(precision, own.dist)
        return replace(own, config=config, model=model, precision=precise)


def _trained(
    replica: TrainState, start: _Snapshot, rates: Tensor, seed: int, seconds: float, noise: float = 0.0
) -> _Snapshot:
    """Where updates from ``start`` on lead, from weights that are off by a share of ``noise``. Raises `_Unable`."""
    generator, weights, first = torch.Generator().manual_seed(seed), dict(start.weights), start.link.position
    for name, value in weights.items():
        if noise and value.is_floating_point():
            weights[name] = value * (1.0 + noise * torch.randn(value.shape, generator=generator))
    load_weights(replica.model, Held(weights), replica.dist)
    replica.optimizer.state.clear()
    load_moments(replica.model, replica.optimizer, Held(_copies(start.moments)), replica.dist)  # it keeps them
    update, until = Updater(replica), time.monotonic() + seconds
    replica.model.train()
    with replica.batches(first, first + len(rates), seed=seed, workers=0) as batches:
        for position, rate in enumerate(rates.tolist(), first):
            if time.monotonic() > until:
                raise _Unable(f"trains more than can be trained again here in {seconds:.0f} s")
            update(batches, lr=rate, seed=derive_seed(seed, position))
    weights, moments = weights_of(replica.model), moments_of(replica.model, replica.optimizer)
    return _Snapshot(start.link, _copies(weights), _copies(moments), start.theta)


def _require_same(snapshot: _Snapshot, off: float, learned: float) -> None:
    """Raises `_Inconclusive` where a peer has gone on from other common weights, as far as matters beside what it has
    learned: it has missed an average, perhaps, which is not its fault."""
    length = float(snapshot.theta.norm())
    if not off * length <= _MOVED * learned + _ROUNDING * length:
        raise _Inconclusive("went on from other weights than the run's")


def _require_committed(what: str, kept: Mapping[str, Tensor], digest: str, own: Mapping[str, Tensor]) -> None:
    """Raises ValueError for tensors that nobody had committed itself to, `_Otherwise` for another model's than ``own``,
    `_Unable` where there are no own."""
    shapes, wanted = ({name: (one.dtype, one.shape) for name, one in them.items()} for them in (kept, own))
    if _digest(kept) != digest:
        raise ValueError(f"other {what}")
    if not own:
        raise _Unable("has trained when nothing had been trained here")
    if shapes != wanted:
        raise _Otherwise(f"has shown the {what} of another model")


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def distance(one: Tensor, other: Tensor) -> float:
    """How far they are apart, over the length of the second."""
    return float((one - other).norm()) / max(float(other.norm()), _TINY)


def misgiven(given: Mapping[int, Any], learned: Tensor) -> str:
    """What is wrong with a contribution; empty if it is what was learned, or the mean of that over several rounds.

    Args:
        given: position -> pseudo-gradients from there on, as they have arrived, an array.
        learned: how far the model is from the common weights.
    """
    for position, values in sorted(given.items()):
        there, wanted = torch.from_numpy(values).double(), -learned[position : position + len(values)].double()
        smallest = _HALF * math.sqrt(len(values))
        ways = (wanted, torch.sub, _ROUNDED), (rounded(wanted).double(), misrounded, _MISROUNDED)
        is_part = any(
            0.0 < (factor := float(there @ sent) / max(float(sent @ sent), _TINY)) <= _LONGER
            and float(apart(there, factor * wanted).norm()) <= share * float(there.norm()) + smallest
            for sent, apart, share in ways
        )
        if not (is_part or float(there.norm()) + float(wanted.norm()) <= 2 * smallest):  # also for not-a-number
            return f"has given something else than it has trained (cosine {_cosine(there, wanted):.2f})"
    return ""


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other) / max(float(one.norm() * other.norm()), _TINY)


def misled(now: Tensor, before: Tensor, contributed: Tensor, length: float) -> str:
    """What is wrong with how a model has moved with the common weights; empty if nothing is.

    What was learned is kept, but for what was contributed to the last average where that counted, all of it or as it is
    in 4 bit; or all is given up.

    Args:
        now: how far the model is from the new common weights; ``before``: from the old ones.
        contributed: what was contributed to the last average, alike.
        length: of the common weights.
    """
    for part in cuts(now.numel()):
        given = before[part] - now[part]
        errors = (given - contributed[part], given, now[part], misrounded(given, contributed[part]))
        most = _MOVED * float(before[part].norm() + contributed[part].norm()) + _ROUNDING * length
        if not min(float(error.norm()) for error in errors) <= most:
            return "has other weights than those that it had trained and those that all have in common"
    return ""
