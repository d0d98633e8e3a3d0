"""A small internet of network namespaces, of this test alone: public machines, and homes behind a router each.

Its "public" addresses exist nowhere else, and nothing leads out of it. Making it needs root.
"""

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import pytest

from tests import debian

_numbers = count(1)


@dataclass(frozen=True)
class Internet:
    """Machines by name: ``pub1``, ... have an address of their own, ``lan1``, ... are behind ``nat1``, ..."""

    tag: str
    network: str = "45.10.10"

    def on(self, machine: str) -> tuple[str, ...]:
        """What starts a command there."""
        return ("ip", "netns", "exec", f"{self.tag}-{machine}")

    def address(self, machine: str) -> str:
        """Its address, as the others know it."""
        return f"{self.network}.{(10 if machine.startswith('pub') else 50) + int(machine[3:])}"

    def slow(self, machine: str, upload: str) -> None:
        """Let it send so much at most, as ``2mbit``; skips the test where that cannot be made."""
        limit = ("qdisc", "add", "dev", "eth0", "root", "tbf", "rate", upload, "burst", "16kb", "latency", "400ms")
        try:
            subprocess.run([*self.on(machine), "tc", *limit], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no slow links here: {getattr(error, 'stderr', None) or error}")

    @contextmanager
    def split(self, *machines: str) -> Iterator[None]:
        """Cut those machines (``pub1``, ``nat1``) off the others, with no word to anybody, and connect them again."""
        try:
            self._plug(machines, "br1")
            yield
        finally:
            self._plug(machines, "br0")

    def _plug(self, machines: Sequence[str], switch: str) -> None:
        for machine in machines:
            _ip("-n", f"{self.tag}-inet", "link", "set", f"v-{machine}", "master", switch)


@contextmanager
def internet(*, public: int, homes: int, network: str = "45.10.10") -> Iterator[Internet]:
    """So many public machines, and so many behind a router that lets nobody in.

    Skips the test where that cannot be made.
    """
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    debian.program("ip", package="iproute2")
    debian.program("iptables", package="iptables")
    _remove_those_of_killed_tests()
    net = Internet(f"tk{os.getpid()}-{next(_numbers)}", network)
    names = ["inet", *(f"pub{i + 1}" for i in range(public))]
    names += [f"{kind}{i + 1}" for i in range(homes) for kind in ("nat", "lan")]
    made: list[str] = []
    try:
        for name in names:
            try:
                _ip("netns", "add", f"{net.tag}-{name}")
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
            made.append(name)
            _ip("-n", f"{net.tag}-{name}", "link", "set", "lo", "up")
        for switch in ("br0", "br1"):
            _ip("-n", f"{net.tag}-inet", "link", "add", switch, "type", "bridge")
            _ip("-n", f"{net.tag}-inet", "link", "set", switch, "up")
        for i in range(public):
            _attach(net, f"pub{i + 1}")
        for i in range(homes):
            _attach(net, f"nat{i + 1}")
            _home(net, i + 1)
        yield net
    finally:
        for name in made:
            subprocess.run(["ip", "netns", "del", f"{net.tag}-{name}"], check=False)


def _remove_those_of_killed_tests() -> None:
    for left in Path("/run/netns").glob("tk*-*-*"):
        pid = left.name.removeprefix("tk").partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            subprocess.run(["ip", "netns", "del", left.name], check=False)


def _attach(net: Internet, machine: str) -> None:
    inside = f"{net.tag}-{machine}"
    _ip("-n", f"{net.tag}-inet", "link", "add", f"v-{machine}", "type", "veth", "peer", "name", "eth0", "netns", inside)
    _ip("-n", f"{net.tag}-inet", "link", "set", f"v-{machine}", "master", "br0", "up")
    _ip("-n", inside, "addr", "add", f"{net.address(machine)}/24", "dev", "eth0")
    _ip("-n", inside, "link", "set", "eth0", "up")


def _home(net: Internet, number: int) -> None:
    router, inside, lan = f"{net.tag}-nat{number}", f"{net.tag}-lan{number}", f"192.168.{50 + number}"
    _ip("-n", router, "link", "add", "lan0", "type", "veth", "peer", "name", "eth0", "netns", inside)
    _ip("-n", router, "addr", "add", f"{lan}.1/24", "dev", "lan0")
    _ip("-n", router, "link", "set", "lan0", "up")
    _ip("-n", inside, "addr", "add", f"{lan}.2/24", "dev", "eth0")
    _ip("-n", inside, "link", "set", "eth0", "up")
    _ip("-n", inside, "route", "add", "default", "via", f"{lan}.1")
    _ip("netns", "exec", router, "sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
    _ip("netns", "exec", router, "iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "eth0", "-j", "MASQUERADE")
    for chain in ("FORWARD", "INPUT"):
        for rule in (["-i", "lan0"], ["-m", "conntrack", "--ctstate", "ESTABLISHED,RELATED"]):
            _ip("netns", "exec", router, "iptables", "-A", chain, *rule, "-j", "ACCEPT")
        _ip("netns", "exec", router, "iptables", "-P", chain, "DROP")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)
