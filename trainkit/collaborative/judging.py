"""Whether an average may be used, and whether this peer still trains what the others train."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainkit.collaborative.admission import Member
from trainkit.collaborative.common import PROBE_SIZE
from trainkit.collaborative.invitation import Role

# An average more than so many times longer than this peer's own pseudo-gradient is refused.
_LARGEST_RATIO = 10.0
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
