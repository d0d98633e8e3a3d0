"""How far all peers together are with an update, by what each says of itself.

As `hivemind.optim.ProgressTracker` reckons it: what a peer has gathered when it last said so, and what it will have
gathered since at its speed. But what a volunteer says is a claim: it counts up to a few times the median, as in
`screening`, or one peer could end every update before the others have anything to give to it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from trainkit.collaborative.messages import Progress
from trainkit.collaborative.screening import LARGEST_SHARE

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
    others: Mapping[str, Progress],
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
    there = {peer: told for peer, told in others.items() if told.round == round_index and _is_fresh(told, now)}
    believed = [(own.samples, own.samples_per_sec, is_trusted)]
    for peer, told in there.items():
        gathered = told.samples + told.samples_per_sec * max(0.0, now - told.time)
        believed.append((gathered, told.samples_per_sec, peer in trusted))
    return Tally(
        _bounded([(samples, free) for samples, _, free in believed]),
        _bounded([(rate, free) for _, rate, free in believed]),
    )


def newest_round(others: Mapping[str, Progress], trusted: Collection[str], now: float) -> int:
    """The furthest update that the owner's side is at, by its own word; -1 if nobody of it is heard."""
    heard = [told.round for peer, told in others.items() if peer in trusted and _is_fresh(told, now)]
    return max(heard, default=-1)


def _is_fresh(told: Progress, now: float) -> bool:
    return abs(now - told.time) <= FRESH_SECONDS


def _bounded(claims: Sequence[tuple[float, bool]]) -> float:
    """The sum of what is claimed, and by whom without bounds; of the others nothing is more than a few times what is
    usual, the lower median of those who have something."""
    known = sorted(claim for claim, _ in claims if claim > 0.0)
    most = LARGEST_SHARE * known[(len(known) - 1) // 2] if known else 0.0
    return sum(claim if is_free else min(claim, most) for claim, is_free in claims)
