"""How a group exchanges: in this process, where calls go through queues."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hivemind.averaging import DecentralizedAverager
from hivemind.compression import NoCompression
from hivemind.p2p import PeerID
from hivemind.utils.asyncio import as_aiter
from torch import Tensor

from trainkit.swarm.network.exchange import Exchange, Sending
from trainkit.swarm.protocol.codecs import PART, Codec, encoded_bytes
from trainkit.swarm.protocol.outer_step import ExchangeOutcome
from trainkit.swarm.trust.screening import KnownSenders, Screen

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
    knows_all: bool = True,
) -> dict[str, tuple[Tensor, ExchangeOutcome]]:
    """The average and the outcome of each member; the owner is trusted. ``screens`` is given the screen of each.

    Args:
        knows_all: otherwise who does not reduce knows itself, and those who do.
    """

    class Near(Exchange):
        """An exchange whose calls reach the others directly."""

        def _get_peer_stub(self, peer: PeerID) -> Any:
            async def call(messages: AsyncIterator[Any]) -> AsyncIterator[Any]:
                sender, context = senders[self.peer_id], SimpleNamespace(remote_id=self.peer_id)
                said = [message async for message in messages] if sender.twice else []

                async def arriving() -> AsyncIterator[Any]:
                    on_the_way = iter(sender.seconds)
                    async for message in as_aiter(*said) if sender.twice else messages:
                        if sender.cut:
                            message.tensor_part.buffer = message.tensor_part.buffer[::2]
                        await asyncio.sleep(next(on_the_way))
                        yield message

                if sender.twice:
                    again = drained(group[peer].rpc_aggregate_part(as_aiter(*said), context))
                    calls.append(asyncio.ensure_future(again))
                return group[peer].rpc_aggregate_part(arriving(), context)

            return SimpleNamespace(rpc_aggregate_part=call)

    ids = {member.name: PeerID(member.name.encode()) for member in members}
    senders = {ids[member.name]: member for member in members}
    group: dict[PeerID, Exchange] = {}
    calls: list[Any] = []

    async def drained(answers: AsyncIterator[Any]) -> None:
        async for _ in answers:
            pass

    async def run() -> dict[str, tuple[Tensor, ExchangeOutcome]]:
        for member in members:
            known = [one for one in members if knows_all or member.reduces or one.reduces or one is member]
            group[ids[member.name]] = Near(
                p2p=SimpleNamespace(peer_id=ids[member.name]),
                servicer_type=DecentralizedAverager,
                prefix=None,
                group_id=b"group",
                tensors=[member.vector.clone()],  # which becomes the average
                ordered_peer_ids=[ids[one.name] for one in known],
                peer_fractions=tuple(one.reduces for one in known),
                sender_timeout=patience,
                reducer_timeout=15.0,
                compression=NoCompression(),
                part_size_bytes=4 * PART,
                sending=Sending(member.weights, member.codec, codec, delicate),
                limits=KnownSenders(frozenset({str(ids.get("owner"))}), owners=frozenset({str(ids.get("owner"))})),
            )
            if screens is not None:
                screens[member.name] = group[ids[member.name]].screen

        async def take(one: Exchange) -> tuple[Tensor, ExchangeOutcome]:
            (average,) = [tensor async for tensor in one]
            return average, one.outcome()

        found = await asyncio.wait_for(asyncio.gather(*map(take, group.values())), 20.0)
        return dict(zip(ids, found, strict=True))

    return asyncio.run(run())


def filled(value: float) -> Tensor:
    return torch.full((VALUES,), value)


OWNER = Member("owner", filled(1.0), reduces=1.0)
SLOW = Member("slow", filled(7.0), seconds=(0.0, 60.0, 60.0, 60.0))


def test_two_reducers_average_is_weighted_and_the_same_bits_for_every_peer() -> None:
    torch.manual_seed(0)
    common = torch.randn(VALUES)
    first, second, third = (common + 0.02 * torch.randn(VALUES) for _ in range(3))
    members = [Member("owner", first, (3.0,) * 4, reduces=0.5), Member("second", second, reduces=0.5)]
    members.append(Member("third", third, codec="8bit"))
    found = meet(*members)
    (first, _), *others = found.values()
    assert all(torch.equal(first, average) for average, _ in others)
    expected = (3 * members[0].vector + members[1].vector + members[2].vector) / 5
    assert float((first - expected).norm() / expected.norm()) < 0.005
    assert all(outcome.received == outcome.expected == (3, 3, 3, 3) for _, outcome in found.values())


def test_a_slow_peer_is_left_out_and_still_gets_every_average() -> None:
    found = meet(OWNER, Member("quick", filled(0.5)), SLOW, patience=1.0)
    average, outcome = found["quick"]
    assert outcome.received == (3, 2, 2, 2)
    assert outcome.expected == (3, 3, 3, 3)
    assert outcome.counted == (True,) * 4
    assert float(average[-1]) == 0.75
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


def test_a_part_left_out_costs_no_bytes_and_of_nobody_arrives_nowhere() -> None:
    found = meet(replace(OWNER, weights=(0.0, 1.0, 1.0, 1.0)), Member("guest", filled(0.5), (0.0, 1.0, 0.0, 0.0)))
    average, outcome = found["guest"]
    assert outcome.expected == outcome.received == (0, 2, 1, 1)
    assert outcome.counted == (False, True, False, False)
    assert outcome.bytes_up == 2 * PART
    assert (float(average[PART]), float(average[-1])) == (0.75, 1.0)


def test_a_weight_that_is_no_number_counts_as_none() -> None:
    found = meet(OWNER, Member("liar", filled(9.0), (float("nan"), float("inf"), -1.0, 1.0)))
    assert found["owner"][1].received == (1, 1, 1, 2)


def test_running_statistics_are_sent_in_16_bit_when_all_else_is_8() -> None:
    found = meet(OWNER, Member("guest", filled(0.0), codec="8bit"), codec="8bit", delicate=3 * PART)
    last = VALUES - 3 * PART
    assert found["guest"][1].bytes_up == 3 * (PART + 4 * PART // 512) + 2 * last
    found = meet(OWNER, Member("guest", filled(0.0), codec="4bit"), codec="4bit")  # there are none
    assert found["guest"][1].bytes_up == encoded_bytes(3 * PART, "4bit") + encoded_bytes(last, "4bit")


def test_who_calls_twice_counts_once_and_takes_nobodys_place() -> None:
    slower = Member("slower", filled(4.0), seconds=(0.3, 0.0, 0.0, 0.0))
    found = meet(OWNER, Member("liar", filled(7.0), twice=True), slower)
    average, outcome = found["slower"]
    assert outcome.counted == (True,) * 4
    assert torch.allclose(average, filled(3.0))  # of 1, 4 and 7, which is clipped to the median of their lengths


def test_a_part_of_another_size_drops_its_sender_and_nobody_waits() -> None:
    screens: dict[str, Screen] = {}
    found = meet(OWNER, Member("guest", filled(4.0)), Member("liar", filled(7.0), cut=True), screens=screens)
    average, outcome = found["guest"]
    assert outcome.counted == (True,) * 4
    assert torch.allclose(average, filled(1.0))  # the shorter of two, to whose length the longer is clipped
    (verdict,) = [one for one in screens["owner"].verdicts() if one.action == "dropped"]
    assert verdict.why == "sent something of the wrong shape"
    assert found["owner"][1].late == ()


def test_an_anchor_whose_senders_are_all_late_ends() -> None:
    found = meet(Member("idle", filled(0.0), (0.0,) * 4, reduces=1.0), SLOW, patience=1.0)
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


def test_who_knows_only_some_of_the_group_gets_the_same_average() -> None:
    """Of three that call out, each knows itself and those who reduce."""
    torch.manual_seed(0)
    members = [Member("owner", torch.randn(VALUES), reduces=0.3), Member("rita", torch.randn(VALUES), reduces=0.7)]
    members += [Member(name, torch.randn(VALUES)) for name in ("ann", "bob", "cem")]
    everybody, some = meet(*members), meet(*members, knows_all=False)
    for name, (average, outcome) in everybody.items():
        assert torch.equal(some[name][0], average)
        assert max(some[name][1].expected) == 5
        assert some[name][1].counted == outcome.counted == (True,) * 4
