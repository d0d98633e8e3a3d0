"""A link is measured by sending; the swarm's side is one of the test's own."""

from __future__ import annotations

import asyncio
import math
import socket
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


# libp2p waits the longer for every vain attempt: it is asked to dial where somebody listens, and nowhere else.


ME, OTHER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "QmS4aGLVN18yCqRSccfXxhdjve8BkLcAGf2yJjFA453wDz"


@dataclass
class Node:
    """Its libp2p daemon comes through to whoever it is asked to dial; some of them are of the swarm."""

    members: tuple[str, ...] = (OTHER,)
    dialled: list[str] = field(default_factory=list)
    searched: int = 0
    node_id: int = 1

    @property
    def peer_id(self) -> Any:
        from hivemind.p2p import PeerID

        return PeerID.from_base58(ME)

    @property
    def p2p(self) -> Any:
        async def connect(peer: Any, machines: Any) -> None:
            self.dialled += map(str, machines)

        return SimpleNamespace(_client=SimpleNamespace(connect=connect))

    @property
    def protocol(self) -> Any:
        async def call_ping(peer: Any) -> Any:
            return 7 if str(peer) in self.members else None

        return SimpleNamespace(call_ping=call_ping)

    async def find_nearest_nodes(self, ids: Any) -> None:
        self.searched += 1


def look(node: Node, *addresses: str) -> int:
    from trainkit.swarm.dialback import redial

    return asyncio.run(redial(None, node, addresses=addresses))


def at(port: int, peer: str = OTHER) -> str:
    return f"/ip4/127.0.0.1/tcp/{port}/p2p/{peer}"


@pytest.fixture
def silent() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_where_nobody_listens_libp2p_is_not_asked(silent: int) -> None:
    node = Node()
    assert look(node, at(silent)) == 0
    assert (node.dialled, node.searched) == ([], 0)


def test_where_somebody_listens_it_is_and_all_are_found_by_one(silent: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        node = Node()
        assert look(node, at(silent), at(port)) == 1
    assert (node.dialled, node.searched) == ([f"/ip4/127.0.0.1/tcp/{port}"], 1)


def test_who_listens_there_and_is_none_of_the_swarm_does_not_count() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = Node(members=())
        assert look(node, at(server.getsockname()[1])) == 0
    assert node.searched == 0


def test_a_peer_does_not_look_for_itself() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        node = Node(members=(ME,))
        assert look(node, at(server.getsockname()[1], ME)) == 0
    assert node.dialled == []
