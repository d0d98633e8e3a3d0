"""How the vector that peers average is cut into parts, and what of it a peer sends.

A part is what can arrive or not; peers with a slow link send some parts in one round and others in the next.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Codec = Literal["none", "fp16", "8bit"]

CODECS: tuple[Codec, ...] = ("none", "fp16", "8bit")
"""From the finest to the coarsest."""
PART = 1 << 16
"""Values in a part. All peers cut the vector alike, whatever codec they use."""
BLOCK = 512
"""So many values have a scale in common, in 8 bit."""
# A peer's own parts are sent within this share of a round; the others wait for a little longer, see `averager`.
SHARE = 0.2


def num_parts(values: int) -> int:
    """Parts of a vector of so many values."""
    return -(-values // PART)


def cuts(values: int) -> Iterator[slice]:
    """Where the parts are, in order."""
    return (slice(first, min(first + PART, values)) for first in range(0, values, PART))


def coarser(first: Codec, second: Codec) -> Codec:
    """The one of two that sends fewer bytes."""
    return max(first, second, key=CODECS.index)


def encoded_bytes(values: int, codec: Codec) -> int:
    """Bytes of ``values`` numbers."""
    if codec == "8bit":
        return values + 4 * -(-values // BLOCK)
    return values * (2 if codec == "fp16" else 4)


@dataclass(frozen=True)
class Load:
    """What a peer sends of its own progress in a round."""

    codec: Codec
    parts: int
    of: int

    @property
    def rounds(self) -> int:
        """Each part is sent once in so many rounds."""
        return -(-self.of // self.parts)

    def chosen(self, turn: int) -> list[bool]:
        """Which parts are sent, where ``turn`` rounds have been sent before: they take turns."""
        first = turn * self.parts % self.of
        return [(index - first) % self.of < self.parts for index in range(self.of)]


@dataclass(frozen=True)
class Sending:
    """What a peer puts into an exchange, besides the vector."""

    weights: Sequence[float]
    """Of each part; 0 leaves it out."""
    codec: Codec
    """Of this peer's parts."""
    codec_back: Codec
    """Of the averages; the same on all peers."""
    delicate: int
    """Values from here on (BatchNorm's statistics) are never coarser than fp16."""

    def codec_of(self, part: int, codec: Codec) -> Codec:
        """The codec of a part, where ``codec`` is that of most."""
        return "fp16" if codec == "8bit" and (part + 1) * PART > self.delicate else codec


def load_for(upload: float | None, values: int, codec: Codec, round_seconds: float) -> Load:
    """What a peer can send in time: all of it as the run does, else in 8 bit, else a share of the parts in each round.

    Args:
        upload: bytes per second; None when it is not known.
        values: in the vector.
        codec: the run's.
    """
    parts = num_parts(values)
    budget = float("inf") if upload is None else upload * SHARE * round_seconds
    if encoded_bytes(values, codec) <= budget:
        return Load(codec, parts, parts)
    codec = coarser(codec, "8bit")
    fit = int(budget // encoded_bytes(PART, codec)) if encoded_bytes(values, codec) > budget else parts
    return Load(codec, max(1, fit), parts)
