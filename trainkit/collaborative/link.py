"""How fast this peer's contributions reach the others, and what it therefore sends in a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from trainkit.collaborative.parts import PART, SHARE, Codec, Load, encoded_bytes, load_for

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

    Of what was measured before the first round (see `upload`) only that counts that is too slow; otherwise a peer sends
    everything in its first round, and whatever of it is late is left out and sent later.

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
