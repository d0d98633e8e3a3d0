"""Addresses of a swarm, ``/ip4/203.0.113.7/tcp/4711/p2p/QmPeer``: who is reached there; and a peer's own place in it,
as it is asked for, and as it is kept.

An address names a machine, a port, and the peer that must answer there, so a stranger on the same port is not mistaken
for it.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from trainkit import fileio, terminal
from trainkit.config.schema import Config
from trainkit.errors import UserError
from trainkit.ranks import NO_SECRET, RankEnv, Secret
from trainkit.run.events import Attempt
from trainkit.run.folder import SWARM, SWARM_ADDRESS, SWARM_IDENTITY, RunDir
from trainkit.swarm import processes

EXAMPLE = "/ip4/203.0.113.7/tcp/4711/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
FORWARD = "Have your router and firewall let TCP port {port} through; add --port {port} --announce PUBLIC_IP:{port}."
MEGABIT = 125_000.0
"""Bytes."""
_MOST_DIALLED = 3
_PLACE = r"/(ip4|ip6|dns|dns4|dns6)/([\w.:-]+)/tcp/(\d{1,5})"
# base58 has no 0, O, I and l. Identities here are RSA keys, whose ids begin with Qm and are 46 characters long.
_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})/p2p/(Qm[1-9A-HJ-NP-Za-km-z]{44})")


def check(address: str) -> str:
    """``address`` if it is one; quick, so that a mistyped one is refused before anything heavy is imported.

    Raises UserError.
    """
    if match := _ADDRESS.fullmatch(address):
        kind, host, port, _ = match.groups()
        ip = _ip(host)
        if 0 < int(port) < 65536 and (kind.startswith("dns") or (ip is not None and kind == f"ip{ip.version}")):
            return address
    why = f"It has the form /ip4/ADDRESS/tcp/PORT/p2p/PEER, for example {EXAMPLE}."
    fix = "Copy the whole line that `python -m jobs.swarm create` printed."
    raise UserError(f"'{address}' is not the address of a peer.", why=why, fix=fix)


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An IP address; None for a name."""
    with suppress(ValueError):
        return ipaddress.ip_address(host)
    return None


def known_of(addresses: Iterable[object]) -> tuple[str, ...]:
    """Those of ``addresses`` that are some, without repetition; they come from others, and become dialled."""
    good: dict[str, None] = {}
    for item in addresses:
        with suppress(UserError):
            good[check(str(item))] = None
    return tuple(good)[:MOST_OTHERS]


def looks_like(text: str) -> bool:
    """Whether ``text`` is meant as an address and not as the name or path of a run."""
    return "/p2p/" in text or text.startswith(("/ip4/", "/ip6/", "/dns"))


def peer_of(address: str) -> str:
    """Id of the peer at the end of an address."""
    return address.rsplit("/p2p/", 1)[1]


def port_of(address: str) -> int:
    """TCP port of a peer's address."""
    return int(address.split("/tcp/", 1)[1].split("/", 1)[0])


def nobody_answers(address: str) -> UserError:
    """What is to be said when the peer at ``address`` does not answer."""
    why = "The run is over or has moved, a firewall is between, or this invitation was revoked."
    fix = "Ask whoever runs it for a token, which `python -m jobs.swarm invite` makes."
    return UserError(f"Nobody of the swarm answers at {address}.", why=why, fix=fix)


def best_first(addresses: Iterable[str]) -> list[str]:
    """Addresses in the order in which others should try them: public ones, private ones, this machine only.

    Other transports than TCP (QUIC, relays) are left out: nobody needs them here.
    """

    def rank(address: str) -> tuple[int, ...]:
        ip = _ip(address.split("/")[2])
        return () if ip is None else (ip.is_loopback, ip.is_link_local, ip.is_private, ip.version)

    return sorted(filter(_ADDRESS.fullmatch, addresses), key=rank)


def how_to_be_reached(addresses: Sequence[str]) -> list[str]:
    """What the creator is told whose addresses do not reach far; empty if one of them does."""
    ips = [_ip(item.split("/")[2]) for item in addresses]
    if not ips or any(ip is None or ip.is_global for ip in ips):
        return []
    return [
        "Only this machine and its network reach that. To let others in, have an anchor on a public machine join; or",
        f"start it with --host 0.0.0.0. {FORWARD.format(port=port_of(addresses[0]))}",
    ]


def worth_dialling(announced: Sequence[str], seen_ip: str) -> list[str]:
    """Of the addresses that a peer announces, ``/ip4/HOST/tcp/PORT``, those that another one should dial.

    Behind a router a peer announces addresses of its own network; then its ports are tried where its connection comes
    from. Nothing else that is private is dialled, or any peer could have another one look into its network.
    """
    wanted: dict[str, None] = {}
    for item in announced:
        match = re.fullmatch(_PLACE, item)
        if match is None or not 0 < (port := int(match[3])) < 65536:
            continue
        ip = _ip(match[2])
        if match[1].startswith("dns") or (ip is not None and ip.is_global):
            wanted[item] = None
        elif seen_ip:
            wanted[f"/ip{6 if ':' in seen_ip else 4}/{seen_ip}/tcp/{port}"] = None
    return [*wanted][:_MOST_DIALLED]


def announced(text: str | None, port: int) -> str | None:
    """``--announce HOST[:PORT]`` as libp2p writes it, ``/ip4/HOST/tcp/PORT``, which will do as well.

    ``port``: the one to listen on, and to announce if no other is given.

    Raises UserError.
    """
    if text is None or (re.fullmatch(_PLACE, text) and 0 < port_of(text) < 65536):
        return text
    match = re.fullmatch(r"(?:\[([0-9a-fA-F:]+)\]|([\w.-]+))(?::(\d{1,5}))?", text)
    there = int(match[3] or port) if match is not None else 0
    if match is None or not 0 < there < 65536:
        why = f"It is HOST or HOST:PORT{', and without --port it must name one' if match else ''}."
        fix = "For example --port 4711 --announce 203.0.113.7:4711."
        raise UserError(f"--announce {text} is no address.", why=why, fix=fix)
    host = match[1] or match[2]
    ip = _ip(host)
    return f"/{f'ip{ip.version}' if ip else 'dns'}/{host}/tcp/{there}"


_TIME_HANDLER = "trainkit.time"
_TCP_SECONDS, _START_SECONDS, _ASK_SECONDS = 3.0, 8.0, 5.0
# hivemind starts no node whose clock is further off, and takes what was signed more than a minute ago, or will be, for
# forged; it does not say so. So the time is told to anybody.
_MOST_SECONDS = 3.0
MOST_APART = 1.0
"""Seconds by which peers' clocks may differ. With 1.5 every second round finds no others, with 2.5 none does, as if the
others were gone: nobody would know why."""


def wrong_clock(how: str = "differs from the swarm's by more than three seconds") -> UserError:
    """This machine's clock and the swarm's differ."""
    why = "Rounds end by the clock, so the peers' clocks must agree."
    fix = "Set it: `timedatectl set-ntp true`, or ask the administrator."
    return UserError(f"The clock of this machine {how}.", why=why, fix=fix)


def _steady() -> float:
    # On Linux also while the machine sleeps.
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


class WallClock:
    """Notices when somebody, or NTP, sets this machine's clock."""

    def __init__(self, now: Callable[[], float] = time.time, steady: Callable[[], float] = _steady) -> None:
        self._now, self._steady = now, steady
        self._offset = now() - steady()

    def jumped(self) -> float:
        """Seconds by which it was set forward since the last call, negative if back; 0 for what no peer minds."""
        before, offset = self._offset, self._now() - self._steady()
        if abs(offset - before) <= MOST_APART / 2:
            return 0.0
        self._offset = offset
        return offset - before


async def serve_wall_clock(node: Any) -> None:
    """From now on tell the time."""
    from google.protobuf.wrappers_pb2 import DoubleValue  # type: ignore[import-untyped]

    async def answer(request: Any, context: Any) -> Any:
        return DoubleValue(value=time.time())

    await node.p2p.add_protobuf_handler(_TIME_HANDLER, answer, DoubleValue)


def require_same_time(dht: Any, peers: Sequence[str]) -> bool:
    """Compare clocks with the peers at these addresses, by a `SwarmDHT`. False if none of them tells the time.

    Raises UserError when this machine's is off.
    """
    ahead: float | None = dht.in_dht(partial(_ahead, of=tuple(peers)), _ASK_SECONDS, None)
    if ahead is not None and abs(ahead) > MOST_APART:
        raise wrong_clock(f"is {abs(ahead):.1f} s {'ahead of' if ahead > 0 else 'behind'} the swarm's")
    return ahead is not None


async def _ahead(dht: Any, node: Any, *, of: Sequence[str]) -> float | None:
    """Seconds by which this machine's clock is ahead at least, by the first that answers; None if none does."""
    for name in dict.fromkeys(map(peer_of, of)):
        with suppress(Exception):  # gone: the next one
            return await _ahead_of(node.p2p, name)
    return None


async def _ahead_of(p2p: Any, name: str) -> float:
    from google.protobuf.wrappers_pb2 import DoubleValue
    from hivemind.p2p import PeerID

    began = time.time()
    answer = p2p.call_protobuf_handler(PeerID.from_base58(name), _TIME_HANDLER, DoubleValue(), DoubleValue)
    told = (await asyncio.wait_for(answer, processes.at_load(_ASK_SECONDS))).value
    return ahead_by(began, told, time.time())


def ahead_by(began: float, told: float, over: float) -> float:
    """Seconds by which a clock is ahead for certain, of all that it can be; negative if it is behind.

    Args:
        began: when a question was sent, by this clock; ``told``: the other's answer; ``over``: when that arrived.
    """
    return began - told if began > told else min(over - told, 0.0)


async def is_off(peers: Sequence[str]) -> bool:
    """Whether one of the peers at these addresses has another time; False if none of them tells."""
    there = [item for item in peers if await listens(item)]
    # A daemon that did not come through may end when nobody waits for it any more, which asyncio would remark.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    with suppress(Exception):  # of libp2p's daemon, in many words: then the clock is not known to be wrong
        if there:
            async with _daemon(there, _START_SECONDS) as p2p:
                return abs(await _ahead_of(p2p, peer_of(there[0]))) > _MOST_SECONDS
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

    seconds = processes.at_load(seconds)
    options = {"dht_mode": "client", "auto_nat": False, "nat_port_map": False, "startup_timeout": seconds}
    with processes.private_sockets():
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


PATIENCE_SECONDS = 24 * 3600.0
"""How long a peer waits for a swarm that does not answer any more."""


@dataclass(frozen=True)
class PeerSpec:
    """One peer's place: who it is, how others reach it, and whether it trains."""

    name: str
    env: RankEnv = field(default_factory=RankEnv.single)
    host: str | None = None
    """Address to listen on; None: call out only."""
    port: int = 0
    announce: str | None = None
    """The address that others are told, where it is not this machine's own."""
    identity: Path | None = None
    folder: RunDir | None = None
    """The run folder, if there is one already: what it says of the swarm counts."""
    trains: bool = True
    """Else it only reduces, keeps the common weights and gives them away."""
    max_upload: float | None = None
    """Bytes per second that this peer may send at most; None: no limit."""
    patience: float = PATIENCE_SECONDS
    """Seconds to wait for a swarm that does not answer any more."""
    goes_on_later: bool = False
    """A stopped run will be started again from its last checkpoint, so it has no results yet."""
    team: bool = False
    """All ranks of ``env`` are this one peer, and this is rank 0, whom others may not reach though it listens; else
    every rank is a peer of its own, whom the job's network reaches."""
    secret: Secret = NO_SECRET
    """Known to the ranks and nobody else."""


@dataclass(frozen=True)
class Hooks:
    """What a peer calls while it works."""

    stop_requested: Callable[[], bool]
    say: Callable[[str], None]
    open_run: Callable[[Config, str], Attempt] | None = None
    """Makes or opens the run folder of a peer that joins the run of this name (empty for its creator), and takes its
    lease; None for a rank whose rank 0 keeps the records."""
    beat: Callable[[], None] = lambda: None
    """Called whenever this peer has made progress."""
    step: Callable[[str], None] = lambda what: None
    """Called with what this peer is to do next, until it trains; empty: there is nothing to wait for any more."""


# What a peer that others can reach keeps in its run folder, so that it comes back as the same one.

ADDRESS_FILE = SWARM_ADDRESS.name
"""Addresses of a running swarm, one a line."""
MOST_OTHERS = 16
"""Most peers that are remembered, of those that can be reached."""


@dataclass(frozen=True)
class SavedPeer:
    """A peer's place in a swarm, beyond the life of its process.

    Key and port are its address, which volunteers hold in their hands; the run's id and clock are what they go on by;
    and whoever comes back may find nobody but the others that it remembers.
    """

    run_id: str
    first_round: int
    host: str
    port: int
    announce: str | None = None
    """The address by which others know this machine, where that is not its own."""
    name: str = ""
    """What the others call it."""
    others: tuple[str, ...] = ()
    """Addresses of other peers that can be reached."""

    def write(self, run: RunDir) -> None:
        """Keep it. Raises OSError, and then what was kept before is as it was."""
        fileio.write(SWARM.at(run.path), json.dumps(asdict(self), indent=2) + "\n", run.path)


_SAVED = TypeAdapter(SavedPeer)


def saved_peer(run: RunDir) -> SavedPeer | None:
    """What `SavedPeer.write` has kept there; None if nothing.

    Raises UserError for a file that says something else.
    """
    if not (file := SWARM.at(run.path)).exists():
        return None
    try:
        found = _SAVED.validate_python(fileio.read_object(file))
    except ValidationError as error:
        wrong = error.errors()[0]
        why = f"{'.'.join(map(str, wrong['loc']))}: {wrong['msg']}."
        fix = "Restore it from a copy; or start a new swarm, whose volunteers must be told the new address."
        raise UserError(f"{file} does not say where the swarm was.", why=why, fix=fix) from None
    return replace(found, name=found.name[: terminal.LONGEST_NAME], others=known_of(found.others))


def keep_identity(run: RunDir, content: bytes) -> None:
    """Keep the peer's key in its run folder, where only its user can read it."""
    if not (file := SWARM_IDENTITY.at(run.path)).exists():
        fileio.write(file, content, run.path, private=True)


def addresses_in(run: RunDir) -> tuple[str, ...]:
    """Where others have joined, by what `write_addresses` has kept; empty if nothing."""
    file = run.path / ADDRESS_FILE
    return known_of(fileio.read_text(file).split()) if file.exists() else ()


def write_addresses(run_dir: RunDir, addresses: Sequence[str]) -> None:
    """Where others join, for whoever reads the run folder."""
    fileio.write(run_dir.path / ADDRESS_FILE, "".join(f"{item}\n" for item in addresses), run_dir.path)
