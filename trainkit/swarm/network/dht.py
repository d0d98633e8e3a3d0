"""A peer's place in the swarm's DHT: start, publish, read, be reached, leave; every step bounded in time.

One DHT is one swarm. Records of ours in it: the creator's manifest, every peer's progress and credential, and the lists
of those who are out. The functions ``work(dht, node)`` run inside the DHT's own process.
"""

import asyncio
import ipaddress
import json
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import compress
from typing import Any, NamedTuple

import hivemind
from google.protobuf.wrappers_pb2 import StringValue  # type: ignore[import-untyped]
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.auth import AuthRole, AuthRPCWrapper
from hivemind.utils.multiaddr import Multiaddr

from trainkit.common import fileio
from trainkit.common.errors import RunFailedError, TrainkitError, UserError
from trainkit.swarm.identity import bans
from trainkit.swarm.identity.admission import Member, introduced, peer_key
from trainkit.swarm.network import processes, signed_records, wall_clock
from trainkit.swarm.network.bounds import bound_node
from trainkit.swarm.protocol import messages
from trainkit.swarm.protocol.addresses import best_first, known_of, nobody_answers, peer_of, port_of, worth_dialling
from trainkit.swarm.protocol.messages import BANNED, MANIFEST, PROGRESS, REVOKED

_DIALBACK_HANDLER = "trainkit.dial_back"
_LONGEST = 4000
# libp2p's own dialling takes up to 5 s; then a daemon has to be started for it.
_DIAL_SECONDS = 10.0
# Of who is asked for it, and may have much more to do than this machine.
_ASK_SECONDS = 150.0
_AT_A_TIME = 2
_MOST_WAITING = 16
_REDIAL_SECONDS = 6.0


class Seen(NamedTuple):
    """Addresses at which another peer has tried to reach this one, and has reached it."""

    tried: tuple[str, ...] = ()
    reached: tuple[str, ...] = ()


async def serve_members(dht: Any, node: Any, *, announce: str | None = None) -> None:
    """From now on serve others: dial back who asks, tell the time.

    Args:
        announce: see `open_dht`.
    """
    some_at_a_time = asyncio.Semaphore(_AT_A_TIME)
    waiting: set[PeerID] = set()

    async def dial_back(request: StringValue, context: P2PContext) -> StringValue:
        peer = context.remote_id
        if node.protocol.authorizer.admission.admitted(str(peer)) is None:
            raise RuntimeError("not invited")
        if peer in waiting or len(waiting) >= _MOST_WAITING:  # or strangers would have this machine do nothing else
            raise RuntimeError("busy")
        waiting.add(peer)
        try:
            announced = fileio.parse(request.value[:_LONGEST])
            seen_ip = _ip_of(peer, await node.p2p.list_peers())
            tried = worth_dialling(list(map(str, announced[:8])), seen_ip, announce)
            async with some_at_a_time:
                reached = [item for item in tried if await processes.answers_at(f"{item}/p2p/{peer}", _DIAL_SECONDS)]
        finally:
            waiting.discard(peer)
        return StringValue(value=json.dumps([tried, reached]))

    await node.p2p.add_protobuf_handler(_DIALBACK_HANDLER, dial_back, StringValue)
    await wall_clock.serve_wall_clock(node)


def _ip_of(peer: PeerID, connected: Iterable[Any]) -> str:
    """Return from where a peer is connected; empty if that is not known."""
    for info in connected:
        for item in map(str, info.addrs if info.peer_id == peer else ()):
            parts = item.split("/")
            if len(parts) > 2 and parts[1] in ("ip4", "ip6"):
                return parts[2]
    return ""


async def ask_for_dialback(dht: Any, node: Any, *, of: Sequence[str]) -> Seen:
    """Have one of the peers at these addresses dial this one back; the first that answers.

    A peer that only believes that it can be reached spoils rounds: it is made a reducer, and nobody's part arrives. So
    it begins as one that only calls out, and becomes a full member of the DHT once somebody has dialled it.
    """
    own = [str(item).rpartition("/p2p/")[0] for item in await node.p2p.get_visible_maddrs(latest=True)]
    request = StringValue(value=json.dumps(own[:8]))
    for item in of:
        with suppress(Exception):  # gone, or another version: the next one
            peer = PeerID.from_base58(peer_of(item))
            call = node.p2p.call_protobuf_handler(peer, _DIALBACK_HANDLER, request, StringValue)
            tried, reached = fileio.parse((await asyncio.wait_for(call, _ASK_SECONDS)).value[:_LONGEST])
            return Seen(*(known_of(f"{one}/p2p/{node.peer_id}" for one in which) for which in (tried, reached)))
    return Seen()


async def reached(dht: Any, node: Any, *, at: Sequence[str]) -> list[str]:
    """Return those of the addresses, at most eight, at which the peer that they name answers."""
    tried = at[:8]
    return list(compress(tried, await asyncio.gather(*(processes.answers_at(item, _DIAL_SECONDS) for item in tried))))


async def become_member(dht: Any, node: Any) -> None:
    """Make of a node that has only called out one that answers, as if it had been started so."""
    protocol = node.protocol
    protocol.client_mode = False
    protocol.node_info = dht_pb2.NodeInfo(node_id=node.node_id.to_bytes())
    await protocol.add_p2p_handlers(protocol.p2p, AuthRPCWrapper(protocol, AuthRole.SERVICER, protocol.authorizer))
    await node.find_nearest_nodes([node.node_id])  # whoever is asked learns of it
    await serve_members(dht, node)


async def redial(dht: Any, node: Any, *, addresses: Sequence[str]) -> int:
    """Connect to each of the peers and take those that answer into the routing table; how many do.

    hivemind forgets a peer that does not answer, and a node that has forgotten everybody stays alone for ever. libp2p
    dials an address again when it is asked to, but waits longer after each failure, 6 s at first, 5 minutes at most. So
    it is only asked to where somebody listens by now; else a peer that comes back would not be seen for minutes.
    """

    async def answers(item: str) -> bool:
        peer = PeerID.from_base58(peer_of(item))
        if peer == node.peer_id or not await processes.listens(item):
            return False
        with suppress(Exception):  # refused, unreachable, or too early to ask again: the ping says what matters
            dialling = node.p2p._client.connect(peer, [Multiaddr(item.rpartition("/p2p/")[0])])
            await asyncio.wait_for(dialling, _REDIAL_SECONDS)
        return await node.protocol.call_ping(peer) is not None

    found = sum(await asyncio.gather(*map(answers, addresses)))
    if found:
        await node.find_nearest_nodes([node.node_id])  # and by them everybody else
    return found


async def _read_together(dht: Any, node: Any, *, keys: Sequence[str]) -> Any:
    return await node.get_many(keys, sufficient_expiration_time=float("inf"))


async def known_names(dht: Any, node: Any) -> dict[str, str]:
    """Peer id -> name of its invitation, of those whose records have been read."""
    return node.protocol.authorizer.admission.names()  # type: ignore[no-any-return]


def check_listening(host: str, port: int) -> None:
    """Refuse an address that is not this machine's, and a port that somebody else has.

    Tried here, because libp2p shares a port with whoever let others share it, such as another peer.
    """
    try:
        family = {4: socket.AF_INET, 6: socket.AF_INET6}[ipaddress.ip_address(host).version]
        socket.create_server((host, port), family=family).close()
    except (OSError, ValueError) as error:
        why = f"{getattr(error, 'strerror', None) or error}."
        fix = "Choose another --port, or a --host that is an IP address of this machine."
        raise UserError(f"Cannot listen on {host}, port {port or 'any'}.", why=why, fix=fix) from None


def explain(error: Exception, peers: Sequence[str]) -> TrainkitError:
    """Return what a user can do about a node that did not start."""
    text = str(error) or type(error).__name__
    if "local time must be within" in text or (peers and asyncio.run(wall_clock.is_off(peers))):
        return wall_clock.wrong_clock()
    if "already taken" in text:
        why = "A peer is known by its key, so two cannot share one."
        fix = "Omit --identity, or give every peer its own file."
        return UserError("Another peer uses this identity now.", why=why, fix=fix)
    if peers:
        return nobody_answers(peers[0])
    why = f"{text.strip().splitlines()[-1][:200]}."
    fix = "On a loaded machine, try again; otherwise run with HIVEMIND_LOGLEVEL=DEBUG and read its output."
    return RunFailedError("The peer-to-peer daemon of hivemind did not start.", why=why, fix=fix)


_START_SECONDS = 20.0
_READ_SECONDS = 5.0
_MANIFEST_SECONDS = 10.0
_PROVE_SECONDS = 160.0
_RECONNECT_SECONDS = 10.0
# The lists of those who are out are stored anew in every round.
_EXCLUDED_SECONDS = 3600.0
# Until it has trained its first round.
INTRODUCED_SECONDS = 600.0


class SwarmDHT:
    """This peer's node of the DHT."""

    def __init__(self, node: Any, identity: signed_records.Identity, helpers: list[Any], *, client_mode: bool) -> None:
        self.client_mode = client_mode
        """Calls out only; hivemind asks the node's process for it."""
        self.node = node
        self._helpers = helpers
        self.peer_id = str(node.peer_id)
        self.own = identity.own
        self.admission = identity.admission
        self._subkey = identity.subkey
        self._credential = identity.credential
        self.excluded = bans.Excluded(identity.own, self.peer_id, identity.admission)

    @property
    def alive(self) -> bool:
        """Return whether the DHT's process and libp2p's daemon still run; they do not come back."""
        return processes.all_alive(self._helpers)

    def addresses(self) -> list[str]:
        """Return where others reach this peer, the most useful first."""
        return best_first(map(str, self.node.get_visible_maddrs(latest=True)))

    @property
    def port(self) -> int:
        """Return where it listens, by TCP."""
        return port_of(str(self.node.get_visible_maddrs(latest=True)[0]))

    def store(self, key: str, value: Any, seconds: float, *, wait: bool = False) -> None:
        """Store a record of this peer's, signed by it; it expires after ``seconds``."""
        with suppress(FutureTimeoutError, OSError):
            # A record must not outlast the invitation of its writer.
            until = min(time.time() + seconds, float(self.own.grant.expires))
            future = self.node.store(key, value, until, subkey=self._subkey, return_future=True)
            if wait:
                future.result(_READ_SECONDS)

    def publish_progress(self, progress: messages.PeerProgress, seconds: float) -> None:
        """Store this peer's progress, and who it is; it expires after ``seconds``. Does not wait."""
        self.store(PROGRESS, asdict(progress), seconds)
        self.introduce_myself(seconds)
        self.publish_excluded()

    def introduce_myself(self, seconds: float, *, wait: bool = False) -> None:
        """Store this peer's credential, by which those know it whom it asks for something."""
        self.store(peer_key(self.peer_id), self._credential, seconds, wait=wait)

    def publish_excluded(self, *, wait: bool = False) -> None:
        """Store who is out, as far as this peer may say so."""
        for key, statement in self.excluded.told().items():
            self.store(key, statement, _EXCLUDED_SECONDS, wait=wait)

    def require_welcome(self) -> None:
        """Ask whether this peer may take part; it may wait for an answer.

        Raises RefusedError if it may not (any more).
        """
        for key in (REVOKED, BANNED):
            self.excluded.take(key, self._read(key))
        self.excluded.require_welcome()

    def member(self, peer_id: str) -> Member | None:
        """Return who that peer is; None if it does not take part. May wait for an answer of the DHT."""
        known = self.admission.admitted(peer_id)
        return known or introduced(self.admission, peer_id, self._read(peer_key(peer_id), latest=False))

    def manifests(self) -> dict[str, messages.Manifest]:
        """Creator's peer id -> manifest."""
        return messages.records_in(MANIFEST, self._read(MANIFEST))

    def progress(self) -> dict[str, messages.PeerProgress]:
        """Peer id -> its last progress; of peers that have gone, until it expires."""
        return messages.records_in(PROGRESS, self._read(PROGRESS))

    def look_for(self, addresses: Sequence[str]) -> Any:
        """Look for peers where they were, and know them again; a future of how many answer."""
        return self.node.run_coroutine(partial(redial, addresses=tuple(addresses)), return_future=True)

    def reconnect(self, addresses: Sequence[str]) -> int:
        """Look for peers, and wait at most `_RECONNECT_SECONDS`."""
        return bool(addresses) and int(_result(lambda: self.look_for(addresses), _RECONNECT_SECONDS, 0))

    def prove(self, peers: Sequence[str]) -> Seen:
        """Have somebody at ``peers`` dial this node back, which has only called out so far; if it is reached, it is a
        member from then on."""
        seen: Seen = self.in_dht(partial(ask_for_dialback, of=tuple(peers)), _PROVE_SECONDS, Seen())
        if seen.reached:
            self.in_dht(become_member, _PROVE_SECONDS, None)
            self.client_mode = False
        return seen

    def in_dht(self, work: Any, seconds: float, otherwise: Any) -> Any:
        """Return what the coroutine ``work(dht, node)`` returns, in the node's process; ``otherwise`` if it takes too
        long.
        """
        return _result(lambda: self.node.run_coroutine(work, return_future=True), seconds, otherwise)

    def ask(self, keys: Sequence[str]) -> Any:
        """Start to read records, all with the same requests; the answer is a future, of key -> what was found."""
        return self.node.run_coroutine(partial(_read_together, keys=tuple(keys)), return_future=True)

    def _read(self, key: str, *, latest: bool = True) -> Any:
        return _result(lambda: self.node.get(key, latest=latest, return_future=True), _READ_SECONDS, None)


def _result(asked: Callable[[], Any], seconds: float, otherwise: Any) -> Any:
    """Return what the node's process answers in time."""
    try:
        return asked().result(processes.at_load(seconds))
    except (FutureTimeoutError, OSError):
        return otherwise


@contextmanager
def open_dht(
    identity: signed_records.Identity, host: str | None = None, port: int = 0, announce: str | None = None, *,
    peers: Sequence[str] = (), proven: bool = True, introduces: bool = True,
) -> Iterator[SwarmDHT]:  # fmt: skip
    """Start a node, and on leaving end every process that it has started.

    Args:
        peers: addresses to join; none starts a swarm.
        host: address to listen on, for a peer that others can reach; None for one that only calls out, as it must be
            behind a router or a firewall (``client_mode``).
        port: TCP port to listen on; 0 for any.
        announce: the address that others are told instead: of the router that forwards it to this machine.
        introduces: it tells who it is; else it only reads.
        proven: others are known to reach it; else it only calls out until `SwarmDHT.prove` says that they do.

    Raises:
        UserError: nobody of the swarm answers at ``peers`` in time, the clocks differ, or the port is taken.
    """
    machine = "/ip4/127.0.0.1/tcp/0"  # libp2p insists on listening; without a host nobody is told of it
    if host is not None:
        check_listening(host, port)
        machine = f"/ip{ipaddress.ip_address(host).version}/{host}/tcp/{port}"
    client_mode = host is None or not proven
    node = DHT(
        initial_peers=list(peers) or None, start=False, client_mode=client_mode, host_maddrs=[machine],
        dht_mode="client" if host is None else "server", announce_maddrs=announce and [announce],
        identity_path=str(identity.path), check_if_identity_free=identity.kept,
        record_validators=[signed_records.SignedRecords(identity)], authorizer=signed_records.Authorizer(identity),
        startup_timeout=processes.at_load(_START_SECONDS) - 5.0, shutdown_timeout=2.0, daemon=True,
        nat_port_map=host == "0.0.0.0" and announce is None,
    )  # fmt: skip
    mine: list[Any] = []
    try:
        try:
            with processes.private_sockets():
                node.start()
            mine = processes.family(node.pid)
            node.wait_until_ready(processes.at_load(_START_SECONDS))
            mine = processes.family(node.pid)
        except Exception as error:  # whatever went wrong in the other process comes back as it was there
            raise explain(error, peers) from None
        dht = SwarmDHT(node, identity, mine, client_mode=client_mode)
        if not client_mode:
            dht.in_dht(partial(serve_members, announce=announce), _READ_SECONDS, None)
        if introduces:
            dht.introduce_myself(INTRODUCED_SECONDS, wait=bool(peers))
        yield dht
    finally:
        with suppress(OSError, ValueError):
            node.shutdown()
        processes.end(mine)


def read_manifest(dht: SwarmDHT, peers: Sequence[str]) -> tuple[str, messages.Manifest]:
    """The manifest of the swarm that was joined through ``peers``, and its creator's id, as `manifest_of` says.

    Raises UserError when there is none in time, and RefusedError for a peer that is out.
    """
    deadline = time.monotonic() + processes.at_load(_MANIFEST_SECONDS)
    while True:
        found = dht.manifests()
        if found:
            return messages.manifest_of(found)
        dht.require_welcome()
        if time.monotonic() > deadline:
            raise messages.no_run_at(peers[0])
        time.sleep(0.5)


class DHT(hivemind.DHT):  # type: ignore[misc]
    """hivemind's node of the DHT, in a process of its own that is bounded and ends with its peer."""

    def run_coroutine(self, coro: Any, return_future: bool = False) -> Any:
        """Run as hivemind does, which waits for ever for the answer of a process that has died. Raises
        RunFailedError.
        """
        future = super().run_coroutine(coro, return_future=True)
        return future if return_future else processes.answer_of(future, "node of the DHT", self.pid)

    async def _run_coroutine(self, **asked: Any) -> None:
        processes.hold_tasks()
        await super()._run_coroutine(**asked)

    def run(self) -> None:
        processes.become_helper(self._parent_pid)
        bound_node()
        super().run()
