"""libp2p waits the longer for every vain attempt: it is asked to dial where somebody listens, and nowhere else."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("hivemind_here")

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
