"""Whom to believe: a reducer screens contributions, a peer audits reducers, and a sentry draws the consequences.

A reducer sees every sender's own part, so it can judge before it averages. Besides the part itself it needs the matrix
of their inner products, which adds up over the parts of a round: lengths and directions are judged by all that has come
so far, and every part is averaged as soon as it is there.

- What is not finite, or not of the right shape, is dropped, and its sender for the rest of the round.
- Weights are claims, and claims buy nothing: another peer's counts up to what it has stated for an audit, and up to the
  median. The owner's and the reducer's own count in full.
- Lengths are clipped to the median in each block of 4096 values, so that nobody can put all of theirs into one layer
  (kappa = 1; with 3, one of four cancels the rest). Who says that it has trained on more may be longer without being
  blamed, but is clipped alike. Who was many times longer is left out, and not blamed for it: so is an honest newcomer
  to a run that has nearly converged, whose AdamW is fresh (12 times the others, measured after 300 updates of theirs).
- The root of trust is what the owner's side has trained, the reducer itself first of all (FLTrust, arXiv 2012.13995).
  In each block a contribution counts by its cosine with that: in full if it agrees as most do, not at all if it points
  against it. FLTrust's own weights, the cosines, would leave the owner almost alone where honest cosines are small.
- Where most agree, who points against them is dropped: by this liars get their names, and an average is screened in
  which nobody of the owner's side has a part (all of that side only reduce, or have trained nothing in the round).
- BatchNorm's buffers are averaged as a median of each number: all peers measure the same data.
- Credited is what was accepted: the weight as far as it was believed, in the blocks in which it counted. Zeros earn
  nothing.

With two senders there is no majority: then the other is measured by the owner's side alone, counts by its cosine, and
is not blamed for pointing against it: once both have learned everything, two honest ones do (cosines to -0.6,
measured). All who use one invitation have one voice together where a majority decides, or one who was invited would
come ten times and be it.

Nobody but the reducer has seen all contributions. But a peer knows its own, which is in the average or beside others
that began at the same weights: an average is not against it, and not many times longer. So each peer, the owner first
of all, audits by its own contribution the slice of every other reducer but the owner. Where a slice cannot be true the
common weights stay as they are, and what was learned waits for a later round. A slice that is wrong but neither long
nor against anybody passes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainkit import terminal
from trainkit.run.events import Remark
from trainkit.run.metrics import Counted
from trainkit.swarm.access import STRIKES, Ban, banned_with
from trainkit.swarm.admission import Member, remember
from trainkit.swarm.diloco import PROBE_SIZE, Outcome, cuts, halves
from trainkit.swarm.invitations import GUESTS, Role, credited

if TYPE_CHECKING:
    from trainkit.swarm.session import Session

# Values of a part that are judged together: a small layer's harm does not hide in a large one's length.
_BLOCK = 4096
# Speed varies: up to this many times what a peer has trained on in another round is believed.
_SPEED_SLACK = 1.5
# How many times too long a contribution is left out, and a reducer's average is no accident.
_GROSS_LENGTH = 5.0
# Honest contributions can be this much longer than the median without a word about it, and as much shorter for what
# they have trained on without losing credit.
_NOTED_LENGTH = 2.0
# Beyond any weight, and small enough that sums of squares are finite.
_LARGEST_VALUE = 1e12
# Peers agree when the typical cosine between them is at least this; towards the end of training they need not.
_AGREEMENT = 0.1
_AGAINST = 0.05
# Who agrees with the owner's side in less than this share of its values is told of.
_LEAST_AGREED = 0.05
_ROUNDING = 1e-9  # of voices: eight eighths are one
_TINY = 1e-30  # nothing is divided by less
MOST_KEPT = 1 << 31
"""Bytes of a round that are kept to find out whose contribution does harm; of what can be taken back; and of what is
shown at once."""

Action = Literal["dropped", "left out", "clipped", "audited"]
"""Dropped is who has sent what no honest peer sends; who is left out may be honest; who was audited counts."""


@dataclass(frozen=True)
class Verdict:
    """What was done to a peer's contribution or average, and why, for people."""

    peer: str
    action: Action
    why: str


@dataclass(frozen=True)
class Limits:
    """What a reducer knows of senders beforehand."""

    trusted: frozenset[str] = frozenset()
    """Ids of the owner's side: they are no liars, as far as is known."""
    verified: Mapping[str, float] = field(default_factory=dict)
    """Samples of a round that a peer has trained on beyond doubt, see `trainkit.swarm.replay`; 0: it does not count."""
    voices: Mapping[str, float] = field(default_factory=dict)
    """How much a peer counts where a majority decides, if that is not 1."""
    own: str = ""
    """Id of the reducer: no majority says that its own contribution is wrong."""
    keeps: bool = False
    """What each has put into the average is kept, see `Screen.alone`."""
    drawn: Collection[str] = ()
    """Ids of peers that are to show their work: what they send is kept."""
    stated: Mapping[str, float] = field(default_factory=dict)
    """Samples that a peer has trained on in the round before, by the account that an audit holds it to."""
    owners: frozenset[str] = frozenset()
    """Ids of the owner's peers: their weights are believed."""


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


def lower_median(values: Iterable[tuple[float, float]]) -> float:
    """The median of values, each with its voice; the lower one of two: an honest peer's, if at least half are honest.

    Raises ValueError for no values.
    """
    numbers, voices = torch.tensor([*zip(*values, strict=True)], dtype=torch.float64)
    return float(_middle(numbers, voices)[0])


def _middle(rows: Tensor, voices: Tensor) -> tuple[Tensor, Tensor]:
    """The median of each column, each value with its voice: the lower and, of an even number, the upper one."""
    ordered, of = rows.sort(0)
    counted = voices.gather(0, of).cumsum(0)
    below, above = ((counted < counted[-1] / 2 + rounding).sum(0)[None] for rounding in (-_ROUNDING, _ROUNDING))
    return ordered.gather(0, below)[0], ordered.gather(0, above.clamp_max(len(rows) - 1))[0]


class _Kept(NamedTuple):
    """What senders have put into the average of a part, of so many values, at that position of the vector."""

    position: int
    values: int
    senders: Sequence[int]
    put: Tensor
    """[senders, blocks, values]"""
    share: Tensor
    """Of each in the average of a block, [senders, blocks]."""


class Screen:
    """Judges and averages one round's parts, in their order."""

    def __init__(self, senders: Sequence[str], limits: Limits, num_parameters: int) -> None:
        """
        Args:
            senders: peer ids.
            num_parameters: values before this position of the vector are pseudo-gradients, the others buffers.
        """
        self._senders, self._num_parameters = senders, num_parameters
        self._own, self._verified, self._stated = limits.own, limits.verified, limits.stated
        self.given: dict[str, dict[int, Any]] = {peer: {} for peer in limits.drawn}
        """Of each peer that is to show its work: position -> pseudo-gradients, as arrays."""
        self._trusted = {sender for sender, peer in enumerate(senders) if peer in limits.trusted}
        self._believes = {sender for sender, peer in enumerate(senders) if peer in limits.owners | {limits.own}}
        self._voices = torch.tensor([limits.voices.get(peer, 1.0) for peer in senders], dtype=torch.float64)
        # Sums over the parts that both senders of a pair have sent: of products, and of the first one's squares.
        self._products = torch.zeros(len(senders), len(senders), dtype=torch.float64)
        self._squares = torch.zeros_like(self._products)
        self._allowed_squares = [0.0] * len(senders)
        self._judged: dict[int, Verdict] = {}
        """Who does not count."""
        self._dropped: set[int] = set()
        self._claims: dict[int, float] = {}
        self._counted: dict[int, float] = defaultdict(float)
        """Sums over the parts, of weight times accepted values."""
        self._agreed, self._asked = [0.0] * len(senders), [0] * len(senders)
        """Values of each that agree with the owner's side, and all that it has sent."""
        self._seen = self._averaged = 0
        fits = 2 * num_parameters * len(senders) <= MOST_KEPT
        self._kept: list[_Kept] | None = [] if limits.keeps and fits else None

    def average(self, position: int, parts: Mapping[int, Tensor], weights: Mapping[int, float], own: Tensor) -> Tensor:
        """The average of one part.

        Args:
            position: of the part's first value in the vector.
            parts: sender's index -> its values.
            weights: sender's index -> samples that it claims, a finite number above 0; of a sender the first claim of
                a round counts.
            own: this reducer's own values, finite; its buffers are those in common if it has trained nothing.

        Returns:
            Where nobody's contribution counts: no change, and the own buffers.
        """
        result = own.clone()
        good: dict[int, Tensor] = {}
        split = min(max(self._num_parameters - position, 0), result.numel())
        for sender, part in sorted(parts.items()):
            self._claims.setdefault(sender, weights[sender])
            if self._senders[sender] in self.given:
                self.given[self._senders[sender]][position] = part[:split].numpy().copy()
            if part.numel() != result.numel():
                self._drop(sender, "sent something of the wrong shape")
            elif not bool((part.abs() <= _LARGEST_VALUE).all()):
                self._drop(sender, "sent values that are not finite")
            elif sender not in self._dropped:
                good[sender] = part
        weight = self._believed(good)
        good = {sender: good[sender] for sender in weight}
        result[:split] = 0.0
        if split and good:
            result[:split] = self._parameters(position, {one: part[:split] for one, part in good.items()}, weight)
        good = {sender: values for sender, values in good.items() if sender not in self._judged}
        if split < result.numel() and good:
            result[split:] = self._buffers({sender: values[split:] for sender, values in good.items()})
        self._averaged += split
        return result

    def alone(self, peer: str) -> list[tuple[int, Tensor]]:
        """The average as the owner's side and ``peer`` alone would have made it, each with what it has put into it: the
        position of each part, and its pseudo-gradients. Empty if that is not known."""
        found, them = list[tuple[int, Tensor]](), {self._senders.index(peer), *self._trusted}
        for position, values, senders, put, share in self._kept or []:
            rows = [row for row, sender in enumerate(senders) if sender in them]
            total = put[rows].float().sum(0) / share[rows].sum(0).clamp_min(_TINY)[:, None]
            found.append((position, total.view(-1)[:values]))
        return found

    def moved(self) -> Iterator[tuple[str, int, Tensor]]:
        """By what each peer but the owner has moved the average of each part: away from what the owner has trained, or
        where that does not count, from what the others have. So what several have done together adds up.

        Yields: id, position, pseudo-gradients."""
        for position, values, senders, put, share in self._kept or []:
            own = [row for row, sender in enumerate(senders) if sender in self._believes]
            every, owners = ((put[rows].float().sum(0), share[rows].sum(0)[:, None]) for rows in (slice(None), own))
            counts = owners[1] > 0.0
            for row, sender in enumerate(senders):
                if sender not in self._believes:
                    beside = torch.where(counts, owners[0], every[0] - put[row])
                    beside /= torch.where(counts, owners[1], every[1] - share[row, :, None]).clamp_min(_TINY)
                    yield self._senders[sender], position, (put[row] - share[row, :, None] * beside).view(-1)[:values]

    def counted(self) -> dict[str, float]:
        """Samples that each sender has in the averages so far: its weight, as far as it was believed, by what of it was
        accepted. Nothing for zeros, nor for parts that have not arrived in time."""
        counting = ((sender, total) for sender, total in sorted(self._counted.items()) if sender not in self._judged)
        return {self._senders[sender]: total / self._averaged for sender, total in counting}

    def verdicts(self) -> tuple[Verdict, ...]:
        """One for each sender that did not count, or counted much less."""
        excess = {sender: self._excess(sender) for sender in range(len(self._senders)) if sender not in self._judged}
        clipped = (
            Verdict(self._senders[sender], "clipped", f"was {ratio:.1f} times longer than the group's median")
            for sender, ratio in excess.items()
            if ratio > _NOTED_LENGTH
        )
        against = (
            Verdict(peer, "left out", "has nothing in common with what the owner's side has trained")
            for sender, peer in enumerate(self._senders)
            if sender not in self._judged and self._agreed[sender] < _LEAST_AGREED * self._asked[sender]
        )
        return (*self._judged.values(), *against, *clipped)

    def _drop(self, sender: int, why: str) -> None:
        if sender not in self._dropped:
            self._dropped.add(sender)
            self._judged[sender] = Verdict(self._senders[sender], "dropped", why)

    def _can_vote(self, senders: Iterable[int]) -> bool:
        """Whether there can be a majority."""
        return float(self._voices[list(senders)].sum()) > 2.0 + _ROUNDING

    def _reference(self, senders: list[int]) -> list[int]:
        """Whom the others are measured by: all, if there can be a majority."""
        trusted = [sender for sender in senders if sender in self._trusted]
        return senders if self._can_vote(senders) else trusted or senders

    def _median(self, values: Mapping[int, float]) -> float:
        return lower_median((value, float(self._voices[sender])) for sender, value in values.items())

    def _believed(self, senders: Collection[int]) -> dict[int, float]:
        """How much each counts: nobody for more than what is usual, but who has shown what it did."""
        believed: dict[int, float] = {}
        known = self._reference(list(senders))
        usual = self._median({sender: self._claims[sender] for sender in known}) if known else 0.0
        for sender in senders:
            claim = self._claims[sender]
            if sender in self._believes:
                believed[sender] = claim
                continue
            peer = self._senders[sender]
            stated, verified = self._stated.get(peer, math.inf), self._verified.get(peer)
            if stated > 0.0 and verified != 0.0:  # else nothing can be in proportion to it
                believed[sender] = min(claim, stated, max(usual, _SPEED_SLACK * (verified or 0.0)))
        return believed

    def _parameters(self, position: int, values: Mapping[int, Tensor], weight: Mapping[int, float]) -> Tensor:
        senders, rows = list(values), torch.stack(list(values.values()))
        where, products = torch.tensor(senders), (rows @ rows.T).double()
        self._products[where[:, None], where] += products
        self._squares[where[:, None], where] += products.diagonal()[:, None]
        self._seen += rows.shape[1]
        number = -(-rows.shape[1] // _BLOCK)
        blocks = pad(rows, (0, -rows.shape[1] % number)).view(len(senders), number, -1)
        lengths = blocks.norm(dim=2)
        usual, work, _ = self._usual(senders, lengths, weight)
        for sender in senders:
            # Who says that it has trained on more may be longer without being blamed: that moves nothing.
            self._allowed_squares[sender] += (float(usual.norm()) * max(1.0, self._claims[sender] / work)) ** 2
            if (ratio := self._excess(sender)) > _GROSS_LENGTH:
                why = f"was {ratio:.3g} times longer than the group's median"
                self._judged.setdefault(sender, Verdict(self._senders[sender], "left out", why))
        self._judge_directions([sender for sender in senders if sender not in self._dropped])
        usual, work, voices = self._usual(senders, lengths, weight)  # anew, without those that do not count
        weights = torch.tensor([0.0 if sender in self._judged else weight[sender] for sender in senders])[:, None]
        trust, agreed = self._trust(senders, blocks, lengths, voices)
        share = weights * trust
        allowed = usual * (weights / work).clamp_min(1.0)  # more for the owner's side alone: see `_believed`
        share /= share.sum(0).clamp_min(_TINY)
        factors = share * (allowed / lengths.clamp_min(_TINY)).clamp_max(1.0)
        if self._kept is not None:
            # Half the memory, and precise enough to tell harm by.
            put = (factors[:, :, None] * blocks).bfloat16()
            self._kept.append(_Kept(position, rows.shape[1], senders, put, share))
        moved = _NOTED_LENGTH * lengths * work / (usual * weights).clamp_min(_TINY)
        accepted = weights * agreed * moved.clamp_max(1.0) * (usual > 0.0)
        for sender, *means in zip(senders, accepted.mean(1).tolist(), agreed.mean(1).tolist(), strict=True):
            self._counted[sender] += means[0] * rows.shape[1]
            self._agreed[sender] += means[1] * rows.shape[1]
            self._asked[sender] += rows.shape[1]
        return torch.einsum("sb,sbv->bv", factors, blocks).view(-1)[: rows.shape[1]]

    def _trust(self, senders: Sequence[int], blocks: Tensor, lengths: Tensor, voices: Tensor) -> tuple[Tensor, Tensor]:
        """How much of each counts in each block, by its cosine with the directions of the owner's side: all, if it is
        that of those by whom the others are measured; without any of that side all of everybody. And the same as a
        share of what is usual.

        Args:
            voices: of those by whom the others are measured, in each block.
        """
        side = [place for place, one in enumerate(senders) if one in self._trusted and one not in self._judged]
        root = (blocks[side] / lengths[side].clamp_min(_TINY)[:, :, None]).sum(0)
        length = root.norm(dim=1)
        cosines = torch.einsum("sbv,bv->sb", blocks, root) / (lengths * length).clamp_min(_TINY)
        measure, _ = _middle(cosines, voices)
        trust = ((cosines + _AGAINST) / (measure.clamp_min(0.0) + _AGAINST)).clamp(0.0, 1.0)
        trust = trust.where(length > 0.0, 1.0) * (lengths > 0.0)
        usual, _ = _middle(trust, self._heard(senders, lengths, set(senders) - self._judged.keys()))
        return trust, (trust / usual.clamp_min(_TINY)).clamp_max(1.0)

    def _usual(
        self, senders: Sequence[int], lengths: Tensor, weight: Mapping[int, float]
    ) -> tuple[Tensor, float, Tensor]:
        """Of those by whom the others are measured: in each block median length and voices; the median weight."""
        moved = zip(senders, lengths.any(1).tolist(), strict=True)
        reference = self._reference([sender for sender, has_moved in moved if has_moved and sender not in self._judged])
        voices = self._heard(senders, lengths, reference)
        work = self._median({sender: weight[sender] for sender in reference}) if reference else 1.0
        return _middle(lengths, voices)[0] * voices.any(0), work, voices

    def _heard(self, senders: Sequence[int], lengths: Tensor, among: Collection[int]) -> Tensor:
        """The voices in each block: of those ``among`` the senders who have something in it."""
        is_in = torch.tensor([sender in among for sender in senders])
        return self._voices[senders, None] * is_in[:, None] * (lengths > 0.0)

    def _excess(self, sender: int) -> float:
        """How many times longer than it may be, over all parts of a sender."""
        length, allowed = float(self._squares[sender, sender]), self._allowed_squares[sender]
        return math.sqrt(length / allowed) if allowed else 0.0

    def _judge_directions(self, senders: list[int]) -> None:
        senders = [sender for sender in senders if self._products[sender, sender] > 0.0]
        where = torch.tensor(senders, dtype=torch.long)
        squares = self._squares[where[:, None], where]
        cosines = self._products[where[:, None], where] / (squares * squares.T).clamp_min(1e-300).sqrt()
        chance = 3.0 / math.sqrt(max(self._seen, 1))  # of vectors that have nothing to do with one another
        if len(senders) > 2 and (self._can_vote(senders) or not self._trusted.intersection(senders)):
            voices = self._voices[where]
            # Of an even number the larger one: of three, one that is against must not make the honest ones suspects.
            typical = -_middle(-cosines.T, voices[:, None] * (1.0 - torch.eye(len(senders))))[0]
            if float(_middle(typical, voices)[0]) >= _AGREEMENT:
                for sender, cosine in zip(senders, typical.tolist(), strict=True):
                    if cosine < -(_AGAINST + chance) and self._senders[sender] != self._own:
                        self._drop(sender, f"points against the others (cosine {cosine:.2f})")

    def _buffers(self, values: Mapping[int, Tensor]) -> Tensor:
        trusted = [part for sender, part in values.items() if sender in self._trusted]
        if not self._can_vote(values) and (trusted or len(values) < 3):
            return torch.stack(trusted or list(values.values())).mean(0)
        rows = torch.stack(list(values.values()))
        below, above = _middle(rows, self._voices[list(values), None].expand(rows.shape))
        return (below + above) / 2


# A reducer's slice is no longer than the median of what is in it; layers and peers differ by less than this.
_LONG = 3.0
# BatchNorm's statistics are of the same data on all peers.
_LARGEST_BUFFERS = 10.0


def untrue(
    average: Tensor, own: Tensor, num_parameters: int, reducers: Sequence[str], *, own_id: str, slower: float
) -> tuple[Verdict, ...]:
    """Reducers whose slices of ``average`` must not be used, and why.

    Args:
        average: of the whole vector, [values].
        own: this peer's contribution, alike.
        num_parameters: values before this position are pseudo-gradients, the others buffers.
        reducers: id of the peer that has averaged each part; empty where no average has arrived.
        slower: how many times more updates the others make in the time in which ``own`` was made, at least 1.
    """
    parameters: dict[str, list[slice]] = defaultdict(list)
    buffers: dict[str, list[slice]] = defaultdict(list)
    for part, reducer in zip(cuts(own.numel()), reducers, strict=True):
        if reducer:
            in_parameters, in_buffers = halves(part, num_parameters)
            parameters[reducer].append(in_parameters)
            buffers[reducer].append(in_buffers)

    def both(places: Sequence[slice]) -> list[Tensor]:
        """The average and the own values there; float64, whose squares are finite."""
        return [torch.cat([vector[place] for place in places]).double() for vector in (average, own)]

    # What this peer has averaged itself is true: by so much the others' contributions may be longer than its own.
    mine = _length_ratio(*both(parameters.pop(own_id))) if own_id in parameters else 0.0
    longest = _LONG * max(1.0, slower, mine)
    verdicts: list[Verdict] = []
    for reducer, places in parameters.items():
        (theirs, ours), measured = both(places), both(buffers[reducer])
        ratio, why = _length_ratio(theirs, ours), ""
        action: Action = "dropped"
        if not all(bool(torch.isfinite(values).all()) for values in (theirs, measured[0])):
            why = "values that are not finite"
        elif _length_ratio(*measured) > _LARGEST_BUFFERS:
            why = "running statistics that nobody has measured"
        elif ratio:
            cosine = float(theirs @ ours) / (float(theirs.norm()) * float(ours.norm()))
            if cosine < -(_AGAINST + 3.0 / math.sqrt(ours.numel())):
                why = f"the opposite of what it got (cosine {cosine:.2f})"
            elif ratio > longest:
                why = f"an average {ratio:.3g} times longer than usual"
                action = "dropped" if ratio > _GROSS_LENGTH * longest else "left out"
        if why:
            verdicts.append(Verdict(reducer, action, f"as a reducer gave back {why}"))
    return tuple(verdicts)


# Relative distance beyond which a peer takes over the state of the owner's side. Rounding to fp16 gives about 1e-5.
_DRIFT = 1e-3


def has_drifted(
    own: bytes, given: Mapping[str, bytes], look_up: Callable[[str], Member | None], *, role: Role, own_id: str
) -> bool:
    """Whether this peer has other weights than the owner's side: than the owner, or without the owner than the first of
    its side by id. That peer itself has not drifted: what it has trained counts, whatever anybody says.

    Args:
        own: this peer's probe.
        given: id -> probe, of those who say that they give their weights away.
        role: this peer's.
    """
    trusted = [member for peer in given if (member := look_up(peer)) is not None and member.trusted]
    first = min(trusted, key=lambda member: (member.role != "owner", member.peer_id), default=None)
    if first is None or role == "owner" or first.peer_id == own_id:
        return False
    probes = own, given[first.peer_id]
    if not all(len(probe) == 4 * PROBE_SIZE for probe in probes):
        return False
    ours, theirs = (torch.frombuffer(bytearray(probe), dtype=torch.float32) for probe in probes)
    return not float((theirs - ours).norm()) <= _DRIFT * float(ours.norm())  # also for not-a-number


def slower_than(rates: Mapping[str, float], own_id: str) -> float:
    """How many times faster the others are, by the median of what they say, the lower one: so many peers must lie.

    Args:
        rates: samples per second that each peer trains on; 0 or missing: not known.
    """
    others, own = [rate for peer, rate in rates.items() if peer != own_id and rate > 0.0], rates.get(own_id, 0.0)
    return max(1.0, statistics.median_low(others) / own) if others and own > 0.0 else 1.0


def _length_ratio(average: Tensor, own: Tensor) -> float:
    """How many times longer the average is; 0 where there is nothing to compare."""
    mine = float(own.norm())
    return float(average.norm()) / mine if mine > 0.0 else 0.0


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
    outcome: Outcome = field(default_factory=Outcome)
    """Of the exchange, without the averages that were not used."""
    untrue: tuple[Verdict, ...] = ()
    """Of those whose averages were not used."""
    refused: bool = False
    """The average would have made the model worse, see `trainkit.swarm.average`."""
    harmful: tuple[Verdict, ...] | None = None
    """Of those by whom it would; None: they were not searched for."""
    advice: str = ""
    """What the person at this machine should know about its link; empty if nothing has changed."""


# Of one round; a flood of liars must not become a flood of records.
_MOST_EVENTS = 20
_MOST_SUSPECTS = 1000
_EVENTS: Mapping[Action, Remark] = {
    "dropped": "peer_dropped", "left out": "peer_left_out", "clipped": "peer_clipped", "audited": "peer_audited",
}  # fmt: skip


class Strikes:
    """Rounds in a row in which each peer's contribution was dropped."""

    def __init__(self) -> None:
        self.counts: dict[str, int] = {}

    def note(self, verdicts: Iterable[Verdict], took_part: Iterable[str]) -> dict[str, str]:
        """Take in a round. Peer id -> why, of those for whom it was one too many.

        Args:
            took_part: ids of all peers in the round; one that was not in it neither gains nor loses by it.
        """
        dropped = {verdict.peer: verdict.why for verdict in verdicts if verdict.action == "dropped"}
        left_out = {verdict.peer for verdict in verdicts if verdict.action == "left out"}
        for peer in set(took_part) - dropped.keys() - left_out:
            self.counts.pop(peer, None)
        out: dict[str, str] = {}
        for peer, why in dropped.items():
            times = self.counts.pop(peer, 0) + 1
            if times >= STRIKES:
                out[peer] = why
            else:
                remember(self.counts, peer, times, _MOST_SUSPECTS)
        return out


class Sentry:
    """Keeps watch over the rounds of one peer: events, strikes, bans, credit.

    Also who has averaged wrongly is banned, by the owner, who has trusted them.
    """

    def __init__(self, peer: Session) -> None:
        self._peer, self._bans, self._began = peer, peer.dht.excluded.bans, time.time()
        self._as_senders, self._as_reducers, self._as_culprits = Strikes(), Strikes(), Strikes()
        """The last of refused rounds alone, so that nobody has better ones in between."""
        self._enforced: set[str] = set()
        self._invited: dict[str, str] = {}
        self._banned_with: dict[str, str] = {}
        """Of peers in the rounds so far: of one that is shut out nobody knows its invitation any more."""

    def after_round(self, index: int, result: Round) -> None:
        """Take note of what the averager has found out in the round, and of what this peer makes of its ``result``."""
        self._invited = {}
        for found in self._peer.averaging.averager.findings():
            for peer in {*found.members} - self._banned_with.keys():
                remember(self._banned_with, peer, self._goes_with(peer), _MOST_SUSPECTS)
            self._invited |= found.names
            received, counted = found.received, {} if result.refused else found.counted
            self._peer.credit([Counted(self._name(peer), n, received.get(peer, 0)) for peer, n in counted.items()])
            self._tell(index, found.verdicts, "{} was left out of round {}")
            self._ban(index, self._as_senders.note(found.verdicts, found.members))
            if result.harmful is not None:
                self._tell(index, result.harmful, "{} has spoiled round {}")
                self._ban(index, self._as_culprits.note(result.harmful, found.members))
        self._tell(index, result.untrue, "What {} has averaged in round {} is not used")
        out = self._as_reducers.note(result.untrue, result.outcome.sources)
        if self._peer.dht.own.grant.role == "owner":
            self._ban(index, out)
        self.look()

    def _goes_with(self, peer: str) -> str:
        return banned_with(self._peer.dht.member(peer), peer, self._peer.dht.peer_id)

    def note_audit(self, index: int, verdict: Verdict) -> None:
        """Draw the consequences of an audit, of that round: what a peer has put into the weights that counts no more is
        taken out again; who has been false is out, and has contributed nothing."""
        name = self._name(verdict.peer)
        self._tell(index, [verdict], "The audit of {} in round {}")
        if verdict.action == "left out":
            self._undo([verdict.peer])
        elif verdict.action == "dropped":
            self._peer.withdraw(name)
            self._ban(index, {verdict.peer: verdict.why}, "")

    def look(self) -> None:
        """Enforce the bans as they are by now: others pronounce them too, and a command lifts them. Cheap."""
        banned = self._bans.read()
        if banned.keys() == self._enforced:
            return
        for ban in banned.values():
            if ban.id not in self._enforced and ban.time >= self._began:
                name, why = terminal.name(ban.name), terminal.one_line(ban.why, 200)
                self._peer.remark("peer_banned", peer=ban.id, name=name, why=why)
                self._peer.hooks.say(f"  {name} is banned by another peer of the owner's side: {why}")
        self._enforce(banned)

    def _enforce(self, banned: Collection[str]) -> None:
        self._peer.shut_out(banned)
        self._enforced = set(banned)

    def _undo(self, peers: Sequence[str]) -> None:
        """Take out of the weights what these have put into them; the best model so far has it, too."""
        if self._peer.averaging.undo(peers):
            self._peer.progress.forget_best()

    def _name(self, peer: str) -> str:
        known = self._peer.watch.peers.get(peer)
        said = known.name if known is not None else f"..{peer[-6:]}"
        return terminal.name(credited(self._invited.get(peer, ""), said))

    def _tell(self, index: int, verdicts: Sequence[Verdict], what: str) -> None:
        for verdict in verdicts[:_MOST_EVENTS]:
            name = self._name(verdict.peer)
            facts = {"peer": verdict.peer, "name": name, "why": verdict.why, "round": index + 1}
            self._peer.remark(_EVENTS[verdict.action], **facts)
            if verdict.action in ("dropped", "left out"):
                self._peer.hooks.say(f"  {what.format(name, index + 1)}: {verdict.why}")

    def _ban(self, index: int, out: Mapping[str, str], times: str = f" after {STRIKES} such rounds in a row") -> None:
        bans = {peer: self._banned_with.get(peer) or self._goes_with(peer) for peer in out}
        for peer, banned in bans.items():
            name, why = self._name(peer), out[peer]
            if not banned or banned in self._bans.read():
                continue  # nobody can be banned with it; or it is, with another peer of its invitation
            self._bans.add(Ban(banned, name, why))
            self._enforce(self._enforced | {banned})  # others' bans are told of by `look`
            self._undo([one for one, its in self._banned_with.items() if its == banned])
            self._peer.remark("peer_banned", peer=peer, name=name, why=why, round=index + 1)
            lift = terminal.command("swarm", "unban", name)
            self._peer.hooks.say(f"  {name} is banned{times}. To lift it: {lift}")
