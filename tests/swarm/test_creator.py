from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from trainkit.config.loading import load
from trainkit.errors import UserError
from trainkit.swarm.messages import PeerProgress
from trainkit.swarm.spec import Hooks, PeerSpec

if TYPE_CHECKING:
    from trainkit.swarm.creator import Creator

pytestmark = pytest.mark.usefixtures("hivemind_here")

ME, ANOTHER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "QmS4aGLVN18yCqRSccfXxhdjve8BkLcAGf2yJjFA453wDz"
TOLD = PeerProgress("creator", 3, 64, 10.0, 0.5, 2, time=1000.0)


def at(host: str, peer: str = ME) -> str:
    return f"/ip4/{host}/tcp/4711/p2p/{peer}"


HERE = [at("10.0.0.1"), at("127.0.0.1")]


@dataclass
class Node:
    """A peer's node: the swarm knows this of it, and these addresses answer."""

    told: PeerProgress | None
    answering: tuple[str, ...]
    peer_id: str = ME
    dialled: list[str] = field(default_factory=list)

    def addresses(self) -> list[str]:
        return HERE

    def progress(self) -> dict[str, PeerProgress]:
        return {} if self.told is None else {ME: self.told}

    def in_dht(self, work: Any, seconds: float, otherwise: Any) -> list[str]:
        self.dialled += work.keywords["at"]
        return [item for item in work.keywords["at"] if item in self.answering]


def require(node: Node, *known: str) -> None:
    from trainkit.swarm.creator import require_alone

    require_alone(node, known)  # type: ignore[arg-type]


def test_who_comes_back_where_it_was_dials_nobody() -> None:
    node = Node(replace(TOLD, addresses=HERE), (at("10.0.0.1"),))
    require(node, *HERE)
    assert node.dialled == []


def test_a_creator_may_move_if_its_old_address_is_silent() -> None:
    node = Node(None, ())
    require(node, at("10.0.0.2"), at("10.0.0.3", ANOTHER))
    assert node.dialled == [at("10.0.0.2")]


@pytest.mark.parametrize("known", [(at("10.0.0.2"),), ()])
def test_a_creator_that_answers_elsewhere_is_not_doubled(known: tuple[str, ...]) -> None:
    node = Node(replace(TOLD, addresses=[at("10.0.0.2")]), (at("10.0.0.2"),))
    with pytest.raises(UserError, match="goes on already, on another machine") as refused:
        require(node, *known)
    assert at("10.0.0.2") in refused.value.why


@pytest.fixture
def said() -> list[str]:
    return []


@pytest.fixture
def creator(said: list[str]) -> Creator:
    """One that leads its run since 900 s."""
    from trainkit.swarm.creator import Creator

    made = Creator(ExitStack(), load("hivemind").config, PeerSpec("me"), Hooks(lambda: False, said.append))
    made.own_addresses, made.since = HERE, 900.0
    return made


def test_a_duplicate_is_told_of_once(creator: Creator, said: list[str]) -> None:
    for _ in range(3):
        creator.warn_of_duplicate(replace(TOLD, addresses=[at("10.0.0.2")]))
    assert len(said) == 1
    assert f"at {at('10.0.0.2')}: two swarms come of it" in said[0]


@pytest.mark.parametrize(
    "told",
    [None, replace(TOLD, addresses=HERE), TOLD, replace(TOLD, time=899.0, addresses=[at("10.0.0.2")])],
    ids=["nothing", "its own", "no addresses", "of its earlier life"],
)
def test_what_the_swarm_knows_of_this_very_peer_is_no_duplicate(
    creator: Creator, said: list[str], told: PeerProgress | None
) -> None:
    creator.warn_of_duplicate(told)
    assert said == []
