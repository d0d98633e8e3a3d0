"""In the averager's process: who is it that asks to average, or for the state?

hivemind's averager answers everybody who reaches it. libp2p proves the id of whoever asks; the credential of that id is
in the DHT, where it is looked up once.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from trainkit.collaborative.admission import Admission, Member
from trainkit.collaborative.dht import introduced
from trainkit.collaborative.signed_records import peer_key

_LOOK_SECONDS = 3.0
# Strangers are not looked up again for so long; so many of them are remembered.
_STRANGER_SECONDS = 5.0
_MOST_STRANGERS = 1000


class Guard:
    """Knows the members that have asked."""

    def __init__(self, dht: Any, admission: Admission) -> None:
        self._dht, self.admission = dht, admission
        self._strangers: dict[str, float] = {}

    async def member(self, peer_id: str) -> Member | None:
        """The member of that id; None for a stranger, and for whom the run does not want any more."""
        if (known := self.admission.admitted(peer_id)) is not None:
            return known
        now = time.monotonic()
        if now - self._strangers.get(peer_id, float("-inf")) < _STRANGER_SECONDS:
            return None
        try:
            asked = self._dht.get(peer_key(peer_id), latest=False, return_future=True)
            found = introduced(self.admission, peer_id, await asyncio.wait_for(asked, _LOOK_SECONDS))
        except (asyncio.TimeoutError, OSError):
            found = None
        if found is None:
            if len(self._strangers) >= _MOST_STRANGERS:
                self._strangers.clear()
            self._strangers[peer_id] = now
        return found
