"""Whether an average may be used, and whether this peer still trains what the others train."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.collaborative.admission import Member
from trainkit.collaborative.common import PROBE_SIZE, CommonState, Given
from trainkit.collaborative.invitation import Role

# An average more than so many times longer than this peer's own pseudo-gradient is refused.
_LARGEST_RATIO = 10.0
# Where a round's way is so many times longer than the last one's, and its loss as many times higher, it has collapsed.
_COLLAPSE = 10.0
_MOST_PASSED_OVER = 3
# Of a round; what was done in less says little about a whole one.
_LEAST_TRAINED = 0.05
# Below this a loss may rise as it likes: nothing is told wrong yet.
_LOW_LOSS = 1e-3
# Relative distance beyond which a peer takes over the state of the owner's side. Rounding to fp16 gives about 1e-5.
_DRIFT = 1e-3


def objection(average: Tensor, num_parameters: int, usual: float) -> str:
    """Why ``average`` must not be used; empty if it may. ``usual``: length of a pseudo-gradient here; 0: not known."""
    if not bool(torch.isfinite(average).all()):
        return "the average is not finite"
    norm = float(average[:num_parameters].norm())
    if usual > 0.0 and norm > _LARGEST_RATIO * usual:
        return f"the average is {norm / usual:.0f} times longer than usual"
    return ""


@dataclass
class OwnRounds:
    """Judges each round of this peer by the one before.

    AdamW at a high rate can collapse once the loss is nearly zero: its second moments decay faster than they follow the
    gradients, until one update throws the weights anywhere (Bai et al., arXiv 2506.04805; tests/benchmarks/README.md).
    Reducers leave out whoever is many times longer than the others; but of two peers the owner's is what the other is
    measured by, and its collapse was everybody's.

    Length alone says nothing: who has waited for a compiler makes one update in a round, and hundreds in the next.
    After a collapse AdamW's first moment can lead away from the common weights once more; but so many rounds in a row
    are passed over at most, so that nobody is stuck.
    """

    _length: float = 0.0
    _loss: float = 0.0
    _passed_over: int = 0
    """In a row."""

    def give(self, common: CommonState, samples: int, trained: float, loss: float | None) -> Given:
        """This peer's contribution to a round, as `CommonState.give`; nothing, where it has collapsed.

        Args:
            trained: the share of the round in which it did.
            loss: of the round; None: not to be judged by.
        """
        given = common.give(samples)
        if not given.usable or loss is None:
            return given
        why = self._objection(whole(float(given.vector[: common.num_parameters].norm()), trained), loss)
        return common.nothing(why) if why else given

    def _objection(self, length: float, loss: float) -> str:
        """Why a round must not count in which the weights have moved so far; empty if it may."""
        collapsed = (
            0.0 < _COLLAPSE * self._length < length
            and loss > _COLLAPSE * max(self._loss, _LOW_LOSS)
            and self._passed_over < _MOST_PASSED_OVER
        )
        if collapsed:
            self._passed_over += 1
            return f"its loss rose from {self._loss:.2g} to {loss:.2g}"
        self._length, self._loss, self._passed_over = length, loss, 0
        return ""


def whole(length: float, trained: float) -> float:
    """How far a peer would have moved in a whole round that has moved so far in a share of one."""
    return length / max(trained, _LEAST_TRAINED)


def reference_among(trusted: Iterable[Member], role: Role, own_id: str) -> str | None:
    """With whose weights a peer compares its own: the owner's; without the owner, of the first of its side by id.

    None if it is itself the one that others compare with; what it has trained counts, whatever anybody says.
    """
    first = min(trusted, key=lambda member: (member.role != "owner", member.peer_id), default=None)
    return None if first is None or role == "owner" or first.peer_id == own_id else first.peer_id


def has_drifted(probe: object, own: Tensor) -> bool:
    """Whether this peer's ``own`` probe is no longer that of the peer which has sent ``probe``."""
    if not isinstance(probe, bytes) or len(probe) != 4 * PROBE_SIZE:
        return False
    theirs = torch.frombuffer(bytearray(probe), dtype=torch.float32)
    return not float((theirs - own).norm()) <= _DRIFT * float(own.norm())  # also for not-a-number


def finite(value: float | None) -> float | None:
    """``value``, or None if it is none that can be told."""
    return value if value is not None and math.isfinite(value) else None


def number(value: Any) -> float:
    """A finite number, or 0."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0


def first_line(error: BaseException) -> str:
    """Why something failed, in few words."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
