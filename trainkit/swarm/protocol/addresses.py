"""Addresses of a swarm, ``/ip4/203.0.113.7/tcp/4711/p2p/QmPeer``: who is reached there.

An address names a machine, a port, and the peer that must answer there, so a stranger on the same port is not mistaken
for it.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress

from trainkit.common.errors import UserError

EXAMPLE = "/ip4/203.0.113.7/tcp/4711/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
FORWARD = "Let your router and firewall pass TCP port {port}; add --port {port} --announce PUBLIC_IP:{port}."
MEGABIT = 125_000.0
"""Bytes."""
_MOST_DIALLED = 3
_PLACE = r"/(ip4|ip6|dns|dns4|dns6)/([\w.:-]+)/tcp/(\d{1,5})"
# base58 has no 0, O, I and l. Identities here are RSA keys, whose ids begin with Qm and are 46 characters long.
_ADDRESS = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d{1,5})/p2p/(Qm[1-9A-HJ-NP-Za-km-z]{44})")


def check_address(address: str) -> str:
    """``address`` if it is one; quick, so that a mistyped one is refused before anything heavy is imported.

    Raises UserError.
    """
    match = _ADDRESS.fullmatch(address)
    if match:
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
    """Return those of ``addresses`` that are some, without repetition; they come from others, and become dialled."""
    good: dict[str, None] = {}
    for item in addresses:
        with suppress(UserError):
            good[check_address(str(item))] = None
    return tuple(good)[:MOST_OTHERS]


def is_address(text: str) -> bool:
    """Return whether ``text`` is meant as an address and not as the name or path of a run."""
    return "/p2p/" in text or text.startswith(("/ip4/", "/ip6/", "/dns"))


def peer_of(address: str) -> str:
    """Id of the peer at the end of an address."""
    return address.rsplit("/p2p/", 1)[1]


def port_of(address: str) -> int:
    """TCP port of a peer's address."""
    return int(address.split("/tcp/", 1)[1].split("/", 1)[0])


def nobody_answers(address: str) -> UserError:
    """Return what is to be said when the peer at ``address`` does not answer."""
    why = "The run is over or has moved, a firewall blocks it, or this invitation was revoked."
    fix = "Ask whoever runs it for a token, which `python -m jobs.swarm invite` makes."
    return UserError(f"No peer of the swarm answers at {address}.", why=why, fix=fix)


def best_first(addresses: Iterable[str]) -> list[str]:
    """Addresses in the order in which others should try them: public ones, private ones, this machine only.

    Other transports than TCP (QUIC, relays) are left out: nobody needs them here.
    """

    def rank(address: str) -> tuple[int, ...]:
        ip = _ip(address.split("/")[2])
        return () if ip is None else (ip.is_loopback, ip.is_link_local, ip.is_private, ip.version)

    return sorted(filter(_ADDRESS.fullmatch, addresses), key=rank)


def how_to_be_reached(addresses: Sequence[str]) -> list[str]:
    """Return what the creator is told whose addresses do not reach far; empty if one of them does."""
    ips = [_ip(item.split("/")[2]) for item in addresses]
    if not ips or any(ip is None or ip.is_global for ip in ips):
        return []
    return [
        "Only this machine and its network reach that. To let others in, add --through HOST, which they reach; or",
        f"start it with --host 0.0.0.0. {FORWARD.format(port=port_of(addresses[0]))}",
    ]


def worth_dialling(announced: Sequence[str], seen_ip: str, own_place: str | None = None) -> list[str]:
    """Return those addresses, ``/ip4/HOST/tcp/PORT``, that another peer should dial of those that one announces.

    Behind a router a peer announces addresses of its own network; then its ports are tried where its connection comes
    from. Nothing else that is private is dialled, or any peer could have another one look into its network; except the
    host of ``own_place``, where the owner of the dialling peer announces it: an anchor on a campus may be private.
    """
    own_host = own_place.split("/")[2] if own_place else None
    wanted: dict[str, None] = {}
    for item in announced:
        match = re.fullmatch(_PLACE, item)
        if match is None or not 0 < (port := int(match[3])) < 65536:
            continue
        ip = _ip(match[2])
        if match[1].startswith("dns") or (ip is not None and ip.is_global) or match[2] == own_host:
            wanted[item] = None
        elif seen_ip:
            wanted[f"/ip{6 if ':' in seen_ip else 4}/{seen_ip}/tcp/{port}"] = None
    return [*wanted][:_MOST_DIALLED]


def announced(text: str | None, port: int, flag: str = "--announce") -> str | None:
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
        fix = f"For example --port 4711 {flag} 203.0.113.7:4711."
        raise UserError(f"{flag} {text} is not an address.", why=why, fix=fix)
    host = match[1] or match[2]
    ip = _ip(host)
    return f"/{f'ip{ip.version}' if ip else 'dns'}/{host}/tcp/{there}"


MOST_OTHERS = 16
"""Most peers that are remembered, of those that can be reached."""
