"""Who can be reached from where: what an address says by itself."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence

from trainkit.collaborative import address
from trainkit.errors import UserError

FORWARD = "Have your router and firewall let TCP port {port} through; add --port {port} --announce PUBLIC_IP:{port}."
_PLACE = re.compile(r"/(ip4|ip6|dns|dns4|dns6)/([\w.:-]+)/tcp/(\d{1,5})")
_MOST_DIALLED = 3


def how_to_be_reached(addresses: Sequence[str]) -> list[str]:
    """What the creator is told whose addresses do not reach far; empty if one of them does."""
    ips = [ip for item in addresses if (ip := _ip_of(item)) is not None]
    if len(ips) < len(addresses) or any(ip.is_global for ip in ips) or not ips:
        return []
    if all(ip.is_loopback for ip in ips):
        return ["Only this machine reaches that. To let others in, start it with --host 0.0.0.0 and a fixed --port."]
    port = address.port_of(addresses[0])
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
        if kind.startswith("dns") or _is_global(host):
            wanted[item] = None
        elif seen_ip:
            wanted[f"/ip{6 if ':' in seen_ip else 4}/{seen_ip}/tcp/{int(port)}"] = None
    return [*wanted][:_MOST_DIALLED]


def _is_global(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_global
    except ValueError:
        return False


def announced(text: str | None, port: int) -> str | None:
    """``--announce HOST[:PORT]`` as libp2p writes it, ``/ip4/HOST/tcp/PORT``, which will do as well.

    ``port``: the one to listen on, and to announce if no other is given.

    Raises UserError.
    """
    if text is None or (_PLACE.fullmatch(text) and 0 < address.port_of(text) < 65536):
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
    try:
        kind = f"ip{ipaddress.ip_address(host).version}"
    except ValueError:
        kind = "dns"
    return f"/{kind}/{host}/tcp/{there}"


def _ip_of(item: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    _, kind, host, *_ = item.split("/")
    return ipaddress.ip_address(host) if kind in ("ip4", "ip6") else None
