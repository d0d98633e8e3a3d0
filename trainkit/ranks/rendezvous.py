"""Where ranks meet: the head node's address and a port.

``python -m trainkit.ranks.rendezvous`` prints a free port; batch scripts call it on the head node.
"""

from __future__ import annotations

import hashlib
import ipaddress
import os
import random
import socket
from collections.abc import Iterable, Mapping
from pathlib import Path

from trainkit import reading
from trainkit.errors import UserError

PORTS = range(20000, 30000)
"""Below Linux's default ephemeral range (32768-60999): a port in that range can be taken, between our probe and
rank 0's bind, by any outgoing connection."""

_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def derived_port(job: str, attempt: int) -> int:
    """A port that all ranks compute alike, without a message: another one for each job, and for each attempt of it."""
    digest = hashlib.sha256(job.encode()).digest()
    # A stride that shares no factor with the span: the attempts of a job visit every port before one returns.
    return PORTS[(int.from_bytes(digest[:4], "big") + 7919 * attempt) % len(PORTS)]


def ephemeral_range(text: str) -> range:
    """The ports that the kernel gives to outgoing connections, from the text of ip_local_port_range."""
    first, last = text.split()
    return range(int(first), int(last) + 1)


def candidates(start: int, ephemeral: range) -> Iterable[int]:
    """Ports to try, from ``start`` on; none of them ephemeral, unless the site has made all of them so."""
    ring = [*range(start, PORTS.stop), *range(PORTS.start, start)]
    outside = [port for port in ring if port not in ephemeral]
    return outside or [port for port in range(1024, 65536) if port not in ephemeral] or ring


def free_port(start: int | None = None) -> int:
    """A port that nothing listens on here now, outside the ephemeral range; near ``start``, else anywhere."""
    try:
        ephemeral = ephemeral_range(reading.read_text(_EPHEMERAL))
    except OSError:  # not Linux: the range that IANA suggests, which macOS uses
        ephemeral = range(49152, 65536)
    for port in candidates(random.choice(PORTS) if start is None else start, ephemeral):
        if _is_free(port):
            return port
    raise UserError(
        "No free port for the ranks to meet on.",
        why=f"Everything outside the ephemeral range, from {PORTS.start} on, is taken on {socket.gethostname()}.",
        fix="Set MASTER_PORT to a free one.",
    )


def check_head(addr: str, num_nodes: int) -> None:
    """Refuse a head node that other nodes cannot reach: a name that does not resolve, or loopback on several nodes."""
    try:
        found = socket.getaddrinfo(addr, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise UserError(
            f"The head node '{addr}' cannot be found.",
            why=f"Its name does not resolve on {socket.gethostname()}: {error}.",
            fix="Give a name or an IP address that every node can resolve, as MASTER_ADDR or --master-addr.",
        ) from error
    addresses = sorted({str(entry[4][0]) for entry in found})
    # A scope ("fe80::1%eth0") is not part of the address.
    if num_nodes > 1 and all(ipaddress.ip_address(address.split("%")[0]).is_loopback for address in addresses):
        raise UserError(
            f"The head node '{addr}' is loopback ({', '.join(addresses)}), but there are {num_nodes} nodes.",
            why="On every other node that address is the node itself, so its ranks would wait for ever.",
            fix="Give the head node's address in the nodes' network, as MASTER_ADDR or --master-addr.",
        )


def head_address(addr: str) -> str | None:
    """The head node's address in the nodes' network, by its name as another node sees it; None if there is none."""
    try:
        found = socket.getaddrinfo(addr, None, type=socket.SOCK_STREAM)
    except OSError:
        return None
    addresses = [str(entry[4][0]).split("%")[0] for entry in found]
    return next((address for address in addresses if not ipaddress.ip_address(address).is_loopback), None)


def address_towards(addr: str) -> str | None:
    """This machine's own address on the route to ``addr``, as the kernel would choose it; nothing is sent."""
    there = head_address(addr)
    if there is None:
        return None
    with socket.socket(socket.AF_INET6 if ":" in there else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there, 9))
        except OSError:  # no route
            return None
        return str(probe.getsockname()[0]).split("%")[0]


def _is_free(port: int) -> bool:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # both families, as TCPStore listens
        # As TCPStore does: a port in TIME_WAIT from the attempt before may be used, one in LISTEN may not.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True


def start_for(env: Mapping[str, str]) -> int | None:
    """Where this job's search for a port begins: moves on with each restart; None outside of SLURM."""
    job = env.get("SLURM_JOB_ID")
    return derived_port(job, int(env.get("SLURM_RESTART_COUNT") or 0)) if job else None


if __name__ == "__main__":
    print(free_port(start_for(os.environ)))
