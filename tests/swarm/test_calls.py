"""What a peer may send before anybody has asked who it is."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

pytestmark = pytest.mark.usefixtures("hivemind_here")


def read(*arrives: tuple[float, bytes], sizes: list[int], monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """What a reader gets of what arrives after so many seconds each."""
    from trainkit.swarm import exchange

    monkeypatch.setattr(exchange, "FIRST_SECONDS", 0.2)
    monkeypatch.setattr(exchange, "REST_SECONDS", 0.3)

    async def run() -> list[bytes]:
        stream = asyncio.StreamReader()

        async def feed() -> None:
            for seconds, data in arrives:
                await asyncio.sleep(seconds)
                stream.feed_data(data)

        feeding, reader = asyncio.ensure_future(feed()), exchange.Reader(stream)
        try:
            return [await reader.readexactly(size) for size in sizes]
        finally:
            feeding.cancel()

    return asyncio.run(run())


def test_between_two_messages_a_peer_may_be_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    said = read((0.0, b"\x00length!!body"), (0.6, b"\x00"), sizes=[1, 8, 4, 1], monkeypatch=monkeypatch)
    assert said == [b"\x00", b"length!!", b"body", b"\x00"]


@pytest.mark.parametrize(
    ("arrives", "sizes"),
    [
        ([], [1]),
        ([(0.0, b"\x00")], [1, 8]),
        ([(0.0, b"\x00length!!bo"), (0.6, b"dy")], [1, 8, 4]),
        ([(0.0, b"\x00length!!")], [1, 8, 1 << 33]),
    ],
    ids=["never begins", "stops after a mark", "stops in a message", "announces too much"],
)
def test_who_says_too_little_or_too_much_has_hung_up(
    arrives: list[tuple[float, bytes]], sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(asyncio.IncompleteReadError):
        read(*arrives, sizes=sizes, monkeypatch=monkeypatch)


def test_a_peer_has_so_many_calls_at_once_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    from hivemind.p2p import P2P

    from trainkit.swarm import exchange

    added: list[Any] = []

    async def add(self: Any, name: str, handler: Any, balanced: bool = False) -> None:
        added.append(handler)

    monkeypatch.setattr(P2P, "add_binary_stream_handler", add)
    exchange.bound_calls()

    class Stream:
        closed = False

        def close(self) -> None:
            self.closed = True

    async def run() -> tuple[list[bool], list[bool]]:
        hang_up = asyncio.Event()

        async def handler(info: Any, reader: Any, writer: Any) -> None:
            await hang_up.wait()

        await P2P.add_binary_stream_handler(cast("P2P", None), "call", handler)

        def opened(peer: str) -> tuple[Stream, asyncio.Future[None]]:
            stream = Stream()
            call = added[0](type("Info", (), {"peer_id": peer}), None, stream)
            return stream, asyncio.ensure_future(call)

        eve = [opened("eve") for _ in range(exchange.MOST_CALLS + 3)]
        ann = opened("ann")
        await asyncio.sleep(0)
        refused = [stream.closed for stream, _ in (*eve, ann)]
        hang_up.set()
        await asyncio.gather(*(call for _, call in (*eve, ann)))
        hang_up.clear()
        later, call = opened("eve")
        await asyncio.sleep(0)
        call.cancel()
        return refused, [later.closed]

    refused, later = asyncio.run(run())
    assert refused == [False] * exchange.MOST_CALLS + [True] * 3 + [False]
    assert later == [False]
