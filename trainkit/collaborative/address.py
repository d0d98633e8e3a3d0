"""Addresses of a swarm: one line that people send to each other, ``/ip4/203.0.113.7/tcp/4711/p2p/QmPeer``.

It names a machine, a port, and the peer that must answer there, so a stranger on the same port is not mistaken for it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence

from trainkit import terminal
from trainkit.errors import UserError

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
    if kind in ("ip4", "ip6"):
        try:
            good = ipaddress.ip_address(host).version == int(kind[-1])
        except ValueError:
            good = False
        if not good:
            raise UserError(
                f"'{address}' has no usable address.", why=f"'{host}' is no {kind} address.", fix="Copy it again."
            )
    return address


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
        if kind.startswith("dns"):
            return (1, 0)
        ip = ipaddress.ip_address(host)
        return (4 if ip.is_loopback else 3 if ip.is_link_local else 2 if ip.is_private else 1, ip.version)

    return [address for address in sorted(addresses, key=rank) if rank(address)[0] < 9]


def join_command(addresses: Sequence[str]) -> str:
    """The line that others paste into their terminal."""
    return terminal.command("join", addresses[0])
