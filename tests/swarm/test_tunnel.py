"""The tunnel to a creator behind a router, on one machine: who may hold its line, and what goes through."""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple

import pytest

from trainkit.swarm.identity.invitations import Key, Role, grant
from trainkit.swarm.network import processes, tunnel
from trainkit.swarm.network.tunnel import Caller, Carrier

OWNER, STRANGER = Key(b"o" * 32), Key(b"s" * 32)
GREETING = b"\x13/multistream/1.0.0\n"


async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """As libp2p does, and then say everything twice, until the caller hangs up, in whatever way."""
    try:
        writer.write(GREETING)
        with suppress(ConnectionError):
            while data := await reader.read(1 << 16):
                writer.write(data + data)
    finally:
        writer.close()


class Ends(NamedTuple):
    carrier: Carrier
    port: int
    """The anchor's."""
    call: Callable[[Key, Role], Awaitable[Caller]]
    """A creator calls, by this key and in this role."""


@asynccontextmanager
async def anchor() -> AsyncIterator[Ends]:
    carrier = Carrier(OWNER.public, 0)
    tasks: list[asyncio.Task[None]] = []  # the loop itself holds none
    async with (
        await asyncio.start_server(carrier.answer, "127.0.0.1", 0) as outside,
        await asyncio.start_server(greet, "127.0.0.1", 0) as libp2p,
    ):
        port, home = (one.sockets[0].getsockname()[1] for one in (outside, libp2p))

        async def call(key: Key, role: Role) -> Caller:
            own = grant(key, "run", "anna", role, time.time() + 60.0)
            caller = Caller(f"/ip4/127.0.0.1/tcp/{port}", own, home)
            tasks.append(asyncio.create_task(caller.stay()))
            until = time.monotonic() + 2.0
            while not caller.up.value and time.monotonic() < until:
                await asyncio.sleep(0.02)
            return caller

        yield Ends(carrier, port, call)
        await ended(asyncio.all_tasks() - {asyncio.current_task()})


async def ended(tasks: Iterable[asyncio.Task[Any] | None]) -> None:
    """End tasks, and the connections that they hold."""
    for task in filter(None, tasks):
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
    await asyncio.sleep(0.05)  # closed connections are gone after another turn of the loop


def test_what_is_sent_to_the_anchor_reaches_the_creator_and_comes_back() -> None:
    async def story() -> bytes:
        async with anchor() as ends:
            await ends.call(OWNER, "owner")
            reader, writer = await asyncio.open_connection("127.0.0.1", ends.port)
            writer.write(GREETING + b"x" * 100_000)
            async with asyncio.timeout(10):
                answer = await reader.readexactly(3 * len(GREETING) + 200_000)
            writer.close()
            return answer

    answer = asyncio.run(story())
    assert answer.startswith(GREETING)
    assert answer.count(b"x") == 200_000


@pytest.mark.parametrize(("key", "role"), [(STRANGER, "owner"), (OWNER, "reducer"), (OWNER, "volunteer")])
def test_nobody_but_the_creator_holds_the_line(key: Key, role: Role) -> None:
    async def story() -> tuple[bool, bool]:
        async with anchor() as ends:
            await ends.call(key, role)
            return await processes.listens(f"/ip4/127.0.0.1/tcp/{ends.port}/p2p/Qm"), bool(ends.carrier.up.value)

    assert asyncio.run(story()) == (False, False)


def test_without_a_ticket_of_the_anchor_nothing_is_connected() -> None:
    async def story() -> bytes:
        async with anchor() as ends:
            await ends.call(OWNER, "owner")
            reader, writer = await asyncio.open_connection("127.0.0.1", ends.port)
            writer.write(b"C" + bytes(16))
            async with asyncio.timeout(10):
                answer = await reader.read()
            writer.close()
            return answer

    assert asyncio.run(story()) == b""


def test_a_creator_that_calls_anew_ends_what_was_carried_before() -> None:
    """Of a router that has come back with another address nobody hears that the old connections are dead."""

    async def story() -> tuple[bytes, bool]:
        async with anchor() as ends:
            await ends.call(OWNER, "owner")
            reader, writer = await asyncio.open_connection("127.0.0.1", ends.port)
            writer.write(GREETING)
            async with asyncio.timeout(10):
                await reader.readexactly(len(GREETING))
                await ends.call(OWNER, "owner")
                rest = await reader.read()
            writer.close()
            return rest, await processes.listens(f"/ip4/127.0.0.1/tcp/{ends.port}/p2p/Qm")

    rest, is_reached = asyncio.run(story())
    assert len(rest) <= 2 * len(GREETING)
    assert is_reached


def test_a_line_on_which_nothing_is_heard_any_more_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "_SILENT_SECONDS", 0.3)
    monkeypatch.setattr(tunnel, "_ALIVE_SECONDS", 0.1)

    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(bytes(32 + 16))  # what the creator is to sign, and one sign of life
        while await reader.read(1024):  # until the creator hangs up
            pass
        writer.close()

    async def story() -> list[bool]:
        async with await asyncio.start_server(deaf, "127.0.0.1", 0) as server:
            own = grant(OWNER, "run", "anna", "owner", time.time() + 60.0)
            caller = Caller(f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}", own, 1)
            task = asyncio.create_task(caller.stay())
            seen = []
            for pause in (0.2, 1.0):
                await asyncio.sleep(pause)
                seen.append(bool(caller.up.value))
            await ended([task])
        return seen

    assert asyncio.run(story()) == [True, False]


def test_a_creator_of_whom_nothing_is_heard_any_more_loses_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tunnel, "_SILENT_SECONDS", 0.3)

    async def story() -> list[bool]:
        async with anchor() as ends:
            reader, writer = await asyncio.open_connection("127.0.0.1", ends.port)
            writer.write(b"L")
            own = grant(OWNER, "run", "anna", "owner", time.time() + 60.0)
            said = own.state("tunnel", await reader.readexactly(32))
            writer.write(len(said).to_bytes(4, "big") + said)
            await reader.readexactly(16)  # a sign of life, which is not answered
            seen = [bool(ends.carrier.up.value)]
            async with asyncio.timeout(10):
                await reader.read()
            seen.append(bool(ends.carrier.up.value))
            writer.close()
        return seen

    assert asyncio.run(story()) == [True, False]
