"""What an exchange came to, for one peer of the group."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from trainkit.collaborative.parts import cuts


@dataclass(frozen=True)
class Outcome:
    """What an exchange came to, for one peer of the group. One entry a part, in the order of the vector."""

    received: tuple[int, ...]
    """Contributions in the average that has arrived here; 0: none has, and the vector holds this peer's own part."""
    expected: tuple[int, ...]
    """Contributions that peers had announced."""
    counted: tuple[bool, ...]
    """This peer's own part is in the average."""
    reducers: tuple[str, ...]
    """Id of the peer that has averaged it."""
    late: tuple[str, ...]
    """Ids of the peers that were left out here, with what they had not sent in time."""
    bytes_up: int
    bytes_down: int
    """Of the parts, sent and received, as a sender and as a reducer. Not counted: what TCP and libp2p add, the search
    for a group, the DHT, and the state for newcomers."""
    timed_bytes: int
    """Bytes of this peer's own parts that were counted, without the first that a reducer got."""
    timed_seconds: float
    """How long a reducer waited for those; of several the longest."""

    def arrived_from(self) -> tuple[str, ...]:
        """Who has averaged each part; empty where no average has arrived."""
        return tuple(peer if count else "" for peer, count in zip(self.reducers, self.received, strict=True))

    def refusing(self, peers: Collection[str], average: Tensor, own: Tensor) -> Outcome:
        """As if the averages of these peers had not arrived: there ``average`` becomes this peer's ``own`` again."""
        for part, peer in zip(cuts(average.numel()), self.reducers, strict=True):
            if peer in peers:
                average[part] = own[part]
        out = [peer in peers for peer in self.reducers]
        received = tuple(0 if gone else count for gone, count in zip(out, self.received, strict=True))
        counted = tuple(is_in and not gone for gone, is_in in zip(out, self.counted, strict=True))
        return replace(self, received=received, counted=counted)

    def in_short(self) -> dict[str, Any]:
        """What a round's record says of it."""
        return {
            "parts": sum(self.received),
            "expected": sum(self.expected),
            "bytes_up": self.bytes_up,
            "bytes_down": self.bytes_down,
            "late": self.late,
        }
