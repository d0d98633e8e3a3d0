"""A peer's node of the DHT: who controls it, what it asks, how fast its link is, and whom it dials again."""

import asyncio
import gc
import os
import signal
import stat
import subprocess
import weakref
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hivemind
import psutil
import pytest
from hivemind.p2p import PeerID
from torch import nn

from tests.runs import wait_until
from tests.shell import python
from tests.swarm.conftest import Commands
from trainkit.common.errors import RunFailedError
from trainkit.config.loading import load
from trainkit.swarm.identity.invitations import Key
from trainkit.swarm.network import processes
from trainkit.swarm.network.dht import DHT, SwarmDHT, open_dht, redial
from trainkit.swarm.network.signed_records import identity
from trainkit.swarm.network.watch import PeerWatch
from trainkit.swarm.peer.averaging import open_averager
from trainkit.swarm.peer.owner import own_pass
from trainkit.swarm.protocol.messages import BANNED, MANIFEST, MOST_PEERS, PROGRESS, REVOKED, PeerProgress
from trainkit.swarm.protocol.outer_step import OuterState

pytestmark = pytest.mark.usefixtures("hivemind_here")


@pytest.mark.parametrize("client_mode", [True, False])
def test_that_a_peer_only_calls_out_is_known_without_its_node(client_mode: bool) -> None:
    """A job that ends sends SIGTERM to all processes of a peer: one that was joining waited for ever."""
    identity: Any = SimpleNamespace(own=None, admission=None, subkey=b"", credential=b"")
    dead = SimpleNamespace(peer_id="QmDead")  # hivemind would ask its process, which never answers
    assert SwarmDHT(dead, identity, [], client_mode=client_mode).client_mode is client_mode


@pytest.mark.parametrize("asked", ["peer_id", "get_visible_maddrs"])
def test_a_silent_node_is_said_to_live_or_to_have_died(asked: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(hivemind.DHT, "run_coroutine", lambda self, coroutine, return_future: Future())
    ended = subprocess.Popen(["true"])
    ended.wait()
    said = {ended.pid: "A helper process of this peer died: its node of the DHT.", os.getppid(): "not answered for"}
    for pid, words in said.items():
        node: Any = DHT.__new__(DHT)
        node._closed, node._popen, node._parent_pid = False, SimpleNamespace(pid=pid), -1
        node._peer_id = None
        with pytest.raises(RunFailedError, match=words):
            _ = node.peer_id if asked == "peer_id" else node.get_visible_maddrs()


def test_an_answer_as_the_wait_ends_counts_and_an_error_is_a_death() -> None:
    class Late(Future[str]):
        def result(self, timeout: float | None = None) -> str:
            if not self.done():
                self.set_result("late")
                raise FutureTimeoutError
            return super().result(timeout)

    assert processes.answer_of(Late(), "averager", os.getpid()) == "late"
    unreachable: Future[str] = Future()
    unreachable.set_exception(ConnectionRefusedError())
    with pytest.raises(RunFailedError, match="died: its node of the DHT"):
        processes.answer_of(unreachable, "node of the DHT", os.getpid())


@pytest.mark.parametrize(
    ("load", "cores", "longer"),
    [
        ("0.50 0.30 0.20 1/300 4711", 2, 1.0),
        ("25.00 9.00 3.00 2/300 4711", 2, 12.5),
        ("1.00 1.00 1.00 8/300 4711", 2, 4.0),  # it has only just begun
        ("8.00 8.00 8.00 8/300 4711", 64, 1.0),
        ("900.00 800.00 700.00 1/300 4711", 2, 20.0),
    ],
)
def test_limits_are_longer_by_the_load_of_a_core(load: str, cores: int, longer: float) -> None:
    assert processes.slowness(load, cores) == longer


async def waiting(dht: Any, node: Any) -> str:
    """Wait for a moment, as long as anybody but the garbage collector knows of it; the collector comes first."""
    moment, loop = asyncio.Event(), asyncio.get_running_loop()
    known = weakref.WeakSet([moment])
    loop.call_later(0.1, gc.collect)
    loop.call_later(0.5, lambda: list(map(asyncio.Event.set, known)))
    await moment.wait()
    return "answered"


async def nothing(dht: Any, node: Any) -> None:
    """Another question: hivemind keeps the task of the last one."""


def ask_while_collecting() -> None:
    key = Key.generate()
    own = own_pass(key, "me")
    with identity(None, own) as me, open_dht(me, host="127.0.0.1") as dht:
        answer = dht.node.run_coroutine(waiting, return_future=True)
        assert dht.in_dht(nothing, 10.0, "late") is None
        print(answer.result(20.0))


@pytest.mark.swarm
def test_the_garbage_collector_ends_nothing_that_a_peer_waits_for() -> None:
    # In a process of its own: the node is a fork, and would collect what other tests have left here.
    done = python("-c", "from tests.swarm.test_dht import ask_while_collecting as ask; ask()")
    assert done.stdout.strip() == "answered", done.stderr


@pytest.mark.parametrize("held", [True, False])
def test_tasks_live_until_they_are_done_once_they_are_held(held: bool) -> None:
    async def survives() -> bool:
        if held:
            processes.hold_tasks()
        task = weakref.ref(asyncio.create_task(asyncio.Event().wait()))
        await asyncio.sleep(0.0)
        gc.collect()
        return task() is not None

    assert asyncio.run(survives()) is held


def expect_many() -> None:
    """Of so many peers whose names and ids are as long as real ones."""
    key, config = Key.generate(), load("hivemind").config
    own, common = own_pass(key, "me"), OuterState(nn.Linear(2, 2), lr=1.0, momentum=0.0)
    with (
        identity(None, own) as me,
        open_dht(me, host="127.0.0.1") as dht,
        open_averager(dht, common, config, "run") as averager,
    ):
        known = {f"{index:046}": index / 3 for index in range(MOST_PEERS)}
        averager.known.write(verified=known)
        print(averager.alone("nobody"), averager.alone(peer="nobody"))


@pytest.mark.swarm
def test_an_averager_is_told_of_a_thousand_peers_and_lives() -> None:
    done = python("-c", "from tests.swarm.test_dht import expect_many as expect; expect()")
    assert done.stdout.strip() == "None None", done.stderr


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

    wait_until(are_there, 60, "the sockets of the daemon and of the node")
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in sockets} == {0}
    creator.process.send_signal(signal.SIGINT)
    creator.ends()


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
        value = {bytes([place]): SimpleNamespace(value=told) for place in range(self.peers)}
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


@pytest.mark.parametrize(
    ("peers", "oldest", "times", "pause"),
    [(16, 60.0, 120, 0.0), (64, 60.0, 40, 3.0), (176, 60.0, 12, 10.0), (176, 3.0, 40, 3.0)],
)
def test_reads_a_second_do_not_grow_with_the_swarm_nor_do_news_get_too_old(
    peers: int, oldest: float, times: int, pause: float
) -> None:
    node = Node(peers)
    watch = PeerWatch(node, "creator", oldest, now=lambda: node.seconds)  # type: ignore[arg-type]
    node.progress_read(watch, 200)
    assert (len(watch.peers), watch.pause) == (peers, pause)
    assert node.progress_read(watch, 120) == times
    assert {tuple(sorted(keys)) for keys in node.asked} == {tuple(sorted((MANIFEST, PROGRESS, REVOKED, BANNED)))}


PEERS = ("QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N", "QmS4aGLVN18yCqRSccfXxhdjve8BkLcAGf2yJjFA453wDz")


# libp2p waits the longer for every vain attempt: it is asked to dial where somebody listens, and nowhere else.


OTHER, ME = PEERS[1], PEERS[0]


@pytest.mark.parametrize(
    ("greeting", "peer", "members", "dialled", "found"),
    [(None, OTHER, (OTHER,), 0, 0), (b"", OTHER, (OTHER,), 0, 0), (b"\x13", OTHER, (OTHER,), 1, 1),
     (b"\x13", OTHER, (), 1, 0), (b"\x13", ME, (ME,), 0, 0)],
    ids=["nobody listens", "an anchor without its creator", "a member", "a stranger", "itself"],
)  # fmt: skip
def test_a_peer_is_dialled_where_libp2p_greets_and_found_if_it_answers(
    greeting: bytes | None, peer: str, members: tuple[str, ...], dialled: int, found: int
) -> None:
    asked, searched = list[str](), list[Any]()

    async def connect(peer: Any, machines: Any) -> None:
        asked.extend(map(str, machines))

    async def call_ping(peer: Any) -> Any:
        return 7 if str(peer) in members else None

    async def find_nearest_nodes(ids: Any) -> None:
        searched.append(ids)

    node = SimpleNamespace(
        peer_id=PeerID.from_base58(ME), node_id=1, find_nearest_nodes=find_nearest_nodes,
        p2p=SimpleNamespace(_client=SimpleNamespace(connect=connect)), protocol=SimpleNamespace(call_ping=call_ping),
    )  # fmt: skip

    async def greet(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting or b"")
        writer.close()

    async def story() -> tuple[str, int]:
        async with await asyncio.start_server(greet, "127.0.0.1", 0) as server:
            machine = f"/ip4/127.0.0.1/tcp/{server.sockets[0].getsockname()[1]}"
            if greeting is None:
                server.close()
            return machine, await redial(None, node, addresses=[f"{machine}/p2p/{peer}"])

    machine, answered = asyncio.run(story())
    assert answered == found
    assert (asked, len(searched)) == ([machine] * dialled, found)
