"""A peer's place in the swarm's DHT: start, publish, read, leave; every step bounded in time.

One DHT is one swarm. Two kinds of records live in it: the creator's manifest, and every peer's progress.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import TimeoutError as FutureTimeoutError
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from typing import Any

import hivemind

from trainkit.collaborative import address, dialback, processes
from trainkit.collaborative.bounds import bound_records
from trainkit.collaborative.dialback import Seen
from trainkit.collaborative.home import known_of
from trainkit.collaborative.messages import (
    Manifest,
    Progress,
    credit_record,
    manifest_of,
    manifests_in,
    no_run_at,
    progress_in,
)
from trainkit.collaborative.redial import redial
from trainkit.collaborative.trust import CREDITS, MANIFEST, PROGRESS, Identity
from trainkit.errors import RunFailedError, TrainkitError, UserError
from trainkit.records.contributions import Contribution

_START_SECONDS = 20.0
_READ_SECONDS = 5.0
_PROVE_SECONDS = 60.0


class _DHT(hivemind.DHT):  # type: ignore[misc]
    def run(self) -> None:
        processes.become_helper(self._parent_pid)
        processes.subprocesses_die_with_us()
        bound_records(PROGRESS)
        super().run()


class SwarmDHT:
    """This peer's node of the DHT."""

    def __init__(self, node: Any, identity: Identity, helpers: list[Any]) -> None:
        self.node, self._helpers = node, helpers
        self.peer_id = str(node.peer_id)
        self._subkey = identity.subkey

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

    def publish_progress(self, progress: Progress, seconds: float) -> None:
        """Store this peer's progress for so many seconds; does not wait."""
        self._store(PROGRESS, asdict(progress), seconds, wait=False)

    def publish_credits(self, contributions: Sequence[Contribution], seconds: float) -> None:
        """Store who has contributed how much, by this peer's account; does not wait."""
        self._store(CREDITS, credit_record(contributions), seconds, wait=False)

    def manifests(self) -> dict[str, Manifest]:
        """Creator's peer id -> manifest."""
        return manifests_in(self._read(MANIFEST))

    def progress(self) -> dict[str, Progress]:
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
        seen: Seen = self._in_dht(partial(dialback.ask, of=tuple(peers)), _PROVE_SECONDS, Seen(by=""))
        if seen.reached and as_member:
            self._in_dht(dialback.become_member, _PROVE_SECONDS, None)
            self.node._client_mode = None  # asked anew
        return seen

    def _in_dht(self, work: Any, seconds: float, otherwise: Any) -> Any:
        try:
            return self.node.run_coroutine(work, return_future=True).result(seconds)
        except (FutureTimeoutError, OSError):
            return otherwise

    def look_for(self, addresses: Sequence[str]) -> Any:
        """As `reconnect`, but the answer is a future."""
        return self.node.run_coroutine(partial(redial, addresses=tuple(addresses)), return_future=True)

    def ask(self, key: str) -> Any:
        """Start to read a record; the answer is a future."""
        return self.node.get(key, latest=True, return_future=True)

    def _store(self, key: str, value: dict[str, Any], seconds: float, *, wait: bool) -> None:
        with suppress(FutureTimeoutError, OSError):
            future = self.node.store(key, value, time.time() + seconds, subkey=self._subkey, return_future=True)
            if wait:
                future.result(_READ_SECONDS)

    def _read(self, key: str) -> Any:
        try:
            return self.ask(key).result(_READ_SECONDS)
        except (FutureTimeoutError, OSError):
            return None


class Watch:
    """The other peers, as far as this one has heard of them; asking never keeps it from training."""

    def __init__(self, dht: SwarmDHT, creator: str) -> None:
        self._dht, self._creator = dht, creator
        self._questions: dict[str, Any] = {}
        self.peers: dict[str, Progress] = {}
        self.stopped = False
        """The creator has ended the run."""
        self.first_round = 0
        """By the creator's clock; 0 as long as it has not been heard."""

    def poll(self) -> None:
        """Take the answers that are there and ask again."""
        for key in (MANIFEST, PROGRESS):
            question = self._questions.get(key)
            if question is not None and not question.done():
                continue
            if question is not None:
                with suppress(Exception):  # a question that failed is asked again
                    self._take(key, question.result(0))
            with suppress(OSError):  # the node has died, which ends the round
                self._questions[key] = self._dht.ask(key)

    def others(self, since: float) -> dict[str, Progress]:
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
        else:
            manifest = manifests_in(found).get(self._creator)
            self.stopped = manifest is not None and manifest.stopped
            self.first_round = manifest.first_round if manifest is not None else self.first_round


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
        _check_listening(host, port)
    node = _DHT(
        initial_peers=list(peers) or None,
        start=False,
        client_mode=host is None or not proven,
        dht_mode="client" if host is None else "server",
        host_maddrs=[_listen_on(host, port)],
        identity_path=str(identity.path),
        check_if_identity_free=identity.kept,
        record_validators=identity.validators(),
        startup_timeout=_START_SECONDS - 5.0,
        announce_maddrs=[announce] if announce is not None else None,
        nat_port_map=host == "0.0.0.0" and announce is None,
        shutdown_timeout=2.0,
        daemon=True,
    )
    mine: list[Any] = []
    try:
        try:
            node.start()
            mine = processes.family(node.pid)
            node.wait_until_ready(_START_SECONDS)
            mine = processes.family(node.pid)
        except Exception as error:  # whatever went wrong in the other process comes back as it was there
            raise _explain(error, peers) from None
        dht = SwarmDHT(node, identity, mine)
        if host is not None and proven:
            dht._in_dht(dialback.serve, _READ_SECONDS, None)
        yield dht
    finally:
        with suppress(OSError, ValueError):
            node.shutdown()
        processes.end(mine)


def read_manifest(dht: SwarmDHT, peers: Sequence[str], *, seconds: float = 10.0) -> Manifest:
    """The manifest of the swarm that was joined through ``peers``, as `manifest_of` chooses it.

    Raises UserError as well when there is none in time.
    """
    deadline = time.monotonic() + seconds
    while not (found := dht.manifests()):
        if time.monotonic() > deadline:
            raise no_run_at(peers[0])
        time.sleep(0.5)
    return manifest_of(found, peers)[1]


def _check_listening(host: str, port: int) -> None:
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


def _listen_on(host: str | None, port: int) -> str:
    if host is None:
        return "/ip4/127.0.0.1/tcp/0"  # libp2p insists on listening; nobody is told of it
    return f"/ip{6 if ':' in host else 4}/{host}/tcp/{port}"


def _explain(error: Exception, peers: Sequence[str]) -> TrainkitError:
    text = str(error) or type(error).__name__
    if "local time must be within" in text:
        return UserError(
            "The clock of this machine differs from the swarm's by more than three seconds.",
            why="Rounds end by the clock, so the peers' clocks must agree.",
            fix="Set it: `timedatectl set-ntp true`, or ask the administrator.",
        )
    if "already taken" in text:
        return UserError(
            "Another peer uses this identity now.",
            why="A peer is known by its key, so two cannot share one.",
            fix="Leave --identity out, or give every peer its own file.",
        )
    if peers:
        return address.nobody_answers(peers[0])
    return RunFailedError(
        "The peer-to-peer daemon of hivemind did not start.",
        why=f"{text.strip().splitlines()[-1][:200]}.",
        fix="On a loaded machine try again; else run with HIVEMIND_LOGLEVEL=DEBUG and see what it says.",
    )
