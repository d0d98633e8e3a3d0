from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from trainkit.config.schema import CollaborativeConfig
from trainkit.swarm import address
from trainkit.swarm.address import MEGABIT, Finding, examine
from trainkit.swarm.admission import Entry, by_address
from trainkit.swarm.invitations import Key, grant

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture
def about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Finding]]:
    """What the doctor finds about an address, short of asking the swarm."""
    monkeypatch.setattr(address, "_swarm", lambda entry, env: iter([Finding("swarm", " ".join(entry.addresses))]))

    def look(*addresses: str) -> dict[str, Finding]:
        entry = by_address(addresses, name="doctor")
        return {finding.what: finding for finding in examine(entry, {"TRAINKIT_RUNS": str(tmp_path / "runs")})}

    return look


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_all_is_well_where_somebody_listens(about: Callable[..., dict[str, Finding]], listening: int) -> None:
    found = about(f"/ip4/127.0.0.1/tcp/{listening}/p2p/{PEER}")
    assert [*found] == ["device", "tcp", "swarm"]
    assert {finding.exit_code for finding in found.values()} == {0}


def test_a_token_is_told_with_whose_it_is_and_how_long_it_is_good(tmp_path: Path) -> None:
    own = grant(Key(b"o" * 32), "hivemind-0001", "anna", "volunteer", 1.9e9)
    found = list(examine(Entry((f"/dns/nowhere.invalid/tcp/4711/p2p/{PEER}",), own), {"TRAINKIT_RUNS": str(tmp_path)}))
    assert [finding.found for finding in found if finding.what == "token"] == [
        "of anna, a volunteer of hivemind-0001, good until 2030-03-17 17:46 UTC"
    ]


def test_an_unknown_name_is_told_with_its_remedy(about: Callable[..., dict[str, Finding]]) -> None:
    found = about(f"/dns/nowhere.invalid/tcp/4711/p2p/{PEER}")
    assert found["name"].found.startswith("nowhere.invalid is not known")
    assert (found["name"].exit_code, "tcp" in found) == (2, False)


def test_a_port_that_nobody_listens_on_is_the_swarms_fault(about: Callable[..., dict[str, Finding]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = about(f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}")
    assert found["tcp"].found == f"127.0.0.1 port {port} refuses"
    assert (found["tcp"].exit_code, "swarm" in found) == (1, False)


def test_one_address_that_answers_is_enough(about: Callable[..., dict[str, Finding]], listening: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    dead, alive = (f"/ip4/127.0.0.1/tcp/{number}/p2p/{PEER}" for number in (port, listening))
    found = about(alive, dead)
    assert (found["tcp"].found, found["tcp"].exit_code) == (
        f"127.0.0.1 port {port} refuses; another address answers",
        0,
    )
    assert found["swarm"].found == alive


def upload(rate: float, **settings: Any) -> Finding:
    """What is said of a link of so many Mbit/s, for a model of 3 million weights and rounds of 12 s."""
    rounds = CollaborativeConfig(round_seconds=12.0, **settings)
    return address._upload(rate * MEGABIT, 3_000_000, rounds)


def test_an_upload_is_told_with_what_it_means_for_this_run() -> None:
    assert upload(50.0).found == "50.0 Mbit/s at least, and the run needs less"
    assert upload(2.0).found.startswith("2.0 Mbit/s: this peer sends 8 bit, and each weight only in one of 6")
    assert upload(2.0, sync="gradients").found == "2.0 Mbit/s: the 6.0 MB of an update take 24.0 s"


def test_who_is_slow_can_join_nonetheless_and_who_cannot_send_at_all_cannot() -> None:
    assert (upload(2.0).exit_code, upload(2.0).remedy != "") == (0, True)
    assert (upload(0.0).exit_code, upload(0.0).remedy[:10]) == (1, "Try again;")


def test_a_disk_without_room_is_told_before_anything_is_joined(
    about: Callable[..., dict[str, Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "_LEAST_FREE", 1 << 60)
    found = about(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}")
    assert (found["disk"].exit_code, found["disk"].remedy) == (
        2,
        "Free some space, or set TRAINKIT_RUNS to a folder with more.",
    )


@pytest.mark.parametrize(("ahead", "exit_code"), [(0.2, 0), (-0.9, 0), (2.0, 2), (-40.0, 2)])
def test_a_clock_that_is_off_is_told(ahead: float, exit_code: int) -> None:
    finding = address._clock(ahead)
    assert finding.exit_code == exit_code
    assert ("timedatectl" in finding.remedy) == bool(exit_code)


def test_a_finding_is_one_line_and_its_remedy_another() -> None:
    lines = Finding("tcp", "a\x1b[2Jb\nc refuses", "Ask its creator.", 1).lines()
    assert lines == ["FAIL  tcp        ab c refuses", "      fix: Ask its creator."]
