"""Screening: what a reducer makes of the contributions of a round; who counts, how much, and who does not.

A reducer sees every sender's own part, so it can judge before it averages. Besides the part itself it needs the
matrix of their inner products, which adds up over the parts of a round: lengths and
directions are judged by all that has come so far, and every part is averaged as soon as it is there.

- What is not finite, or not of the right shape, is dropped, and its sender for the rest of the round.
- Weights are claims. A volunteer's counts up to what its own speed makes possible, and up to a few times the median.
- Lengths are clipped to the group's median, part by part (kappa = 1; with 3, one of four cancels the rest), so that
  nobody can put all of theirs into one layer. Who was many times longer is left out, and not blamed for it: so is an
  honest newcomer to a run that has nearly converged, whose AdamW is fresh (12 times the others, measured after 300
  updates of theirs).
- Directions: where most agree, who points against them is dropped (as FLTrust, arXiv 2012.13995, without a trusted
  data set: by the median of a sender's cosines with all others).
- BatchNorm's buffers are averaged as a median of each number: all peers measure the same data.

With two senders there is no majority: then the owner's side is what the other is measured by, and nobody is blamed for
pointing against it: once both have learned everything, two honest ones do (cosines to -0.6, measured). All who use one
invitation have one voice together where a majority decides, or one who was invited would come ten times and be it.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from trainkit.swarm.admission import Member
from trainkit.swarm.invitations import GUESTS
from trainkit.swarm.messages import PeerProgress

# A volunteer's weight counts at most so many times the group's median; the owner's side counts in full.
LARGEST_SHARE = 3.0
# Speed varies: so many times what a peer's last rounds were like is still believed.
_SPEED_SLACK = 1.5
# A claim so many times what it may be is no accident.
_GROSS_CLAIM = 20.0
# Who is so many times longer than it may be is left out.
_GROSS_LENGTH = 5.0
# Honest contributions can be this much longer than the median without a word about it.
_NOTED_LENGTH = 2.0
# Beyond any weight, and small enough that sums of squares are finite.
_LARGEST_VALUE = 1e12
# Peers agree when the typical cosine between them is at least this; towards the end of training they need not.
_AGREEMENT = 0.1
_AGAINST = 0.05
_ROUNDING = 1e-9  # of voices: eight eighths are one
# Of two, one of the owner's side: there is no agreement to measure, so more is asked.
_AGAINST_OF_TWO = 0.2

Action = Literal["dropped", "left out", "clipped"]
"""Dropped is who has sent what no honest peer sends; who is left out may be honest."""


@dataclass(frozen=True)
class Verdict:
    """What a reducer has done to a sender's contribution, and why, for people."""

    peer: str
    action: Action
    why: str


@dataclass(frozen=True)
class Limits:
    """What a reducer knows of senders beforehand."""

    trusted: frozenset[str] = frozenset()
    """Ids of the owner's side: their weights are believed."""
    possible: Mapping[str, float] = field(default_factory=dict)
    """Samples that a peer can have trained on in a round, by what it has said of its speed before; a newcomer is
    missing."""
    voices: Mapping[str, float] = field(default_factory=dict)
    """How much a peer counts where a majority decides, if that is not 1."""


@dataclass(frozen=True)
class Findings:
    """What a reducer has found out about its group in one round."""

    members: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    counted: Mapping[str, float] = field(default_factory=dict)
    """Samples of each member that are in the average."""
    received: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each member's parts that have arrived here."""
    names: Mapping[str, str] = field(default_factory=dict)
    """By which each member was invited."""


def voices_of(members: Mapping[str, Member]) -> dict[str, float]:
    """What each counts for where a majority decides: those of one invitation share a voice.

    Not the owner's side; nor guests, who have one invitation for many: that may fall into any hands.
    """
    shared = {
        peer: member.invitation for peer, member in members.items() if not (member.trusted or member.name == GUESTS)
    }
    many = Counter(shared.values())
    return {peer: 1.0 / many[invitation] for peer, invitation in shared.items()}


class Screen:
    """Judges and averages one round's parts, in their order."""

    def __init__(self, senders: Sequence[str], limits: Limits, num_parameters: int) -> None:
        """
        Args:
            senders: peer ids.
            num_parameters: values before this position of the vector are pseudo-gradients, the others buffers.
        """
        self._senders, self._limits, self._num_parameters = senders, limits, num_parameters
        # Sums over the parts that both senders of a pair have sent: of products, and of the first one's squares.
        self._products = torch.zeros(len(senders), len(senders), dtype=torch.float64)
        self._squares = torch.zeros_like(self._products)
        self._allowed_squares = [0.0] * len(senders)
        self._seen = 0
        self._out: dict[int, str] = {}
        """Who was dropped, and why."""
        self._left_out: dict[int, str] = {}
        self._claims: dict[int, float] = {}
        self._counted: dict[int, float] = {}
        """Sums over the parts, of weight times values."""
        self._averaged = 0

    def average(self, position: int, parts: Mapping[int, Tensor], weights: Mapping[int, float], own: Tensor) -> Tensor:
        """The average of one part.

        Args:
            position: of the part's first value in the vector.
            parts: sender's index -> its values, flat or not.
            weights: sender's index -> samples that it claims; of a sender the first claim of a round counts.
            own: this reducer's own values, finite; its buffers are those in common if it has trained nothing.

        Returns:
            Of ``own``'s shape. Where nobody's contribution counts: no change, and the own buffers.
        """
        flat = own.reshape(-1).float()
        good: dict[int, Tensor] = {}
        for sender, part in sorted(parts.items()):
            if weights[sender] == 0.0:
                continue  # it has trained nothing, or leaves this part out: what it sends does not matter
            if part.numel() != flat.numel() or not part.is_floating_point():
                self._drop(sender, "sent something of the wrong shape")
            elif not math.isfinite(claim := self._claims.setdefault(sender, float(weights[sender]))) or claim < 0.0:
                self._drop(sender, f"claims {claim:g} samples")
            elif not bool(((values := part.reshape(-1).float()).abs() <= _LARGEST_VALUE).all()):
                self._drop(sender, "sent values that are not finite")
            elif sender not in self._out:
                good[sender] = values
        weight = self._believed(list(good))
        good = {sender: values for sender, values in good.items() if sender in weight}
        split = min(max(self._num_parameters - position, 0), flat.numel())
        result = flat.clone()
        result[:split] = 0.0
        if split and good:
            members = list(good)
            rows = torch.stack([good[sender][:split] for sender in members])
            result[:split] = self._parameters(members, rows, weight)
        good = {sender: values for sender, values in good.items() if self._counts(sender)}
        if split < flat.numel() and good:
            result[split:] = self._buffers({sender: values[split:] for sender, values in good.items()}, flat[split:])
        self._averaged += flat.numel()
        for sender in good:
            self._counted[sender] = self._counted.get(sender, 0.0) + weight[sender] * flat.numel()
        return result.view_as(own)

    def counted(self) -> dict[str, float]:
        """Samples that each sender has in the averages so far: its weight, as far as it was believed, in as many of the
        parts as have arrived in time."""
        return {
            self._senders[sender]: total / self._averaged
            for sender, total in sorted(self._counted.items())
            if self._counts(sender)
        }

    def verdicts(self) -> tuple[Verdict, ...]:
        """One for each sender that did not count, or counted much less."""
        found = [Verdict(self._senders[sender], "dropped", why) for sender, why in sorted(self._out.items())]
        for sender, why in sorted(self._left_out.items()):
            if sender not in self._out:
                found.append(Verdict(self._senders[sender], "left out", why))
        for sender, peer in enumerate(self._senders):
            if self._counts(sender) and (ratio := self._excess(sender)) > _NOTED_LENGTH:
                found.append(Verdict(peer, "clipped", f"was {ratio:.1f} times longer than the group's median"))
        return tuple(found)

    def _drop(self, sender: int, why: str) -> None:
        self._out.setdefault(sender, why)

    def _counts(self, sender: int) -> bool:
        return sender not in self._out and sender not in self._left_out

    def _trusted(self, sender: int) -> bool:
        return self._senders[sender] in self._limits.trusted

    def _believed(self, members: list[int]) -> dict[int, float]:
        """How much each counts; without those whose claim is no accident."""
        if not members:
            return {}
        usual = self._median_of({sender: self._claims[sender] for sender in self._reference(members)})
        believed: dict[int, float] = {}
        for sender in members:
            claim = self._claims[sender]
            if self._trusted(sender) or len(members) == 1:
                believed[sender] = claim
                continue
            seen = self._limits.possible.get(self._senders[sender])
            # Who has said nothing about its speed yet counts as the others do.
            possible = usual if seen is None else min(_SPEED_SLACK * seen, LARGEST_SHARE * usual)
            if claim > _GROSS_CLAIM * max(possible, usual):
                self._drop(sender, f"claims {claim:.3g} samples, {max(possible, usual):.3g} are possible")
            elif possible > 0.0:  # who counts for nothing is left out: nothing can be in proportion to it
                believed[sender] = min(claim, possible)
        return believed

    def _voice(self, sender: int) -> float:
        return self._limits.voices.get(self._senders[sender], 1.0)

    def _can_vote(self, members: list[int]) -> bool:
        """Whether there can be a majority."""
        return sum(map(self._voice, members)) > 2.0 + _ROUNDING

    def _reference(self, members: list[int]) -> list[int]:
        """Whom the others are measured by: all, if there can be a majority."""
        if self._can_vote(members):
            return members
        return [sender for sender in members if self._trusted(sender)] or members

    def _median_of(self, values: Mapping[int, float]) -> float:
        """Of a value of each sender."""
        return _median(list(values.values()), [self._voice(sender) for sender in values])

    def _parameters(self, members: list[int], rows: Tensor, weight: Mapping[int, float]) -> Tensor:
        products = (rows @ rows.T).double()
        lengths = products.diagonal().sqrt().tolist()
        where = torch.tensor(members)
        self._products[where[:, None], where] += products
        self._squares[where[:, None], where] += products.diagonal()[:, None]
        self._seen += rows.shape[1]
        for sender, allowed in self._allowed(dict(zip(members, lengths, strict=True)), weight).items():
            self._allowed_squares[sender] += allowed * allowed
        for sender in members:
            if (ratio := self._excess(sender)) > _GROSS_LENGTH:
                self._left_out.setdefault(sender, f"was {ratio:.3g} times longer than the group's median")
        self._judge_directions([sender for sender in members if sender not in self._out])
        kept = [index for index, sender in enumerate(members) if self._counts(sender)]
        norm = {members[index]: lengths[index] for index in kept}
        allowed_now = self._allowed(norm, weight)  # anew, without those that do not count
        factors = torch.zeros(len(members))
        total = sum(weight[sender] for sender in norm)
        for index in kept:
            sender = members[index]
            clip = min(1.0, allowed_now[sender] / norm[sender]) if norm[sender] else 1.0
            factors[index] = weight[sender] / total * clip
        return factors[kept] @ rows[kept]

    def _excess(self, sender: int) -> float:
        """How many times longer than it may be, over all parts of a sender."""
        length, allowed = float(self._squares[sender, sender]), self._allowed_squares[sender]
        return math.sqrt(length / allowed) if allowed else 0.0

    def _allowed(self, norm: Mapping[int, float], weight: Mapping[int, float]) -> dict[int, float]:
        """How long each contribution may be: the median, and in proportion for who has trained on more samples."""
        reference = self._reference([sender for sender in norm if norm[sender] > 0.0])
        if not reference:
            return dict.fromkeys(norm, 0.0)
        usual = self._median_of({sender: norm[sender] for sender in reference})
        work = self._median_of({sender: weight[sender] for sender in reference})
        return {sender: usual * max(1.0, weight[sender] / work) for sender in norm}

    def _judge_directions(self, members: list[int]) -> None:
        members = [sender for sender in members if self._products[sender, sender] > 0.0]
        where = torch.tensor(members, dtype=torch.long)
        squares = self._squares[where[:, None], where]
        cosines = (self._products[where[:, None], where] / (squares * squares.T).clamp_min(1e-300).sqrt()).tolist()
        chance = 3.0 / math.sqrt(max(self._seen, 1))  # of vectors that have nothing to do with one another
        trusted = [place for place, sender in enumerate(members) if self._trusted(sender)]
        if trusted and not self._can_vote(members):
            for place, sender in enumerate(members):
                cosine = min(cosines[place][one] for one in trusted)
                if place not in trusted and cosine < -(_AGAINST_OF_TWO + chance):
                    self._left_out.setdefault(sender, f"points against the owner's side (cosine {cosine:.2f})")
        elif len(members) > 2:
            voices = [self._voice(sender) for sender in members]
            # Of an even number the larger one: of three, one that is against must not make the honest ones suspects.
            typical = [
                -_median([-value for j, value in enumerate(row) if j != i], voices[:i] + voices[i + 1 :])
                for i, row in enumerate(cosines)
            ]
            if _median(typical, voices) >= _AGREEMENT:
                for sender, cosine in zip(members, typical, strict=True):
                    if cosine < -(_AGAINST + chance):
                        self._drop(sender, f"points against the others (cosine {cosine:.2f})")

    def _buffers(self, values: Mapping[int, Tensor], own: Tensor) -> Tensor:
        trusted = [part for sender, part in values.items() if self._trusted(sender)]
        if not self._can_vote(list(values)) and (trusted or len(values) < 3):
            return torch.stack(trusted or list(values.values())).mean(0)
        ordered, of = torch.stack(list(values.values())).sort(0)
        voices = torch.tensor([self._voice(sender) for sender in values], dtype=torch.float64)
        counted, half = voices[of].cumsum(0), float(voices.sum()) / 2
        # Of an even number the mean of the two in the middle.
        below, above = ((counted < half + rounding).sum(0) for rounding in (-_ROUNDING, _ROUNDING))
        return (ordered.gather(0, below[None]) + ordered.gather(0, above[None]))[0] / 2


def _median(values: Sequence[float], voices: Sequence[float]) -> float:
    """The lower one, of an even number: an honest peer's, if at least half are honest."""
    half, counted = sum(voices) / 2, 0.0
    for value, voice in sorted(zip(values, voices, strict=True)):
        counted += voice
        if counted >= half - _ROUNDING:
            return value
    raise ValueError("the median of nothing")


# How far all peers together are with an update, by what each says of itself.
#
# As `hivemind.optim.ProgressTracker` reckons it: what a peer has gathered when it last said so, and what it will have
# gathered since at its speed. But what a volunteer says is a claim: it counts up to a few times the median, as in
# `screening`, or one peer could end every update before the others have anything to give to it.

FRESH_SECONDS = 10.0
"""A peer that has said nothing for so long has gone, or is busy with something else than the update."""


@dataclass(frozen=True)
class Tally:
    """What has been gathered for an update by now."""

    samples: float
    samples_per_sec: float

    def seconds_left(self, target: int) -> float:
        """Until there are ``target`` samples."""
        left = target - self.samples
        return 0.0 if left <= 0 else left / self.samples_per_sec if self.samples_per_sec else math.inf


def tally(
    own: Tally,
    others: Mapping[str, PeerProgress],
    *,
    round_index: int,
    trusted: Collection[str],
    is_trusted: bool,
    now: float,
) -> Tally:
    """This peer's ``own`` work and that of the others, by their ids, that are at the same update.

    Args:
        trusted: those of the others that are of the owner's side.
        is_trusted: this peer is. All bound a volunteer's work alike, its own too: so all come to the same sum.
    """
    believed = [(own.samples, own.samples_per_sec, is_trusted)]
    for peer, told in others.items():
        if told.round == round_index and _is_fresh(told, now):
            gathered = told.samples + told.samples_per_sec * max(0.0, now - told.time)
            believed.append((gathered, told.samples_per_sec, peer in trusted))
    samples, rates = ([(claim[index], claim[2]) for claim in believed] for index in (0, 1))
    return Tally(_bounded(samples), _bounded(rates))


def newest_round(others: Mapping[str, PeerProgress], trusted: Collection[str], now: float) -> int:
    """The furthest update that the owner's side is at, by its own word; -1 if nobody of it is heard."""
    heard = [told.round for peer, told in others.items() if peer in trusted and _is_fresh(told, now)]
    return max(heard, default=-1)


def _is_fresh(told: PeerProgress, now: float) -> bool:
    return abs(now - told.time) <= FRESH_SECONDS


def _bounded(claims: Sequence[tuple[float, bool]]) -> float:
    """The sum of what is claimed, and by whom without bounds; of the others nothing is more than a few times what is
    usual, the lower median of those who have something."""
    known = [claim for claim, _ in claims if claim > 0.0]
    most = LARGEST_SHARE * statistics.median_low(known) if known else 0.0
    return sum(claim if is_free else min(claim, most) for claim, is_free in claims)


# How a round ended for one peer: a record of facts.


@dataclass(frozen=True)
class Round:
    """How a round ended for this peer."""

    group: int
    """Peers that averaged, itself included; 0 when it went on alone."""
    used: str
    """"average"; "own" (it went on alone); or "nothing": what it has learned, if anything, waits for the next round."""
    why: str
    """Why the average was not used; empty if it was."""
    samples_per_sec: float
    """Of the whole group."""
    drifted: bool
    """This peer's weights are no longer those of the group."""
    seconds: float = 0.0
    """How long the exchange took, from the end of the round."""
    parts: int = 0
    """Contributions to the parts of the average that have arrived here, of ``expected``."""
    expected: int = 0
    """Contributions that the peers of the group had announced."""
    bytes_up: int = 0
    bytes_down: int = 0
    """Of the parts alone, see `exchange.Outcome`."""
    late: tuple[str, ...] = ()
    """Ids of peers that this one, as a reducer, has left out of the rest of the round."""
    reducers: tuple[str, ...] = ()
    """Ids of the others that have averaged for this peer."""
    untrue: tuple[Verdict, ...] = ()
    """Of those whose averages were not used, see `trainkit.swarm.average`."""
    collapsed: str = ""
    """Why this peer's own training of the round was given up; empty if it was not."""
    advice: str = ""
    """What the person at this machine should know about its link; empty if nothing has changed."""
