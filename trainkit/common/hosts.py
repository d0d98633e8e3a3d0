"""Lists of hosts as SLURM writes them: `n[1-3,5]`."""

from __future__ import annotations

import hashlib
import itertools
import math
import re
import secrets
import socket
from collections.abc import Iterable, Sequence
from pathlib import Path

from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError

_MOST = 100_000
"""Hosts in one list; SLURM itself knows at most 65,533."""
_LONGEST = 1 << 20
"""Characters of a list."""
_RANGES = r"\d{1,18}(?:-\d{1,18})?(?:,\d{1,18}(?:-\d{1,18})?)*"
_ITEM = rf"(?:[^,\[\]\s]|\[{_RANGES}\])+"  # a comma inside brackets does not end an item
_LIST = re.compile(rf"{_ITEM}(?:,{_ITEM})*")
_NUMBER = re.compile(r"(.*?)(\d+)(\D*)", re.DOTALL)  # the last one of a host name
_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand(nodelist: str) -> list[str]:
    """The host names of ``nodelist`` in its order, which is SLURM's order of nodes.

    ``rack[1-2]-n[03-04]`` is ``rack1-n03, rack1-n04, rack2-n03, rack2-n04``; leading zeros are kept.
    Raises UserError if it is empty, malformed, or longer than any machine's.
    """
    hosts: list[str] = []
    try:
        if len(nodelist) > _LONGEST or not _LIST.fullmatch(nodelist):
            raise ValueError
        for item in re.findall(_ITEM, nodelist):
            choices: list[list[str]] = []
            for at, part in enumerate(re.split(r"[\[\]]", item)):  # text, ranges, text, ...
                choices.append(_numbers(part) if at % 2 else [part])
            if math.prod(map(len, choices)) + len(hosts) > _MOST:
                raise ValueError
            hosts += map("".join, itertools.product(*choices))
    except ValueError:
        what = f"Cannot read the host list '{terminal.one_line(nodelist, 200)}'."
        fix = "Give host names, or a list that 'scontrol show hostnames' can read."
        raise UserError(what, why="SLURM writes them like 'n1,n2' or 'gpu[03-05,9]'.", fix=fix) from None
    return hosts


def _numbers(ranges: str) -> list[str]:
    numbers: list[str] = []
    for piece in ranges.split(","):
        first, _, last = piece.partition("-")
        count = int(last or first) - int(first) + 1
        if not 0 < count <= _MOST - len(numbers):
            raise ValueError
        numbers += [str(int(first) + at).zfill(len(first)) for at in range(count)]
    return numbers


def fold(hosts: Sequence[str]) -> str:
    """``hosts`` for people, in their order: three and more in a row are ``n[01-32]``."""
    rows: list[list[str]] = []
    for host in hosts:
        if rows and host == _successor(rows[-1][-1]):
            rows[-1].append(host)
        else:
            rows.append([host])
    words: list[str] = []
    for row in rows:
        first = _NUMBER.fullmatch(row[0])
        if len(row) > 2 and first is not None:
            last = row[-1][len(first[1]) :].removesuffix(first[3])
            row = [f"{first[1]}[{first[2]}-{last}]{first[3]}"]
        words += row
    return ", ".join(words)


def _successor(host: str) -> str | None:
    match = _NUMBER.fullmatch(host)
    return match and f"{match[1]}{int(match[2]) + 1:0{len(match[2])}}{match[3]}"


def expand_counts(counts: str) -> list[int]:
    """SLURM_TASKS_PER_NODE, one number per node: ``2(x3),1`` is ``[2, 2, 2, 1]``."""
    found: list[int] = []
    for item in counts.split(","):
        match = _COUNT.fullmatch(item)
        if match is None:
            fix = "Leave SLURM_TASKS_PER_NODE as SLURM sets it."
            why = "SLURM writes them like '4' or '2(x3),1'."
            raise UserError(f"Cannot read the tasks per node '{counts}'.", why=why, fix=fix)
        found += [int(match[1])] * int(match[2] or 1)
    return found


PORTS = range(20000, 30000)
"""Below Linux's default ephemeral range (32768-60999): a port in that range can be taken, between our probe and
rank 0's bind, by any outgoing connection."""
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


def derived_port(job: str, attempt: int) -> int:
    """A port that all ranks compute alike, without a message: another one for each job, and for each attempt of it."""
    digest = hashlib.sha256(job.encode()).digest()
    # A stride that shares no factor with the span: the attempts of a job visit every port before one returns.
    return PORTS[(int.from_bytes(digest[:4], "big") + 7919 * attempt) % len(PORTS)]


def candidates(start: int, ephemeral: range) -> Iterable[int]:
    """Ports to try, from ``start`` on; none of them ephemeral, unless the site has made all of them so."""
    ring = [*range(start, PORTS.stop), *range(PORTS.start, start)]
    for ports in (ring, range(1024, 65536)):
        outside = sorted(set(ports).difference(ephemeral), key=lambda port: (port < start, port))
        if outside:
            return outside
    return ring


def free_port(start: int | None = None) -> int:
    """A port that nothing listens on here now, outside the kernel's range for outgoing connections; near ``start``,
    else anywhere."""
    try:
        first, last = map(int, fileio.read_text(_EPHEMERAL).split())
    except OSError:  # not Linux: the range that IANA suggests, which macOS uses
        first = 49152
        last = 65535
    for port in candidates(secrets.choice(PORTS) if start is None else start, range(first, last + 1)):
        if is_free(port):
            return port
    why = f"All ports from {PORTS.start} on, outside the ephemeral range, are taken on {socket.gethostname()}."
    raise UserError(
        "There is no free port on which the ranks could meet.", why=why, fix="Set MASTER_PORT to a free one."
    )


def is_free(port: int) -> bool:
    """True if a server may listen on this port of this machine."""
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    with socket.socket(family) as probe:
        if family == socket.AF_INET6:
            probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)  # both families, as TCPStore listens
        # As TCPStore does: a port in TIME_WAIT from the attempt before may be used, one in LISTEN may not.
        # Bound and not listened on: ranks that dial already would be accepted, and then cut off.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("", port))
        except OSError:
            return False
    return True
