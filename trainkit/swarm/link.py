"""What fits through a peer's connection in a round: how large a vector is, how long it takes."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from trainkit.config.schema import CollaborativeConfig
from trainkit.errors import UserError

# How the vector that peers average is cut into parts, and what of it a peer sends.
#
# A part is what can arrive or not; peers with a slow link send some parts in one round and others in the next.

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


# How fast this peer's contributions reach the others, and what it therefore sends in a round.

MEGABIT = 125_000.0
"""Bytes."""
# A wait shorter than this says nothing about a link: what was waited for was there already.
_SHORTEST = 0.05
# What nobody has waited for has come by a link that is faster than was known: by how much is tried out.
_FASTER = 1.5
# Speeds vary from round to round; people are told again when what is sent has changed by so much.
_NOTABLE = 2.0


class Arrivals(Protocol):
    """What of `exchange.Outcome` is of interest here."""

    @property
    def received(self) -> Sequence[int]: ...

    @property
    def counted(self) -> Sequence[bool]: ...

    @property
    def timed_bytes(self) -> int: ...

    @property
    def timed_seconds(self) -> float: ...


class Link:
    """Measured where it counts: by how long those who average have waited for this peer.

    Of what was measured before the first round (see `dialback.measure`) only that counts that is too slow; otherwise a
    peer sends everything in its first round, and whatever of it is late is left out and sent later.

    Args:
        values: in the vector.
        codec: the run's.
        patience: the others wait so long for a peer's parts, in seconds.
        limit: bytes per second that this peer may use at most.
        measured: bytes per second, where they are known not to be `enough`.
    """

    def __init__(
        self,
        values: int,
        codec: Codec,
        round_seconds: float,
        patience: float,
        limit: float | None = None,
        measured: float | None = None,
    ) -> None:
        self._values, self._codec, self._round_seconds = values, codec, round_seconds
        self._patience, self._limit = patience, limit
        self._turn = 0
        known = [rate for rate in (limit, measured) if rate is not None]
        self.upload = min(known) if known else None
        """Bytes per second; None: not known, so not slow."""
        self.load = self._told = self._load()

    def sent(self, weights: Sequence[float]) -> tuple[float, ...]:
        """Those of the parts' weights that are sent in this round, and 0 for the others."""
        return tuple(weight * is_sent for weight, is_sent in zip(weights, self.load.chosen(self._turn), strict=True))

    def learn(self, sent: Sequence[float], found: Arrivals) -> str:
        """Take note of an exchange. What to tell the person at this machine; empty if nothing changes."""
        self._turn += 1
        measured = found.timed_bytes / found.timed_seconds if found.timed_seconds > _SHORTEST else None
        late = any(weight and not is_in for weight, is_in in zip(sent, found.counted, strict=True))
        if late and all(found.received):  # else it was the others that were gone
            most = (found.timed_bytes + encoded_bytes(PART, self.load.codec)) / self._patience
            measured = most if measured is None else min(measured, most)
        if measured is None:
            if self.upload is None or late or not any(sent):
                return ""
            measured = _FASTER * self.upload  # it was there before anybody waited for it
        known = measured if self.upload is None else 0.5 * (self.upload + measured)
        self.upload = known if self._limit is None else min(known, self._limit)
        self.load = self._load()
        told = self._told
        if told.codec == self.load.codec and 1 / _NOTABLE < told.rounds / self.load.rounds < _NOTABLE:
            return ""
        self._told = self.load
        return in_words(self.load, self.upload)

    def _load(self) -> Load:
        return load_for(self.upload, self._values, self._codec, self._round_seconds)


def in_words(load: Load, upload: float) -> str:
    """What a link of so many bytes per second means, for the person at the machine."""
    codec = "8 bit" if load.codec == "8bit" else load.codec
    words = f"upload {upload / MEGABIT:.1f} Mbit/s: this peer sends {codec}"
    if load.rounds == 1:
        return words
    return f"{words}, and each weight only in one of {load.rounds} rounds; nothing it learns is lost"


def enough(values: int, codec: Codec, round_seconds: float) -> float:
    """Bytes per second with which a peer can send all of its vector in every round."""
    return encoded_bytes(values, codec) / (SHARE * round_seconds)


def shortest_round(upload: float, values: int, codec: Codec) -> float:
    """Seconds of the shortest round in which a peer can send all of its vector in time."""
    return encoded_bytes(values, codec) / (SHARE * upload)


# ``--max-upload``: what a link of a known speed means before anything is sent.

_UNITS = {"k": 1e-3, "m": 1.0, "g": 1e3}


def rate_of(text: str) -> float:
    """Bytes per second of ``20Mbit``, ``500kbit`` or ``1Gbit/s``.

    Raises UserError.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])bit(?:/s)?", text.strip(), re.IGNORECASE)
    rate = float(found[1]) * _UNITS[found[2].lower()] * MEGABIT if found else 0.0
    if not 0.0 < rate < math.inf:
        raise UserError(
            f"--max-upload {text} is no speed of a link.",
            why="It is given in bits per second, as on the contract with the provider.",
            fix="Write it as 20Mbit, 500kbit or 1Gbit.",
        )
    return rate


def fitted(config: CollaborativeConfig, values: int, upload: float) -> CollaborativeConfig:
    """The run's settings for a creator with that upload: 8 bit if need be, and rounds that are long enough.

    Args:
        values: in the vector that peers average.
        upload: bytes per second, of which one volunteer's averages may take their share of a round.
    """
    codec, seconds = config.compression, config.round_seconds
    if shortest_round(upload, values, codec) > seconds:
        codec = coarser(codec, "8bit")
        seconds = max(seconds, float(math.ceil(shortest_round(upload, values, codec))))
    return config.model_copy(update={"compression": codec, "round_seconds": seconds})


def creators_share(config: CollaborativeConfig, values: int, upload: float) -> str:
    """What to expect of a creator that averages for all, in a line."""
    size = encoded_bytes(values, config.compression)
    seconds = size / upload
    volunteers = int((config.round_seconds - config.matchmaking_seconds) / seconds)
    return (
        f"At {upload / MEGABIT:g} Mbit/s: {_codec(config.compression)}, rounds of {config.round_seconds:g} s. "
        f"For each volunteer this machine sends {size / 1e6:.1f} MB a round, {seconds:.1f} s, "
        f"{100 * seconds / config.round_seconds:.0f} % of it; {volunteers} at most, or others must reduce as well."
    )


def volunteers_share(config: CollaborativeConfig, values: int, upload: float) -> str:
    """What to expect of a volunteer, in a line."""
    load = load_for(upload, values, config.compression, config.round_seconds)
    size = encoded_bytes(values, load.codec) * load.parts / load.of
    return (
        f"{in_words(load, upload)}; {size / 1e6:.1f} MB a round, {size / upload:.1f} s, "
        f"{100 * size / upload / config.round_seconds:.0f} % of it."
    )


def _codec(codec: str) -> str:
    return "8 bit" if codec == "8bit" else "no compression" if codec == "none" else codec
