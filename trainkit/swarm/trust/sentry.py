"""The sentry: what one peer concludes of the others, round by round."""

from __future__ import annotations

import math
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from trainkit.common import terminal
from trainkit.run.contributions import Counted
from trainkit.run.events import Remark
from trainkit.swarm.identity.admission import Member, remember
from trainkit.swarm.identity.bans import STRIKES, Ban, Bans, banned_with
from trainkit.swarm.identity.invitations import Role, credited
from trainkit.swarm.protocol.codecs import cuts, halves
from trainkit.swarm.protocol.outer_step import PROBE_SIZE, ExchangeOutcome
from trainkit.swarm.trust.screening import AGAINST, GROSS_LENGTH, Action, Findings, Verdict


@dataclass(frozen=True)
class Round:
    """End of a round for this peer."""

    group: int
    """Peers that averaged, itself included; 0 when it went on alone."""
    used: str
    """"average"; "own" (it went on alone); or "nothing": what it has learned, if anything, waits for the next round."""
    why: str
    """Why the average was not used; empty if it was."""
    samples_per_sec: float
    """Rate of the whole group."""
    drifted: bool
    """This peer's weights are no longer those of the group."""
    seconds: float = 0.0
    """Time that the exchange took, from the end of the round."""
    outcome: ExchangeOutcome = field(default_factory=ExchangeOutcome)
    """Outcome of the exchange, without the averages that were not used."""
    untrue: tuple[Verdict, ...] = ()
    """Verdicts on those whose averages were not used."""
    refused: bool = False
    """The average would have made the model worse, see `trainkit.swarm.peer.averaging`."""
    harmful: tuple[Verdict, ...] | None = None
    """Verdicts on those by whom it would; None: they were not searched for."""
    advice: str = ""
    """Advice on its link for the person at this machine; empty if nothing has changed."""


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
        dropped = dict[str, str]()
        innocent = set(took_part)
        for verdict in verdicts:
            if verdict.action in ("dropped", "left out"):
                innocent.discard(verdict.peer)
            if verdict.action == "dropped":
                dropped[verdict.peer] = verdict.why
        for peer in innocent:
            self.counts.pop(peer, None)
        out: dict[str, str] = {}
        for peer, why in dropped.items():
            times = self.counts.pop(peer, 0) + 1
            if times >= STRIKES:
                out[peer] = why
            else:
                remember(self.counts, peer, times, _MOST_SUSPECTS)
        return out


class PeerView(Protocol):
    """A peer, as its sentry sees it and has it act."""

    bans: Bans
    peer_id: str
    role: Role

    def member(self, peer_id: str) -> Member | None: ...

    def name_of(self, peer_id: str) -> str: ...

    def findings(self) -> Sequence[Findings]: ...

    def credit(self, counted: Collection[Counted]) -> None: ...

    def withdraw(self, name: str) -> None: ...

    def undo(self, peers: Sequence[str]) -> None: ...

    def shut_out(self, banned: Collection[str]) -> None: ...

    def remark(self, kind: Remark, **facts: Any) -> None: ...

    def say(self, line: str) -> None: ...


class Sentry:
    """Keeps watch over the rounds of one peer: events, strikes, bans, credit.

    Also who has averaged wrongly is banned, by the owner, who has trusted them.
    """

    def __init__(self, peer: PeerView) -> None:
        self._peer = peer
        self._began = time.time()
        self._as_senders = Strikes()
        self._as_reducers = Strikes()
        self._as_culprits = Strikes()
        """The last of refused rounds alone, so that nobody has better ones in between."""
        self._enforced: set[str] = set()
        self._invited: dict[str, str] = {}
        self._banned_with: dict[str, str] = {}
        """Invitations of peers in the rounds so far: of one that is shut out nobody knows its invitation any more."""

    def after_round(self, index: int, result: Round) -> None:
        """Take note of what the averager has found out in the round, and of what this peer makes of its ``result``."""
        self._invited = {}
        for found in self._peer.findings():
            for peer in {*found.members} - self._banned_with.keys():
                remember(self._banned_with, peer, self._goes_with(peer), _MOST_SUSPECTS)
            self._invited |= found.names
            received = found.received
            counted = {} if result.refused else found.counted
            self._peer.credit([Counted(self._name(peer), n, received.get(peer, 0)) for peer, n in counted.items()])
            self._tell(index, found.verdicts, "{} was left out of round {}")
            self._ban(index, self._as_senders.note(found.verdicts, found.members))
            if result.harmful is not None:
                self._tell(index, result.harmful, "{} has harmed round {}")
                self._ban(index, self._as_culprits.note(result.harmful, found.members))
        self._tell(index, result.untrue, "What {} has averaged in round {} is not used")
        out = self._as_reducers.note(result.untrue, result.outcome.sources)
        if self._peer.role == "owner":
            self._ban(index, out)
        self.look()

    def _goes_with(self, peer: str) -> str:
        return banned_with(self._peer.member(peer), peer, self._peer.peer_id)

    def note_audit(self, index: int, verdict: Verdict) -> None:
        """Draw the consequences of an audit, of that round: what a peer has put into the weights that counts no more is
        taken out again; who has been false is out, and has contributed nothing."""
        name = self._name(verdict.peer)
        self._tell(index, [verdict], "The audit of {} in round {}")
        if verdict.action == "left out":
            self._peer.undo([verdict.peer])
        elif verdict.action == "dropped":
            self._peer.withdraw(name)
            self._ban(index, {verdict.peer: verdict.why}, "")

    def look(self) -> None:
        """Enforce the bans as they are by now: others pronounce them too, and a command lifts them. Cheap."""
        banned = self._peer.bans.read()
        if banned.keys() == self._enforced:
            return
        for ban in banned.values():
            if ban.id not in self._enforced and ban.time >= self._began:
                name = terminal.name(ban.name)
                why = terminal.one_line(ban.why, 200)
                self._peer.remark("peer_banned", peer=ban.id, name=name, why=why)
                self._peer.say(f"  {name} is banned by another peer of the owner's side: {why}")
        self._enforce(banned)

    def _enforce(self, banned: Collection[str]) -> None:
        self._peer.shut_out(banned)
        self._enforced = set(banned)

    def _name(self, peer: str) -> str:
        return terminal.name(credited(self._invited.get(peer, ""), self._peer.name_of(peer)))

    def _tell(self, index: int, verdicts: Sequence[Verdict], what: str) -> None:
        for verdict in verdicts[:_MOST_EVENTS]:
            name = self._name(verdict.peer)
            facts = {"peer": verdict.peer, "name": name, "why": verdict.why, "round": index + 1}
            self._peer.remark(_EVENTS[verdict.action], **facts)
            if verdict.action in ("dropped", "left out"):
                self._peer.say(f"  {what.format(name, index + 1)}: {verdict.why}")

    def _ban(self, index: int, out: Mapping[str, str], times: str = f" after {STRIKES} such rounds in a row") -> None:
        bans = {peer: self._banned_with.get(peer) or self._goes_with(peer) for peer in out}
        for peer, banned in bans.items():
            name = self._name(peer)
            why = out[peer]
            if not banned or banned in self._peer.bans.read():
                continue  # nobody can be banned with it; or it is, with another peer of its invitation
            self._peer.bans.add(Ban(banned, name, why))
            self._enforce(self._enforced | {banned})  # others' bans are told of by `look`
            self._peer.undo([one for one, its in self._banned_with.items() if its == banned])
            self._peer.remark("peer_banned", peer=peer, name=name, why=why, round=index + 1)
            lift = terminal.command("swarm", "unban", name)
            self._peer.say(f"  {name} is banned{times}. To lift it: {lift}")


# The audit of reducers. Nobody but a reducer has seen all contributions. But a peer knows its own, which is in the
# average or beside others that began at the same weights: an average is not against it, and not many times longer. So
# each peer audits by its own contribution the slice of every other reducer but the owner. Where a slice cannot be true
# the common weights stay as they are. A slice that is wrong but neither long nor against anybody passes.

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
    longest = _LONG * max(1.0, slower)
    if own_id in parameters:
        longest = max(longest, _LONG * _length_ratio(*both(parameters.pop(own_id))))
    verdicts: list[Verdict] = []
    for reducer, places in parameters.items():
        (theirs, ours), measured = both(places), both(buffers[reducer])
        ratio = _length_ratio(theirs, ours)
        why = ""
        action: Action = "dropped"
        if not all(bool(torch.isfinite(values).all()) for values in (theirs, measured[0])):
            why = "values that are not finite"
        elif _length_ratio(*measured) > _LARGEST_BUFFERS:
            why = "impossible running statistics"
        elif ratio:
            cosine = float(theirs @ ours) / (float(theirs.norm()) * float(ours.norm()))
            if cosine < -(AGAINST + 3.0 / math.sqrt(ours.numel())):
                why = f"the opposite of what it received (cosine {cosine:.2f})"
            elif ratio > longest:
                why = f"an average {ratio:.3g} times longer than usual"
                action = "dropped" if ratio > GROSS_LENGTH * longest else "left out"
        if why:
            verdicts.append(Verdict(reducer, action, f"as a reducer returned {why}"))
    return tuple(verdicts)


# Relative distance beyond which a peer takes over the state of the owner's side. Rounding to fp16 gives about 1e-5.
_DRIFT = 1e-3


def has_drifted(
    own: bytes, given: Mapping[str, bytes], look_up: Callable[[str], Member | None], *, role: Role, own_id: str
) -> bool:
    """Return whether this peer has other weights than the owner's side: than the owner, or without the owner than the
    first of its side by id. That peer itself has not drifted: what it has trained counts, whatever anybody says.

    Args:
        own: this peer's probe.
        given: id -> probe, of those who say that they give their weights away.
        role: this peer's.
    """
    members = filter(None, map(look_up, given))
    trusted = [member for member in members if member.trusted]
    first = min(trusted, key=lambda member: (member.role != "owner", member.peer_id), default=None)
    if first is None or role == "owner" or first.peer_id == own_id:
        return False
    if not len(own) == len(given[first.peer_id]) == 4 * PROBE_SIZE:
        return False
    ours = torch.frombuffer(bytearray(own), dtype=torch.float32)
    theirs = torch.frombuffer(bytearray(given[first.peer_id]), dtype=torch.float32)
    return not float((theirs - ours).norm()) <= _DRIFT * float(ours.norm())  # also for not-a-number


def slower_than(rates: Mapping[str, float], own_id: str) -> float:
    """Return how many times faster the others are, by the median of what they say, the lower one: so many peers must
    lie.

    Args:
        rates: samples per second that each peer trains on; 0 or missing: not known.
    """
    others = [rate for peer, rate in rates.items() if peer != own_id and rate > 0.0]
    own = rates.get(own_id, 0.0)
    return max(1.0, statistics.median_low(others) / own) if others and own > 0.0 else 1.0


def _length_ratio(average: Tensor, own: Tensor) -> float:
    """Return how many times longer the average is; 0 where there is nothing to compare."""
    mine = float(own.norm())
    return float(average.norm()) / mine if mine > 0.0 else 0.0
