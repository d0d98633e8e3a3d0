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
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import safetensors.torch
import torch
from safetensors import SafetensorError
from torch import Tensor

from trainkit.checkpoint.state import Held, load_moments, load_weights, moments_of, weights_of
from trainkit.common.errors import TrainkitError
from trainkit.data.order import derive_seed
from trainkit.swarm.protocol.codecs import cuts, exact, misrounded, rounded
from trainkit.swarm.trust import accounts
from trainkit.swarm.trust.accounts import THETA, TINY, WEIGHTS, Account, Shown, Snapshot, Summed, whole
from trainkit.training.precision import Precision
from trainkit.training.train_state import TrainState
from trainkit.training.update import Updater

# By how much of its length the sums of a snapshot may be off.
_OFF = 1e-4
# By how much of their length weights, moments and squares of a large model may be off, which are in 8 bit; and by how
# much of what was trained updates that begin with those.
_COARSE = (0.02, 0.02, 0.06)
_COARSE_ALIKE = 0.05
# Of what was trained, by which a replay may differ in any case; and so many times as far as it leads to begin with
# weights that are off by this share of them, of weights, and of what the optimizer remembers. Random sums say how far
# that is, and are off by a fifth, now and then by more.
_ALIKE = 0.02
_AS_FAR = (6.0, 15.0, 15.0)
_DRAWS = 3
"""Times that it is looked for, before somebody is found false."""
# In the same number format; and in another one, what bf16 rounds by: of what may be, 227 stretches of honest peers were
# off by a seventh, as a rule, and by 0.45 at most, 86 of those who turn labels by 0.99 to 14 times as much.
_NOISE = 1e-6
_OTHER_NOISE = 2e-3
# Of what was learned, by which a contribution may differ, which was rounded on its way; the same of what 4 bit make of
# that, which is known; and how much longer it may be.
_ROUNDED = 0.1
_MISROUNDED = 0.04
_LONGER = 1.1
_HALF = 2.0**-24  # the smallest number of fp16
# The same of a model that has followed the common weights; and of the common weights, which are rounded as well.
_MOVED = 0.01
_COARSELY_MOVED = 0.05
_ROUNDING = 1e-6
_ANOTHER = "has shown something else than it had committed to"
_EVERYWHERE = ("fp32", "bf16")
"""Number formats that every device has."""


class InconclusiveError(Exception):
    """Nothing can be said, for this reason."""


class TrainedOtherwiseError(Exception):
    """It is false, for this reason; of a peer with other libraries, those may be to blame."""


class UnableError(Exception):
    """This machine cannot say anything, and the peer is not to blame."""


@dataclass(frozen=True)
class Replay:
    """Work that a peer has shown, and by what this machine sees whether it is true."""

    state: TrainState
    """The model for this rank alone."""
    shown: Shown
    thetas: Mapping[int, Tensor]
    """The common weights before each of the last rounds, without buffers."""
    seed: int
    """Seed of the peer's order of the data."""
    rates: tuple[float, float]
    """The lowest and the highest learning rate that the peer can have used."""
    seconds: float
    """Seconds that updates may take which are made again."""

    def falsehood(self) -> str:
        """Say why it is false; empty if it is true.

        Raises InconclusiveError, UnableError, and TrainedOtherwiseError.
        """
        shown = self.shown
        account = self.shown.account
        where = account.where()
        theta = self._theta(account.links[-1].base)
        learned = where[:, WEIGHTS] - where[:, THETA]
        length = float(learned[-1].norm())
        self._require_same(theta, where[-1], length)
        try:
            tensors = safetensors.torch.load(shown.data)
            why = self._misgiven(tensors, theta)
            if why:
                return why
            found = {index: self._read(index, tensors) for index in shown.wanted}
            rates = tensors["rates"] if len(found) == 1 else torch.zeros(0, dtype=torch.float64)
            if rates.dtype != torch.float64 or rates.dim() != 1:
                raise ValueError("no learning rates")
        except (SafetensorError, LookupError, RuntimeError, TypeError, ValueError) as error:
            return f"{_ANOTHER}: {error}"[:200]
        for index, snapshot in found.items():
            self._require_same(snapshot.theta, where[index], length)
            said = [account] if index or shown.before is None else [account, shown.before]
            # Of the first one it has said twice where it is: as the end of the round before, too.
            rows = 1 if shown.has_moved else THETA
            if not all(self._is_there(snapshot, one, index if one is account else -1, rows) for one in said):
                return "has claimed another position than its own"
        if found and shown.before is None and not float(learned[0].norm()) <= _MOVED * length:
            raise InconclusiveError("has restarted with other weights than the run's")
        if shown.has_moved:
            return self._misled(found)
        return self._retrained(found[shown.wanted[0]], rates) if found else ""

    @property
    def _is_large(self) -> bool:
        return accounts.is_large(self._size)

    @property
    def _size(self) -> int:
        return sum(own.numel() for own in accounts.trained_in(self.state.model).values())

    def _like(self) -> dict[str, Tensor]:
        return moments_of(self.state.model, self.state.optimizer)

    def _sums(self, account: Account, summed: Sequence[Iterable[Summed]]) -> Tensor:
        return accounts.sums_of(account.links, summed, large=self._is_large).double()

    def _is_there(self, snapshot: Snapshot, account: Account, index: int, rows: int) -> bool:
        """Return whether a snapshot is where an account says that the one at ``index`` is, by so many rows of sums."""
        said = account.where()[index, :rows]
        summed = accounts.summed_in(self.state.model, snapshot, self._like())[:rows]
        off = (self._sums(account, summed) - said).norm(dim=1)
        return bool((off <= _OFF * said.norm(dim=1)).all())  # also for not-a-number

    def _require_same(self, theta: Tensor, said: Tensor, learned: float) -> None:
        """Raise InconclusiveError where a peer has gone on from other common weights, as far as matters beside what it
        has learned: it has missed an average, perhaps, which is not its fault.
        """
        off = float((self._sums(self.shown.account, [[whole(theta)]])[0] - said[THETA]).norm())
        if not off <= _MOVED * learned + _ROUNDING * float(theta.norm()):
            raise InconclusiveError("continued from other weights than the run's")

    def _misled(self, found: Mapping[int, Snapshot]) -> str:
        moved = self.shown.wanted[0]
        if found[moved].link.moments != found[moved + 1].link.moments:
            return "has changed its optimizer without an update"
        places = list(cuts(self._size))
        most = _MOVED
        if self._is_large:
            places = accounts.drawn_slices(self._size, random.SystemRandom().getrandbits(32))
            most = _COARSELY_MOVED
        learned = (accounts.learned_in(self.state.model, found[index]) for index in (moved + 1, moved, 0))
        now, before, contributed = (torch.cat([one.part(place) for place in places]) for one in learned)
        return misled(now, before, contributed, float(found[moved + 1].theta.norm()), most)

    def _misgiven(self, tensors: Mapping[str, Tensor], theta: Tensor) -> str:
        """Return what is wrong with the parts that a peer has given; empty if nothing is. Raises LookupError,
        RuntimeError, TypeError or ValueError for others than it has committed itself to.
        """
        shown = self.shown
        if not shown.parts:
            return ""
        places = list(cuts(len(theta)))
        learned = torch.zeros_like(theta)
        digests = tensors["digests"].numpy().tobytes()
        if len(digests) != 32 * (len(places) + 1) or _digest(digests) != shown.account.links[-1].weights:
            raise ValueError("other digests")
        for number in shown.parts:
            part = tensors[f"part.{number}"]
            own = theta[places[number]]
            is_part = self._is_large or (part.dtype, part.shape) == (own.dtype, own.shape)
            if not is_part or accounts.digest_of_part(part) != digests[32 * number : 32 * (number + 1)]:
                raise ValueError("other weights")
            learned[places[number]] = exact(part, slice(0, len(own))) if self._is_large else part - own
        return misgiven(shown.given, learned)

    def _read(self, index: int, tensors: Mapping[str, Tensor]) -> Snapshot:
        """The snapshot at ``index``, with what the optimizer remembers if it is the only one.

        Raises ValueError for what is not what the peer has committed itself to, or no state of this model and
        optimizer.
        """
        model = self.state.model
        link = self.shown.account.links[index]
        weights = _under(tensors, f"{index}.weights.")
        moments = _under(tensors, f"{index}.moments.")
        if not weights:
            raise ValueError("no weights")
        snapshot = Snapshot(link, weights, moments, self._theta(link.base))
        _require_alike("weights", accounts.weights_in(model, snapshot), weights_of(model))
        if _digest(accounts.digests_of(model, weights)) != link.weights:
            raise ValueError("other weights")
        if len(self.shown.wanted) == 1 and (moments or link.moments != accounts.NO_MOMENTS):
            if accounts.digest_of_tensors(moments) != link.moments:
                raise ValueError("another optimizer")
            like = self._like()
            _require_alike("optimizer", accounts.Moments(snapshot, like), like)
        return snapshot

    def _theta(self, base: int) -> Tensor:
        """The common weights before that round, without buffers."""
        if base not in self.thetas:
            raise InconclusiveError("continued from another round's weights")
        return self.thetas[base]

    def _retrained(self, start: Snapshot, rates: Tensor) -> str:
        """Train from that snapshot to the next; what does not agree."""
        account, (index,) = self.shown.account, self.shown.wanted
        lowest, highest = self.rates
        is_right = (rates >= lowest / _LONGER) & (rates <= highest * _LONGER)
        end = account.links[index + 1]
        if len(rates) != end.position - start.link.position or not bool(is_right.all()):
            return "has trained with other learning rates than the run's"
        if self.state.config.train.global_batch_size % account.micro_batch_size:
            return f"has trained in micro batches of {account.micro_batch_size}, which the run cannot have"
        try:
            replica = self._replica(account)
            here = self._trained(replica, start, rates)
            said = account.where()
            before = self._sums(account, accounts.summed_in(self.state.model, start, self._like())[:THETA])
            ways = (here - before).norm(dim=1)
            errors = (here - said[index + 1, :THETA]).norm(dim=1)
            allowed = _ALIKE * ways
            if self._is_large:
                said[:, WEIGHTS] -= said[:, THETA]
                lengths = said[index : index + 2, :THETA].norm(dim=2).sum(0)
                allowed = _COARSE_ALIKE * ways + torch.tensor(_COARSE) * lengths
            # How far rounding leads in these updates: the same from weights that are off by that.
            is_same = replica.precision.name == account.precision and not replica.precision.scales_loss
            noise = _NOISE if is_same else _OTHER_NOISE
            for draw in range(_DRAWS + 1):  # by chance it leads far, or not
                if bool((errors <= allowed).all()):
                    return ""
                if draw < _DRAWS:
                    noisy = self._trained(replica, start, rates, noise=noise, draw=draw)
                    allowed = torch.maximum(allowed, torch.tensor(_AS_FAR) * (here - noisy).norm(dim=1))
        except (ArithmeticError, LookupError, OSError, RuntimeError, TrainkitError, TypeError, ValueError) as problem:
            raise UnableError(f"could not be repeated here: {(str(problem) or repr(problem))[:200]}") from problem
        finally:
            Precision(self.state.precision.name, self.state.dist)  # it sets torch's switches as they were
        off = 100 * float((errors / ways.clamp_min(TINY)).max())
        found = f"its {len(rates)} updates, made again, lead elsewhere by {off:.0f} %"
        raise TrainedOtherwiseError(f"has trained differently: {found}")

    def _replica(self, account: Account) -> TrainState:
        """The model once more, as that peer trains it."""
        own = self.state
        precision = account.precision if account.precision in _EVERYWHERE else own.precision.name
        train = own.config.train.model_copy(update={"micro_batch_size": account.micro_batch_size})
        config = own.config.model_copy(update={"train": train})
        return replace(own, config=config, model=deepcopy(own.model), precision=Precision(precision, own.dist))

    def _trained(
        self, replica: TrainState, start: Snapshot, rates: Tensor, noise: float = 0.0, draw: int = 0
    ) -> Tensor:
        """Train from ``start`` on, with weights that are off by a share of ``noise``. Sums of where that leads.

        Raises UnableError.
        """
        generator = torch.Generator().manual_seed(self.seed + draw)
        model = replica.model
        weights = accounts.weights_in(model, start)
        first = start.link.position
        for name, value in weights.items():
            if noise and value.is_floating_point():
                weights[name] = value * (1.0 + noise * torch.randn(value.shape, generator=generator))
        load_weights(model, Held(weights), replica.dist)
        del weights, value
        replica.optimizer.state.clear()
        load_moments(model, replica.optimizer, Held(accounts.Moments(start, self._like())), replica.dist)
        update = Updater(replica)
        until = time.monotonic() + self.seconds
        model.train()
        with replica.batches(first, first + len(rates), seed=self.seed, workers=0) as batches:
            for position, rate in enumerate(rates.tolist(), first):
                if time.monotonic() > until:
                    raise UnableError(f"trains more than can be repeated here in {self.seconds:.2g} s")
                update(batches, lr=rate, seed=derive_seed(self.seed, position))
        moments = moments_of(model, replica.optimizer)
        ours = Snapshot(start.link, weights_of(model), moments, start.theta)
        return self._sums(self.shown.account, accounts.summed_in(model, ours, moments)[:THETA])


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _require_alike(what: str, kept: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Raise ValueError for nothing, TrainedOtherwiseError for another model's, UnableError where there is no own."""
    if not kept:
        raise ValueError(f"no {what}")
    if not own:
        raise UnableError("has trained when nothing had been trained here")
    if shapes_of(kept) != shapes_of(own):
        raise TrainedOtherwiseError(f"has shown the {what} of another model")


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, torch.Size]]:
    return {name: (one.dtype, one.shape) for name, one in tensors.items()}


def _under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def misgiven(given: Mapping[int, Any], learned: Tensor) -> str:
    """Return what is wrong with a contribution; empty if it is what was learned, or the mean of that over several
    rounds.

    Args:
        given: position -> pseudo-gradients from there on, as they have arrived, an array.
        learned: how far the model is from the common weights.
    """
    for position, values in sorted(given.items()):
        there = torch.from_numpy(values).double()
        wanted = -learned[position : position + len(values)].double()
        smallest = _HALF * math.sqrt(len(values))
        ways = (wanted, torch.sub, _ROUNDED), (rounded(wanted).double(), misrounded, _MISROUNDED)
        is_part = any(
            0.0 < (factor := float(there @ sent) / max(float(sent @ sent), TINY)) <= _LONGER
            and float(apart(there, factor * wanted).norm()) <= share * float(there.norm()) + smallest
            for sent, apart, share in ways
        )
        if not (is_part or float(there.norm()) + float(wanted.norm()) <= 2 * smallest):  # also for not-a-number
            return f"has sent something else than it has trained (cosine {_cosine(there, wanted):.2f})"
    return ""


def _cosine(one: Tensor, other: Tensor) -> float:
    return float(one @ other) / max(float(one.norm() * other.norm()), TINY)


def misled(now: Tensor, before: Tensor, contributed: Tensor, length: float, share: float = _MOVED) -> str:
    """Return what is wrong with how a model has moved with the common weights; empty if nothing is.

    What was learned is kept, but for what was contributed to the last average where that counted, all of it or as it is
    in 4 bit; or all is given up.

    Args:
        now: how far the model is from the new common weights; ``before``: from the old ones.
        contributed: what was contributed to the last average, alike.
        length: of the common weights.
        share: of what was learned and contributed, by which it may differ.
    """
    for part in cuts(now.numel()):
        given = before[part] - now[part]
        errors = (given - contributed[part], given, now[part], misrounded(given, contributed[part]))
        most = share * float(before[part].norm() + contributed[part].norm()) + _ROUNDING * length
        if not min(float(error.norm()) for error in errors) <= most:
            return "has neither the weights that it had trained nor the common ones"
    return ""
