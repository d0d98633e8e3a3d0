"""The reducer inside hivemind's all-reduce, without processes: senders as coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from trainkit.swarm.robust import Limits, Screen

if TYPE_CHECKING:
    from trainkit.swarm.exchange import ScreeningReducer

pytestmark = pytest.mark.usefixtures("hivemind_here")

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
