"""A link is measured by sending; the swarm's side is one of the test's own."""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from trainkit.swarm.dialback import Uploaded

pytestmark = pytest.mark.usefixtures("hivemind_here")

PEERS = ("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "QmS4aGLVN18yCqRSccfXxhdjve8BkLcAGf2yJjFA453wDz")
ADDRESSES = tuple(f"/ip4/203.0.113.{number}/tcp/4711/p2p/{peer}" for number, peer in enumerate(PEERS))
KIB = 1 << 10


@dataclass
class Wire:
    """A link of ``rate`` bytes per second to some peers; it is so many seconds long."""

    rate: float
    alive: tuple[str, ...] = PEERS
    length: float = 0.01
    sent: list[int] = field(default_factory=list)

    async def call_protobuf_handler(self, peer: Any, handler: str, message: Any, answer: Any) -> Any:
        if str(peer) not in self.alive:
            raise RuntimeError("failed to dial")
        self.sent.append(len(message.value))
        await asyncio.sleep(self.length + len(message.value) / self.rate)
        return answer(value=len(message.value))

    def measured(self, enough: float = math.inf) -> Uploaded:
        from trainkit.swarm.dialback import measure

        return asyncio.run(measure(None, SimpleNamespace(p2p=self), to=ADDRESSES, enough=enough))


@pytest.mark.parametrize("length", [0.0, 0.1])
@pytest.mark.parametrize("rate", [400e3, 10e6])
def test_the_figure_is_the_links_however_far_the_other_one_is(rate: float, length: float) -> None:
    found = Wire(rate, length=length).measured()
    assert found.rate == pytest.approx(rate, rel=0.15)
    assert found.to == PEERS[0]


def test_a_slow_link_is_not_kept_busy_for_long() -> None:
    wire = Wire(100e3)
    wire.measured()
    assert wire.sent == [0, 0, 64 * KIB]


def test_a_link_that_is_fast_enough_is_not_measured_further() -> None:
    wire = Wire(10e6)
    assert wire.measured(enough=1e6).rate >= 1e6
    assert wire.sent == [0, 0, 64 * KIB]


def test_it_is_sent_to_the_first_that_answers() -> None:
    assert Wire(10e6, alive=PEERS[1:]).measured().to == PEERS[1]


def test_when_nobody_answers_nothing_is_known() -> None:
    found = Wire(10e6, alive=()).measured()
    assert (found.rate, found.to) == (0.0, "")


def test_nobody_may_send_without_end_under_the_name_of_a_measurement() -> None:
    from trainkit.swarm.dialback import _OF_ALL, _OF_ONE, SIZES, Allowance

    allowance, most = Allowance(0.0), SIZES[-1]
    assert not allowance.takes("anna", most + 1, 0.0)
    taken = [allowance.takes("anna", most, 0.0) for _ in range(_OF_ONE // most + 1)]
    assert taken == [True] * (_OF_ONE // most) + [False]
    assert allowance.takes("ben", most, 0.0)
    others = [allowance.takes(f"{number}", most, 0.0) for number in range(_OF_ALL // most)]
    assert sum(others) == _OF_ALL // most - _OF_ONE // most - 1
    assert allowance.takes("anna", most, 3601.0)
