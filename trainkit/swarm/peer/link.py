"""A peer's line: what it can send in a round."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from trainkit.config.schema import CollaborativeConfig
from trainkit.swarm.protocol.addresses import MEGABIT
from trainkit.swarm.protocol.codecs import CODECS, PART, Codec, encoded_bytes, num_parts
from trainkit.swarm.protocol.outer_step import ExchangeOutcome

_SENDING_SHARE = 0.2
"""Part of a round in which a peer sends its own parts. The others wait a little longer, see `patience`."""

GRACE = 2.0
"""Seconds after the end of a round within which a group must be found."""
_PATIENCE = 0.25
"""Part of a round that the others wait for a peer's parts, in total."""


def exchange_seconds(config: CollaborativeConfig) -> float:
    """Return how long an exchange may take: until the search for the next one begins."""
    return max(GRACE, config.round_seconds - config.matchmaking_seconds)


def patience(config: CollaborativeConfig) -> float:
    """Return how long the others wait in an exchange for the parts of a peer that sends them slowly."""
    return min(_PATIENCE * config.round_seconds, exchange_seconds(config) / 2)


@dataclass(frozen=True)
class SentShare:
    """Share of its own progress that a peer sends in a round."""

    codec: Codec
    parts: int
    of: int

    @property
    def rounds(self) -> int:
        """Rounds in which each part is sent once."""
        return -(-self.of // self.parts)

    def chosen(self, turn: int) -> list[bool]:
        """Return which parts are sent, where ``turn`` rounds have been sent before: they take turns."""
        first = turn * self.parts % self.of
        return [(index - first) % self.of < self.parts for index in range(self.of)]


def codec_back(config: CollaborativeConfig) -> Codec:
    """The codec of averages: what 4 bit round off would be lost, for no reducer keeps it for the next round."""
    if config.compression == "4bit":
        return "8bit"
    return config.compression


def load_for(upload: float | None, values: int, config: CollaborativeConfig) -> SentShare:
    """Return what a peer can send in time: all of it as the run does, else in a coarser codec, else a share of the
    parts in each round.

    Args:
        upload: bytes per second; None when it is not known.
        values: in the vector.
    """
    parts = num_parts(values)
    if upload is None:
        return SentShare(config.compression, parts, parts)
    coarser = CODECS[CODECS.index(config.compression) :]
    most = upload * _SENDING_SHARE * config.round_seconds
    codec = next((codec for codec in coarser if encoded_bytes(values, codec) <= most), coarser[-1])
    return SentShare(codec, max(1, int(parts * min(most / encoded_bytes(values, codec), 1.0))), parts)


# A wait shorter than this says nothing about a link: what was waited for was there already.
_SHORTEST = 0.05
# What nobody has waited for has come by a link that is faster than was known: by how much is tried out.
_FASTER = 1.5
# Speeds vary from round to round; people are told again when what is sent has changed by so much.
_NOTABLE = 2.0


class Link:
    """A peer's upload, measured by how long those who average have waited for its parts.

    A peer sends everything in its first round, unless it has a limit. What is late is left out and sent later.

    Args:
        values: in the vector.
        config: the run's.
        limit: bytes per second that this peer may use at most.
    """

    def __init__(self, values: int, config: CollaborativeConfig, limit: float | None = None) -> None:
        self._values = values
        self._config = config
        self._limit = limit
        self._turn = 0
        self.upload = limit
        """Bytes per second; None: not known, so not slow."""
        self.load = self._told = load_for(self.upload, values, config)

    def sent(self, weights: Sequence[float]) -> tuple[float, ...]:
        """Return those of the parts' weights that are sent in this round, and 0 for the others."""
        return tuple(map(operator.mul, weights, self.load.chosen(self._turn)))

    def learn(self, sent: Sequence[float], found: ExchangeOutcome) -> str:
        """Take note of an exchange. What to tell the person at this machine; empty if nothing changes."""
        if not any(sent):
            return ""
        a_part = encoded_bytes(PART, self.load.codec)
        late = False
        measured = found.timed_bytes / found.timed_seconds if found.timed_seconds > _SHORTEST else None
        if found.unfinished:  # not all of it was through by then
            measured = sum(map(bool, sent)) * a_part / exchange_seconds(self._config)
        else:
            self._turn += 1
            late = any(weight and not is_in for weight, is_in in zip(sent, found.counted, strict=True))
            if late and all(found.received):  # else it was the others that were gone
                measured = min(measured or math.inf, (found.timed_bytes + a_part) / patience(self._config))
        if measured is None:
            if self.upload is None or late:
                return ""
            measured = _FASTER * self.upload  # it was there before anybody waited for it
        self.upload = min(0.5 * ((self.upload or measured) + measured), self._limit or math.inf)
        self.load = load_for(self.upload, self._values, self._config)
        told = self._told
        if told.codec == self.load.codec and 1 / _NOTABLE < told.rounds / self.load.rounds < _NOTABLE:
            return ""
        self._told = self.load
        return upload_in_words(self.load, self.upload)


def upload_in_words(load: SentShare, upload: float) -> str:
    """Return what a link of ``upload`` bytes per second means, for the person at the machine."""
    words = f"upload {upload / MEGABIT:.1f} Mbit/s: this peer sends {load.codec.replace('bit', ' bit')}"
    if load.rounds == 1:
        return words
    return f"{words}, and each weight only in one of {load.rounds} rounds; nothing it learns is lost"


def fitted(config: CollaborativeConfig, values: int, upload: float) -> CollaborativeConfig:
    """The run's settings for a creator with that upload: 8 bit if need be, and rounds that are long enough.

    Args:
        values: in the vector that peers average.
        upload: bytes per second, of which one volunteer's averages may take their share of a round.
    """
    codec = config.compression
    seconds = config.round_seconds
    if encoded_bytes(values, codec_back(config)) > upload * _SENDING_SHARE * seconds:
        if codec != "4bit":
            codec = "8bit"
        seconds = max(seconds, float(math.ceil(encoded_bytes(values, "8bit") / (_SENDING_SHARE * upload))))
    return config.model_copy(update={"compression": codec, "round_seconds": seconds})


def creators_share(config: CollaborativeConfig, values: int, upload: float) -> str:
    """Return what to expect of a creator that averages for all, in a line."""
    back = codec_back(config)
    seconds = encoded_bytes(values, back) / upload
    volunteers = int((config.round_seconds - config.matchmaking_seconds) / seconds)
    codec = {"none": "no compression", "8bit": "8 bit"}.get(back, back)
    return (
        f"At {upload / MEGABIT:g} Mbit/s: {codec}, rounds of {config.round_seconds:g} s. Sending to a volunteer takes "
        f"{seconds:.1f} s of each; {volunteers} at most, or others must reduce as well."
    )
