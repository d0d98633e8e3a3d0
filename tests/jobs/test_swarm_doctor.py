"""What ``swarm doctor`` says of a machine, short of joining."""

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit.swarm.identity.invitations import Entry, Key, grant
from trainkit.swarm.peer import doctor
from trainkit.swarm.peer.doctor import DoctorFinding, examine

PEER = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
OWN = grant(Key(b"o" * 32), "hivemind-0001", "anna", "volunteer", 1.9e9)
About = Callable[..., dict[str, DoctorFinding]]


@pytest.fixture
def about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> About:
    """What the doctor finds about ways in, short of asking the swarm."""
    monkeypatch.setattr(doctor, "_swarm", lambda entry, env: iter([DoctorFinding("swarm", " ".join(entry.addresses))]))

    def look(*places: str, entry: Entry | None = None) -> dict[str, DoctorFinding]:
        entry = entry or Entry(tuple(f"{place}/p2p/{PEER}" for place in places), OWN)
        return {finding.what: finding for finding in examine(entry, {"TRAINKIT_RUNS": str(tmp_path / "runs")})}

    return look


def test_a_token_is_told_with_its_owner_and_an_unknown_name_with_its_fix(about: About) -> None:
    found = about("/dns/nowhere.invalid/tcp/4711")
    assert found["token"].found == "of anna, a volunteer of hivemind-0001, good until 2030-03-17 17:46 UTC"
    assert found["name"].found.startswith("nowhere.invalid does not resolve: ")
    assert (found["name"].exit_code, "tcp" in found) == (2, False)
    assert about(f"/dns/{'a' * 64}.org/tcp/4711")["name"].exit_code == 2  # no name can be so long


def test_where_somebody_listens_all_is_well_and_one_address_is_enough(about: About) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_server(("127.0.0.1", 0)) as closed:
        listening, silent = (f"/ip4/127.0.0.1/tcp/{one.getsockname()[1]}" for one in (server, closed))
        closed.close()
        found = about(listening)
        well = {what: finding.exit_code for what, finding in found.items()}
        assert well == {"device": 0, "token": 0, "tcp": 0, "swarm": 0}
        found = about(listening, silent)
        assert found["tcp"].found.endswith("Connection refused; another address answers")
        assert (found["tcp"].exit_code, found["swarm"].found) == (0, f"{listening}/p2p/{PEER}")
        found = about(silent)
        assert found["tcp"].found == f"127.0.0.1 port {silent.rpartition('/')[2]}: Connection refused"
        assert (found["tcp"].exit_code, "swarm" in found) == (1, False)


def test_a_disk_without_room_is_told_before_anything_is_joined(about: About, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_LEAST_FREE", 1 << 60)
    disk = about("/ip4/127.0.0.1/tcp/9")["disk"]
    assert (disk.exit_code, disk.remedy) == (2, "Free some space, or set TRAINKIT_RUNS to a folder with more.")


def test_a_finding_is_one_line_and_its_remedy_another() -> None:
    lines = DoctorFinding("tcp", "a\x1b[2Jb\nc refuses", "Ask its creator.", 1).lines()
    assert lines == ["FAIL  tcp        ab c refuses", "      fix: Ask its creator."]


@pytest.mark.parametrize(
    ("own", "found", "command"),
    [
        (["127.0.0.1", "192.168.51.2", "45.10.10.11"], "itself, at 45.10.10.11, ", ""),
        (["127.0.0.1", "::1", "192.168.51.2", "2a01:4f8::1"], "through an anchor: ", "swarm create hivemind --through"),
        (["127.0.0.1"], "through an anchor: it has no public address (it has none); ", "swarm anchor"),
    ],
)
def test_a_creator_is_told_in_which_way_others_would_reach_it(own: list[str], found: str, command: str) -> None:
    reach = doctor.reach_of(own)
    assert reach.found.startswith(found)
    assert command in reach.remedy
    assert bool(reach.remedy) == bool(command)
    assert reach.exit_code == 0
