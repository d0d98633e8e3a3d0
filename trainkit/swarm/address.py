"""Addresses of a swarm: one line that people send to each other, ``/ip4/203.0.113.7/tcp/4711/p2p/QmPeer``.

It names a machine, a port, and the peer that must answer there, so a stranger on the same port is not mistaken for it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import math
import re
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from trainkit import fileio, terminal
from trainkit.errors import UserError
from trainkit.run.folder import RunDir
from trainkit.swarm.processes import private_sockets
from trainkit.terminal import LONGEST_NAME

# Beside config.yaml: the addresses of a running swarm, one a line.
ADDRESS_FILE = "swarm_address"

EXAMPLE = "/ip4/203.0.113.7/tcp/4711/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"

# base58 has no 0, O, I and l. Identities here are RSA keys, whose ids begin with Qm and are 46 characters long.
_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})/p2p/(Qm[1-9A-HJ-NP-Za-km-z]{44})")


def check(address: str) -> str:
    """``address`` if it is one; quick, so that a mistyped one is refused before anything heavy is imported.

    Raises UserError and says which part is wrong.
    """
    match = _ADDRESS.fullmatch(address)
    if match is None:
        raise UserError(
            f"'{address}' is not the address of a peer.",
            why="It has the form /ip4/ADDRESS/tcp/PORT/p2p/PEER, for example " + EXAMPLE + ".",
            fix="Copy the whole line that `python -m jobs.swarm create` printed.",
        )
    kind, host, port, _ = match.groups()
    if not 0 < int(port) < 65536:
        raise UserError(
            f"'{address}' has no usable port.", why=f"Ports go from 1 to 65535, not {port}.", fix="Copy it again."
        )
    if kind in ("ip4", "ip6") and ((ip := _ip(host)) is None or ip.version != int(kind[-1])):
        raise UserError(
            f"'{address}' has no usable address.", why=f"'{host}' is no {kind} address.", fix="Copy it again."
        )
    return address


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An IP address; None for a name."""
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


def looks_like(text: str) -> bool:
    """Whether ``text`` is meant as an address and not as the name or path of a run."""
    return "/p2p/" in text or text.startswith(("/ip4/", "/ip6/", "/dns"))


def peer_of(address: str) -> str:
    """Id of the peer at the end of an address."""
    return address.rsplit("/p2p/", 1)[1]


def nobody_answers(address: str, *, invited: bool = False) -> UserError:
    """What is to be said when the peer at ``address`` does not answer; to strangers none does in a run of invited."""
    refused = "this invitation was revoked" if invited else "it takes only those whom its owner has invited"
    return UserError(
        f"Nobody of the swarm answers at {address}.",
        why=f"The run is over or has moved, a firewall is between, or {refused}.",
        fix="Ask whoever runs it for a token, which `python -m jobs.swarm invite` makes.",
    )


def port_of(address: str) -> int:
    """TCP port of a peer's address."""
    return int(address.split("/tcp/", 1)[1].split("/", 1)[0])


def best_first(addresses: Iterable[str], prefer_host: str | None = None) -> list[str]:
    """Addresses in the order in which others should try them: public ones, private ones, this machine only.

    ``prefer_host``, an IP address, goes before all of them: the one by which the nodes of a job know each other.
    """

    def rank(address: str) -> tuple[int, int]:
        match = _ADDRESS.fullmatch(address)
        if match is None:  # other transports (QUIC, relays): nobody needs them here
            return (9, 0)
        kind, host = match[1], match[2]
        if host == prefer_host:
            return (0, 0)
        if kind.startswith("dns") or (ip := _ip(host)) is None:
            return (1, 0)
        return (4 if ip.is_loopback else 3 if ip.is_link_local else 2 if ip.is_private else 1, ip.version)

    return [address for address in sorted(addresses, key=rank) if rank(address)[0] < 9]


def join_command(addresses: Sequence[str]) -> str:
    """The line that others paste into their terminal."""
    return terminal.command("join", addresses[0])


# Who can be reached from where: what an address says by itself.

FORWARD = "Have your router and firewall let TCP port {port} through; add --port {port} --announce PUBLIC_IP:{port}."
_PLACE = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([\w.:-]+)/tcp/(\d{1,5})")
_MOST_DIALLED = 3


def how_to_be_reached(addresses: Sequence[str]) -> list[str]:
    """What the creator is told whose addresses do not reach far; empty if one of them does."""
    ips = [ip for item in addresses if (ip := _ip(item.split("/")[2])) is not None]
    if len(ips) < len(addresses) or any(ip.is_global for ip in ips) or not ips:
        return []
    if all(ip.is_loopback for ip in ips):
        return ["Only this machine reaches that. To let others in, start it with --host 0.0.0.0 and a fixed --port."]
    port = port_of(addresses[0])
    return [
        "Only machines of your own network reach that. To let others in, have your router forward a TCP port to this "
        "machine,",
        f"and start it with --port {port} --announce PUBLIC_ADDRESS:{port}; or let an anchor on a public machine join.",
    ]


def worth_dialling(announced: Sequence[str], seen_ip: str) -> list[str]:
    """Of the addresses that a peer announces, ``/ip4/HOST/tcp/PORT``, those that another one should dial.

    Behind a router a peer announces addresses of its own network; then its ports are tried where its connection comes
    from. Nothing else that is private is dialled, or any peer could have another one look into its network.
    """
    wanted: dict[str, None] = {}
    for item in announced:
        match = _PLACE.fullmatch(item)
        if match is None or not 0 < int(match[3]) < 65536:
            continue
        kind, host, port = match.groups()
        ip = _ip(host)
        if kind.startswith("dns") or (ip is not None and ip.is_global):
            wanted[item] = None
        elif seen_ip:
            wanted[f"/ip{6 if ':' in seen_ip else 4}/{seen_ip}/tcp/{int(port)}"] = None
    return [*wanted][:_MOST_DIALLED]


def announced(text: str | None, port: int) -> str | None:
    """``--announce HOST[:PORT]`` as libp2p writes it, ``/ip4/HOST/tcp/PORT``, which will do as well.

    ``port``: the one to listen on, and to announce if no other is given.

    Raises UserError.
    """
    if text is None or (_PLACE.fullmatch(text) and 0 < port_of(text) < 65536):
        return text
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:]+)\]|([\w.-]+))(?::(\d{1,5}))?", text)
    there = int(match[3]) if match is not None and match[3] else port
    if match is None or not 0 < there < 65536:
        raise UserError(
            f"--announce {text} is no address.",
            why="It is HOST or HOST:PORT, and without --port it must name one."
            if match
            else "It is HOST or HOST:PORT.",
            fix="For example --port 4711 --announce 203.0.113.7:4711.",
        )
    host = match[1] or match[2]
    ip = _ip(host)
    return f"/{f'ip{ip.version}' if ip else 'dns'}/{host}/tcp/{there}"


MEGABIT = 125_000.0
"""Bytes."""
_UNITS = {"k": 1e-3, "m": 1.0, "g": 1e3}


def rate_of(text: str) -> float:
    """Bytes per second of ``--max-upload``: ``20Mbit``, ``500kbit`` or ``1Gbit/s``.

    Raises UserError.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg])bit(?:/s)?", text.strip(), re.IGNORECASE)
    rate = float(found[1]) * _UNITS[found[2].lower()] * MEGABIT if found else 0.0
    if not 0.0 < rate < math.inf:
        raise UserError(
            f"--max-upload {text} is no speed of a link.",
            why="It is given in bits per second, as on the contract with the provider.",
            fix="Write it as 20Mbit, 500kbit or 1Gbit.",
        )
    return rate


# What time it is in the swarm, told to anybody: whose clock is off is refused before it can ask for anything else.
#
# hivemind takes what was signed more than a minute ago, or will be, for forged, and does not say so.

_HANDLER = "trainkit.time"
_TCP_SECONDS, _START_SECONDS, _ASK_SECONDS = 3.0, 8.0, 5.0
# hivemind starts no node whose clock is further off.
_MOST_SECONDS = 3.0
MOST_APART = 1.0
"""Seconds by which peers' clocks may differ. With 1.5 every second round finds no others, with 2.5 none does, as if the
others were gone: nobody would know why."""
_TIMES = 3


def wrong_clock(ahead: float | None = None) -> UserError:
    """This machine's clock and the swarm's differ, by so much if that is known."""
    how = "differs from the swarm's by more than three seconds"
    if ahead is not None:
        how = f"is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the swarm's"
    return UserError(
        f"The clock of this machine {how}.",
        why="Rounds end by the clock, so the peers' clocks must agree.",
        fix="Set it: `timedatectl set-ntp true`, or ask the administrator.",
    )


async def serve_wall_clock(node: Any) -> None:
    """From now on tell the time."""
    from google.protobuf.wrappers_pb2 import DoubleValue  # type: ignore[import-untyped]

    async def answer(request: Any, context: Any) -> Any:
        return DoubleValue(value=time.time())

    await node.p2p.add_protobuf_handler(_HANDLER, answer, DoubleValue)


def require_same_time(dht: Any, peers: Sequence[str]) -> None:
    """Ask the peers at these addresses what time it is.

    Args:
        dht: the peer's `SwarmDHT`.

    Raises UserError when this machine's clock is off; nothing happens when nobody says.
    """
    ahead = dht.in_dht(partial(_ahead, of=tuple(peers)), _ASK_SECONDS, None)
    if ahead is not None and abs(ahead) > MOST_APART:
        raise wrong_clock(ahead)


async def _ahead(dht: Any, node: Any, *, of: Sequence[str]) -> float | None:
    """Seconds by which this machine's clock is ahead at least, by the first that answers."""
    for name in dict.fromkeys(map(peer_of, of)):
        asked = []
        with suppress(Exception):  # gone: the next one
            for _ in range(_TIMES):
                asked.append(await _time_of(node.p2p, name))
        if asked:
            return ahead_by(asked)
    return None


async def _time_of(p2p: Any, name: str) -> tuple[float, float, float]:
    """When a peer was asked by this clock, what it answered, and when that arrived."""
    from google.protobuf.wrappers_pb2 import DoubleValue
    from hivemind.p2p import PeerID

    began = time.time()
    answer = p2p.call_protobuf_handler(PeerID.from_base58(name), _HANDLER, DoubleValue(), DoubleValue)
    return began, (await asyncio.wait_for(answer, _ASK_SECONDS)).value, time.time()


def ahead_by(asked: Sequence[tuple[float, float, float]]) -> float:
    """Seconds by which a clock is ahead for certain, of all that it can be; negative if it is behind.

    Args:
        asked: when a question was sent, by this clock, the other's answer, and when that arrived.
    """
    least, most = max(began - told for began, told, _ in asked), min(over - told for _, told, over in asked)
    return least if least > 0.0 else min(most, 0.0)


async def is_off(peers: Sequence[str]) -> bool:
    """Whether one of the peers at these addresses has another time; False if none of them tells."""
    there = [item for item in peers if await listens(item)]
    if not there:
        return False
    # A daemon that did not come through may end when nobody waits for it any more, which asyncio would remark.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    with suppress(Exception):  # of libp2p's daemon, in many words: then the clock is not known to be wrong
        async with _daemon(there, _START_SECONDS) as p2p:
            for name in dict.fromkeys(map(peer_of, there)):
                began, told, over = await _time_of(p2p, name)
                return not began - _MOST_SECONDS <= told <= over + _MOST_SECONDS
    return False


async def answers_at(item: str, seconds: float) -> bool:
    """Whether a libp2p daemon that knows nobody yet comes through to the peer, and finds its key there."""
    with suppress(Exception):  # of libp2p's daemon: it does not
        async with _daemon([item], seconds):
            return True
    return False


@asynccontextmanager
async def _daemon(peers: Sequence[str], seconds: float) -> AsyncIterator[Any]:
    """A libp2p daemon that is connected to these peers, and ends with the block."""
    from hivemind.p2p import P2P

    options = {"dht_mode": "client", "auto_nat": False, "nat_port_map": False, "startup_timeout": seconds}
    with private_sockets():
        p2p = await asyncio.wait_for(P2P.create(initial_peers=peers, **options), seconds + 2.0)
    try:
        yield p2p
    finally:
        await p2p.shutdown()


async def listens(item: str) -> bool:
    """Whether a machine takes TCP connections at this address."""
    _, _, host, _, port, *_ = item.split("/")
    with suppress(OSError, asyncio.TimeoutError):
        _, writer = await asyncio.wait_for(asyncio.open_connection(host, int(port)), _TCP_SECONDS)
        writer.close()
        return True
    return False


# What of a swarm lies in the run folder of a peer that others can reach, so that it comes back as the same one.
#
# Its key and port are its address, which volunteers hold in their hands; the run's id and clock are what they go on
# by; and whom else one can reach is remembered, because whoever comes back may find nobody but them.

_FILE, _IDENTITY = "swarm.json", "swarm_identity"
# Of those that can be reached, so many are remembered.
MOST_OTHERS = 16


@dataclass(frozen=True)
class SavedPeer:
    """A peer's place in a swarm, beyond the life of its process."""

    run_id: str
    first_round: int
    host: str
    port: int
    announce: str | None = None
    """The address by which others know this machine, where that is not its own."""
    name: str = ""
    """What the others call it."""
    is_anchor: bool = False
    """It has joined, and does not answer for the run."""
    others: tuple[str, ...] = ()
    """Addresses of other peers that can be reached."""

    def write(self, run: RunDir) -> None:
        """Keep it. Raises OSError, and then what was kept before is as it was."""
        fileio.write(run.path / _FILE, json.dumps(asdict(self), indent=2) + "\n", run.path)


def saved_peer(run: RunDir) -> SavedPeer | None:
    """What `SavedPeer.write` has kept there; None if nothing.

    Raises UserError for a file that says something else.
    """
    if not (run.path / _FILE).exists():
        return None
    found = fileio.read_object(run.path / _FILE)
    try:
        announce = found.get("announce")
        return SavedPeer(
            run_id=str(found["run_id"]),
            first_round=int(found["first_round"]),
            host=str(found["host"]),
            port=int(found["port"]),
            announce=str(announce) if announce else None,
            name=str(found.get("name") or "")[:LONGEST_NAME],
            is_anchor=found.get("is_anchor") is True,
            others=known_of(found.get("others") or ()),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{run.path / _FILE} does not say where the swarm was.",
            why=f"{type(error).__name__}: {error}.",
            fix="Restore it from a copy; or start a new swarm, whose volunteers must be told the new address.",
        ) from None


class Memory:
    """Peers to turn to when the swarm is lost, kept up to date; also on disk, in the `SavedPeer` there."""

    def __init__(self, others: Sequence[str]) -> None:
        self.others = known_of(others)
        self._kept: tuple[RunDir, SavedPeer] | None = None

    def keep_in(self, run: RunDir, home: SavedPeer) -> None:
        """From now on also there."""
        self._kept = run, home
        self._write()

    def note(self, reachable: Sequence[str]) -> None:
        """These can be reached now. Those of before stay, for they may come back: the newest first."""
        others = known_of([*reachable, *self.others])
        if set(others) != set(self.others):
            self.others = others
            self._write()

    def _write(self) -> None:
        if self._kept is not None:
            run, home = self._kept
            with suppress(OSError):  # a full disk: what was known before is still there
                replace(home, others=self.others).write(run)


def known_of(addresses: Sequence[object]) -> tuple[str, ...]:
    """Those of ``addresses`` that are some, without repetition; they come from others, and become dialled."""
    good: dict[str, None] = {}
    for item in addresses:
        try:
            good[check(str(item))] = None
        except UserError:
            continue
    return tuple(good)[:MOST_OTHERS]


def identity_in(run: RunDir) -> Path:
    """The file of the peer's key."""
    return run.path / _IDENTITY


def keep_identity(run: RunDir, key: Path) -> None:
    """Copy the peer's key into its run folder, where only its user can read it."""
    file = identity_in(run)
    if file.exists() or file == key:
        return
    fileio.write(file, fileio.read_bytes(key, follow=True), run.path, private=True)


def addresses_in(run: RunDir) -> tuple[str, ...]:
    """Where others have joined, by what `write_addresses` has kept; empty if nothing."""
    file = run.path / ADDRESS_FILE
    return known_of(fileio.read_text(file).split()) if file.exists() else ()


def write_addresses(run_dir: RunDir, addresses: Sequence[str]) -> None:
    """Where others join, for whoever reads the run folder."""
    fileio.write(run_dir.path / ADDRESS_FILE, "".join(f"{item}\n" for item in addresses), run_dir.path)
