"""Tunnel to a creator behind a router, carried by an anchor that others reach.

The creator calls the anchor and stays on the line. Whoever then connects to the anchor's port is announced there by a
ticket; the creator calls once more with it, and the bytes of the two calls are passed on, both ways. They are libp2p's:
encrypted between the two peers, who prove their keys to each other. So an anchor can cut a connection, and neither read
nor change what goes through it; whoever admits, bans and signs is the creator, as if it had been reached itself.
"""

import asyncio
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from trainkit.swarm.identity.invitations import Pass, UntrustedError, read_statement
from trainkit.swarm.network import processes

# First byte of a connection: of the creator's line, of its call with a ticket, of libp2p (the length of its greeting).
_LINE, _CALL, _LIBP2P = b"L", b"C", b"\x13"
_PURPOSE = "tunnel"
_TICKET = 16
_NOBODY = bytes(_TICKET)
"""A ticket for nobody: the line is alive."""
_LONGEST_STATEMENT = 2048
_ANSWER_SECONDS = 10.0
_ALIVE_SECONDS = 3.0
_SILENT_SECONDS = 12.0
"""Silence after which a line is lost: a router that comes back with another address says so to nobody."""
_PAUSE_SECONDS = 2.0
_MOST_CALLS = 400
"""Connections that are carried at a time; each takes two of the 1,024 files that a process may usually open."""
_PIECE = 1 << 16

_Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def _pass_on(one: _Ends, other: _Ends) -> None:
    """Pass on what comes from either of two, until one of them ends; then end both."""

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await reader.read(_PIECE):
                writer.write(data)
                await writer.drain()

    ways = [asyncio.create_task(pump(one[0], other[1])), asyncio.create_task(pump(other[0], one[1]))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        one[1].close()
        other[1].close()


class _Line:
    """At the anchor: the line that a creator holds, and the connections that are carried for it."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self.writer = writer
        self.carried: set[asyncio.Task[Any]] = set()
        self.waiting: dict[bytes, asyncio.Future[_Ends]] = {}

    async def hold(self, reader: asyncio.StreamReader) -> None:
        """Stay until the creator is silent."""
        while True:
            self.writer.write(_NOBODY)
            async with asyncio.timeout(_SILENT_SECONDS):
                await reader.readexactly(1)
            await asyncio.sleep(_ALIVE_SECONDS)

    def end(self) -> None:
        """End it, with all that is carried for it: it would be waited for in vain."""
        self.writer.close()
        for task in self.carried:
            task.cancel()

    async def carry(self, caller: _Ends) -> None:
        """Announce whoever has connected, and hand it on to the creator."""
        ticket = os.urandom(_TICKET)
        arrived: asyncio.Future[_Ends] = asyncio.get_running_loop().create_future()
        self.waiting[ticket] = arrived
        try:
            self.writer.write(ticket)
            async with asyncio.timeout(_ANSWER_SECONDS):
                creator = await arrived
            creator[1].write(_LIBP2P)
            await _pass_on(caller, creator)
        finally:
            del self.waiting[ticket]
            if arrived.done() and not arrived.cancelled():
                arrived.result()[1].close()


def _shared() -> Any:
    """A flag that a forked process sets."""
    return multiprocessing.get_context("fork").RawValue("b", False)


class Carrier:
    """The anchor's side.

    Args:
        owner: public key of the run's owner, whose creator alone may hold a line.
        port: to listen on, at all interfaces or at ``host``.
    """

    def __init__(self, owner: bytes, port: int, host: str | None = None) -> None:
        self._owner = owner
        self._place = host, port
        self._line: _Line | None = None
        self.up = _shared()

    async def stay(self) -> None:
        """Answer for ever."""
        server = await asyncio.start_server(self.answer, *self._place)
        await server.serve_forever()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take one connection, whoever it is."""
        with suppress(OSError, EOFError, UntrustedError, asyncio.CancelledError):
            async with asyncio.timeout(_ANSWER_SECONDS):
                kind = await reader.readexactly(1)
                if kind == _LINE:
                    await self._prove(reader, writer)
                if kind == _CALL and self._take(await reader.readexactly(_TICKET), (reader, writer)):
                    return  # it is carried by the task of who has waited for it
            if kind == _LINE:
                await self._hold(reader, writer)
            elif kind == _LIBP2P and self._line is not None and len(self._line.carried) < _MOST_CALLS:
                task = asyncio.create_task(self._line.carry((reader, writer)))
                self._line.carried.add(task)
                task.add_done_callback(self._line.carried.discard)
                await task
        writer.close()

    async def _prove(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Raises UntrustedError unless it is the creator, who signs what it is asked to."""
        nonce = os.urandom(32)
        writer.write(nonce)
        size = int.from_bytes(await reader.readexactly(4), "big")
        if size > _LONGEST_STATEMENT:
            raise UntrustedError("it is too long")
        said = read_statement(await reader.readexactly(size), _PURPOSE, owner=self._owner)
        if said.grant.role != "owner" or said.content != nonce:
            raise UntrustedError("it is not the creator's")

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        before = self._line
        line = self._line = _Line(writer)
        if before is not None:  # of a creator that was killed, or whose address has changed
            before.end()
        self.up.value = True
        try:
            await line.hold(reader)
        finally:
            line.end()
            if self._line is line:
                self._line = None
                self.up.value = False

    def _take(self, ticket: bytes, ends: _Ends) -> bool:
        arrived = self._line.waiting.get(ticket) if self._line is not None else None
        if arrived is None or arrived.done():
            return False
        arrived.set_result(ends)
        return True


class Caller:
    """The creator's side.

    Args:
        place: of the anchor's port, ``/ip4/HOST/tcp/PORT``.
        port: at which this machine's libp2p listens.
    """

    def __init__(self, place: str, own: Pass, port: int) -> None:
        _, _, self.host, _, anchors_port = place.split("/")
        self.anchors_port = int(anchors_port)
        self.own = own
        self.port = port
        self.up = _shared()

    async def stay(self) -> None:
        """Call, and call again whenever the line is lost, for ever."""
        while True:
            with suppress(OSError, EOFError):
                await self._hold()
            self.up.value = False
            await asyncio.sleep(_PAUSE_SECONDS)

    async def _hold(self) -> None:
        reader, writer = await self._call(_LINE)
        calls: set[asyncio.Task[None]] = set()
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                said = self.own.state(_PURPOSE, await reader.readexactly(32))
            writer.write(len(said).to_bytes(4, "big") + said)
            while True:
                async with asyncio.timeout(_SILENT_SECONDS):
                    ticket = await reader.readexactly(_TICKET)
                self.up.value = True
                if ticket == _NOBODY:
                    writer.write(b".")
                elif len(calls) < _MOST_CALLS:
                    task = asyncio.create_task(self._fetch(ticket))
                    calls.add(task)
                    task.add_done_callback(calls.discard)
        finally:
            writer.close()
            for task in calls:
                task.cancel()

    async def _fetch(self, ticket: bytes) -> None:
        with suppress(OSError):
            here = await asyncio.open_connection("127.0.0.1", self.port)
            try:
                await _pass_on(here, await self._call(_CALL + ticket))
            finally:
                here[1].close()

    async def _call(self, first: bytes) -> _Ends:
        async with asyncio.timeout(_ANSWER_SECONDS):
            ends = await asyncio.open_connection(self.host, self.anchors_port)
        ends[1].write(first)
        return ends


class Tunnel(NamedTuple):
    """One side of a tunnel, as the peer's own process sees it."""

    process: Any
    up: Any

    @property
    def is_up(self) -> bool:
        """Return whether creator and anchor hear each other."""
        return bool(self.up.value)

    def require(self) -> None:
        """Raises HelperDiedError when its process is gone."""
        if not self.process.is_alive():
            raise processes.HelperDiedError("tunnel")


def _run(parent: int, side: Caller | Carrier) -> None:
    processes.become_helper(parent)
    asyncio.run(side.stay())


@contextmanager
def opened(side: Caller | Carrier) -> Iterator[Tunnel]:
    """One side of a tunnel, in a process of its own: it does not wait for a training."""
    start = multiprocessing.get_context("fork").Process
    process = start(target=_run, args=(os.getpid(), side), name="tunnel", daemon=True)
    process.start()
    try:
        yield Tunnel(process, side.up)
    finally:
        process.kill()
        process.join(2.0)
