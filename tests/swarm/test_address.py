from __future__ import annotations

import pytest

from trainkit.errors import UserError
from trainkit.swarm import address

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.mark.parametrize(
    "text",
    [
        f"/ip4/203.0.113.7/tcp/4711/p2p/{PEER}",
        f"/ip6/2001:db8::1/tcp/1/p2p/{PEER}",
        f"/dns/swarm.example.org/tcp/65535/p2p/{PEER}",
    ],
)
def test_an_address_has_a_machine_a_port_and_a_peer(text: str) -> None:
    assert address.check(text) == text
    assert address.peer_of(text) == PEER


@pytest.mark.parametrize(
    "text",
    [
        "",
        "203.0.113.7:4711",
        "/ip4/203.0.113.7/tcp/4711",
        f"/ip4/203.0.113.7/tcp/4711/p2p/{PEER[:-1]}",  # not copied to its end
        f"/ip4/203.0.113.7/tcp/4711/p2p/{PEER[:-1]}0",  # no letter of base58
        f"/ip4/203.0.113.777/tcp/4711/p2p/{PEER}",
        f"/ip6/203.0.113.7/tcp/4711/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/0/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/70000/p2p/{PEER}",
        f"/ip4/203.0.113.7/udp/4711/p2p/{PEER}",
    ],
)
def test_a_mistyped_address_is_refused_with_what_is_wrong_and_how_to_mend_it(text: str) -> None:
    with pytest.raises(UserError) as caught:
        address.check(text)
    assert caught.value.why
    assert caught.value.fix


def test_the_example_in_the_message_is_an_address() -> None:
    assert address.check(address.EXAMPLE)


def test_public_addresses_come_before_private_ones_and_loopback_comes_last() -> None:
    machines = ["127.0.0.1", "10.0.0.5", "8.8.8.8"]
    addresses = [f"/ip4/{machine}/tcp/1/p2p/{PEER}" for machine in machines]
    assert address.best_first(addresses) == addresses[::-1]


def test_the_address_by_which_nodes_of_a_job_know_each_other_comes_first() -> None:
    addresses = [f"/ip4/{machine}/tcp/1/p2p/{PEER}" for machine in ("8.8.8.8", "10.0.0.5")]
    assert address.best_first(addresses, "10.0.0.5") == addresses[::-1]


def test_addresses_of_other_transports_are_left_out() -> None:
    assert address.best_first([f"/ip4/8.8.8.8/udp/1/quic/p2p/{PEER}"]) == []


@pytest.mark.parametrize(
    ("text", "is_address"),
    [("/ip4/1.2.3.4", True), (f"x/p2p/{PEER}", True), ("runs/hivemind-0001", False), ("/home/me/runs/a", False)],
)
def test_an_address_is_told_from_a_run(text: str, is_address: bool) -> None:
    assert address.looks_like(text) is is_address
