"""How much the averager's process takes of a call: who may open how many, how long they may be silent, and say at once.

hivemind's streams wait for ever for the first word, for the rest of a message, and for somebody to read the answers;
and they make room for a message of whatever length its first eight bytes announce. All that before anybody is asked who
they are, so that it is open to whoever reaches the port.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from hivemind.p2p import P2P

# Of one peer at once. An honest one looks for a group, sends its parts and fetches a state; and may do so anew while
# what it has given up is still being closed.
MOST_CALLS = 8
# A part is 256 kB, the list of a full group 1 MB.
LONGEST_MESSAGE = 1 << 21
FIRST_SECONDS = 10.0
# For the rest of a message that has begun, and for the other side to take an answer: 8 kB/s for the longest part.
REST_SECONDS = 30.0


def bound_calls() -> None:
    """Call it in the averager's process before it listens."""
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
                await handler(info, Reader(reader), Writer(writer))
            finally:
                calls[peer] -= 1
                if not calls[peer]:
                    del calls[peer]

        await add(self, name, bounded, balanced=balanced)

    P2P.add_binary_stream_handler = add_bounded


class Reader:
    """What hivemind uses of a stream's reader. To it whoever says too much or too little has hung up."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader, self._limit = reader, FIRST_SECONDS

    async def readexactly(self, size: int) -> bytes:
        """As asyncio's: a message's mark (one byte), its length (eight), or the message."""
        if size > LONGEST_MESSAGE:
            raise asyncio.IncompleteReadError(b"", size)
        # Between messages there may be silence, as long as a search for a group lasts.
        limit = None if size == 1 and self._limit == REST_SECONDS else self._limit
        try:
            found = await asyncio.wait_for(self._reader.readexactly(size), limit)
        except asyncio.TimeoutError:
            raise asyncio.IncompleteReadError(b"", size) from None
        self._limit = REST_SECONDS
        return found


class Writer:
    """What hivemind uses of a stream's writer."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer

    def write(self, data: bytes) -> None:
        """As asyncio's."""
        self._writer.write(data)

    async def drain(self) -> None:
        """Raises TimeoutError when nobody takes what was written."""
        await asyncio.wait_for(self._writer.drain(), REST_SECONDS)

    def close(self) -> None:
        """As asyncio's."""
        self._writer.close()
