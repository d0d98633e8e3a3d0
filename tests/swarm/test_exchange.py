"""Exchanges of a group within one process: what the peers send each other goes through queues."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import msgpack
import pytest
import torch
from torch import Tensor

from trainkit.swarm.exchange import NODE, read_gathered
from trainkit.swarm.link import PART, Codec, Sending
from trainkit.swarm.robust import Limits, Screen

if TYPE_CHECKING:
    from trainkit.swarm.exchange import Exchange, Outcome, ScreeningReducer


pytestmark = pytest.mark.usefixtures("hivemind_here")

VALUES = 4 * PART - 100


@dataclass(frozen=True)
class Member:
    """A peer of the test's group, which is called by a letter."""

    name: str
    vector: Tensor
    weights: Sequence[float] = (1.0, 1.0, 1.0, 1.0)
    codec: Codec = "fp16"
    reduces: float = 0.0
    seconds: Sequence[float] = (0.0, 0.0, 0.0, 0.0)
    """How long each of its parts is on its way."""
    cut: bool = False
    """It sends half of what it says."""
    twice: bool = False
    """It sends everything in two calls at once."""


def meet(
    *members: Member,
    codec: Codec = "fp16",
    delicate: int = VALUES,
    patience: float = 10.0,
    screens: dict[str, Screen] | None = None,
) -> dict[str, tuple[Tensor, Outcome]]:
    """The average and the outcome of each member.

    ``screens``: is given the screen of each.
    """
    from hivemind.averaging import DecentralizedAverager
    from hivemind.compression import NoCompression
    from hivemind.p2p import PeerID
    from hivemind.utils.asyncio import as_aiter

    from trainkit.swarm.exchange import Exchange, install_screen
    from trainkit.swarm.robust import Limits

    class Near(Exchange):
        """An exchange whose calls reach the others directly."""

        def _get_peer_stub(self, peer: PeerID) -> Any:
            async def call(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
                async def slowly() -> AsyncIterator[Any]:
                    on_the_way = iter(delays[self.peer_id])
                    async for message in messages:
                        if self.peer_id in cut:
                            message.tensor_part.buffer = message.tensor_part.buffer[::2]
                        await asyncio.sleep(next(on_the_way))
                        yield message

                context = SimpleNamespace(remote_id=self.peer_id)
                if self.peer_id in liars:
                    messages = as_aiter(*(said := [message async for message in messages]))
                    calls.append(
                        asyncio.ensure_future(drained(group[peer].rpc_aggregate_part(as_aiter(*said), context)))
                    )
                return group[peer].rpc_aggregate_part(slowly(), context)

            return SimpleNamespace(rpc_aggregate_part=call)

    ids = {member.name: PeerID(member.name.encode()) for member in members}
    delays = {ids[member.name]: member.seconds for member in members}
    cut = {ids[member.name] for member in members if member.cut}
    liars = {ids[member.name] for member in members if member.twice}
    group: dict[PeerID, Exchange] = {}
    calls: list[Any] = []

    async def drained(answers: AsyncIterator[Any]) -> None:
        async for _ in answers:
            pass

    async def run() -> dict[str, tuple[Tensor, Outcome]]:
        for member in members:
            group[ids[member.name]] = Near(
                p2p=SimpleNamespace(peer_id=ids[member.name]),
                servicer_type=DecentralizedAverager,
                prefix=None,
                group_id=b"group",
                tensors=[member.vector],
                ordered_peer_ids=list(ids.values()),
                peer_fractions=tuple(other.reduces for other in members),
                sender_timeout=patience,
                reducer_timeout=15.0,
                compression=NoCompression(),
                part_size_bytes=4 * PART,
                sending=Sending(member.weights, member.codec, codec, delicate),
            )

            if screens is not None:
                limits = Limits(frozenset({str(ids["owner"])}))
                screens[member.name] = install_screen(group[ids[member.name]], limits, VALUES)

        async def take(one: Exchange) -> tuple[Tensor, Outcome]:
            (average,) = [tensor async for tensor in one]
            return average, one.outcome()

        found = await asyncio.wait_for(asyncio.gather(*map(take, group.values())), 20.0)
        return dict(zip(ids, found, strict=True))

    return asyncio.run(run())


def filled(value: float) -> Tensor:
    return torch.full((VALUES,), value)


OWNER = Member("owner", filled(1.0), reduces=1.0)
SLOW = Member("slow", filled(7.0), seconds=(0.0, 60.0, 60.0, 60.0))


def test_the_average_is_weighted_and_every_peer_gets_the_very_same_bits() -> None:
    torch.manual_seed(0)
    members = [Member("owner", torch.randn(VALUES), (3.0,) * 4, reduces=1.0), Member("second", torch.randn(VALUES))]
    members.append(replace(members[1], name="third", vector=torch.randn(VALUES), codec="8bit"))
    found = meet(*members)
    (first, _), *others = found.values()
    assert all(torch.equal(first, average) for average, _ in others)
    expected = (3 * members[0].vector + members[1].vector + members[2].vector) / 5
    assert float((first - expected).norm() / expected.norm()) < 0.005


def test_two_reducers_share_the_vector_and_all_hold_the_same_bits() -> None:
    torch.manual_seed(0)
    members = [
        Member(name, torch.randn(VALUES), reduces=reduces) for name, reduces in (("a", 0.5), ("b", 0.5), ("c", 0))
    ]
    found = meet(*members, codec="8bit")
    assert all(torch.equal(average, found["a"][0]) for average, _ in found.values())
    assert all(outcome.received == outcome.expected == (3, 3, 3, 3) for _, outcome in found.values())


def test_a_round_reports_contributions_received_of_those_expected_and_bytes_both_ways() -> None:
    found = meet(OWNER, Member("guest", filled(0.0)))
    for _, outcome in found.values():
        assert (outcome.received, outcome.expected, outcome.counted) == ((2,) * 4, (2,) * 4, (True,) * 4)
    owner, guest = found["owner"][1], found["guest"][1]
    assert (guest.bytes_up, guest.bytes_down) == (2 * VALUES, 2 * VALUES)
    assert (owner.bytes_up, owner.bytes_down) == (2 * VALUES, 2 * VALUES)


def test_who_is_slow_is_left_out_of_the_rest_and_still_gets_every_average() -> None:
    found = meet(OWNER, Member("quick", filled(0.0)), SLOW, patience=1.0)
    average, outcome = found["quick"]
    assert outcome.received == (3, 2, 2, 2)
    assert outcome.expected == (3, 3, 3, 3)
    assert outcome.counted == (True,) * 4
    assert float(average[-1]) == 0.5
    slow, own = found["slow"]
    assert torch.equal(slow, average)
    assert own.counted == (True, False, False, False)
    assert len(found["owner"][1].late) == 1


def test_a_slow_peers_time_is_not_charged_to_a_quick_one() -> None:
    found = meet(OWNER, Member("quick", filled(0.0)), Member("slow", filled(7.0), seconds=(0.0, 0.3, 0.3, 0.3)))
    slow = found["slow"][1]
    assert found["quick"][1].timed_seconds < 0.5 * slow.timed_seconds
    assert slow.timed_bytes == 2 * (VALUES - PART)
    assert 0.8 < slow.timed_seconds < 3.0


def test_a_part_that_a_peer_leaves_out_costs_no_bytes_and_is_not_expected() -> None:
    found = meet(OWNER, Member("guest", filled(0.0), (0.0, 1.0, 0.0, 0.0)))
    average, outcome = found["guest"]
    assert outcome.expected == outcome.received == (1, 2, 1, 1)
    assert outcome.counted == (False, True, False, False)
    assert outcome.bytes_up == 2 * PART
    assert (float(average[0]), float(average[PART])) == (1.0, 0.5)


def test_a_part_that_nobody_sends_arrives_nowhere() -> None:
    nothing = (0.0, 1.0, 1.0, 1.0)
    found = meet(replace(OWNER, weights=nothing), Member("guest", filled(0.0), nothing))
    assert all(outcome.received == (0, 2, 2, 2) for _, outcome in found.values())


def test_batch_norms_statistics_are_sent_in_16_bit_when_all_else_is_8() -> None:
    found = meet(OWNER, Member("guest", filled(0.0), codec="8bit"), codec="8bit", delicate=3 * PART)
    last = VALUES - 3 * PART
    assert found["guest"][1].bytes_up == 3 * (PART + 4 * PART // 512) + 2 * last


def test_a_weight_that_is_no_number_counts_as_none() -> None:
    found = meet(OWNER, Member("liar", filled(9.0), (float("nan"), float("inf"), -1.0, 1.0)))
    assert found["owner"][1].received == (1, 1, 1, 2)


def test_who_calls_twice_counts_once_and_takes_nobodys_place() -> None:
    slower = Member("slower", filled(4.0), seconds=(0.3, 0.0, 0.0, 0.0))
    found = meet(OWNER, Member("liar", filled(7.0), twice=True), slower)
    average, outcome = found["slower"]
    assert outcome.counted == (True,) * 4
    assert torch.equal(average, filled(4.0))


def test_who_sends_a_part_of_another_size_is_dropped_by_name_and_nobody_waits_for_it() -> None:
    screens: dict[str, Screen] = {}
    found = meet(OWNER, Member("guest", filled(4.0)), Member("liar", filled(7.0), cut=True), screens=screens)
    average, outcome = found["guest"]
    assert outcome.counted == (True,) * 4
    assert torch.allclose(average, filled(1.0))  # the shorter of two, to whose length the longer is clipped
    (verdict,) = [one for one in screens["owner"].verdicts() if one.action == "dropped"]
    assert verdict.why == "sent something of the wrong shape"
    assert found["owner"][1].late == ()


def test_an_anchor_whose_senders_are_all_late_ends_and_says_that_nothing_arrived() -> None:
    found = meet(
        Member("idle", filled(0.0), (0.0,) * 4, reduces=1.0),
        SLOW,
        patience=1.0,
    )
    assert found["slow"][1].received == (1, 0, 0, 0)


def test_averages_that_are_refused_are_as_if_they_had_not_arrived() -> None:
    own = torch.randn(VALUES)
    found = meet(Member("owner", own, reduces=0.5), Member("anna", torch.randn(VALUES), reduces=0.5))
    average, outcome = found["owner"]
    theirs = [peer != str(outcome.reducers[0]) for peer in outcome.reducers]
    kept = outcome.refusing({outcome.reducers[-1]}, average, own)
    assert theirs == [False, False, True, True]
    assert kept.received == (2, 2, 0, 0)
    assert kept.counted == (True, True, False, False)
    assert torch.equal(average[2 * PART :], own[2 * PART :])
    assert not torch.equal(average[: 2 * PART], own[: 2 * PART])


# The reducer inside hivemind's all-reduce, without processes: senders as coroutines.


SIZES = (3000, 2000)
LIMITS = Limits(possible=dict.fromkeys("abcd", 10.0))


def vectors(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    common = torch.randn(sum(SIZES), generator=generator)
    return [common + torch.randn(sum(SIZES), generator=generator) for _ in range(count)]


def cut(vector: Tensor) -> tuple[Tensor, Tensor]:
    """Into two parts, as hivemind does."""
    return vector[: SIZES[0]], vector[SIZES[0] :]


def reducer(senders: int) -> tuple[ScreeningReducer, Screen]:
    from trainkit.swarm.exchange import ScreeningReducer

    own = cut(torch.zeros(sum(SIZES)))
    screen = Screen("abcd"[:senders], LIMITS, sum(SIZES))
    return ScreeningReducer(own, senders, screen), screen


async def send(to: ScreeningReducer, sender: int, vector: Tensor, weight: float = 10.0) -> Tensor:
    parts = cut(vector)
    return torch.cat([await to.accumulate_part(sender, i, part, weight) for i, part in enumerate(parts)])


def in_time(work: Awaitable[list[Tensor]]) -> list[Tensor]:
    async def run() -> list[Tensor]:
        return await asyncio.wait_for(work, 10.0)

    return asyncio.run(run())


def test_every_sender_gets_the_same_average_of_every_part() -> None:
    sent = vectors(3)

    async def round_of() -> list[Tensor]:
        to, _ = reducer(3)
        return list(await asyncio.gather(*(send(to, i, vector) for i, vector in enumerate(sent))))

    first, *others = in_time(round_of())
    assert all(torch.equal(first, other) for other in others)
    assert float((first - sum(sent, torch.zeros(sum(SIZES))) / 3).norm() / first.norm()) < 0.05


def test_a_sender_of_another_shape_is_dropped_and_does_not_hold_up_the_others() -> None:
    sent = vectors(3)

    async def round_of() -> list[Tensor]:
        to, screen = reducer(4)
        liar = asyncio.ensure_future(to.accumulate_part(3, 0, torch.zeros(7), 10.0))
        honest = [asyncio.ensure_future(send(to, i, vector)) for i, vector in enumerate(sent)]
        await liar
        to.on_sender_failed(3)  # as hivemind does when the answer cannot be made
        averages = list(await asyncio.gather(*honest))
        assert [verdict.why for verdict in screen.verdicts()] == ["sent something of the wrong shape"]
        return averages

    assert len(in_time(round_of())) == 3


def test_a_sender_that_goes_away_in_the_middle_has_had_its_say_until_then() -> None:
    sent = vectors(3)

    async def round_of() -> list[Tensor]:
        to, _ = reducer(3)
        honest = [asyncio.ensure_future(send(to, i, vector)) for i, vector in enumerate(sent[:2])]
        await to.accumulate_part(2, 0, cut(sent[2])[0], 10.0)
        to.on_sender_failed(2)
        return list(await asyncio.gather(*honest))

    average = in_time(round_of())[0]
    first, second = cut(average)
    halves = [cut(vector) for vector in sent]
    assert float((first - (halves[0][0] + halves[1][0] + halves[2][0]) / 3).norm() / first.norm()) < 0.05
    assert float((second - (halves[0][1] + halves[1][1]) / 2).norm() / second.norm()) < 0.05


def test_a_part_that_does_not_exist_ends_its_sender_only() -> None:
    async def round_of() -> list[Tensor]:
        from hivemind.averaging.partition import BannedException

        to, _ = reducer(3)
        with pytest.raises(BannedException, match="does not exist"):
            await to.accumulate_part(0, 2, torch.zeros(1), 1.0)
        return []

    assert in_time(round_of()) == []


# What peers tell their group, from honest ones and from others.


def plain(value: Any) -> bytes:
    """As hivemind's serializer packs it, which is not imported here: that changes how a process starts others."""
    return bytes(msgpack.packb(value, use_bin_type=True, strict_types=True, default=as_tuple))


def as_tuple(value: Any) -> Any:
    return msgpack.ExtType(0x40, plain(list(value)))


def packed(*, bandwidth: Any = None, mode: Any = 1, **about: Any) -> bytes:
    return plain([bandwidth, mode, plain(about)])


def test_what_a_peer_of_ours_sends_is_read() -> None:
    found = read_gathered(packed(bandwidth=5.0, mode=0, rate=12.5, shares=True, probe=b"\0" * 1024, later="field"))
    assert found is not None
    assert (found.bandwidth, found.mode, found.about.rate) == (5.0, NODE, 12.5)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1garbage",
        plain(None),
        plain([None, 1]),
        plain([None, 1, b"\xc1"]),
        plain([None, 1, "text"]),
        plain([None, 1, plain([1, 2])]),
        packed(mode=7),
        packed(bandwidth="fast"),
        packed(bandwidth=-1.0),
        packed(bandwidth=float("nan")),
        packed(bandwidth=float("inf")),
        packed(rate=float("inf")),
        packed(rate=1e300),
        packed(rate=-1.0),
        packed(rate="12"),
        packed(shares="yes"),
        packed(probe=b"\0" * 1025),
        packed(padding="x" * 5000),
        packed(rate=(1.0, 2.0)),  # an object of hivemind's own
        b"\x91" * 4000,  # lists in lists
        msgpack.packb([None, 1, msgpack.packb({"rate": msgpack.ExtType(0x50, b"\x00")})]),
    ],
)
def test_everything_else_is_nothing_and_raises_nothing(data: bytes) -> None:
    assert read_gathered(data) is None


# What a peer may send before anybody has asked who it is.


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
