"""What a peer makes of averages that others have made. Reducers are trusted; one that lies must not be believed for it.

Nobody but the reducer has seen all contributions. But a peer knows its own, which is in the average or beside others
that began at the same weights: an average is not against it, and not many times longer. So each peer, the owner first
of all, judges by its own one the slice of every other reducer but the owner, and does without a slice that cannot be
true: the common weights stay there as they are, and what was learned waits for a later round. Who was sent something
else than the owner finds its weights differ from the owner's in the next round, and takes over those.

A slice that is wrong but neither long nor against anybody passes: who averages for others decides, within one round's
usual step, what they learn in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from trainkit.collaborative.parts import cuts
from trainkit.collaborative.screening import Action, Verdict

# An average is no longer than the median of what is in it; layers and peers differ by less than this.
_LONG = 3.0
# So many times longer than that is no accident.
_GROSS = 5.0
_AGAINST = 0.05
# BatchNorm's statistics are of the same data on all peers.
_LARGEST_BUFFERS = 10.0


def untrue(
    average: Tensor,
    own: Tensor,
    num_parameters: int,
    reducers: Sequence[str],
    *,
    own_id: str,
    slower: float,
) -> tuple[Verdict, ...]:
    """Reducers whose slices of ``average`` must not be used, and why.

    Args:
        average: of the whole vector, [values].
        own: this peer's contribution, alike.
        num_parameters: values before this position are pseudo-gradients, the others buffers.
        reducers: id of the peer that has averaged each part; empty where no average has arrived.
        slower: how many times more updates the others make in the time in which ``own`` was made, at least 1.
    """
    places: dict[str, list[slice]] = {}
    for part, reducer in zip(cuts(own.numel()), reducers, strict=True):
        if reducer:
            places.setdefault(reducer, []).append(part)
    ratios = {one: _length_ratio(*_picked(average, own, places[one], 0, num_parameters)) for one in places}
    # What this peer has averaged itself is true: by so much the others' contributions may be longer than its own.
    allowed = _LONG * max(1.0, slower, ratios.get(own_id, 0.0))
    found = []
    for reducer, ratio in ratios.items():
        if reducer != own_id:
            sliced = _picked(average, own, places[reducer], 0, num_parameters)
            buffers = _picked(average, own, places[reducer], num_parameters, own.numel())
            if verdict := _verdict(reducer, sliced, buffers, ratio, allowed):
                found.append(verdict)
    return tuple(found)


def slower_than(others: Mapping[str, float], own: float) -> float:
    """How many times faster the others are, by the median of what they say, the lower one: so many peers must lie.

    Args:
        others: samples per second that each of them trains on.
        own: the same of this peer; 0: not known.
    """
    known = sorted(rate for rate in others.values() if rate > 0.0)
    return max(1.0, known[(len(known) - 1) // 2] / own) if known and own > 0.0 else 1.0


def _verdict(
    reducer: str, sliced: tuple[Tensor, Tensor], buffers: tuple[Tensor, Tensor], ratio: float, allowed: float
) -> Verdict | None:
    average, own = sliced
    if not bool(torch.isfinite(average).all()) or not bool(torch.isfinite(buffers[0]).all()):
        return Verdict(reducer, "dropped", "as a reducer gave back values that are not finite")
    if _length_ratio(*buffers) > _LARGEST_BUFFERS:
        return Verdict(reducer, "dropped", "as a reducer gave back running statistics that nobody has measured")
    chance = 3.0 / math.sqrt(max(own.numel(), 1))
    if ratio and (cosine := float(average @ own) / (float(average.norm()) * float(own.norm()))) < -(_AGAINST + chance):
        return Verdict(reducer, "dropped", f"as a reducer gave back the opposite of what it got (cosine {cosine:.2f})")
    if ratio > allowed:
        action: Action = "dropped" if ratio > _GROSS * allowed else "left out"
        return Verdict(reducer, action, f"as a reducer gave back an average {ratio:.3g} times longer than usual")
    return None


def _picked(average: Tensor, own: Tensor, parts: Sequence[slice], first: int, last: int) -> tuple[Tensor, Tensor]:
    """Both vectors, in these parts and between these positions; float64, whose squares are finite."""
    where = [slice(max(part.start, first), min(part.stop, last)) for part in parts]
    where = [one for one in where if one.start < one.stop]
    if not where:
        return average.new_empty(0).double(), own.new_empty(0).double()
    return torch.cat([average[one] for one in where]).double(), torch.cat([own[one] for one in where]).double()


def _length_ratio(average: Tensor, own: Tensor) -> float:
    """How many times longer the average is; 0 where there is nothing to compare."""
    mine = float(own.norm())
    return float(average.norm()) / mine if mine > 0.0 else 0.0
