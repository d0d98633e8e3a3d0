"""Screening of contributions, by the reducer that averages them.

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
  Not so who has passed its last audit: a creator that audits trains little, and others seem long beside it.
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
"""

from __future__ import annotations

import math
import mmap
import secrets
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from trainkit.swarm.identity.admission import Member, remember
from trainkit.swarm.identity.invitations import GUESTS
from trainkit.swarm.protocol.codecs import PART
from trainkit.swarm.protocol.outer_step import drop, on_disk

# Values of a part that are judged together: a small layer's harm does not hide in a large one's length.
_BLOCK = 4096
# Speed varies: up to this many times what a peer has trained on in another round is believed.
_SPEED_SLACK = 1.5
# How many times too long a contribution is left out, and a reducer's average is no accident.
GROSS_LENGTH = 5.0
# Honest contributions can be this much longer than the median without a word about it, and as much shorter for what
# they have trained on without losing credit.
_NOTED_LENGTH = 2.0
# Beyond any weight, and small enough that sums of squares are finite.
_LARGEST_VALUE = 1e12
# Peers agree when the typical cosine between them is at least this; towards the end of training they need not.
_AGREEMENT = 0.1
AGAINST = 0.05
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
    """Judgement of a peer's contribution or average, and why, for people."""

    peer: str
    action: Action
    why: str


@dataclass(frozen=True)
class KnownSenders:
    """Knowledge of a reducer about senders beforehand."""

    trusted: frozenset[str] = frozenset()
    """Ids of the owner's side: they are no liars, as far as is known."""
    verified: Mapping[str, float] = field(default_factory=dict)
    """Samples of a round that a peer has proven to have trained on, by `trainkit.swarm.trust.replay`; 0: not proven."""
    voices: Mapping[str, float] = field(default_factory=dict)
    """Weight of a peer where a majority decides, if that is not 1."""
    own: str = ""
    """Id of the reducer: no majority says that its own contribution is wrong."""
    keeps: bool = False
    """Keep what each has put into the average, see `Screen.alone`."""
    drawn: Collection[str] = ()
    """Ids of peers that are to show their work: what they send is kept."""
    most_given: int = 1 << 20
    """Parts of each that are kept, drawn at random."""
    stated: Mapping[str, float] = field(default_factory=dict)
    """Samples that a peer has trained on in the round before, by the account that an audit holds it to."""
    owners: frozenset[str] = frozenset()
    """Ids of the owner's peers: their weights are believed."""
    passed: Collection[str] = ()
    """Ids of peers whose last audit was true: what they send may be long, and is clipped."""


@dataclass(frozen=True)
class Findings:
    """Findings of a reducer about its group in one round."""

    members: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    counted: Mapping[str, float] = field(default_factory=dict)
    """Samples of each member that are in the average."""
    received: Mapping[str, int] = field(default_factory=dict)
    """Bytes of each member's parts that have arrived here."""
    names: Mapping[str, str] = field(default_factory=dict)
    """Names by which each member was invited."""


def voices_of(members: Mapping[str, Member]) -> dict[str, float]:
    """Return what each counts for where a majority decides: those of one invitation share a voice.

    Not the owner's side; nor guests, who have one invitation for many: that may fall into any hands.
    """
    shared = {
        peer: member.invitation for peer, member in members.items() if not (member.trusted or member.name == GUESTS)
    }
    many = Counter(shared.values())
    return {peer: 1.0 / many[invitation] for peer, invitation in shared.items()}


def _middle(rows: Tensor, voices: Tensor) -> tuple[Tensor, Tensor]:
    """The median of each column, each value with its voice: the lower and, of an even number, the upper one."""
    ordered, of = rows.sort(0)
    counted = voices.gather(0, of).cumsum(0)
    below, above = ((counted < counted[-1] / 2 + rounding).sum(0)[None] for rounding in (-_ROUNDING, _ROUNDING))
    return ordered.gather(0, below)[0], ordered.gather(0, above.clamp_max(len(rows) - 1))[0]


def _places(senders: Sequence[str], among: Collection[str]) -> set[int]:
    return {sender for sender, peer in enumerate(senders) if peer in among}


class _Kept(NamedTuple):
    """Contributions of senders to the average of a part, of so many values, at that position of the vector."""

    position: int
    values: int
    senders: Sequence[int]
    put: Tensor
    """[senders, blocks, values]"""
    share: Tensor
    """Share of each in the average of a block, [senders, blocks]."""


class Screen:
    """Judges and averages one round's parts, in their order."""

    def __init__(self, senders: Sequence[str], limits: KnownSenders, num_parameters: int) -> None:
        """
        Args:
            senders: peer ids.
            num_parameters: values before this position of the vector are pseudo-gradients, the others buffers.
        """
        self._senders = senders
        self._num_parameters = num_parameters
        self._limits = limits
        self.given: dict[str, dict[int, Any]] = {peer: {} for peer in limits.drawn}
        """Given by each peer that is to show its work: position -> pseudo-gradients, as arrays."""
        self._given = Counter[str]()
        """Parts of each so far."""
        self._trusted = _places(senders, limits.trusted)
        self._believes = _places(senders, limits.owners | {limits.own})
        self._voices = torch.tensor([limits.voices.get(peer, 1.0) for peer in senders], dtype=torch.float64)
        # Sums over the parts that both senders of a pair have sent: of products, and of the first one's squares.
        self._products = torch.zeros(len(senders), len(senders), dtype=torch.float64)
        self._squares = torch.zeros_like(self._products)
        self._allowed_squares = [0.0] * len(senders)
        self._judged: dict[int, Verdict] = {}
        """Senders that do not count."""
        self._dropped: set[int] = set()
        self._claims: dict[int, float] = {}
        self._counted: dict[int, float] = defaultdict(float)
        """Sums over the parts, of weight times accepted values."""
        self._agreed, self._asked = [0.0] * len(senders), [0] * len(senders)
        """Values of each that agree with the owner's side, and all that it has sent."""
        self._seen = self._averaged = 0
        fits = 2 * num_parameters * len(senders) <= MOST_KEPT
        self._kept: list[_Kept] | None = [] if limits.keeps and fits else None
        self._room: mmap.mmap | bytearray = bytearray()
        self._filled = 0
        if self._kept is not None:  # blocks of a part are of one length, and end with zeros
            room = num_parameters + num_parameters // _BLOCK + num_parameters // PART + _BLOCK
            self._room = on_disk(2 * len(senders) * room)

    def _keep_given(self, peer: str, position: int, part: Tensor) -> None:
        given = self.given[peer]
        self._given[peer] += 1
        if len(given) == self._limits.most_given:
            if secrets.randbelow(self._given[peer]) >= len(given):
                return
            del given[secrets.choice([*given])]
        given[position] = part.numpy().copy()

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
        good = dict[int, Tensor]()
        split = min(max(self._num_parameters - position, 0), result.numel())
        for sender, part in sorted(parts.items()):
            self._claims.setdefault(sender, weights[sender])
            if self._senders[sender] in self.given:
                self._keep_given(self._senders[sender], position, part[:split])
            if part.numel() != result.numel():
                self._drop(sender, "sent something of the wrong shape")
            elif not bool((part.abs() <= _LARGEST_VALUE).all()):
                self._drop(sender, "sent values that are not finite")
            elif sender not in self._dropped:
                good[sender] = part
        weight = self._believed(good)
        for sender in good.keys() - weight.keys():
            del good[sender]
        result[:split] = 0.0
        if split and good:
            rows = torch.stack(list(good.values()))[:, :split]
            result[:split] = self._parameters(position, list(good), rows, weight)
        for sender in good.keys() & self._judged.keys():
            del good[sender]
        if split < result.numel() and good:
            result[split:] = self._buffers(list(good), torch.stack(list(good.values()))[:, split:])
        self._averaged += split
        return result

    def alone(self, peer: str) -> list[tuple[int, Tensor]]:
        """The average as the owner's side and ``peer`` alone would have made it, each with what it has put into it: the
        position of each part, and its pseudo-gradients. Empty if that is not known."""
        found = list[tuple[int, Tensor]]()
        them = {self._senders.index(peer), *self._trusted}
        for position, values, senders, put, share in self._kept or []:
            rows = [row for row, sender in enumerate(senders) if sender in them]
            total = put[rows].float().sum(0) / share[rows].sum(0).clamp_min(_TINY)[:, None]
            found.append((position, total.view(-1)[:values]))
        return found

    def moved(self) -> Iterator[tuple[str, int, Tensor]]:
        """Yield by what each peer but the owner has moved the average of each part: away from what the owner has
        trained, or where that does not count, from what the others have. So what several have done together adds up.

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
        found = [*self._judged.values()]
        for sender, peer in enumerate(self._senders):
            if sender in self._judged:
                continue
            if self._agreed[sender] < _LEAST_AGREED * self._asked[sender]:
                found.append(Verdict(peer, "left out", "has nothing in common with what the owner's side has trained"))
            ratio = self._excess(sender)
            if ratio > _NOTED_LENGTH:
                found.append(Verdict(peer, "clipped", f"was {ratio:.1f} times longer than the group's median"))
        return tuple(found)

    def _drop(self, sender: int, why: str) -> None:
        if sender not in self._dropped:
            self._dropped.add(sender)
            self._judged[sender] = Verdict(self._senders[sender], "dropped", why)

    def _can_vote(self, senders: Iterable[int]) -> bool:
        """Return whether there can be a majority."""
        return float(self._voices[list(senders)].sum()) > 2.0 + _ROUNDING

    def _reference(self, senders: list[int]) -> list[int]:
        """Return whom the others are measured by: all, if there can be a majority."""
        trusted = [sender for sender in senders if sender in self._trusted]
        return senders if self._can_vote(senders) else trusted or senders

    def _median(self, values: Mapping[int, float], among: Collection[int]) -> float:
        """The median of the values of some senders; the lower one of two: an honest peer's, if at least half are."""
        numbers = torch.tensor([values[sender] for sender in among], dtype=torch.float64)
        return float(_middle(numbers, self._voices[[*among]])[0])

    def _believed(self, senders: Collection[int]) -> dict[int, float]:
        """Return how much each counts: nobody for more than what is usual, but who has shown what it did."""
        believed: dict[int, float] = {}
        known = self._reference(list(senders))
        usual = self._median(self._claims, known) if known else 0.0
        for sender in senders:
            peer = self._senders[sender]
            stated = self._limits.stated.get(peer, math.inf)
            verified = self._limits.verified.get(peer)
            if sender in self._believes:
                believed[sender] = self._claims[sender]
            elif stated > 0.0 and verified != 0.0:  # else nothing can be in proportion to it
                believed[sender] = min(self._claims[sender], stated, max(usual, _SPEED_SLACK * (verified or 0.0)))
        return believed

    def _parameters(self, position: int, senders: Sequence[int], rows: Tensor, weight: Mapping[int, float]) -> Tensor:
        where = torch.tensor(senders)
        products = (rows @ rows.T).double()
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
            ratio = self._excess(sender)
            if ratio > GROSS_LENGTH and self._senders[sender] not in self._limits.passed:
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
            place = torch.frombuffer(self._room, dtype=torch.bfloat16, count=blocks.numel(), offset=self._filled)
            put = place.view(blocks.shape).copy_(factors[:, :, None] * blocks)
            self._filled += put.nbytes
            self._kept.append(_Kept(position, rows.shape[1], senders, put, share))
            drop(self._room)
        moved = _NOTED_LENGTH * lengths * work / (usual * weights).clamp_min(_TINY)
        accepted = weights * agreed * moved.clamp_max(1.0) * (usual > 0.0)
        for sender, *means in zip(senders, accepted.mean(1).tolist(), agreed.mean(1).tolist(), strict=True):
            self._counted[sender] += means[0] * rows.shape[1]
            self._agreed[sender] += means[1] * rows.shape[1]
            self._asked[sender] += rows.shape[1]
        return torch.einsum("sb,sbv->bv", factors, blocks).view(-1)[: rows.shape[1]]

    def _trust(self, senders: Sequence[int], blocks: Tensor, lengths: Tensor, voices: Tensor) -> tuple[Tensor, Tensor]:
        """Return how much of each counts in each block, by its cosine with the directions of the owner's side: all, if
        it is that of those by whom the others are measured; without any of that side all of everybody. And the same as
        a share of what is usual.

        Args:
            voices: of those by whom the others are measured, in each block.
        """
        side = [place for place, one in enumerate(senders) if one in self._trusted and one not in self._judged]
        root = (blocks[side] / lengths[side].clamp_min(_TINY)[:, :, None]).sum(0)
        length = root.norm(dim=1)
        cosines = torch.einsum("sbv,bv->sb", blocks, root) / (lengths * length).clamp_min(_TINY)
        measure, _ = _middle(cosines, voices)
        trust = ((cosines + AGAINST) / (measure.clamp_min(0.0) + AGAINST)).clamp(0.0, 1.0)
        trust = trust.where(length > 0.0, 1.0) * (lengths > 0.0)
        usual, _ = _middle(trust, self._heard(senders, lengths, set(senders) - self._judged.keys()))
        return trust, (trust / usual.clamp_min(_TINY)).clamp_max(1.0)

    def _usual(
        self, senders: Sequence[int], lengths: Tensor, weight: Mapping[int, float]
    ) -> tuple[Tensor, float, Tensor]:
        """Return of those by whom the others are measured: in each block median length and voices; the median
        weight.
        """
        moved = zip(senders, lengths.any(1).tolist(), strict=True)
        reference = self._reference([sender for sender, has_moved in moved if has_moved and sender not in self._judged])
        voices = self._heard(senders, lengths, reference)
        work = self._median(weight, reference) if reference else 1.0
        return _middle(lengths, voices)[0] * voices.any(0), work, voices

    def _heard(self, senders: Sequence[int], lengths: Tensor, among: Collection[int]) -> Tensor:
        """The voices in each block: of those ``among`` the senders who have something in it."""
        is_in = torch.tensor([sender in among for sender in senders])
        return self._voices[senders, None] * is_in[:, None] * (lengths > 0.0)

    def _excess(self, sender: int) -> float:
        """Return how many times longer than it may be, over all parts of a sender."""
        return math.sqrt(float(self._squares[sender, sender]) / (self._allowed_squares[sender] or math.inf))

    def _judge_directions(self, senders: list[int]) -> None:
        senders = [sender for sender in senders if self._products[sender, sender] > 0.0]
        where = torch.tensor(senders, dtype=torch.long)
        squares = self._squares[where[:, None], where]
        cosines = self._products[where[:, None], where] / (squares * squares.T).clamp_min(1e-300).sqrt()
        chance = 3.0 / math.sqrt(max(self._seen, 1))  # of vectors that have nothing to do with one another
        if len(senders) <= 2 or not (self._can_vote(senders) or self._trusted.isdisjoint(senders)):
            return
        voices = self._voices[where]
        # Of an even number the larger one: of three, one that is against must not make the honest ones suspects.
        typical = -_middle(-cosines.T, voices[:, None] * (1.0 - torch.eye(len(senders))))[0]
        if float(_middle(typical, voices)[0]) >= _AGREEMENT:
            for sender, cosine in zip(senders, typical.tolist(), strict=True):
                if cosine < -(AGAINST + chance) and self._senders[sender] != self._limits.own:
                    self._drop(sender, f"points against the others (cosine {cosine:.2f})")

    def _buffers(self, senders: list[int], rows: Tensor) -> Tensor:
        trusted = [place for place, sender in enumerate(senders) if sender in self._trusted]
        if not self._can_vote(senders) and (trusted or len(senders) < 3):
            return rows[trusted or slice(None)].mean(0)
        below, above = _middle(rows, self._voices[senders, None].expand(rows.shape))
        return (below + above) / 2


# Of what a peer has moved in a round, half is taken back in any case, and of the other half so much is left after each
# further round: training makes up for some of it, see docs/tried.md.
_FRESH = 0.8


class Moves:
    """Record of what each peer has moved the averages by that were used."""

    def __init__(self, size: int) -> None:
        """``size``: values of the model, without buffers."""
        self._size = size
        self._moved: dict[str, mmap.mmap | bytearray] = {}
        """Peer -> by what it has moved them, and what is fresh of it, [2, values] in float32."""

    def add(self, moved: Iterable[tuple[str, int, Tensor]]) -> None:
        """Add those of a round, see `trainkit.swarm.trust.screening.Screen.moved`."""
        for known in list(self._moved.values()):  # in a thread, while others are taken back
            self._read(known)[1] *= _FRESH
        for peer, position, by in moved:
            known = self._moved[peer] if peer in self._moved else on_disk(8 * self._size)
            self._read(known)[:, position : position + len(by)] += by
            remember(self._moved, peer, known, MOST_KEPT // (8 * self._size))
        for known in list(self._moved.values()):
            drop(known)

    def take(self, peer: str) -> Tensor | None:
        """Return by what a peer has moved them, once; None if that is not known."""
        moved = self._moved.pop(peer, None)
        return None if moved is None else self._read(moved).mean(0)

    def _read(self, known: mmap.mmap | bytearray) -> Tensor:
        return torch.frombuffer(known, dtype=torch.float32).view(2, self._size)
