"""What fits through a peer's connection in a round: parts of a vector, their codecs, and what a link carries of them.

All peers cut the vector that they average into the same parts. A part arrives or does not; a peer with a slow link
sends some parts in one round and others in the next.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trainkit.config.schema import CollaborativeConfig
from trainkit.swarm.address import MEGABIT

Codec = Literal["none", "fp16", "8bit", "4bit"]

CODECS: tuple[Codec, ...] = ("none", "fp16", "8bit", "4bit")
"""From the finest to the coarsest."""
PART = 1 << 16
"""Values in a part. All peers cut the vector alike, whatever codec they use."""
BLOCK = 512
"""Values that share one scale, in 8 and 4 bit."""
_LEVELS = {"8bit": 127, "4bit": 7}
"""A value is one of so many steps on each side of zero."""
SHARE = 0.2
"""Part of a round in which a peer sends its own parts. The others wait a little longer, see `patience`."""
_LARGEST_HALF = float(torch.finfo(torch.float16).max)


def num_parts(values: int) -> int:
    """Parts of a vector of ``values`` numbers."""
    return -(-values // PART)


def cuts(values: int) -> Iterator[slice]:
    """Where the parts are, in order."""
    return (slice(first, min(first + PART, values)) for first in range(0, values, PART))


def halves(part: slice, size: int) -> tuple[slice, slice]:
    """What lies before position ``size`` of a part, and what from there on; either may be empty."""
    return slice(part.start, min(part.stop, size)), slice(max(part.start, size), part.stop)


def encoded_bytes(values: int, codec: Codec) -> int:
    """Bytes of ``values`` numbers."""
    if codec in _LEVELS:
        return (values if codec == "8bit" else -(-values // 2)) + 4 * -(-values // BLOCK)
    return values * (2 if codec == "fp16" else 4)


# hivemind's 8 bit codecs have one codebook for half a million values, in which layers of different scale spoil each
# other (an error of 11 to 39 % of the vector's length; here 1.2 %, in a third of the time), and which numpy 2.4
# cannot read back. Here every 512 values have their own scale, as in block-wise quantization (Dettmers et al.,
# arXiv 2110.02861), which costs 0.8 % more bytes. In 4 bit the error is 14 %: see `sync.OuterState.give`.


def encode(part: Tensor, codec: Codec) -> bytes:
    """``part``, a flat float32 vector on the CPU. Equal parts give equal bytes."""
    if most := _LEVELS.get(codec):
        blocks = pad(part, (0, -part.numel() % BLOCK)).view(-1, BLOCK)
        scales = blocks.abs().amax(dim=1, keepdim=True) / most
        # A block of zeros has scale 0: divided by the smallest number there is, it stays zero.
        levels = (blocks / scales.clamp_min(torch.finfo(torch.float32).tiny)).round_().to(torch.int8)
        levels = levels.view(-1)[: part.numel()]
        if codec == "4bit":
            pairs = pad(levels + most, (0, levels.numel() % 2)).view(-1, 2).view(torch.uint8)
            levels = pairs[:, 0] * 16 + pairs[:, 1]
        return bytes(scales.numpy().tobytes() + levels.numpy().tobytes())
    exact = part.clamp(-_LARGEST_HALF, _LARGEST_HALF).half() if codec == "fp16" else part
    return bytes(exact.numpy().tobytes())


def decode(data: bytes, codec: str, values: int) -> Tensor:
    """The ``values`` numbers in ``data``, as float32. The bytes come from others and are only ever read as numbers.

    Raises ValueError for an unknown codec and for another number of values.
    """
    if codec not in CODECS:
        raise ValueError("unknown codec")
    if len(data) != encoded_bytes(values, codec):
        raise ValueError(f"{len(data)} bytes instead of {encoded_bytes(values, codec)}")
    if codec not in _LEVELS:
        return torch.from_numpy(np.frombuffer(data, np.float16 if codec == "fp16" else np.float32).copy()).float()
    blocks = -(-values // BLOCK)
    scales = torch.from_numpy(np.frombuffer(data, np.float32, blocks).copy())
    read = np.frombuffer(data, np.int8 if codec == "8bit" else np.uint8, offset=4 * blocks)
    if codec == "4bit":
        read = (np.stack([read >> 4, read & 15], axis=1).reshape(-1)[:values]).astype(np.int8) - _LEVELS[codec]
    levels = torch.from_numpy(read.copy()).float()
    return (pad(levels, (0, -values % BLOCK)).view(-1, BLOCK) * scales[:, None]).view(-1)[:values].clone()


def rounded(part: Tensor) -> Tensor:
    """``part`` as it arrives in 4 bit, float32."""
    return decode(encode(part.float(), "4bit"), "4bit", part.numel())


def misrounded(told: Tensor, exact: Tensor) -> Tensor:
    """By how much each value of ``told``, a part, differs from what ``exact`` may become in 4 bit.

    A value halfway between two levels may become either: on another machine it is a little more, or less.
    """
    most = pad(exact, (0, -exact.numel() % BLOCK)).view(-1, BLOCK).abs().amax(dim=1).repeat_interleave(BLOCK)
    steps = (most[: exact.numel()] / _LEVELS["4bit"]).clamp_min(torch.finfo(torch.float32).tiny)
    nearest = (told / steps).round() * steps
    return (told - nearest).abs() + ((exact - nearest).abs() - steps / 2).clamp_min(0.0)


@dataclass(frozen=True)
class Outcome:
    """What an exchange came to, for one peer of the group. One entry for each part, in the order of the vector."""

    received: tuple[int, ...] = ()
    """Contributions in the average that has arrived here; 0: none has, and the vector holds this peer's own part."""
    expected: tuple[int, ...] = ()
    """Contributions that peers had announced."""
    counted: tuple[bool, ...] = ()
    """This peer's own part is in the average."""
    reducers: tuple[str, ...] = ()
    """Id of the peer that has averaged the part."""
    late: tuple[str, ...] = ()
    """Ids of the peers that were left out here, with the parts that they had not sent in time."""
    bytes_up: int = 0
    bytes_down: int = 0
    """Of the parts, sent and received, as a sender and as a reducer. Not counted: what TCP and libp2p add, the search
    for a group, the DHT, and the state for newcomers."""
    timed_bytes: int = 0
    """Bytes of this peer's own parts that were counted, without the first that a reducer got."""
    timed_seconds: float = 0.0
    """How long a reducer waited for those parts; of several reducers the longest."""

    @property
    def sources(self) -> set[str]:
        """Ids of the peers whose averages have arrived."""
        return {peer for peer, count in zip(self.reducers, self.received, strict=True) if count}

    def refusing(self, peers: Collection[str], average: Tensor, own: Tensor) -> Outcome:
        """As if the averages of these peers had not arrived: there ``average`` becomes this peer's ``own`` again."""
        received, counted = list(self.received), list(self.counted)
        for place, (part, peer) in enumerate(zip(cuts(average.numel()), self.reducers, strict=True)):
            if peer in peers:
                average[part] = own[part]
                received[place], counted[place] = 0, False
        return replace(self, received=tuple(received), counted=tuple(counted))


GRACE = 2.0
"""Seconds after the end of a round within which a group must be found."""
_PATIENCE = 0.25
"""Part of a round that the others wait for a peer's parts, in total."""


def exchange_seconds(config: CollaborativeConfig) -> float:
    """How long an exchange may take: until the search for the next one begins."""
    return max(GRACE, config.round_seconds - config.matchmaking_seconds)


def patience(config: CollaborativeConfig) -> float:
    """How long the others wait in an exchange for the parts of a peer that sends them slowly."""
    return min(_PATIENCE * config.round_seconds, exchange_seconds(config) / 2)


@dataclass(frozen=True)
class Load:
    """What a peer sends of its own progress in a round."""

    codec: Codec
    parts: int
    of: int

    @property
    def rounds(self) -> int:
        """Rounds in which each part is sent once."""
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

    def codec_of(self, part: int, values: int, codec: Codec) -> Codec:
        """The codec of a part of so many values, where ``codec`` is that of most."""
        return "fp16" if codec in _LEVELS and part * PART + values > self.delicate else codec


def codec_back(config: CollaborativeConfig) -> Codec:
    """The codec of averages: what 4 bit round off would be lost, for no reducer keeps it for the next round."""
    return "8bit" if config.compression == "4bit" else config.compression


def load_for(upload: float | None, values: int, config: CollaborativeConfig) -> Load:
    """What a peer can send in time: all of it as the run does, else in a coarser codec, else a share of the parts in
    each round; gradients never in 4 bit, for what that rounds off is of no use for the next update.

    Args:
        upload: bytes per second; None when it is not known.
        values: in the vector.
    """
    parts = num_parts(values)
    if upload is None:
        return Load(config.compression, parts, parts)
    codecs, most = CODECS if config.sync == "diloco" else CODECS[:-1], upload * SHARE * config.round_seconds
    coarser = codecs[codecs.index(config.compression) :]
    codec = next((codec for codec in coarser if encoded_bytes(values, codec) <= most), coarser[-1])
    return Load(codec, max(1, int(parts * min(most / encoded_bytes(values, codec), 1.0))), parts)


# A wait shorter than this says nothing about a link: what was waited for was there already.
_SHORTEST = 0.05
# What nobody has waited for has come by a link that is faster than was known: by how much is tried out.
_FASTER = 1.5
# Speeds vary from round to round; people are told again when what is sent has changed by so much.
_NOTABLE = 2.0


class Link:
    """A peer's upload, measured by how long those who average have waited for its parts.

    A measurement before the first round (see `dht.measure_upload`) counts only if it is too slow. Otherwise a peer
    sends everything in its first round, and what is late is left out and sent later.

    Args:
        values: in the vector.
        config: the run's.
        limit: bytes per second that this peer may use at most.
        measured: bytes per second, where they are known not to be `enough`.
    """

    def __init__(
        self, values: int, config: CollaborativeConfig, limit: float | None = None, measured: float | None = None
    ) -> None:
        self._values, self._config, self._limit = values, config, limit
        self._turn = 0
        known = [rate for rate in (limit, measured) if rate is not None]
        self.upload = min(known) if known else None
        """Bytes per second; None: not known, so not slow."""
        self.load = self._told = load_for(self.upload, values, config)

    def sent(self, weights: Sequence[float]) -> tuple[float, ...]:
        """Those of the parts' weights that are sent in this round, and 0 for the others."""
        chosen = self.load.chosen(self._turn)
        return tuple(weight if is_sent else 0.0 for weight, is_sent in zip(weights, chosen, strict=True))

    def learn(self, sent: Sequence[float], found: Outcome) -> str:
        """Take note of an exchange. What to tell the person at this machine; empty if nothing changes."""
        self._turn += 1
        measured = found.timed_bytes / found.timed_seconds if found.timed_seconds > _SHORTEST else None
        late = any(weight and not is_in for weight, is_in in zip(sent, found.counted, strict=True))
        if late and all(found.received):  # else it was the others that were gone
            most = (found.timed_bytes + encoded_bytes(PART, self.load.codec)) / patience(self._config)
            measured = most if measured is None else min(measured, most)
        if measured is None:
            if self.upload is None or late or not any(sent):
                return ""
            measured = _FASTER * self.upload  # it was there before anybody waited for it
        known = measured if self.upload is None else 0.5 * (self.upload + measured)
        self.upload = known if self._limit is None else min(known, self._limit)
        self.load = load_for(self.upload, self._values, self._config)
        told = self._told
        if told.codec == self.load.codec and 1 / _NOTABLE < told.rounds / self.load.rounds < _NOTABLE:
            return ""
        self._told = self.load
        return in_words(self.load, self.upload)


def in_words(load: Load, upload: float) -> str:
    """What a link of ``upload`` bytes per second means, for the person at the machine."""
    words = f"upload {upload / MEGABIT:.1f} Mbit/s: this peer sends {load.codec.replace('bit', ' bit')}"
    if load.rounds == 1:
        return words
    return f"{words}, and each weight only in one of {load.rounds} rounds; nothing it learns is lost"


def enough(values: int, config: CollaborativeConfig) -> float:
    """Bytes per second with which a peer can send all of its vector in every round."""
    return encoded_bytes(values, config.compression) / (SHARE * config.round_seconds)


def fitted(config: CollaborativeConfig, values: int, upload: float) -> CollaborativeConfig:
    """The run's settings for a creator with that upload: 8 bit if need be, and rounds that are long enough.

    Args:
        values: in the vector that peers average.
        upload: bytes per second, of which one volunteer's averages may take their share of a round.
    """
    codec, seconds = config.compression, config.round_seconds
    if encoded_bytes(values, codec_back(config)) > upload * SHARE * seconds:
        codec = "4bit" if codec == "4bit" else "8bit"
        seconds = max(seconds, float(math.ceil(encoded_bytes(values, "8bit") / (SHARE * upload))))
    return config.model_copy(update={"compression": codec, "round_seconds": seconds})


def creators_share(config: CollaborativeConfig, values: int, upload: float) -> str:
    """What to expect of a creator that averages for all, in a line."""
    back = codec_back(config)
    seconds = encoded_bytes(values, back) / upload
    volunteers = int((config.round_seconds - config.matchmaking_seconds) / seconds)
    codec = {"none": "no compression", "8bit": "8 bit"}.get(back, back)
    return (
        f"At {upload / MEGABIT:g} Mbit/s: {codec}, rounds of {config.round_seconds:g} s. Sending to a volunteer takes "
        f"{seconds:.1f} s of each; {volunteers} at most, or others must reduce as well."
    )


def shares(bandwidths: Sequence[float | None], reduces: Sequence[bool]) -> tuple[float, ...]:
    """How much of the vector each peer reduces: in proportion to its bandwidth, the median where it is not known.

    Raises ValueError if nobody reduces.
    """
    known = [value for value, does in zip(bandwidths, reduces, strict=True) if does and value]
    usual = statistics.median(known) if known else 1.0
    rates = [usual if value is None else value for value in bandwidths]
    usable = [rate if does else 0.0 for rate, does in zip(rates, reduces, strict=True)]
    if not any(usable):
        raise ValueError("nobody in the group can reduce")
    return tuple(value / sum(usable) for value in usable)
