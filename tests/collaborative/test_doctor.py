from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainkit.collaborative import doctor
from trainkit.collaborative.doctor import Finding, examine
from trainkit.collaborative.entry import by_address

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


@pytest.fixture
def about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], dict[str, Finding]]:
    """What the doctor finds about an address, short of asking the swarm."""
    monkeypatch.setattr(doctor, "_swarm", lambda entry, env: iter([Finding("swarm", " ".join(entry.addresses))]))

    def look(address: str) -> dict[str, Finding]:
        entry = by_address([address], name="doctor")
        return {finding.what: finding for finding in examine(entry, {"TRAINKIT_RUNS": str(tmp_path / "runs")})}

    return look


@pytest.fixture
def listening() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_all_is_well_where_somebody_listens(about: Callable[[str], dict[str, Finding]], listening: int) -> None:
    found = about(f"/ip4/127.0.0.1/tcp/{listening}/p2p/{PEER}")
    assert [*found] == ["device", "tcp", "swarm"]
    assert {finding.exit_code for finding in found.values()} == {0}


def test_an_unknown_name_is_told_with_its_remedy(about: Callable[[str], dict[str, Finding]]) -> None:
    found = about(f"/dns/nowhere.invalid/tcp/4711/p2p/{PEER}")
    assert found["name"].found.startswith("nowhere.invalid is not known")
    assert (found["name"].exit_code, "tcp" in found) == (2, False)


def test_a_port_that_nobody_listens_on_is_the_swarms_fault(about: Callable[[str], dict[str, Finding]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    found = about(f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}")
    assert found["tcp"].found == f"127.0.0.1 port {port} refuses"
    assert (found["tcp"].exit_code, "swarm" in found) == (1, False)


def test_a_disk_without_room_is_told_before_anything_is_joined(
    about: Callable[[str], dict[str, Finding]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_LEAST_FREE", 1 << 60)
    found = about(f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}")
    assert (found["disk"].exit_code, found["disk"].remedy) == (
        2,
        "Free some space, or set TRAINKIT_RUNS to a folder with more.",
    )


@pytest.mark.parametrize(("ahead", "exit_code"), [(0.2, 0), (-0.9, 0), (2.0, 2), (-40.0, 2)])
def test_a_clock_that_is_off_is_told(ahead: float, exit_code: int) -> None:
    finding = doctor._clock(ahead)
    assert finding.exit_code == exit_code
    assert ("timedatectl" in finding.remedy) == bool(exit_code)


def test_a_finding_is_one_line_and_its_remedy_another() -> None:
    lines = Finding("tcp", "a\x1b[2Jb\nc refuses", "Ask its creator.", 1).lines()
    assert lines == ["FAIL  tcp        ab c refuses", "      fix: Ask its creator."]
