"""Whether an average may be used, and whether this peer still trains what the others train."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from trainkit.collaborative.outer import PROBE_SIZE

# An average more than so many times longer than this peer's own pseudo-gradient is refused.
_LARGEST_RATIO = 10.0
# Relative distance of those beyond which a peer takes over the senior peer's state. Rounding to fp16 gives about 1e-5.
_DRIFT = 1e-3


def objection(average: Tensor, num_parameters: int, usual: float) -> str:
    """Why ``average`` must not be used; empty if it may. ``usual``: length of a pseudo-gradient here; 0: not known."""
    if not bool(torch.isfinite(average).all()):
        return "the average is not finite"
    norm = float(average[:num_parameters].norm())
    if usual > 0.0 and norm > _LARGEST_RATIO * usual:
        return f"the average is {norm / usual:.0f} times longer than usual"
    return ""


def has_drifted(members: Mapping[str, Mapping[str, Any]], own_id: str, own: Tensor) -> bool:
    """Compare this peer's probe with that of the oldest member that shares its state."""
    sharing = [(number(m.get("age")), peer, m) for peer, m in members.items() if m.get("shares") is True]
    if not sharing:
        return False
    _, oldest, member = max(sharing, key=lambda item: item[:2])
    if oldest == own_id:
        return False
    probe = member.get("probe")
    if not isinstance(probe, bytes) or len(probe) != 4 * PROBE_SIZE:
        return False
    theirs = torch.frombuffer(bytearray(probe), dtype=torch.float32)
    return not float((theirs - own).norm()) <= _DRIFT * float(own.norm())  # also for not-a-number


def number(value: Any) -> float:
    """A finite number, or 0."""
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else 0.0
