"""Watch over the other peers of a swarm, by what they publish in its DHT."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from trainkit.swarm.network.dht import SwarmDHT
from trainkit.swarm.protocol.addresses import known_of
from trainkit.swarm.protocol.messages import BANNED, MANIFEST, PROGRESS, REVOKED, PeerProgress, records_in

# Every reader is sent the progress of all peers, and there are as many readers: each reads of so many a second, and
# those who answer are asked as often however many ask.
_PEERS_A_SECOND = 16


class PeerWatch:
    """The other peers, as far as this one has heard of them; asking never keeps it from training.

    Args:
        oldest: seconds; news of the others are never older for want of asking, however many they are.
    """

    def __init__(
        self, dht: SwarmDHT, creator: str, oldest: float, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._dht = dht
        self.creator = creator
        self._oldest = oldest
        self._now = now
        self._question: Any = None
        self._ask_at = 0.0
        self.peers: dict[str, PeerProgress] = {}
        self.stopped = False
        """The creator has ended the run."""
        self.first_round = 0
        """Number of it by the creator's clock; 0 as long as it has not been heard."""
        self.since = 0.0
        """When the creator was started."""

    def poll(self) -> None:
        """Take the answers that are there and ask again."""
        if self._question is not None:
            if not self._question.done():
                return
            with suppress(Exception):  # a question that failed is asked again
                for key, found in self._question.result(0).items():
                    self._take(key, found)
            self._question = None
        now = self._now()
        if now >= self._ask_at:
            self._ask_at = now + self.pause
            with suppress(OSError):  # the node has died, which ends the round
                self._question = self._dht.ask((MANIFEST, PROGRESS, REVOKED, BANNED))

    @property
    def pause(self) -> float:
        """Seconds, beyond the one between two polls, in which nobody asks; 0 in a small swarm."""
        return max(0.0, min(len(self.peers) / _PEERS_A_SECOND - 1.0, self._oldest))

    def others(self, since: float) -> dict[str, PeerProgress]:
        """Peers besides this one that have told of themselves since then (seconds since 1970)."""
        return {peer: own for peer, own in self.peers.items() if peer != self._dht.peer_id and own.time >= since}

    def reachable(self) -> tuple[str, ...]:
        """Addresses of the others, as far as they have any."""
        return known_of(item for own in self.others(0.0).values() for item in own.addresses)

    def _take(self, key: str, found: Any) -> None:
        if key == PROGRESS:
            self.peers = records_in(key, found)
        elif key in (REVOKED, BANNED):
            self._dht.excluded.take(key, found)
        else:
            manifest = records_in(key, found).get(self.creator)
            self.stopped = manifest is not None and manifest.stopped
            if manifest is not None:
                self.first_round = manifest.first_round
                self.since = manifest.since
