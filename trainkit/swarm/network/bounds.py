"""Bounds on what hivemind takes: records, calls, messages."""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter
from functools import cache, partial
from typing import Any

from hivemind.dht.protocol import DHTProtocol
from hivemind.dht.storage import DHTLocalStorage, DictionaryDHTValue
from hivemind.p2p import P2P

from trainkit.common.process import end_with_parent
from trainkit.swarm.identity import admission, invitations
from trainkit.swarm.identity.invitations import unpack
from trainkit.swarm.protocol.messages import MOST_PEERS

# A round, and three more in which nobody has heard of a peer, are shorter.
_LONGEST_NEWS = 3600.0
# Peers that use one invitation, by name and for guests.
_MOST_OF_ONE = 64
_MOST_OF = {invitations.GUESTS: 800}


class Places:
    """Volunteers of whom a node keeps records, by their invitation: whoever has one can make up peers without end."""

    def __init__(self) -> None:
        self._until: dict[str, dict[Any, float]] = {}

    def take(self, value: bytes, subkey: Any, until: float) -> bool:
        """Return whether a record, valid as it is, may stay until then."""
        grant = invitations.Grant.from_bytes(unpack(unpack(value, 3)[1], 4)[0])
        if grant.role != "volunteer":
            return True
        taken = self._until.get(grant.id, {})
        now = time.time()
        if subkey not in taken:
            taken = {one: ends for one, ends in taken.items() if ends > now}
        most = _MOST_OF.get(grant.name, _MOST_OF_ONE)
        if until > now + _LONGEST_NEWS or (subkey not in taken and len(taken) >= most):
            return False
        taken[subkey] = max(until, taken.get(subkey, 0.0))
        admission.remember(self._until, grant.id, taken)
        return True


@cache
def bound_node() -> None:
    """Bound the records that this process and those that it forks keep and read. Call it before a node starts.

    hivemind's nodes keep every record that is valid, and read as many as somebody sends; of many they refuse all as
    soon as one is not valid. A volunteer's records must not outlast an hour: whoever floods a node gives up their place
    by then. Every program that the process starts through asyncio is killed when it dies: hivemind starts libp2p's
    daemon so, and has no hook.
    """
    validate = DHTProtocol._validate_record
    store = DHTLocalStorage.store_subkey
    places = Places()

    def store_bounded(self: Any, key: Any, subkey: Any, value: Any, expiration_time: float) -> bool:
        if not places.take(value, subkey, expiration_time):
            return False
        there = getattr(self.get(key), "value", None)
        if not isinstance(there, DictionaryDHTValue):
            there = {}
        # Peers that are there may stay: else a flood of newcomers would wash away everybody.
        if len(there) >= MOST_PEERS and subkey not in there:
            return False
        # hivemind would keep the newer record and drop it when the older one expires: a peer that sends again what
        # somebody has said before could make that peer, or the run, vanish.
        before = there.get(subkey)
        if before is not None and before.expiration_time >= expiration_time:
            return False
        return bool(store(self, key, subkey, value, expiration_time))

    def validate_bounded(self: Any, key_bytes: bytes, dictionary: Any) -> bool:
        """Leave out what is not valid, and what is too much."""
        if not isinstance(dictionary, DictionaryDHTValue):
            return False
        with dictionary.freeze():
            for place, (subkey, (value, expires)) in enumerate(list(dictionary.items())):
                if place >= MOST_PEERS or not validate(self, key_bytes, self.serializer.dumps(subkey), value, expires):
                    del dictionary[subkey]
        return True

    DHTLocalStorage.store_subkey = store_bounded
    DHTProtocol._validate_dictionary = validate_bounded
    asyncio.subprocess.create_subprocess_exec = partial(
        asyncio.create_subprocess_exec, preexec_fn=_detach_from_terminal
    )


def _detach_from_terminal() -> None:
    os.setpgid(0, 0)  # or Ctrl-C would end the daemon before the peer has said goodbye
    end_with_parent()


# Calls of one peer at once. An honest one looks for a group, sends its parts and fetches a state; and may do so anew
# while what it has given up is still being closed.
MOST_CALLS = 8
# A part is 256 kB, the list of a full group 1 MB.
LONGEST_MESSAGE = 1 << 21
FIRST_SECONDS = 10.0
# For the rest of a message that has begun, and for the other side to take an answer: 8 kB/s for the longest part.
REST_SECONDS = 30.0


def bound_calls() -> None:
    """Bound what the averager's process takes of a call. Call it before it listens.

    hivemind's streams wait for ever for the first word, for the rest of a message, and for somebody to read the
    answers; and they make room for a message of whatever length its first eight bytes announce. All that before anybody
    is asked who they are, so it is open to whoever reaches the port.
    """
    add = P2P.add_binary_stream_handler
    calls: Counter[str] = Counter()

    async def add_bounded(self: Any, name: str, handler: Any, balanced: bool = False) -> None:
        async def bounded(info: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            peer = str(info.peer_id)
            if calls[peer] >= MOST_CALLS:
                writer.close()
                return
            calls[peer] += 1
            try:
                await handler(info, BoundedReader(reader), Writer(writer))
            finally:
                calls[peer] -= 1
                if not calls[peer]:
                    del calls[peer]

        await add(self, name, bounded, balanced=balanced)

    P2P.add_binary_stream_handler = add_bounded


class BoundedReader:
    """Reader of a stream, as far as hivemind uses it. A peer that says too much or too little has hung up to it."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._limit = FIRST_SECONDS

    async def readexactly(self, size: int) -> bytes:
        """Read, as asyncio does: a message's mark (one byte), its length (eight), or the message."""
        limit: float | None = self._limit
        if size == 1 and limit == REST_SECONDS:
            limit = None  # between messages there may be silence, as long as a search for a group lasts
        try:
            if size > LONGEST_MESSAGE:
                raise TimeoutError
            return await asyncio.wait_for(self._reader.readexactly(size), limit)
        except TimeoutError:
            raise asyncio.IncompleteReadError(b"", size) from None
        finally:
            self._limit = REST_SECONDS


class Writer:
    """Writer of a stream, as far as hivemind uses it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.write = writer.write
        self.close = writer.close

    async def drain(self) -> None:
        """Raises TimeoutError when nobody takes what was written."""
        await asyncio.wait_for(self._writer.drain(), REST_SECONDS)
