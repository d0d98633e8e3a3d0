from __future__ import annotations

import pytest

from trainkit.errors import UserError
from trainkit.swarm.address import announced, how_to_be_reached, worth_dialling

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def at(*hosts: str) -> list[str]:
    return [f"/ip{6 if ':' in host else 4}/{host}/tcp/4711/p2p/{PEER}" for host in hosts]


@pytest.mark.parametrize(
    ("hosts", "says"),
    [
        (("127.0.0.1",), "Only this machine reaches that."),
        (("127.0.0.1", "::1"), "Only this machine reaches that."),
        (("192.168.1.7", "127.0.0.1"), "Only machines of your own network reach that."),
        (("10.0.0.7", "fe80::1"), "Only machines of your own network reach that."),
    ],
)
def test_a_creator_whose_addresses_do_not_reach_far_is_told_how_to_be_reached(
    hosts: tuple[str, ...], says: str
) -> None:
    lines = " ".join(how_to_be_reached(at(*hosts)))
    assert lines.startswith(says)
    assert ("--host 0.0.0.0" if "Only this" in says else "--announce PUBLIC_ADDRESS:4711") in lines


@pytest.mark.parametrize("addresses", [at("45.10.10.11", "192.168.1.7"), [f"/dns/a.example.org/tcp/1/p2p/{PEER}"]])
def test_one_that_others_may_reach_is_told_nothing(addresses: list[str]) -> None:
    assert how_to_be_reached(addresses) == []


@pytest.mark.parametrize(
    ("text", "port", "address"),
    [
        ("45.10.10.11:4711", 0, "/ip4/45.10.10.11/tcp/4711"),
        ("45.10.10.11", 4712, "/ip4/45.10.10.11/tcp/4712"),
        ("[2a01:4f8::1]:4711", 0, "/ip6/2a01:4f8::1/tcp/4711"),
        ("/ip4/45.10.10.11/tcp/4711", 0, "/ip4/45.10.10.11/tcp/4711"),
        ("swarm.example.org:4711", 4712, "/dns/swarm.example.org/tcp/4711"),
    ],
)
def test_what_is_announced_is_a_host_and_a_port(text: str, port: int, address: str) -> None:
    assert announced(text, port) == address


@pytest.mark.parametrize("text", ["45.10.10.11", "a b:1", "45.10.10.11:70000", "/ip4/1.2.3.4/tcp/70000", ""])
def test_what_is_none_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="is no address"):
        announced(text, 0)


def test_behind_a_router_a_peers_ports_are_tried_where_its_connection_comes_from() -> None:
    own = ["/ip4/192.168.51.2/tcp/4711", "/ip4/127.0.0.1/tcp/4711"]
    assert worth_dialling(own, "45.10.10.51") == ["/ip4/45.10.10.51/tcp/4711"]


def test_public_addresses_and_names_are_tried_as_they_are() -> None:
    own = ["/ip4/45.10.10.11/tcp/4711", "/dns/swarm.example.org/tcp/4711"]
    assert worth_dialling(own, "45.10.10.99") == own


def test_nobody_can_have_another_peer_look_into_its_own_network() -> None:
    asked = ["/ip4/10.0.0.1/tcp/22", "/ip4/127.0.0.1/tcp/6379", "/ip4/169.254.169.254/tcp/80", "nonsense"]
    assert worth_dialling(asked, "45.10.10.66") == [f"/ip4/45.10.10.66/tcp/{port}" for port in (22, 6379, 80)]
    assert worth_dialling(asked, "") == []


def test_nobody_can_have_another_peer_dial_without_end() -> None:
    assert len(worth_dialling([f"/ip4/45.10.10.66/tcp/{port}" for port in range(1, 1000)], "45.10.10.66")) == 3
