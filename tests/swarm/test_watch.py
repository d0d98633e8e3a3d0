from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from types import SimpleNamespace
from typing import Any

import base58
import pytest

from trainkit.swarm.messages import PeerProgress

pytestmark = pytest.mark.usefixtures("hivemind_here")
MANIFEST, PROGRESS = "trainkit_manifest", "trainkit_progress"
REVOKED, BANNED = "trainkit_revoked", "trainkit_banned"


@dataclass
class Node:
    """A DHT of so many peers, which answers at once; and a clock."""

    peers: int
    asked: list[tuple[str, ...]] = field(default_factory=list)
    seconds: float = 0.0
    peer_id: str = "self"
    excluded: Any = field(default_factory=lambda: SimpleNamespace(take=lambda key, found: None))

    def ask(self, keys: Sequence[str]) -> Future[dict[str, Any]]:
        self.asked.append(tuple(keys))
        told = asdict(PeerProgress("peer", 3, 64, 10.0, 0.5, 2, 100.0))
        records = {base58.b58encode(bytes([place])): told for place in range(self.peers)}
        value = {base58.b58decode(peer): SimpleNamespace(value=record) for peer, record in records.items()}
        answer: Future[dict[str, Any]] = Future()
        answer.set_result({key: SimpleNamespace(value=value) if key == PROGRESS else None for key in keys})
        return answer

    def progress_read(self, watch: Any, polls: int) -> int:
        """How often it was asked for progress, in so many polls a second apart."""
        self.asked.clear()
        for _ in range(polls):
            watch.poll()
            self.seconds += 1.0
        return sum(PROGRESS in keys for keys in self.asked)


def watch_of(node: Node, oldest: float = 60.0) -> Any:
    from trainkit.swarm.dht import Watch

    watch = Watch(node, "creator", oldest, now=lambda: node.seconds)  # type: ignore[arg-type]
    node.progress_read(watch, 200)
    return watch


def test_all_news_are_asked_for_at_once() -> None:
    from trainkit.swarm.dht import Watch

    node = Node(3)
    Watch(node, "creator", 60.0).poll()  # type: ignore[arg-type]
    assert [sorted(keys) for keys in node.asked] == [sorted((MANIFEST, PROGRESS, REVOKED, BANNED))]


@pytest.mark.parametrize(("peers", "times"), [(3, 120), (16, 120), (64, 40), (176, 12)])
def test_what_a_peer_reads_a_second_does_not_grow_with_the_swarm(peers: int, times: int) -> None:
    node = Node(peers)
    watch = watch_of(node)
    assert len(watch.peers) == peers
    assert node.progress_read(watch, 120) == times


def test_but_news_get_no_older_than_the_run_can_bear() -> None:
    node = Node(176)
    assert node.progress_read(watch_of(node, oldest=3.0), 120) == 40


def test_a_pause_is_known_so_that_a_creator_that_leaves_can_wait_for_it() -> None:
    assert [watch_of(Node(peers)).pause for peers in (0, 3, 16, 64)] == [0.0, 0.0, 0.0, 3.0]
