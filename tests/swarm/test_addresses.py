"""Addresses, who can be reached where, how far a clock is off, and what a run folder remembers of a swarm."""

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainkit.common.errors import UserError
from trainkit.run.folder import SWARM_IDENTITY, RunDir
from trainkit.swarm.network import wall_clock
from trainkit.swarm.peer.place import SavedPeer, keep_identity, saved_peer
from trainkit.swarm.protocol.addresses import (
    EXAMPLE,
    announced,
    best_first,
    check_address,
    how_to_be_reached,
    is_address,
    known_of,
    peer_of,
    worth_dialling,
)

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.mark.parametrize(
    "place", ["ip4/203.0.113.7/tcp/4711", "ip6/2001:db8::1/tcp/1", "dns/swarm.example.org/tcp/65535"]
)
def test_an_address_has_a_machine_a_port_and_a_peer(place: str) -> None:
    text = f"/{place}/p2p/{PEER}"
    assert (check_address(text), peer_of(text)) == (text, PEER)
    assert check_address(EXAMPLE)  # of the message


@pytest.mark.parametrize(
    "text",
    [
        "",
        "203.0.113.7:4711",
        "/ip4/203.0.113.7/tcp/4711",
        f"/ip4/203.0.113.7/tcp/4711/p2p/{PEER[:-1]}",  # not copied to its end
        f"/ip4/203.0.113.7/tcp/4711/p2p/{PEER[:-1]}0",  # no letter of base58
        f"/ip4/203.0.113.777/tcp/4711/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/0/p2p/{PEER}",
        f"/ip4/203.0.113.7/tcp/70000/p2p/{PEER}",
        f"/ip4/203.0.113.7/udp/4711/p2p/{PEER}",
    ],
)
def test_a_mistyped_address_is_refused_with_its_remedy(text: str) -> None:
    with pytest.raises(UserError, match=r"\n  why: .+\n  fix: .+"):
        check_address(text)


def test_public_addresses_come_first() -> None:
    addresses = [f"/ip4/{machine}/tcp/1/p2p/{PEER}" for machine in ("8.8.8.8", "10.0.0.5", "127.0.0.1")]
    quic = f"/ip4/8.8.8.8/udp/1/quic/p2p/{PEER}"  # of another transport: it is left out
    assert best_first([quic, *reversed(addresses)]) == addresses


def test_an_address_is_told_from_a_run() -> None:
    words = ("/ip4/1.2.3.4", f"x/p2p/{PEER}", "runs/hivemind-0001", "/home/me/runs/a")
    assert [is_address(word) for word in words] == [True, True, False, False]


@pytest.mark.parametrize(
    ("places", "is_told"),
    [
        (["ip4/127.0.0.1", "ip6/::1"], True),
        (["ip4/192.168.1.7"], True),
        (["ip4/45.10.10.11", "ip4/192.168.1.7"], False),
        (["dns/a.example.org"], False),
    ],
)
def test_a_creator_that_is_not_reached_from_far_is_told_how_it_can_be(places: list[str], is_told: bool) -> None:
    lines = " ".join(how_to_be_reached([f"/{place}/tcp/4711/p2p/{PEER}" for place in places]))
    assert ("--port 4711 --announce PUBLIC_IP:4711" in lines) == bool(lines) == is_told


@pytest.mark.parametrize(
    ("text", "port", "told"),
    [
        ("45.10.10.11:4711", 0, "/ip4/45.10.10.11/tcp/4711"),
        ("45.10.10.11", 4712, "/ip4/45.10.10.11/tcp/4712"),
        ("[2a01:4f8::1]:4711", 0, "/ip6/2a01:4f8::1/tcp/4711"),
        ("/ip4/45.10.10.11/tcp/4711", 0, "/ip4/45.10.10.11/tcp/4711"),
        ("swarm.example.org:4711", 4712, "/dns/swarm.example.org/tcp/4711"),
        *((text, 0, None) for text in ("45.10.10.11", "a b:1", "45.10.10.11:70000", "/ip4/1.2.3.4/tcp/70000", "")),
    ],
)
def test_what_is_announced_is_a_host_and_a_port_or_refused(text: str, port: int, told: str | None) -> None:
    with nullcontext() if told else pytest.raises(UserError, match="is not an address"):
        assert announced(text, port) == told


def test_a_peer_is_dialled_where_it_can_be_and_nowhere_else() -> None:
    """Behind a router where its call comes from; nobody has another peer look into its network, or dial for ever."""
    public = ["/ip4/45.10.10.11/tcp/4711", "/dns/swarm.example.org/tcp/4711"]
    inside = ["/ip4/10.0.0.1/tcp/22", "/ip4/127.0.0.1/tcp/6379", "/ip4/169.254.169.254/tcp/80", "nonsense"]
    assert worth_dialling(public, "45.10.10.99") == public
    assert worth_dialling(inside, "45.10.10.66") == [f"/ip4/45.10.10.66/tcp/{port}" for port in (22, 6379, 80)]
    assert worth_dialling(inside, "") == []
    anchor = "/ip4/10.0.0.1/tcp/4712"
    assert worth_dialling([anchor, *inside[1:]], "", "/ip4/10.0.0.1/tcp/4711") == [anchor], "on a campus"
    assert len(worth_dialling([f"/ip4/45.10.10.66/tcp/{port}" for port in range(1, 1000)], "45.10.10.66")) == 3


@pytest.mark.parametrize(
    ("ahead", "there", "back", "known"),
    [
        *((ahead, 0.001, 0.001, ahead) for ahead in (2.5, 0.3, 0.0, -0.3, -2.5)),
        *((0.0, there, back, 0.0) for there, back in ((3.0, 0.1), (0.1, 3.0), (2.0, 2.0))),  # slow is not wrong
    ],
)
def test_a_clock_is_compared_as_far_as_the_way_to_the_other_allows(
    ahead: float, there: float, back: float, known: float
) -> None:
    found = wall_clock.ahead_by(100.0 + ahead, 100.0 + there, 100.0 + there + back + ahead)
    assert found == pytest.approx(known, abs=0.02 if known else 0.0)


@pytest.mark.parametrize(
    ("ahead", "how"),
    [
        (None, ""),
        (wall_clock.MOST_APART, ""),
        (-wall_clock.MOST_APART, ""),
        (2.5, "2.5 s ahead of"),
        (-1.2, "1.2 s behind"),
    ],
)
def test_a_clock_that_differs_is_named_with_the_remedy(ahead: float | None, how: str) -> None:
    swarm = SimpleNamespace(in_dht=lambda work, seconds, otherwise: ahead)
    refused = pytest.raises(UserError, match=f"The clock of this machine is {how} the swarm's.[^$]*timedatectl")
    with refused if how else nullcontext():
        assert wall_clock.require_same_time(swarm, ["/ip4/127.0.0.1/tcp/1/p2p/x"]) is (ahead is not None)


HOME = SavedPeer("hivemind-0001-0123abcd", 448830083, "0.0.0.0", 4711, None, "anna")


def at_home(port: int) -> str:
    return f"/ip4/203.0.113.7/tcp/{port}/p2p/{PEER}"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "hivemind-0001", "seed: 0\n")


def test_a_peer_comes_back_to_the_place_that_it_has_left(run: RunDir) -> None:
    assert saved_peer(run) is None
    home = replace(HOME, announce="/dns/swarm.example.org/tcp/4711", others=(at_home(1), at_home(2)))
    home.write(run)
    assert saved_peer(run) == home
    file = run.path / "swarm.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text(encoding="utf-8")), "is_anchor": False}), encoding="utf-8"
    )  # as before
    assert saved_peer(run) == home
    for nonsense in ("", "[]", '{"run_id": "a"}', '{"run_id": "a", "first_round": "x"}'):
        file.write_text(nonsense, encoding="utf-8")
        with pytest.raises(UserError, match=r"swarm\.json does not say where the swarm was"):
            saved_peer(run)


def test_the_key_is_kept_for_its_user_alone_and_never_replaced(run: RunDir) -> None:
    for key in (b"first", b"second"):
        keep_identity(run, key)
    assert SWARM_IDENTITY.at(run.path).read_bytes() == b"first"
    assert SWARM_IDENTITY.at(run.path).stat().st_mode & 0o777 == 0o600


def test_what_is_no_address_is_not_remembered() -> None:
    told = [at_home(1), "\x1b[2J", at_home(2), at_home(1), 7, f"/ip4/nowhere/tcp/1/p2p/{PEER}"]
    assert known_of(told) == (at_home(1), at_home(2))
