"""Audits by replay: the owner trains a stretch of a volunteer's round once more, and compares.

Training is a function of weights, optimizer, order of the data and learning rates. So a volunteer keeps *snapshots* of
its model and optimizer, a few in each round, and commits itself to them by their digests in an *account* of the round.
Only then the owner says what it wants to see, of peers that it has drawn before the round's exchange and has told
nobody. It checks four things:

- What the peer has given is how far its last snapshot is from the common weights.
- Updates that are made again lead from one snapshot to where the next one is, by its sums. Or else:
- Where the common weights have moved, they have moved the model as they should.
- The round goes on where the one before ended, or with an optimizer that knows nothing yet.

Whoever gives something else than it has trained is caught by every audit. Who says that its link is slow shows few of
the parts that it has given, and has many rounds to show a snapshot.

Who trains by the same settings on like hardware gets the very same bits; other numbers of threads, micro batches and
number formats get others (docs/security.md has what was measured). What passes is compared by the length of the
difference, over that of what was trained.
"""

import hashlib
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from trainkit.checkpoint.state import Held, load_moments, load_weights, moments_of, weights_of
from trainkit.data.base import derive_seed
from trainkit.errors import TrainkitError
from trainkit.swarm import accounts
from trainkit.swarm.accounts import MOST_AUDITED, THETA, TINY, WEIGHTS, Account, Heard, Link, Shown, Snapshot, copies
from trainkit.swarm.admission import remember
from trainkit.swarm.diloco import OuterState, cuts, misrounded, rounded
from trainkit.swarm.robust import MOST_KEPT, Verdict
from trainkit.training.build import TrainState
from trainkit.training.precision import Precision
from trainkit.training.update import Updater

# Of its time that the owner gives to audits for each other peer, and in all; and in any case for who has failed one.
_SHARE_FOR_AUDITS, _MOST_FOR_AUDITS, _SHARE_FOR_SUSPECTS = 0.05, 0.5, 0.2
# By how much of its length the sums of a snapshot may be off.
_OFF = 1e-4
# Of what was trained, by which a replay may differ in any case; and so many times as far as it leads to begin with
# weights that are off by this share of them, of weights, and of what the optimizer remembers. Random sums say how far
# that is, and are off by a fifth, now and then by more.
_ALIKE, _AS_FAR = 0.02, (6.0, 15.0, 15.0)
_DRAWS = 3
"""How often that is looked for, before somebody is found false."""
# In the same number format; and in another one, what bf16 rounds by: of what may be, 227 stretches of honest peers were
# off by a seventh, as a rule, and by 0.45 at most, 86 of those who turn labels by 0.99 to 14 times as much.
_NOISE, _OTHER_NOISE = 1e-6, 2e-3
# Of what was learned, by which a contribution may differ, which was rounded on its way; the same of what 4 bit make of
# that, which is known; and how much longer it may be.
_ROUNDED, _MISROUNDED, _LONGER = 0.1, 0.04, 1.1
_HALF = 2.0**-24  # the smallest number of fp16
# The same of a model that has followed the common weights; and of the common weights, which are rounded as well.
_MOVED, _ROUNDING = 0.01, 1e-6
# Messages get lost: so many audits in a row may come to nothing. And so many must be passed for a speed to be known.
_MOST_IN_VAIN, _LEAST_PASSED = 3, 2
# Peers of whose rounds the common weights are kept until they have shown what they owe; and that are drawn in a round.
_MOST_PINNED = _MOST_DRAWN = 16
# Until all have the owner's weights again, where it has gone another way than they.
_ROUNDS_APART = 3
_SUSPECTED = 0.5
"""Of rounds: one that has failed an audit is asked again, for most cheats are found once in many rounds only."""
_PROVEN, _CLEARED = 12, 20
"""Audits passed, after which one that has failed one counts again; and after which that is forgotten."""
_ANOTHER = "has shown something else than it had committed itself to"
_ONCE = f"it counts when it has passed {_PROVEN} audits; the next time it is banned"
_BY_LIBRARIES = "it may be its other libraries, with which it does not count yet"
"""What follows for who was found false."""
_EVERYWHERE = ("fp32", "bf16")
"""Number formats that every device has."""


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
        seconds: that updates may take that are made again; an audit may take twice as long, and four times where it
            finds something false.
        round_seconds: of a round.
    """

    state: TrainState
    common: OuterState
    seed_of: Callable[[str], int]
    rates: Callable[[int], tuple[float, float]]
    seconds: float
    round_seconds: float
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
    """The common weights before each of the last rounds."""
    _pinned: dict[str, Mapping[int, Tensor]] = field(default_factory=dict, init=False)
    """The same of the rounds of which a peer has yet to show something."""
    _took: float = field(default=0.0, init=False)
    """Seconds of the last audit in which something was trained again."""
    _at_once: int = field(default=1, init=False)
    """Peers that can show something in one round."""

    @property
    def unproven(self) -> set[str]:
        """Who does not count: who has shown nothing too often, until it has passed an audit, or something false, until
        it has passed some; and who has other libraries, until some of its updates were made again."""
        in_vain = {peer for peer, times in self._times.items() if times >= _MOST_IN_VAIN}
        accused = {peer for peer, passed in self._suspects.items() if passed < _PROVEN}
        tried = {peer for peer, is_tried in self._tried.items() if is_tried}
        return in_vain | accused | (tried - self._agreed.keys())

    def hear(self, tried: Mapping[str, bool]) -> None:
        """Who says that it has other libraries. Its first word counts: else who is caught would plead them."""
        for peer in tried.keys() - self._tried.keys():
            remember(self._tried, peer, tried[peer], MOST_AUDITED)

    def owe(self, heard: Heard) -> list[Verdict]:
        """Take note of who has yet to show something; what to say of those who do not show it. Call it once in each
        round, before `draw`."""
        # As many are drawn at once as have shown all within a round, whatever holds up the others, and as fit here.
        fit = MOST_KEPT // accounts.most_bytes(self.common.theta.numel())
        self._at_once = max(1, self._at_once // 2 if heard.behind else min(self._at_once + 1, _MOST_DRAWN, fit))
        for peer in heard.owing:
            remember(self._pinned, peer, self._pinned.get(peer) or {**self._thetas}, _MOST_PINNED)
        for peer in heard.refused:
            self._pinned.pop(peer, None)
        return [self._in_vain(peer, "has shown nothing") for peer in heard.refused]

    def draw(self, known: Iterable[str], heard: Heard) -> dict[str, bool]:
        """Whom to ask about the round that ends, each with whether some of it is to be trained again, for which there
        is not always time. Call it once in each round, before the exchange.

        Args:
            known: who takes part, without this peer.
        """
        remember(self._thetas, self.common.round, self.common.theta.clone(), 4)
        free, drawn, chance = sorted({*known} - {*heard.owing}), dict[str, bool](), random.SystemRandom()
        share = min(_SHARE_FOR_AUDITS * len(free), _MOST_FOR_AUDITS)
        if self._suspects.keys() & {*free}:
            share = max(share, _SHARE_FOR_SUSPECTS)
        # So many audits take that share of a round, on average.
        times = share * self.round_seconds / self._took if self._took else 1.0
        many = min(math.floor(min(times, _MOST_DRAWN) + chance.random()), self._at_once - heard.behind)
        while free and len(drawn) < max(1, many):
            peer = drawn_of(free, self._suspects, heard.uneven, chance)
            drawn[peer] = len(drawn) < many
            free.remove(peer)
        return drawn

    def _in_vain(self, peer: str, why: str) -> Verdict:
        remember(self._times, peer, self._times[peer] + 1, MOST_AUDITED)
        if self._times[peer] < _MOST_IN_VAIN:
            return Verdict(peer, "audited", why)
        return Verdict(peer, "left out", f"{why}; after {_MOST_IN_VAIN} such audits it counts when it has passed one")

    def audit(self, shown: Shown) -> Verdict | None:
        """Look at what a peer has shown: "audited" if it is true, or nothing can be said.

        None: it is what the peer has given, and nothing was trained again.
        """
        peer, began, by_libraries = shown.peer, time.monotonic(), False
        try:
            why = self._falsehood(shown)
        except _Otherwise as reason:
            # Who is told to leave, and does not, pleads its libraries in vain.
            until = self.differ.get(peer, math.inf) + accounts.ROUNDS_TO_SHOW
            by_libraries = self._tried.get(peer, False) and peer not in self._agreed and shown.account.round <= until
            why = str(reason)
        except _Unable as reason:
            return Verdict(peer, "audited", str(reason))
        except _Inconclusive as reason:
            is_own_doing = shown.account.round <= self.common.apart + _ROUNDS_APART
            return Verdict(peer, "audited", str(reason)) if is_own_doing else self._in_vain(peer, str(reason))
        finally:
            self._pinned.pop(peer, None)
            took = time.monotonic() - began
            if len(shown.wanted) == 1:
                self._took = took
        if why:
            if by_libraries:
                self.verified.pop(peer, None)
                if peer in self._strange:
                    remember(self.differ, peer, self.differ.get(peer, shown.account.round), MOST_AUDITED)
                remember(self._strange, peer, None, MOST_AUDITED)
                return Verdict(peer, "left out", f"{why}; {_BY_LIBRARIES}")
            return self.note_false(peer, why)
        self.note_true(peer)
        if not shown.wanted:
            return None
        self._passed[peer] += 1
        if self._passed[peer] >= _LEAST_PASSED:
            links = shown.account.links
            samples = (links[-1].position - links[0].position) * self.state.config.train.global_batch_size
            remember(self.verified, peer, float(samples), MOST_AUDITED)
        return Verdict(peer, "audited", f"true, as was seen in {took:.2f} s")

    def note_false(self, peer: str, why: str) -> Verdict:
        """It was found false: it does not count for a while, or the second time is out."""
        self.verified.pop(peer, None)
        if peer in self._suspects:
            return Verdict(peer, "dropped", why)
        remember(self._suspects, peer, 0, MOST_AUDITED)
        return Verdict(peer, "left out", f"{why}; {_ONCE}")

    def note_true(self, peer: str) -> None:
        """It has passed an audit."""
        self._times.pop(peer, None)
        if peer in self._suspects:
            self._suspects[peer] += 1
            if self._suspects[peer] >= _CLEARED:
                del self._suspects[peer]

    def _falsehood(self, shown: Shown) -> str:
        """Why it is false; empty if it is true. Raises `_Inconclusive` and `_Unable`."""
        account, links, where = shown.account, shown.account.links, shown.account.where()
        theta, learned = self._theta(shown.peer, links[-1].base), where[:, WEIGHTS] - where[:, THETA]
        length = float(learned[-1].norm())
        _require_same(links, theta, where[-1], length)
        try:
            tensors = safetensors.torch.load(shown.data)
            if why := self._misgiven(shown, tensors, theta):
                return why
            found = {index: self._read(shown, index, tensors) for index in shown.wanted}
            rates = _rates_in(tensors) if len(found) == 1 else None
        except (SafetensorError, LookupError, RuntimeError, TypeError, ValueError) as error:
            return f"{_ANOTHER}: {error}"[:200]
        for index, snapshot in found.items():
            _require_same(links, snapshot.theta, where[index], length)
            said = [account] if index or shown.before is None else [account, shown.before]
            # Of the first one it has said twice where it is: as the end of the round before, too.
            rows = 1 if shown.has_moved else THETA
            if not all(self._is_there(snapshot, one, index if one is account else -1, rows) for one in said):
                return "has said that it was elsewhere than it was"
        if found and shown.before is None and not float(learned[0].norm()) <= _MOVED * length:
            raise _Inconclusive("has begun anew with other weights than the run's")
        if shown.has_moved:
            return self._misled(shown, found)
        return self._retrained(shown, found[shown.wanted[0]], rates) if rates is not None else ""

    def _is_there(self, snapshot: Snapshot, account: Account, index: int, rows: int) -> bool:
        """Whether a snapshot is where an account says that the one at ``index`` is, by so many rows of sums."""
        summed, said = accounts.summed_in(self.state.model, snapshot)[:rows], account.where()[index, :rows]
        off = (accounts.sums_of(account.links, summed) - said).norm(dim=1)
        lengths = torch.tensor([math.hypot(*(float(one.norm()) for one in tensors)) for tensors in summed])
        return bool((off <= _OFF * lengths).all())  # also for not-a-number

    def _misled(self, shown: Shown, found: Mapping[int, Snapshot]) -> str:
        links, moved = shown.account.links, shown.wanted[0]
        if links[moved].moments != links[moved + 1].moments:
            return "has changed its optimizer without an update"
        before, now, began = (found[index] for index in (moved, moved + 1, 0))
        then, here, contributed = (self._vector(one) - one.theta for one in (before, now, began))
        return misled(here, then, contributed, float(now.theta.norm()))

    def _misgiven(self, shown: Shown, tensors: Mapping[str, Tensor], theta: Tensor) -> str:
        """What is wrong with the parts that a peer has given; empty if nothing is. Raises LookupError, RuntimeError,
        TypeError or ValueError for others than it has committed itself to."""
        if not shown.parts:
            return ""
        places, learned = list(cuts(len(theta))), torch.zeros_like(theta)
        digests = tensors["digests"].numpy().tobytes()
        if len(digests) != 32 * (len(places) + 1) or _digest(digests) != shown.account.links[-1].weights:
            raise ValueError("other digests")
        for number in shown.parts:
            part, own = tensors[f"part.{number}"], theta[places[number]]
            is_part = (part.dtype, part.shape) == (own.dtype, own.shape)
            if not is_part or accounts.digest_of_part(part) != digests[32 * number : 32 * (number + 1)]:
                raise ValueError("other weights")
            learned[places[number]] = part - own
        return misgiven(shown.given, learned)

    def _read(self, shown: Shown, index: int, tensors: Mapping[str, Tensor]) -> Snapshot:
        """The snapshot at ``index``, with what the optimizer remembers if it is the only one.

        Raises ValueError for what is not what the peer has committed itself to, or no state of this model and
        optimizer.
        """
        own, link = self.state, shown.account.links[index]
        weights, moments = (_under(tensors, f"{index}.{what}.") for what in ("weights", "moments"))
        _require_alike("weights", weights, weights_of(own.model))
        if _digest(accounts.digests_of(own.model, weights)) != link.weights:
            raise ValueError("other weights")
        if len(shown.wanted) == 1 and (moments or link.moments != accounts.NO_MOMENTS):
            if accounts.digest_of_tensors(moments) != link.moments:
                raise ValueError("another optimizer")
            _require_alike("optimizer", moments, moments_of(own.model, own.optimizer))
        return Snapshot(link, weights, moments, self._theta(shown.peer, link.base))

    def _theta(self, peer: str, base: int) -> Tensor:
        """The common weights before that round, without buffers."""
        known = {**self._pinned.get(peer, {}), **self._thetas}
        if base not in known:
            raise _Inconclusive("went on from other rounds' weights")
        return known[base][: self.common.num_parameters]

    def _vector(self, snapshot: Snapshot) -> Tensor:
        return torch.cat(accounts.parameters_of(self.state.model, snapshot.weights))

    def _retrained(self, shown: Shown, start: Snapshot, rates: Tensor) -> str:
        """Train from that snapshot to the next; what does not agree."""
        account, (index,) = shown.account, shown.wanted
        lowest, highest = self.rates(account.round)
        is_right, end = (rates >= lowest / _LONGER) & (rates <= highest * _LONGER), account.links[index + 1]
        if len(rates) != end.position - start.link.position or not bool(is_right.all()):
            return "has trained with other learning rates than the run's"
        if self.state.config.train.global_batch_size % account.micro_batch_size:
            return f"has trained in micro batches of {account.micro_batch_size}, which the run cannot have"
        try:
            replica, seed = self._replica(account), self.seed_of(shown.peer)
            ours = _trained(replica, start, rates, seed, self.seconds)
            before, here = (accounts.summed_in(self.state.model, one)[:THETA] for one in (start, ours))
            pairs = zip(before, here, strict=True)  # an optimizer that knew nothing began with zeros
            ways = torch.tensor([_apart(old or [0 * one for one in new], new) for old, new in pairs])
            errors = (accounts.sums_of(account.links, here) - account.where()[index + 1, :THETA]).norm(dim=1)
            if bool((errors <= _ALIKE * ways).all()):
                return self._agrees(shown.peer)
            # How far rounding leads in these updates: the same from weights that are off by that.
            is_same = replica.precision.name == account.precision and not replica.precision.scales_loss
            noise = _NOISE if is_same else _OTHER_NOISE
            noises = torch.zeros_like(ways)
            for draw in range(_DRAWS):  # by chance it leads far, or not
                other = _trained(replica, start, rates, seed, self.seconds, noise=noise, draw=draw)
                noisy = accounts.summed_in(self.state.model, other)[:THETA]
                apart = [_apart(one, another) for one, another in zip(here, noisy, strict=True)]
                noises = torch.maximum(noises, torch.tensor(apart))
                if bool((errors <= torch.maximum(torch.tensor(_AS_FAR) * noises, _ALIKE * ways)).all()):
                    return self._agrees(shown.peer)
        except (ArithmeticError, LookupError, OSError, RuntimeError, TrainkitError, TypeError, ValueError) as problem:
            raise _Unable(f"could not be trained again here: {(str(problem) or repr(problem))[:200]}") from problem
        finally:
            Precision(self.state.precision.name, self.state.dist)  # it sets torch's switches as they were
        off = 100 * float((errors / ways.clamp_min(TINY)).max())
        found = f"its {len(rates)} updates, made again, lead elsewhere by {off:.0f} %"
        raise _Otherwise(f"has not trained so: {found}")

    def _agrees(self, peer: str) -> str:
        remember(self._agreed, peer, None, MOST_AUDITED)
        self.differ.pop(peer, None)
        return ""

    def _replica(self, account: Account) -> TrainState:
        """The model once more, as that peer trains it."""
        own = self.state
        precision = account.precision if account.precision in _EVERYWHERE else own.precision.name
        train = own.config.train.model_copy(update={"micro_batch_size": account.micro_batch_size})
        model = deepcopy(own.model)
        config, precise = own.config.model_copy(update={"train": train}), Precision(precision, own.dist)
        return replace(own, config=config, model=model, precision=precise)


def drawn_of(known: Sequence[str], suspects: Container[str], uneven: Mapping[str, float], chance: random.Random) -> str:
    """Whom to audit: a suspect in half of the rounds; else in half of them anybody, and in the others the likelier the
    more unevenly one moves, in squares."""
    if held := [peer for peer in known if peer in suspects and chance.random() < _SUSPECTED]:
        return chance.choice(held)
    squares = [uneven.get(peer, 0.0) ** 2 for peer in known]
    (peer,) = chance.choices(known, [1 / len(known) + square / max(sum(squares), TINY) for square in squares])
    return peer


def _trained(
    replica: TrainState, start: Snapshot, rates: Tensor, seed: int, seconds: float, noise: float = 0.0, draw: int = 0
) -> Snapshot:
    """Where updates from ``start`` on lead, from weights that are off by a share of ``noise``. Raises `_Unable`."""
    generator, weights, first = torch.Generator().manual_seed(seed + draw), dict(start.weights), start.link.position
    for name, value in weights.items():
        if noise and value.is_floating_point():
            weights[name] = value * (1.0 + noise * torch.randn(value.shape, generator=generator))
    load_weights(replica.model, Held(weights), replica.dist)
    replica.optimizer.state.clear()
    load_moments(replica.model, replica.optimizer, Held(copies(start.moments)), replica.dist)  # it keeps them
    update, until = Updater(replica), time.monotonic() + seconds
    replica.model.train()
    with replica.batches(first, first + len(rates), seed=seed, workers=0) as batches:
        for position, rate in enumerate(rates.tolist(), first):
            if time.monotonic() > until:
                raise _Unable(f"trains more than can be trained again here in {seconds:.2g} s")
            update(batches, lr=rate, seed=derive_seed(seed, position))
    weights, moments = weights_of(replica.model), moments_of(replica.model, replica.optimizer)
    return Snapshot(start.link, copies(weights), copies(moments), start.theta)


def _require_same(links: Sequence[Link], theta: Tensor, said: Tensor, learned: float) -> None:
    """Raises `_Inconclusive` where a peer has gone on from other common weights, as far as matters beside what it has
    learned: it has missed an average, perhaps, which is not its fault."""
    off = float((accounts.sums_of(links, [[theta]])[0] - said[THETA]).norm())
    if not off <= _MOVED * learned + _ROUNDING * float(theta.norm()):
        raise _Inconclusive("went on from other weights than the run's")


def _rates_in(tensors: Mapping[str, Tensor]) -> Tensor:
    """The learning rates of the updates. Raises LookupError or ValueError for anything else."""
    if (rates := tensors["rates"]).dtype != torch.float64 or rates.dim() != 1:
        raise ValueError("no learning rates")
    return rates


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _require_alike(what: str, kept: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raises ValueError for nothing, `_Otherwise` for another model's than ``own``, `_Unable` where there is no own."""
    if not kept:
        raise ValueError(f"no {what}")
    if not own:
        raise _Unable("has trained when nothing had been trained here")
    shapes, wanted = ({name: (one.dtype, one.shape) for name, one in them.items()} for them in (kept, own))
    if shapes != wanted:
        raise _Otherwise(f"has shown the {what} of another model")


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def _apart(some: Iterable[Tensor], others: Iterable[Tensor]) -> float:
    """How far they are apart, all together."""
    return math.hypot(*(float((one - other).norm()) for one, other in zip(some, others, strict=True)))


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
            0.0 < (factor := float(there @ sent) / max(float(sent @ sent), TINY)) <= _LONGER
            and float(apart(there, factor * wanted).norm()) <= share * float(there.norm()) + smallest
            for sent, apart, share in ways
        )
        if not (is_part or float(there.norm()) + float(wanted.norm()) <= 2 * smallest):  # also for not-a-number
            return f"has given something else than it has trained (cosine {_cosine(there, wanted):.2f})"
    return ""


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other) / max(float(one.norm() * other.norm()), TINY)


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
