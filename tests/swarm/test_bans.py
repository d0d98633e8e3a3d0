"""Three strikes, and the list of who is out."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from jobs import swarm
from trainkit import fileio
from trainkit.errors import UserError
from trainkit.run.folder import RunDir
from trainkit.swarm.admission import Admission, Member, keep_key, own_pass, revoked_list
from trainkit.swarm.bans import STRIKES, Ban, Bans, Sentry, Strikes, banned_with, bans_list, read_bans
from trainkit.swarm.invitations import GUESTS, Key, Role, UntrustedError, grant
from trainkit.swarm.messages import PeerProgress
from trainkit.swarm.robust import Round, Verdict

EVE_BANS = Ban("QmEve", "eve", "sent values that are not finite")
DROPPED_BANS = Verdict("QmEve", "dropped", EVE_BANS.why)


def test_three_rounds_in_a_row_are_too_many_and_a_good_one_between_starts_anew() -> None:
    strikes, both = Strikes(), ["QmEve", "QmAnn"]
    assert [strikes.note([DROPPED_BANS], both) for _ in range(STRIKES - 1)] == [{}] * (STRIKES - 1)
    assert strikes.note([], both) == {}
    assert [strikes.note([DROPPED_BANS], both) for _ in range(STRIKES - 1)] == [{}] * (STRIKES - 1)
    assert strikes.note([DROPPED_BANS], both) == {"QmEve": EVE_BANS.why}


def test_staying_away_for_a_round_does_not_wipe_the_slate() -> None:
    strikes = Strikes()
    for _ in range(STRIKES - 1):
        strikes.note([DROPPED_BANS], ["QmEve"])
        strikes.note([], ["QmAnn"])
    assert strikes.note([DROPPED_BANS], ["QmEve"]) == {"QmEve": EVE_BANS.why}


def test_to_be_clipped_is_no_strike() -> None:
    strikes = Strikes()
    assert [strikes.note([Verdict("QmEve", "clipped", "long")], ["QmEve"]) for _ in range(5)] == [{}] * 5


def test_to_be_left_out_is_no_strike_nor_does_it_wipe_one_out() -> None:
    strikes, left_out = Strikes(), Verdict("QmEve", "left out", "was 23 times longer than the group's median")
    assert [strikes.note([left_out], ["QmEve"]) for _ in range(5)] == [{}] * 5
    for _ in range(STRIKES - 1):
        strikes.note([DROPPED_BANS], ["QmEve"])
        strikes.note([left_out], ["QmEve"])
    assert strikes.note([DROPPED_BANS], ["QmEve"]) == {"QmEve": EVE_BANS.why}


def test_the_memory_of_suspects_is_bounded() -> None:
    strikes = Strikes()
    strikes.note([Verdict(f"Qm{index}", "dropped", "") for index in range(5000)], [])
    assert len(strikes.counts) <= 1000


def test_a_ban_is_read_by_whoever_opens_the_run_and_lifted_by_name(tmp_path: Path) -> None:
    running, command = Bans(tmp_path / "bans.jsonl"), Bans(tmp_path / "bans.jsonl")
    assert running.read() == {}
    running.add(EVE_BANS)
    running.add(EVE_BANS)
    assert list(command.read()) == ["QmEve"]
    assert command.lift("bob") == []
    assert [(ban.id, ban.why) for ban in command.lift("eve")] == [("QmEve", EVE_BANS.why)]
    assert running.read() == {}


def test_a_torn_or_foreign_line_bans_nobody_and_hides_nobody(tmp_path: Path) -> None:
    file = tmp_path / "bans.jsonl"
    file.write_text('{"id": 5}\n["QmAnn"]\n{"name": "x"}\n{"id": "QmBob", "name"', encoding="utf-8")
    Bans(file).add(EVE_BANS)
    assert list(Bans(file).read()) == ["QmEve"]


def test_without_a_run_folder_the_list_lasts_as_long_as_its_peer() -> None:
    bans = Bans(None)
    bans.add(EVE_BANS)
    assert [ban.id for ban in bans.lift("QmEve")] == ["QmEve"]
    assert bans.read() == {}


def test_unban_lifts_the_ban_of_a_run_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(tmp_path / "swarm-1", "seed: 0")
    Bans(run.path / "bans.jsonl").add(EVE_BANS)
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
    anchor.add(EVE_BANS)
    creator.merge(read_bans(Admission(OWNER.public), told(role, *anchor.said())))
    assert creator.read() == anchor.read() != {}
    assert Bans(tmp_path / "bans.jsonl").read() == anchor.read()  # also for one that comes back


def test_the_last_word_about_somebody_counts_whoever_has_it_and_in_whatever_order_it_comes() -> None:
    first, lifted, again = (EVE_BANS._replace(time=when, lifted=when == 20.0) for when in (10.0, 20.0, 30.0))
    for order, banned in (((first, lifted), False), ((lifted, first), False), ((again, first, lifted), True)):
        bans = Bans()
        for ban in order:
            bans.merge([ban])
        assert bool(bans.read()) == banned


def test_a_volunteer_bans_nobody() -> None:
    with pytest.raises(UntrustedError, match="a volunteer bans nobody"):
        read_bans(Admission(OWNER.public), told("volunteer", EVE_BANS))


def test_nor_does_a_stranger_or_a_reducer_that_was_revoked() -> None:
    with pytest.raises(UntrustedError):
        read_bans(Admission(OWNER.public), told("owner", EVE_BANS, owner=Key(b"s" * 32)))
    admission, own = Admission(OWNER.public), grant(OWNER, "run", "anna", "reducer", time.time() + 60)
    admission.revoke(revoked_list(own_pass(OWNER, "owner"), 1, [own.grant.id]))
    with pytest.raises(UntrustedError, match="revoked"):
        read_bans(admission, bans_list(own, [EVE_BANS]))


@pytest.mark.parametrize(
    "rows", [b"", b"5", b"[5]", b'[["id"]]', b'[["id","n","w",NaN,false]]', b'[[5,"n","w",1,false]]']
)
def test_a_list_of_a_wrong_shape_is_refused(rows: bytes) -> None:
    own = grant(OWNER, "run", "anna", "reducer", time.time() + 60)
    with pytest.raises(UntrustedError, match="no list of bans"):
        read_bans(Admission(OWNER.public), own.state("bans", rows))


def test_a_word_from_the_future_would_be_the_last_for_ever_and_is_passed_over() -> None:
    ahead, now = EVE_BANS._replace(time=time.time() + 3600), EVE_BANS._replace(id="QmBob", time=time.time())
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
        bans.add(EVE_BANS)
        assert list(bans.read()) == ["QmEve"]
        with pytest.raises(OSError, match="No space left"):
            bans.lift("eve")


def full(path: Path, record: object) -> None:
    raise OSError(28, "No space left on device")


pytestmark = pytest.mark.usefixtures("hivemind_here")


@pytest.mark.parametrize("submitted", [True, False])
def test_who_is_out_is_remembered_in_the_run_folder_even_before_it_has_a_key(tmp_path: Path, submitted: bool) -> None:
    """A submitted run has a folder before it has created its swarm."""
    from trainkit.swarm.bans import Excluded

    key = Key.generate()
    if not submitted:
        keep_key(tmp_path, key)
    excluded = Excluded(own_pass(key, "owner"), "QmOwner", Admission(key.public))
    excluded.remember(tmp_path)
    excluded.bans.add(Ban("QmEve", "eve", "lied"))
    assert list(Bans(tmp_path / "bans.jsonl").read()) == ["QmEve"]


# What a reducer does about those that it had to leave out.

EVE_SENTRY = "QmEveEveEve"
PEERS = {EVE_SENTRY: PeerProgress("eve", 3, 640, 80.0, 1.0, 3, 0.0)}


@dataclass(frozen=True)
class Found:
    members: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    counted: Mapping[str, float] = field(default_factory=dict)
    received: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


@dataclass
class Averager:
    """Stands for the averager's process."""

    pending: list[Found] = field(default_factory=list)
    expected: Mapping[str, float] = field(default_factory=dict)

    def expect(self, possible: Mapping[str, float]) -> None:
        self.expected = possible

    def findings(self) -> Collection[Any]:
        found, self.pending = self.pending, []
        return found


@dataclass
class Watched:
    """A sentry, and what came of it."""

    averager: Averager = field(default_factory=Averager)
    bans: Bans = field(default_factory=lambda: Bans(None))
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    shut_out: list[list[str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.sentry = Sentry(
            self.averager,
            self.bans,
            remark=lambda kind, **facts: self.events.append((kind, facts)),
            say=self.lines.append,
            enforce=lambda banned: self.shut_out.append(sorted(banned)),
            invitation_of=lambda peer: f"invitation of {peer}",
        )

    def round(self, *verdicts: Verdict, index: int = 0) -> None:
        self.averager.pending.append(Found(("QmAnn", EVE_SENTRY), verdicts))
        self.sentry.after_round(index, PEERS)


DROPPED_SENTRY = Verdict(EVE_SENTRY, "dropped", "sent values that are not finite")


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_who_was_dropped_in_which_round_and_why_is_an_event_and_a_line(watched: Watched) -> None:
    watched.round(DROPPED_SENTRY, index=6)
    facts = {"peer": EVE_SENTRY, "name": "eve", "why": DROPPED_SENTRY.why, "round": 7}
    assert watched.events == [("peer_dropped", facts)]
    assert watched.lines == ["  eve was left out of round 7: sent values that are not finite"]


def test_who_was_left_out_for_its_length_is_told_of_and_never_banned(watched: Watched) -> None:
    for index in range(STRIKES + 1):
        watched.round(Verdict(EVE_SENTRY, "left out", "was 23 times longer than the group's median"), index=index)
    assert [kind for kind, _ in watched.events] == ["peer_left_out"] * (STRIKES + 1)
    assert watched.lines[0] == "  eve was left out of round 1: was 23 times longer than the group's median"
    assert watched.shut_out == []


def test_who_was_clipped_is_an_event_alone(watched: Watched) -> None:
    watched.round(Verdict(EVE_SENTRY, "clipped", "was 3.0 times longer than the group's median"))
    assert [kind for kind, _ in watched.events] == ["peer_clipped"]
    assert watched.lines == []


def test_the_third_time_in_a_row_shuts_the_door_on_the_invitation(watched: Watched) -> None:
    for index in range(STRIKES):
        assert watched.shut_out == []
        watched.round(DROPPED_SENTRY, index=index)
    assert watched.shut_out == [[f"invitation of {EVE_SENTRY}"]]
    assert [kind for kind, _ in watched.events] == [*["peer_dropped"] * STRIKES, "peer_banned"]
    assert watched.lines[-1].endswith("To lift it: python -m jobs.swarm unban eve")


def test_nobody_is_banned_with_whom_nobody_can_be() -> None:
    """The owner, by a crowd of newcomers: it may be the one whose part is unlike the others'."""
    watched = Watched()
    watched.sentry.invitation_of = lambda peer: ""
    for index in range(STRIKES + 1):
        watched.round(DROPPED_SENTRY, index=index)
    assert [kind for kind, _ in watched.events] == ["peer_dropped"] * (STRIKES + 1)
    assert (watched.shut_out, watched.bans.read()) == ([], {})


def test_a_ban_that_is_lifted_by_hand_opens_the_door_before_the_next_round(watched: Watched) -> None:
    for index in range(STRIKES):
        watched.round(DROPPED_SENTRY, index=index)
    watched.bans.lift("eve")
    watched.sentry.before_round(PEERS, 4.0)
    assert watched.shut_out[-1] == []


def test_the_averager_learns_what_peers_can_have_trained_on(watched: Watched) -> None:
    watched.sentry.before_round(PEERS, 4.0)
    assert watched.averager.expected == {EVE_SENTRY: 320.0}


def test_of_a_newcomer_nothing_is_expected_until_it_has_told_of_a_round() -> None:
    watched = Watched()
    watched.sentry.before_round({**PEERS, "QmNew": PeerProgress("new", 3, 0, 0.0, 0.0, 0, 0.0)}, 4.0)
    assert watched.averager.expected == {EVE_SENTRY: 320.0}


def test_who_was_left_out_is_named_by_its_invitation_as_revoke_takes_it(watched: Watched) -> None:
    watched.averager.pending.append(Found(("QmAnn", EVE_SENTRY), (DROPPED_SENTRY,), names={EVE_SENTRY: "mallory"}))
    watched.sentry.after_round(6, PEERS)
    assert watched.lines == ["  mallory was left out of round 7: sent values that are not finite"]


def test_a_ban_by_another_of_the_owners_side_is_enforced_and_said(watched: Watched) -> None:
    watched.bans.merge([Ban("QmBob", "bob", "claims 1e9 samples", time.time())])
    watched.sentry.look()
    assert watched.shut_out == [["QmBob"]]
    assert watched.lines == ["  bob is banned by another peer of the owner's side: claims 1e9 samples"]
    assert watched.events == [("peer_banned", {"peer": "QmBob", "name": "bob", "why": "claims 1e9 samples"})]


def test_a_ban_of_long_ago_is_enforced_and_not_news(watched: Watched) -> None:
    watched.bans.merge([Ban("QmBob", "bob", "claims 1e9 samples", time.time() - 60)])
    watched.sentry.look()
    assert (watched.shut_out, watched.lines) == ([["QmBob"]], [])


def test_a_crowd_of_liars_is_not_a_crowd_of_events(watched: Watched) -> None:
    watched.round(*(Verdict(f"Qm{index:09}", "dropped", "lied") for index in range(200)))
    assert len(watched.events) <= 20


def test_two_of_one_invitation_that_are_out_in_the_same_round_are_one_ban(watched: Watched) -> None:
    watched.sentry.invitation_of = lambda peer: "invitation of eve"
    for _ in range(STRIKES):
        watched.round(DROPPED_SENTRY, Verdict("QmSecond", "dropped", DROPPED_SENTRY.why))
    assert list(watched.bans.read()) == ["invitation of eve"]
    assert [kind for kind, _ in watched.events].count("peer_banned") == 1
    assert sum("is banned" in line for line in watched.lines) == 1


LIES = Verdict(EVE_SENTRY, "dropped", "as a reducer gave back the opposite of what it got (cosine -0.90)")


def averaged_by_eve(watched: Watched, *untrue: Verdict) -> None:
    """Rounds in which she has contributed well, and averaged for this peer."""
    for index in range(STRIKES):
        watched.averager.pending.append(Found(("QmAnn", EVE_SENTRY), ()))
        result = Round(3, "average", "", 1.0, drifted=False, reducers=(EVE_SENTRY,), untrue=untrue)
        watched.sentry.after_round(index, PEERS, result)


def test_a_reducer_whose_averages_cannot_be_true_is_named_in_every_round(watched: Watched) -> None:
    averaged_by_eve(watched, LIES)
    assert [kind for kind, _ in watched.events] == ["peer_dropped"] * STRIKES
    assert watched.lines[0] == f"  What eve has averaged in round 1 is not used: {LIES.why}"
    assert list(watched.bans.read()) == []  # whom the owner trusts nobody else bans for it


def test_and_is_banned_by_the_owner_who_has_trusted_it(watched: Watched) -> None:
    watched.sentry = replace(watched.sentry, judges_reducers=True)
    averaged_by_eve(watched, LIES)
    assert list(watched.bans.read()) == [f"invitation of {EVE_SENTRY}"]
    assert watched.lines[-1].startswith(f"  eve is banned after {STRIKES} such rounds in a row.")


@pytest.mark.parametrize("untrue", [(), (Verdict(EVE_SENTRY, "left out", "as a reducer gave back a long average"),)])
def test_one_whose_averages_are_true_or_only_long_is_not(watched: Watched, untrue: tuple[Verdict, ...]) -> None:
    watched.sentry = replace(watched.sentry, judges_reducers=True)
    averaged_by_eve(watched, *untrue)
    assert list(watched.bans.read()) == []
