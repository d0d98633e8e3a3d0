"""Audit of reducers: what one peer concludes of the averages that it gets, and of whose weights it has."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from trainkit.swarm.identity.admission import Member
from trainkit.swarm.identity.invitations import Role
from trainkit.swarm.protocol.codecs import cuts, halves
from trainkit.swarm.protocol.outer_step import PROBE_SIZE, ExchangeOutcome
from trainkit.swarm.trust.screening import AGAINST, GROSS_LENGTH, Action, Verdict


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
    own_places = parameters.pop(own_id, [])
    if own_places and parameters:
        longest = max(longest, _LONG * _length_ratio(*both(own_places)))
    verdicts: list[Verdict] = []
    for reducer, places in parameters.items():
        (theirs, ours), measured = both(places), both(buffers[reducer])
        ratio = _length_ratio(theirs, ours)
        why = ""
        action: Action = "dropped"
        if not bool(torch.isfinite(torch.cat([theirs, measured[0]])).all()):
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
    trusted = [member for member in filter(None, map(look_up, given)) if member.trusted]
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
