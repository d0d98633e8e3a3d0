"""What a peer tells its group before they average, read as from a stranger.

hivemind takes it as it comes: one peer that sends garbage ends the round for all, in every round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

import msgpack
from pydantic import BaseModel, ConfigDict, Field, ValidationError

# What is known today takes 1.2 kB.
_LONGEST = 4096
Mode = Literal[0, 1, 2]
NODE: Mode = 0
CLIENT: Mode = 1
AUX: Mode = 2
"""hivemind's ``AveragingMode``: averages for others and trains; only trains; only averages for others."""

Rate = Annotated[float, Field(ge=0.0, le=1e9, allow_inf_nan=False)]


class About(BaseModel):
    """What a peer says about itself; fields of later versions are passed over."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")

    rate: Rate = 0.0
    """Samples per second in this round."""
    shares: bool = False
    """Gives away its state."""
    probe: Annotated[bytes, Field(max_length=1024)] = b""


@dataclass(frozen=True)
class Gathered:
    """What hivemind needs of a peer, and what the peer says."""

    bandwidth: float | None
    mode: Mode
    about: About


NOTHING = Gathered(None, CLIENT, About())
"""Of who sends garbage: a peer of which nothing is wanted."""


def read_gathered(data: bytes) -> Gathered | None:
    """What ``data`` says; None if it is not what a peer of ours sends."""
    if len(data) > _LONGEST:
        return None
    try:
        bandwidth, mode, about = _unpacked(data)
        if bandwidth is not None and not (isinstance(bandwidth, int | float) and 0.0 <= bandwidth <= 1e12):
            return None
        if type(mode) is not int or mode not in (NODE, CLIENT, AUX):
            return None
        return Gathered(bandwidth, mode, About.model_validate(_unpacked(about)))
    except (ValueError, TypeError, ValidationError, msgpack.UnpackException, RecursionError):
        return None


def _unpacked(data: bytes) -> Any:
    """MessagePack's plain types only: hivemind's serializer also makes objects of its own from it."""
    return msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0)
