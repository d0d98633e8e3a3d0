"""A peer's place in the swarm's DHT: start, publish, read, be reached, leave; every step bounded in time.

One DHT is one swarm. Records of ours in it: the creator's manifest, every peer's progress and credential, and the lists
of those who are out. The functions ``work(dht, node)`` run inside the DHT's own process.
"""

import asyncio
import hashlib
import ipaddress
import json
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from google.protobuf.wrappers_pb2 import BytesValue, StringValue  # type: ignore[import-untyped]
from hivemind.p2p import P2PContext, PeerID
from hivemind.proto import dht_pb2
from hivemind.utils.auth import AuthRole, AuthRPCWrapper
from hivemind.utils.multiaddr import Multiaddr

from trainkit import fileio
from trainkit.errors import RunFailedError, TrainkitError, UserError
from trainkit.swarm import access, address, messages, processes
from trainkit.swarm.admission import Member, introduced, peer_key
from trainkit.swarm.averager import DHT
from trainkit.swarm.messages import BANNED, MANIFEST, PROGRESS, REVOKED

_DIALBACK_HANDLER, _CODE_HANDLER = "trainkit.dial_back", "trainkit.code"
_LONGEST = 4000
LONGEST_CODE = 2 << 20
"""Bytes of an archive of code. libp2p's daemon takes messages of twice that."""
# How often one peer, and all together, are given it within an hour.
_MOST_OF_ONE, _MOST_OF_ALL = 8, 512
CODE_SECONDS = 120.0
# libp2p's own dialling takes up to 5 s; then a daemon has to be started for it.
_DIAL_SECONDS = 10.0
# Of who is asked for it, and may have much more to do than this machine.
_ASK_SECONDS = 150.0
_AT_A_TIME, _MOST_WAITING = 2, 16
_REDIAL_SECONDS = 6.0


async def _serve(node: Any, handler: str, kind: Any, answer: Callable[[Any, PeerID], Awaitable[Any]]) -> None:
    """From now on answer members, and nobody else."""

    async def answer_member(request: Any, context: P2PContext) -> Any:
        if node.protocol.authorizer.admission.admitted(str(context.remote_id)) is None:
            raise RuntimeError("not invited")
        return await answer(request, context.remote_id)

    await node.p2p.add_protobuf_handler(handler, answer_member, kind)


class Seen(NamedTuple):
    """Addresses at which another peer has tried to reach this one, and has reached it."""

    tried: tuple[str, ...] = ()
    reached: tuple[str, ...] = ()


async def serve_members(dht: Any, node: Any) -> None:
    """From now on serve others: dial back who asks, tell the time."""
    some_at_a_time = asyncio.Semaphore(_AT_A_TIME)
    waiting: set[PeerID] = set()

    async def dial_back(request: StringValue, peer: PeerID) -> StringValue:
        if peer in waiting or len(waiting) >= _MOST_WAITING:  # or strangers would have this machine do nothing else
            raise RuntimeError("busy")
        waiting.add(peer)
        try:
            infos = [info for info in await node.p2p.list_peers() if info.peer_id == peer]
            places = [str(item).split("/") for info in infos for item in info.addrs]
            ip = next((parts[2] for parts in places if len(parts) > 2 and parts[1] in ("ip4", "ip6")), "")
            announced = fileio.parse(request.value[:_LONGEST])
            tried = address.worth_dialling([str(item) for item in announced[:8]], ip)
            async with some_at_a_time:
                reached = [item for item in tried if await address.answers_at(f"{item}/p2p/{peer}", _DIAL_SECONDS)]
        finally:
            waiting.discard(peer)
        return StringValue(value=json.dumps([tried, reached]))

    await _serve(node, _DIALBACK_HANDLER, StringValue, dial_back)
    await address.serve_wall_clock(node)


async def ask_for_dialback(dht: Any, node: Any, *, of: Sequence[str]) -> Seen:
    """Have one of the peers at these addresses dial this one back; the first that answers.

    A peer that only believes that it can be reached spoils rounds: it is made a reducer, and nobody's part arrives. So
    it begins as one that only calls out, and becomes a full member of the DHT once somebody has dialled it.
    """
    own = [str(item) for item in await node.p2p.get_visible_maddrs(latest=True)]
    request = StringValue(value=json.dumps([item.rpartition("/p2p/")[0] for item in own][:8]))
    for item in of:
        with suppress(Exception):  # gone, or another version: the next one
            peer = PeerID.from_base58(address.peer_of(item))
            call = node.p2p.call_protobuf_handler(peer, _DIALBACK_HANDLER, request, StringValue)
            tried, reached = fileio.parse((await asyncio.wait_for(call, _ASK_SECONDS)).value[:_LONGEST])
            return Seen(*(address.known_of(f"{one}/p2p/{node.peer_id}" for one in which) for which in (tried, reached)))
    return Seen()


async def serve_code(dht: Any, node: Any, *, file: Path) -> None:
    """From now on give members the code that the run's owner gives away.

    By its file: several processes write into the pipe to this one, and what is longer than a pipe holds gets mixed.
    """
    archive, given = fileio.read_bytes(file, LONGEST_CODE), Counter[Any]()

    async def give(request: StringValue, peer: PeerID) -> BytesValue:
        hour = time.monotonic() // 3600.0
        if given[hour, str(peer)] >= _MOST_OF_ONE or given[hour] >= _MOST_OF_ALL:
            raise RuntimeError("too often")
        given.update([hour, (hour, str(peer))])
        return BytesValue(value=archive)

    await _serve(node, _CODE_HANDLER, StringValue, give)


async def fetch_code(dht: Any, node: Any, *, of: str, digest: str) -> bytes:
    """The archive of that digest; empty if the peer does not give that one."""
    with suppress(Exception):  # gone, or it gives none
        call = node.p2p.call_protobuf_handler(PeerID.from_base58(of), _CODE_HANDLER, StringValue(), BytesValue)
        archive = bytes((await asyncio.wait_for(call, CODE_SECONDS)).value)
        if hashlib.sha256(archive).hexdigest() == digest:
            return archive
    return b""


async def reached(dht: Any, node: Any, *, at: Sequence[str]) -> list[str]:
    """Those of the addresses, at most eight, at which the peer that they name answers."""
    tried = at[:8]
    answers = await asyncio.gather(*(address.answers_at(item, _DIAL_SECONDS) for item in tried))
    return [item for item, answer in zip(tried, answers, strict=True) if answer]


async def become_member(dht: Any, node: Any) -> None:
    """Of a node that has only called out, make one that answers, as if it had been started so."""
    protocol = node.protocol
    protocol.client_mode = False
    protocol.node_info = dht_pb2.NodeInfo(node_id=node.node_id.to_bytes())
    wrapper = AuthRPCWrapper(protocol, AuthRole.SERVICER, protocol.authorizer)
    await protocol.add_p2p_handlers(protocol.p2p, wrapper)
    await node.find_nearest_nodes([node.node_id])  # whoever is asked learns of it
    await serve_members(dht, node)


async def redial(dht: Any, node: Any, *, addresses: Sequence[str]) -> int:
    """Connect to each of the peers and take those that answer into the routing table; how many do.

    hivemind forgets a peer that does not answer, and a node that has forgotten everybody stays alone for ever. libp2p
    dials an address again when it is asked to, but waits longer after each failure, 6 s at first, 5 minutes at most. So
    it is only asked to where somebody listens by now; else a peer that comes back would not be seen for minutes.
    """

    async def answers(item: str) -> bool:
        peer = PeerID.from_base58(address.peer_of(item))
        if peer == node.peer_id or not await address.listens(item):
            return False
        machine = Multiaddr(item.rpartition("/p2p/")[0])
        with suppress(Exception):  # refused, unreachable, or too early to ask again: the ping says what matters
            await asyncio.wait_for(node.p2p._client.connect(peer, [machine]), _REDIAL_SECONDS)
        return await node.protocol.call_ping(peer) is not None

    found = sum(await asyncio.gather(*map(answers, addresses)))
    if found:
        await node.find_nearest_nodes([node.node_id])  # and by them everybody else
    return found


async def _read_together(dht: Any, node: Any, *, keys: Sequence[str]) -> Any:
    return await node.get_many(keys, sufficient_expiration_time=float("inf"))


def check_listening(host: str, port: int) -> None:
    """Refuse an address that is not this machine's, and a port that somebody else has.

    Tried here, because libp2p shares a port with whoever let others share it, such as another peer.
    """
    try:
        version = ipaddress.ip_address(host).version
        socket.create_server((host, port), family=socket.AF_INET6 if version == 6 else socket.AF_INET).close()
    except (OSError, ValueError) as error:
        why = f"{getattr(error, 'strerror', None) or error}."
        fix = "Choose another --port, or a --host that is an IP address of this machine."
        raise UserError(f"Cannot listen on {host}, port {port or 'any'}.", why=why, fix=fix) from None


def explain(error: Exception, peers: Sequence[str]) -> TrainkitError:
    """What a user can do about a node that did not start."""
    text = str(error) or type(error).__name__
    if "local time must be within" in text or (peers and asyncio.run(address.is_off(peers))):
        return address.wrong_clock()
    if "already taken" in text:
        why = "A peer is known by its key, so two cannot share one."
        fix = "Leave --identity out, or give every peer its own file."
        return UserError("Another peer uses this identity now.", why=why, fix=fix)
    if peers:
        return address.nobody_answers(peers[0])
    why = f"{text.strip().splitlines()[-1][:200]}."
    fix = "On a loaded machine try again; else run with HIVEMIND_LOGLEVEL=DEBUG and see what it says."
    return RunFailedError("The peer-to-peer daemon of hivemind did not start.", why=why, fix=fix)


_START_SECONDS = 20.0
_READ_SECONDS, _MANIFEST_SECONDS = 5.0, 10.0
_PROVE_SECONDS = 160.0
# The lists of those who are out are stored anew in every round.
_EXCLUDED_SECONDS = 3600.0
# Until it has trained its first round.
INTRODUCED_SECONDS = 600.0


class SwarmDHT:
    """This peer's node of the DHT."""

    def __init__(self, node: Any, identity: access.Identity, helpers: list[Any], *, client_mode: bool) -> None:
        self.client_mode = client_mode
        """Calls out only; hivemind asks the node's process for it."""
        self.node, self._helpers = node, helpers
        self.peer_id = str(node.peer_id)
        self.own, self.admission = identity.own, identity.admission
        self._subkey, self._credential = identity.subkey, identity.credential
        self.excluded = access.Excluded(identity.own, self.peer_id, identity.admission)

    @property
    def alive(self) -> bool:
        """Whether the DHT's process and libp2p's daemon still run; they do not come back."""
        return processes.all_alive(self._helpers)

    def addresses(self) -> list[str]:
        """Where others reach this peer, the most useful first."""
        return address.best_first(map(str, self.node.get_visible_maddrs(latest=True)))

    @property
    def port(self) -> int:
        """Where it listens, by TCP."""
        return address.port_of(str(self.node.get_visible_maddrs(latest=True)[0]))

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
        """Who that peer is; None if it does not take part. May wait for an answer of the DHT."""
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

    def reconnect(self, addresses: Sequence[str], seconds: float = 10.0) -> int:
        """As `look_for`, and wait at most this long."""
        return int(_result(lambda: self.look_for(addresses), seconds, 0)) if addresses else 0

    def prove(self, peers: Sequence[str]) -> Seen:
        """Have somebody at ``peers`` dial this node back, which has only called out so far; if it is reached, it is a
        member from then on."""
        seen: Seen = self.in_dht(partial(ask_for_dialback, of=tuple(peers)), _PROVE_SECONDS, Seen())
        if seen.reached:
            self.in_dht(become_member, _PROVE_SECONDS, None)
            self.client_mode = False
        return seen

    def in_dht(self, work: Any, seconds: float, otherwise: Any) -> Any:
        """What the coroutine ``work(dht, node)`` returns, in the node's process; ``otherwise`` if it takes too long."""
        return _result(lambda: self.node.run_coroutine(work, return_future=True), seconds, otherwise)

    def ask(self, keys: Sequence[str]) -> Any:
        """Start to read records, all with the same requests; the answer is a future, of key -> what was found."""
        return self.node.run_coroutine(partial(_read_together, keys=tuple(keys)), return_future=True)

    def _read(self, key: str, *, latest: bool = True) -> Any:
        return _result(lambda: self.node.get(key, latest=latest, return_future=True), _READ_SECONDS, None)


def _result(asked: Callable[[], Any], seconds: float, otherwise: Any) -> Any:
    """What the node's process answers in time."""
    try:
        return asked().result(processes.at_load(seconds))
    except (FutureTimeoutError, OSError):
        return otherwise


@contextmanager
def open_dht(
    identity: access.Identity,
    *,
    peers: Sequence[str] = (),
    host: str | None = None,
    port: int = 0,
    announce: str | None = None,
    proven: bool = True,
) -> Iterator[SwarmDHT]:
    """Start a node, and on leaving end every process that it has started.

    Args:
        peers: addresses to join; none starts a swarm.
        host: address to listen on, for a peer that others can reach; None for one that only calls out, as it must be
            behind a router or a firewall (``client_mode``).
        port: TCP port to listen on; 0 for any.
        announce: the address that others are told instead: of the router that forwards it to this machine.
        proven: others are known to reach it; else it only calls out until `SwarmDHT.prove` says that they do.

    Raises:
        UserError: nobody of the swarm answers at ``peers`` in time, the clocks differ, or the port is taken.
    """
    if host is not None:
        check_listening(host, port)
    # libp2p insists on listening; without a host nobody is told of it.
    machine = "/ip4/127.0.0.1/tcp/0" if host is None else f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"
    client_mode = host is None or not proven
    node = DHT(
        initial_peers=list(peers) or None,
        start=False,
        client_mode=client_mode,
        dht_mode="client" if host is None else "server",
        host_maddrs=[machine],
        identity_path=str(identity.path),
        check_if_identity_free=identity.kept,
        record_validators=[access.SignedRecords(identity)],
        authorizer=access.Authorizer(identity),
        startup_timeout=processes.at_load(_START_SECONDS) - 5.0,
        announce_maddrs=[announce] if announce is not None else None,
        nat_port_map=host == "0.0.0.0" and announce is None,
        shutdown_timeout=2.0,
        daemon=True,
    )
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
            dht.in_dht(serve_members, _READ_SECONDS, None)
        dht.introduce_myself(INTRODUCED_SECONDS, wait=bool(peers))
        yield dht
    finally:
        with suppress(OSError, ValueError):
            node.shutdown()
        processes.end(mine)


def read_manifest(dht: SwarmDHT, peers: Sequence[str], *, any_version: bool = False) -> tuple[str, messages.Manifest]:
    """The manifest of the swarm that was joined through ``peers``, and its creator's id, as `manifest_of` says.

    Raises UserError when there is none in time, and RefusedError for a peer that is out.
    """
    deadline = time.monotonic() + processes.at_load(_MANIFEST_SECONDS)
    while not (found := dht.manifests()):
        dht.require_welcome()
        if time.monotonic() > deadline:
            raise messages.no_run_at(peers[0])
        time.sleep(0.5)
    return messages.manifest_of(found, any_version=any_version)


# Every reader is sent the progress of all peers, and there are as many readers: each reads of so many a second, and
# those who answer are asked as often however many ask.
_PEERS_A_SECOND = 16


class Watch:
    """The other peers, as far as this one has heard of them; asking never keeps it from training.

    Args:
        oldest: seconds; news of the others are never older for want of asking, however many they are.
    """

    def __init__(
        self, dht: SwarmDHT, creator: str, oldest: float, *, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._dht, self.creator, self._oldest, self._now = dht, creator, oldest, now
        self._question: Any = None
        self._ask_at = 0.0
        self.peers: dict[str, messages.PeerProgress] = {}
        self.stopped = False
        """The creator has ended the run."""
        self.first_round = 0
        """By the creator's clock; 0 as long as it has not been heard."""
        self.since = 0.0
        """When the creator was started."""

    def poll(self) -> None:
        """Take the answers that are there and ask again."""
        if self._question is not None:
            if not self._question.done():
                return
            with suppress(Exception):  # a question that failed is asked again
                for key, found in self._question.result(0).items():
                    self._take(key, found)
            self._question = None
        now = self._now()
        if now >= self._ask_at:
            self._ask_at = now + self.pause
            with suppress(OSError):  # the node has died, which ends the round
                self._question = self._dht.ask((MANIFEST, PROGRESS, REVOKED, BANNED))

    @property
    def pause(self) -> float:
        """Seconds, beyond the one between two polls, in which nobody asks; 0 in a small swarm."""
        return max(0.0, min(len(self.peers) / _PEERS_A_SECOND - 1.0, self._oldest))

    def others(self, since: float) -> dict[str, messages.PeerProgress]:
        """Peers besides this one that have told of themselves since then (seconds since 1970)."""
        return {peer: own for peer, own in self.peers.items() if peer != self._dht.peer_id and own.time >= since}

    def reachable(self) -> tuple[str, ...]:
        """Addresses of the others, as far as they have any."""
        return address.known_of(item for own in self.others(0.0).values() for item in own.addresses)

    def _take(self, key: str, found: Any) -> None:
        if key == PROGRESS:
            self.peers = messages.records_in(key, found)
        elif key in (REVOKED, BANNED):
            self._dht.excluded.take(key, found)
        elif (manifest := messages.records_in(key, found).get(self.creator)) is None:
            self.stopped = False
        else:
            self.stopped, self.first_round, self.since = manifest.stopped, manifest.first_round, manifest.since
