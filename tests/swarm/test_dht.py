from __future__ import annotations

import asyncio
import os
import signal
import stat
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import base58
import psutil
import pytest

from tests.swarm.conftest import Commands, wait_for
from trainkit.errors import RunFailedError
from trainkit.swarm.messages import PeerProgress

pytestmark = pytest.mark.usefixtures("hivemind_here")


class Dead:
    """A node whose process has died: hivemind waits for its answers without limit."""

    peer_id = "QmDead"

    @property
    def client_mode(self) -> bool:
        raise AssertionError("asked a process that never answers")


@pytest.mark.parametrize("client_mode", [True, False])
def test_whether_a_peer_only_calls_out_is_known_without_its_nodes_process(client_mode: bool) -> None:
    """A job that ends sends SIGTERM to all processes of a peer: one that was joining waited for ever."""
    from trainkit.swarm.dht import SwarmDHT

    identity: Any = SimpleNamespace(own=None, admission=None, subkey=b"", credential=b"")
    assert SwarmDHT(Dead(), identity, [], client_mode=client_mode).client_mode is client_mode


@pytest.mark.parametrize("asked", ["peer_id", "get_visible_maddrs"])
def test_a_node_whose_process_has_died_is_not_waited_for_without_limit(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import hivemind

    from trainkit.swarm import dht

    monkeypatch.setattr(dht, "_ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(hivemind.DHT, "run_coroutine", lambda self, coroutine, return_future: Future())
    node: Any = dht._DHT.__new__(dht._DHT)
    node._closed, node._popen, node._peer_id, node._parent_pid = False, None, None, -1
    with pytest.raises(RunFailedError, match="helper process of this peer has died"):
        _ = node.peer_id if asked == "peer_id" else node.get_visible_maddrs()


@pytest.mark.parametrize(("keys", "answered"), [(1, True), (16, True), (17, False), (200_000, False)])
def test_a_member_asks_a_node_for_so_many_records_at_once_and_for_no_more(
    keys: int, answered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hivemind.proto import dht_pb2
    from hivemind.utils.auth import TokenAuthorizerBase

    from trainkit.swarm.access import Authorizer

    async def signed(self: Any, request: Any) -> bool:
        return True

    monkeypatch.setattr(TokenAuthorizerBase, "validate_request", signed)
    monkeypatch.setattr(Authorizer, "_member", lambda self, token: SimpleNamespace(trusted=True))
    authorizer: Any = Authorizer.__new__(Authorizer)
    for kind in (dht_pb2.FindRequest, dht_pb2.StoreRequest):
        assert asyncio.run(authorizer.validate_request(kind(keys=[b"x" * 20] * keys))) == answered


@pytest.mark.swarm
def test_nobody_else_controls_a_peers_daemon_whatever_the_umask(commands: Commands) -> None:
    """hivemind puts the sockets into /tmp, where everybody comes by."""
    before = os.umask(0o000)
    try:
        creator, _ = commands.create()
    finally:
        os.umask(before)
    sockets: set[Path] = set()

    def are_there() -> bool:
        creator.note_family()
        for process in creator.alive():
            with suppress(psutil.Error):
                paths = {Path(str(one.laddr)) for one in process.net_connections("unix") if one.laddr}
                sockets.update(path for path in paths if path.name.startswith("hivemind-"))
        return len(sockets) >= 2

    wait_for(are_there, 60, "the sockets of the daemon and of the node")
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in sockets} == {0}
    creator.process.send_signal(signal.SIGINT)
    creator.ends()


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
