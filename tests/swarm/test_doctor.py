"""What ``swarm doctor`` says of a machine, short of joining."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from trainkit.config.schema import CollaborativeConfig
from trainkit.swarm import address
from trainkit.swarm.address import MEGABIT, Finding, examine
from trainkit.swarm.admission import Entry, by_address
from trainkit.swarm.invitations import Key, grant

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
About = Callable[..., dict[str, Finding]]


@pytest.fixture
def about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> About:
    """What the doctor finds about ways in, short of asking the swarm."""
    monkeypatch.setattr(address, "_swarm", lambda entry, env: iter([Finding("swarm", " ".join(entry.addresses))]))

    def look(*places: str, entry: Entry | None = None) -> dict[str, Finding]:
        entry = entry or by_address([f"{place}/p2p/{PEER}" for place in places], name="doctor")
        return {finding.what: finding for finding in examine(entry, {"TRAINKIT_RUNS": str(tmp_path / "runs")})}

    return look


@pytest.fixture
def listening() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}"


@pytest.fixture
def silent() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}"


def test_all_is_well_where_somebody_listens(about: About, listening: str) -> None:
    found = about(listening)
    assert {what: finding.exit_code for what, finding in found.items()} == {"device": 0, "tcp": 0, "swarm": 0}


def test_a_token_is_told_with_its_owner_and_an_unknown_name_with_its_fix(about: About) -> None:
    own = grant(Key(b"o" * 32), "hivemind-0001", "anna", "volunteer", 1.9e9)
    found = about(entry=Entry((f"/dns/nowhere.invalid/tcp/4711/p2p/{PEER}",), own))
    assert found["token"].found == "of anna, a volunteer of hivemind-0001, good until 2030-03-17 17:46 UTC"
    assert found["name"].found.startswith("nowhere.invalid is not known")
    assert (found["name"].exit_code, "tcp" in found) == (2, False)


def test_a_port_that_nobody_listens_on_is_the_swarms_fault(about: About, silent: str) -> None:
    found = about(silent)
    assert found["tcp"].found == f"127.0.0.1 port {silent.rpartition('/')[2]} refuses"
    assert (found["tcp"].exit_code, "swarm" in found) == (1, False)


def test_one_address_that_answers_is_enough(about: About, listening: str, silent: str) -> None:
    found = about(listening, silent)
    assert found["tcp"].found.endswith("refuses; another address answers")
    assert (found["tcp"].exit_code, found["swarm"].found) == (0, f"{listening}/p2p/{PEER}")


@pytest.mark.parametrize(
    ("megabits", "sync", "says", "remedy", "exit_code"),
    [
        (50.0, "diloco", "50.0 Mbit/s at least, and the run needs less", "", 0),
        (2.0, "diloco", "2.0 Mbit/s: this peer sends 8 bit, and each weight only in one of 6", "It can join", 0),
        (2.0, "gradients", "2.0 Mbit/s: the 6.0 MB of an update take 24.0 s", "", 0),
        (0.0, "diloco", "nobody takes what is sent", "Try again;", 1),
    ],
)
def test_an_upload_is_told_with_what_it_means_for_this_run(
    megabits: float, sync: str, says: str, remedy: str, exit_code: int
) -> None:
    rounds = CollaborativeConfig.model_validate({"round_seconds": 12.0, "sync": sync})
    found = address._upload(megabits * MEGABIT, 3_000_000, rounds)
    assert found.found.startswith(says)
    assert (found.remedy[:11].startswith(remedy), bool(found.remedy)) == (True, bool(remedy))
    assert found.exit_code == exit_code


def test_a_disk_without_room_is_told_before_anything_is_joined(
    about: About, silent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address, "_LEAST_FREE", 1 << 60)
    disk = about(silent)["disk"]
    assert (disk.exit_code, disk.remedy) == (2, "Free some space, or set TRAINKIT_RUNS to a folder with more.")


@pytest.mark.parametrize(("ahead", "exit_code"), [(0.2, 0), (-0.9, 0), (2.0, 2), (-40.0, 2)])
def test_a_clock_that_is_off_is_told(ahead: float, exit_code: int) -> None:
    finding = address._clock(ahead)
    assert (finding.exit_code, "timedatectl" in finding.remedy) == (exit_code, bool(exit_code))
    assert finding.found.endswith(f"{'ahead of' if ahead > 0 else 'behind'} the swarm's")


def test_a_finding_is_one_line_and_its_remedy_another() -> None:
    lines = Finding("tcp", "a\x1b[2Jb\nc refuses", "Ask its creator.", 1).lines()
    assert lines == ["FAIL  tcp        ab c refuses", "      fix: Ask its creator."]
