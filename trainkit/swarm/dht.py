"""A peer's place in the swarm's DHT: start, publish, read, leave; every step bounded in time.

One DHT is one swarm. Records of ours in it: the creator's manifest, every peer's progress and credential, and the lists
of those who are out.
"""

from __future__ import annotations

import asyncio
import ipaddress
import math
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import hivemind

from trainkit.errors import RunFailedError, TrainkitError, UserError
from trainkit.run.contributions import Contribution
from trainkit.swarm import address, dialback, processes
from trainkit.swarm.access import BANNED, CREDITS, MANIFEST, PROGRESS, REVOKED, Identity, bound_records, peer_key
from trainkit.swarm.address import known_of
from trainkit.swarm.admission import Admission, Member
from trainkit.swarm.bans import Excluded
from trainkit.swarm.dialback import Seen, Uploaded, redial
from trainkit.swarm.invitations import NOBODY, UntrustedError
from trainkit.swarm.messages import (
    Manifest,
    PeerProgress,
    credit_record,
    manifest_of,
    manifests_in,
    no_run_at,
    progress_in,
)

# Where libp2p's daemon listens, and what a user can do when a node does not start.


def check_listening(host: str, port: int) -> None:
    """Refuse an address that is not this machine's, and a port that somebody else has.

    Tried here, because libp2p shares a port with whoever let others share it, such as another peer.
    """
    try:
        kind = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(kind, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except (OSError, ValueError) as error:
        raise UserError(
            f"Cannot listen on {host}, port {port or 'any'}.",
            why=f"{getattr(error, 'strerror', None) or error}.",
            fix="Choose another --port, or a --host that is an IP address of this machine.",
        ) from None


def listen_on(host: str | None, port: int) -> str:
    if host is None:
        return "/ip4/127.0.0.1/tcp/0"  # libp2p insists on listening; nobody is told of it
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"


def explain(error: Exception, peers: Sequence[str], *, invited: bool) -> TrainkitError:
    """What a user can do about a node that did not start."""
    text = str(error) or type(error).__name__
    if "local time must be within" in text or (peers and asyncio.run(address.is_off(peers))):
        return address.wrong_clock()
    if "already taken" in text:
        return UserError(
            "Another peer uses this identity now.",
            why="A peer is known by its key, so two cannot share one.",
            fix="Leave --identity out, or give every peer its own file.",
        )
    if peers:
        return address.nobody_answers(peers[0], invited=invited)
    return RunFailedError(
        "The peer-to-peer daemon of hivemind did not start.",
        why=f"{text.strip().splitlines()[-1][:200]}.",
        fix="On a loaded machine try again; else run with HIVEMIND_LOGLEVEL=DEBUG and see what it says.",
    )


_START_SECONDS = 20.0
_READ_SECONDS = 5.0
# For what the node's process knows itself; it answers in milliseconds.
_ANSWER_SECONDS = 30.0
_PROVE_SECONDS = 60.0
_UPLOAD_SECONDS = 30.0
# The lists of those who are out are stored anew in every round.
_EXCLUDED_SECONDS = 3600.0
# Until it has trained its first round.
INTRODUCED_SECONDS = 600.0


class _DHT(hivemind.DHT):  # type: ignore[misc]
    def run_coroutine(self, coro: Any, return_future: bool = False) -> Any:
        """As hivemind's, which waits for ever for the answer of a process that has died.

        Raises RunFailedError.
        """
        future = super().run_coroutine(coro, return_future=True)
        if return_future:
            return future
        try:
            return future.result(_ANSWER_SECONDS)
        except (FutureTimeoutError, OSError):
            raise processes.helper_has_died() from None

    def run(self) -> None:
        processes.become_helper(self._parent_pid)
        processes.subprocesses_die_with_us()
        bound_records(PROGRESS)
        super().run()


class SwarmDHT:
    """This peer's node of the DHT."""

    def __init__(self, node: Any, identity: Identity, helpers: list[Any], *, client_mode: bool) -> None:
        self.client_mode = client_mode
        """Calls out only; hivemind asks the node's process for it."""
        self.node, self._helpers = node, helpers
        self.peer_id = str(node.peer_id)
        self.own, self.admission = identity.own, identity.admission
        self._subkey, self._credential = identity.subkey, identity.credential
        self.excluded = Excluded(identity.own, self.peer_id, identity.admission)

    @property
    def alive(self) -> bool:
        """Whether the DHT's process and libp2p's daemon still run; they do not come back."""
        return processes.all_alive(self._helpers)

    def addresses(self, prefer_host: str | None = None) -> list[str]:
        """Where others reach this peer, the most useful first."""
        return address.best_first(map(str, self.node.get_visible_maddrs(latest=True)), prefer_host)

    @property
    def port(self) -> int:
        """Where it listens, by TCP."""
        return address.port_of(str(self.node.get_visible_maddrs(latest=True)[0]))

    def publish_manifest(self, manifest: Manifest, seconds: float, *, wait: bool = False) -> None:
        """Store the manifest, signed by this peer, for so many seconds."""
        self._store(MANIFEST, asdict(manifest), seconds, wait=wait)

    def publish_progress(self, progress: PeerProgress, seconds: float) -> None:
        """Store this peer's progress for so many seconds, and who it is; does not wait."""
        self._store(PROGRESS, asdict(progress), seconds, wait=False)
        self.introduce_myself(seconds)
        self.publish_excluded()

    def introduce_myself(self, seconds: float, *, wait: bool = False) -> None:
        """Store this peer's credential, by which those know it whom it asks for something."""
        self._store(peer_key(self.peer_id), self._credential, seconds, wait=wait)

    def publish_excluded(self, *, wait: bool = False) -> None:
        """Store who is out, as far as this peer may say so."""
        for key, statement in self.excluded.told().items():
            self._store(key, statement, _EXCLUDED_SECONDS, wait=wait)

    def require_welcome(self) -> None:
        """Ask whether this peer may take part; it may wait for an answer.

        Raises RefusedError if it may not (any more).
        """
        for key in (REVOKED, BANNED):
            self.excluded.take(key, self._read(key))
        self.excluded.require_welcome()

    def member(self, peer_id: str) -> Member | None:
        """Who that peer is; None if it does not take part. May wait for an answer of the DHT."""
        if (known := self.admission.admitted(peer_id)) is not None:
            return known
        found = self._read(peer_key(peer_id), latest=False)
        return introduced(self.admission, peer_id, found)

    def publish_credits(self, contributions: Sequence[Contribution], seconds: float) -> None:
        """Store who has contributed how much, by this peer's account; does not wait."""
        self._store(CREDITS, credit_record(contributions), seconds, wait=False)

    def manifests(self) -> dict[str, Manifest]:
        """Creator's peer id -> manifest."""
        return manifests_in(self._read(MANIFEST))

    def progress(self) -> dict[str, PeerProgress]:
        """Peer id -> its last progress; of peers that have gone, until it expires."""
        return progress_in(self._read(PROGRESS))

    def reconnect(self, addresses: Sequence[str], seconds: float = 10.0) -> int:
        """Look for peers where they were, and know them again; how many answer."""
        try:
            return int(self.look_for(addresses).result(seconds)) if addresses else 0
        except (FutureTimeoutError, OSError):
            return 0

    def prove(self, peers: Sequence[str], *, as_member: bool = True) -> Seen:
        """Have somebody at ``peers`` dial this node back, which has only called out so far.

        ``as_member``: if it is reached, it is a member from then on.
        """
        seen: Seen = self.in_dht(partial(dialback.ask, of=tuple(peers)), _PROVE_SECONDS, Seen(by=""))
        if seen.reached and as_member:
            self.in_dht(dialback.become_member, _PROVE_SECONDS, None)
            self.client_mode = False
        return seen

    def upload(self, peers: Sequence[str], *, enough: float = math.inf) -> Uploaded:
        """How much this peer can send in a second to somebody at ``peers``, see `dialback.measure`."""
        work = partial(dialback.measure, to=tuple(peers), enough=enough)
        found: Uploaded = self.in_dht(work, _UPLOAD_SECONDS, Uploaded(0.0))
        return found

    def in_dht(self, work: Any, seconds: float, otherwise: Any) -> Any:
        """What the coroutine ``work(dht, node)`` returns, in the node's process; ``otherwise`` if it takes too long."""
        try:
            return self.node.run_coroutine(work, return_future=True).result(seconds)
        except (FutureTimeoutError, OSError):
            return otherwise

    def look_for(self, addresses: Sequence[str]) -> Any:
        """As `reconnect`, but the answer is a future."""
        return self.node.run_coroutine(partial(redial, addresses=tuple(addresses)), return_future=True)

    def ask(self, keys: Sequence[str]) -> Any:
        """Start to read records, all with the same requests; the answer is a future, of key -> what was found."""
        return self.node.run_coroutine(partial(_read_together, keys=tuple(keys)), return_future=True)

    def _store(self, key: str, value: Any, seconds: float, *, wait: bool) -> None:
        with suppress(FutureTimeoutError, OSError):
            # A record must not outlast the invitation of its writer.
            until = min(time.time() + seconds, float(self.own.grant.expires))
            future = self.node.store(key, value, until, subkey=self._subkey, return_future=True)
            if wait:
                future.result(_READ_SECONDS)

    def _read(self, key: str, *, latest: bool = True) -> Any:
        try:
            return self.node.get(key, latest=latest, return_future=True).result(_READ_SECONDS)
        except (FutureTimeoutError, OSError):
            return None


async def _read_together(dht: Any, node: Any, *, keys: Sequence[str]) -> Any:
    """In the DHT's own process."""
    return await node.get_many(keys, sufficient_expiration_time=float("inf"))


def introduced(admission: Admission, peer_id: str, found: Any) -> Member | None:
    """Who a peer is, by what the DHT returned for `peer_key`; None if it does not take part."""
    if found is None or not isinstance(found.value, dict):
        return None
    for entry in found.value.values():
        with suppress(UntrustedError, AttributeError, TypeError):
            if (member := admission.introduce(entry.value)).peer_id == peer_id:
                return member
    return None


@contextmanager
def open_dht(
    identity: Identity,
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
    for item in peers:
        address.check(item)
    if host is not None:
        check_listening(host, port)
    node = _DHT(
        initial_peers=list(peers) or None,
        start=False,
        client_mode=host is None or not proven,
        dht_mode="client" if host is None else "server",
        host_maddrs=[listen_on(host, port)],
        identity_path=str(identity.path),
        check_if_identity_free=identity.kept,
        record_validators=identity.validators(),
        authorizer=identity.authorizer(),
        startup_timeout=_START_SECONDS - 5.0,
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
            node.wait_until_ready(_START_SECONDS)
            mine = processes.family(node.pid)
        except Exception as error:  # whatever went wrong in the other process comes back as it was there
            raise explain(error, peers, invited=identity.own.grant.owner != NOBODY) from None
        dht = SwarmDHT(node, identity, mine, client_mode=host is None or not proven)
        if host is not None and proven:
            dht.in_dht(dialback.serve_dialback, _READ_SECONDS, None)
        dht.introduce_myself(INTRODUCED_SECONDS, wait=bool(peers))
        yield dht
    finally:
        with suppress(OSError, ValueError):
            node.shutdown()
        processes.end(mine)


def read_manifest(dht: SwarmDHT, peers: Sequence[str], *, seconds: float = 10.0) -> Manifest:
    """The manifest of the swarm that was joined through ``peers``, as `manifest_of` chooses it.

    From then on the word of its owner counts, and nobody else's. Raises UserError as well when there is none in time,
    and RefusedError for a peer that is out.
    """
    deadline = time.monotonic() + seconds
    while not (found := dht.manifests()):
        dht.require_welcome()
        if time.monotonic() > deadline:
            raise no_run_at(peers[0])
        time.sleep(0.5)
    manifest = manifest_of(found, peers)[1]
    dht.admission.settle(bytes.fromhex(manifest.owner), open_run=manifest.open_run)
    return manifest


# News of the swarm, as a peer hears them while it trains.

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
        self._dht, self._creator, self._oldest, self._now = dht, creator, oldest, now
        self._question: Any = None
        self._ask_at = 0.0
        self.peers: dict[str, PeerProgress] = {}
        self.stopped = False
        """The creator has ended the run."""
        self.first_round = 0
        """By the creator's clock; 0 as long as it has not been heard."""

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

    def others(self, since: float) -> dict[str, PeerProgress]:
        """Peers besides this one that have told of themselves since then (seconds since 1970)."""
        return {peer: own for peer, own in self.peers.items() if peer != self._dht.peer_id and own.time >= since}

    def reachable(self) -> tuple[str, ...]:
        """Addresses of the others, as far as they have any."""
        return known_of(
            [item for peer, own in self.peers.items() if peer != self._dht.peer_id for item in own.addresses]
        )

    def _take(self, key: str, found: Any) -> None:
        if key == PROGRESS:
            self.peers = progress_in(found)
        elif key in (REVOKED, BANNED):
            self._dht.excluded.take(key, found)
        else:
            manifest = manifests_in(found).get(self._creator)
            self.stopped = manifest is not None and manifest.stopped
            self.first_round = manifest.first_round if manifest is not None else self.first_round
