"""Three strikes, and the list of who is out."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import swarm
from trainkit import fileio
from trainkit.errors import UserError
from trainkit.run.folder import RunDir
from trainkit.swarm.admission import Admission, Member, own_pass, revoked_list
from trainkit.swarm.bans import STRIKES, Ban, Bans, Strikes, banned_with, bans_list, read_bans
from trainkit.swarm.invitations import GUESTS, Key, Role, UntrustedError, grant
from trainkit.swarm.robust import Verdict

EVE = Ban("QmEve", "eve", "sent values that are not finite")
DROPPED = Verdict("QmEve", "dropped", EVE.why)


def test_three_rounds_in_a_row_are_too_many_and_a_good_one_between_starts_anew() -> None:
    strikes, both = Strikes(), ["QmEve", "QmAnn"]
    assert [strikes.note([DROPPED], both) for _ in range(STRIKES - 1)] == [{}] * (STRIKES - 1)
    assert strikes.note([], both) == {}
    assert [strikes.note([DROPPED], both) for _ in range(STRIKES - 1)] == [{}] * (STRIKES - 1)
    assert strikes.note([DROPPED], both) == {"QmEve": EVE.why}


def test_staying_away_for_a_round_does_not_wipe_the_slate() -> None:
    strikes = Strikes()
    for _ in range(STRIKES - 1):
        strikes.note([DROPPED], ["QmEve"])
        strikes.note([], ["QmAnn"])
    assert strikes.note([DROPPED], ["QmEve"]) == {"QmEve": EVE.why}


def test_to_be_clipped_is_no_strike() -> None:
    strikes = Strikes()
    assert [strikes.note([Verdict("QmEve", "clipped", "long")], ["QmEve"]) for _ in range(5)] == [{}] * 5


def test_to_be_left_out_is_no_strike_nor_does_it_wipe_one_out() -> None:
    strikes, left_out = Strikes(), Verdict("QmEve", "left out", "was 23 times longer than the group's median")
    assert [strikes.note([left_out], ["QmEve"]) for _ in range(5)] == [{}] * 5
    for _ in range(STRIKES - 1):
        strikes.note([DROPPED], ["QmEve"])
        strikes.note([left_out], ["QmEve"])
    assert strikes.note([DROPPED], ["QmEve"]) == {"QmEve": EVE.why}


def test_the_memory_of_suspects_is_bounded() -> None:
    strikes = Strikes()
    strikes.note([Verdict(f"Qm{index}", "dropped", "") for index in range(5000)], [])
    assert len(strikes.counts) <= 1000


def test_a_ban_is_read_by_whoever_opens_the_run_and_lifted_by_name(tmp_path: Path) -> None:
    running, command = Bans(tmp_path / "bans.jsonl"), Bans(tmp_path / "bans.jsonl")
    assert running.read() == {}
    running.add(EVE)
    running.add(EVE)
    assert list(command.read()) == ["QmEve"]
    assert command.lift("bob") == []
    assert [(ban.id, ban.why) for ban in command.lift("eve")] == [("QmEve", EVE.why)]
    assert running.read() == {}


def test_a_torn_or_foreign_line_bans_nobody_and_hides_nobody(tmp_path: Path) -> None:
    file = tmp_path / "bans.jsonl"
    file.write_text('{"id": 5}\n["QmAnn"]\n{"name": "x"}\n{"id": "QmBob", "name"', encoding="utf-8")
    Bans(file).add(EVE)
    assert list(Bans(file).read()) == ["QmEve"]


def test_without_a_run_folder_the_list_lasts_as_long_as_its_peer() -> None:
    bans = Bans(None)
    bans.add(EVE)
    assert [ban.id for ban in bans.lift("QmEve")] == ["QmEve"]
    assert bans.read() == {}


def test_unban_lifts_the_ban_of_a_run_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(tmp_path / "swarm-1", "seed: 0")
    Bans(run.path / "bans.jsonl").add(EVE)
    with pytest.raises(UserError, match="Nobody called bob is banned") as refused:
        swarm.main(["unban", "bob", str(run.path)], {})
    assert "Banned are: eve." in str(refused.value)
    assert swarm.main(["unban", "eve", str(run.path)], {}) == 0
    assert capsys.readouterr().out == "eve may take part again from the next round of swarm-1.\n"
    assert Bans(run.path / "bans.jsonl").read() == {}


OWNER = Key(b"o" * 32)


def told(role: Role, *bans: Ban, owner: Key = OWNER) -> bytes:
    return bans_list(grant(owner, "run", "anna", role, time.time() + 60), bans)


@pytest.mark.parametrize("role", ["owner", "reducer"])
def test_what_one_of_the_owners_side_has_banned_holds_for_whoever_hears_of_it(role: Role, tmp_path: Path) -> None:
    anchor, creator = Bans(), Bans(tmp_path / "bans.jsonl")
    anchor.add(EVE)
    creator.merge(read_bans(Admission(OWNER.public), told(role, *anchor.said())))
    assert creator.read() == anchor.read() != {}
    assert Bans(tmp_path / "bans.jsonl").read() == anchor.read()  # also for one that comes back


def test_the_last_word_about_somebody_counts_whoever_has_it_and_in_whatever_order_it_comes() -> None:
    first, lifted, again = (replace(EVE, time=when, lifted=when == 20.0) for when in (10.0, 20.0, 30.0))
    for order, banned in (((first, lifted), False), ((lifted, first), False), ((again, first, lifted), True)):
        bans = Bans()
        for ban in order:
            bans.merge([ban])
        assert bool(bans.read()) == banned


def test_a_volunteer_bans_nobody() -> None:
    with pytest.raises(UntrustedError, match="a volunteer bans nobody"):
        read_bans(Admission(OWNER.public), told("volunteer", EVE))


def test_nor_does_a_stranger_or_a_reducer_that_was_revoked() -> None:
    with pytest.raises(UntrustedError):
        read_bans(Admission(OWNER.public), told("owner", EVE, owner=Key(b"s" * 32)))
    admission, own = Admission(OWNER.public), grant(OWNER, "run", "anna", "reducer", time.time() + 60)
    admission.revoke(revoked_list(own_pass(OWNER, "owner"), 1, [own.grant.id]))
    with pytest.raises(UntrustedError, match="revoked"):
        read_bans(admission, bans_list(own, [EVE]))


@pytest.mark.parametrize(
    "rows", [b"", b"5", b"[5]", b'[["id"]]', b'[["id","n","w",NaN,false]]', b'[[5,"n","w",1,false]]']
)
def test_a_list_of_a_wrong_shape_is_refused(rows: bytes) -> None:
    own = grant(OWNER, "run", "anna", "reducer", time.time() + 60)
    with pytest.raises(UntrustedError, match="no list of bans"):
        read_bans(Admission(OWNER.public), own.state("bans", rows))


def test_a_word_from_the_future_would_be_the_last_for_ever_and_is_passed_over() -> None:
    ahead, now = replace(EVE, time=time.time() + 3600), replace(EVE, id="QmBob", time=time.time())
    assert read_bans(Admission(OWNER.public), told("reducer", ahead, now)) == [now]


def test_of_a_list_that_is_too_long_the_newest_are_told() -> None:
    bans = [Ban(f"Qm{index:044}", "x" * 64, "ü" * 200, float(index)) for index in range(1000)]
    statement = told("owner", *bans)
    found = read_bans(Admission(OWNER.public), statement)
    assert 50 < len(found) < 1000
    assert found == bans[-len(found) :]
    assert len(statement) < 1 << 16


@pytest.mark.parametrize(
    ("role", "name", "peer", "banned"),
    [
        ("volunteer", "eve", "QmEve", "her invitation"),
        ("volunteer", GUESTS, "QmEve", "QmEve"),
        ("reducer", "bob", "QmBob", "QmBob"),
        ("owner", "creator", "QmAnn", ""),
        ("reducer", "bob", "QmMe", ""),
    ],
)
def test_a_volunteer_is_banned_with_its_invitation_and_neither_the_owner_nor_oneself_ever(
    role: Role, name: str, peer: str, banned: str
) -> None:
    """Two newcomers to a run that has converged were once a majority, by which its creator banned itself."""
    member = Member(peer, name, role, int(time.time()) + 60, "her invitation", b"")
    assert banned_with(member, peer, "QmMe") == banned
    assert banned_with(None, "QmEve", "QmMe") == "QmEve"


def test_a_ban_holds_though_the_disk_is_full_and_a_command_that_cannot_lift_it_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bans = Bans(tmp_path / "bans.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(fileio, "append_jsonl", full)
        bans.add(EVE)
        assert list(bans.read()) == ["QmEve"]
        with pytest.raises(OSError, match="No space left"):
            bans.lift("eve")


def full(path: Path, record: object) -> None:
    raise OSError(28, "No space left on device")
