"""Three strikes, the list of who is out, and what a reducer does about those that it had to leave out."""

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
from trainkit.swarm.access import STRIKES, Ban, Bans, banned_with, bans_list, read_bans
from trainkit.swarm.admission import Admission, Member, keep_key, own_pass, revoked_list
from trainkit.swarm.invitations import GUESTS, Key, Role, UntrustedError, grant
from trainkit.swarm.messages import PeerProgress
from trainkit.swarm.robust import Findings, Round, Sentry, Strikes, Verdict

EVE = Ban("QmEve", "eve", "sent values that are not finite")
DROPPED = Verdict("QmEve", "dropped", EVE.why)


LEFT_OUT = Verdict("QmEve", "left out", "was 23 times longer than the group's median")
CLIPPED = Verdict("QmEve", "clipped", "long")


@pytest.mark.parametrize(
    ("rounds", "banned"),
    [
        ([DROPPED] * STRIKES, True),
        ([DROPPED, DROPPED, None, DROPPED, DROPPED], False),  # a good one between starts anew
        ([DROPPED, "away", DROPPED, "away", DROPPED], True),
        ([CLIPPED] * 5, False),
        ([LEFT_OUT] * 5, False),
        ([DROPPED, LEFT_OUT, DROPPED, LEFT_OUT, DROPPED], True),  # it is no strike, nor does it wipe one out
    ],
)
def test_three_strikes_in_a_row_are_too_many(rounds: list[Verdict | str | None], banned: bool) -> None:
    strikes = Strikes()
    found = [
        strikes.note([one] if isinstance(one, Verdict) else [], ["QmAnn", *(["QmEve"] if one != "away" else [])])
        for one in rounds
    ]
    assert found == [*[{}] * (len(rounds) - 1), {"QmEve": EVE.why} if banned else {}]


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
def test_a_ban_of_the_owners_side_holds_for_all_who_hear_of_it(role: Role, tmp_path: Path) -> None:
    anchor, creator = Bans(), Bans(tmp_path / "bans.jsonl")
    anchor.add(EVE)
    creator.merge(read_bans(Admission(OWNER.public), told(role, *anchor.said())))
    assert creator.read() == anchor.read() != {}
    assert Bans(tmp_path / "bans.jsonl").read() == anchor.read()  # also for one that comes back


def test_the_last_word_about_somebody_counts_in_whatever_order() -> None:
    first, lifted, again = (EVE._replace(time=when, lifted=when == 20.0) for when in (10.0, 20.0, 30.0))
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


def test_a_word_from_the_future_is_passed_over() -> None:
    ahead, now = EVE._replace(time=time.time() + 3600), EVE._replace(id="QmBob", time=time.time())
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
def test_a_volunteer_is_banned_with_its_invitation_the_owner_never(
    role: Role, name: str, peer: str, banned: str
) -> None:
    """Two newcomers to a run that has converged were once a majority, by which its creator banned itself."""
    member = Member(peer, name, role, int(time.time()) + 60, "her invitation", b"")
    assert banned_with(member, peer, "QmMe") == banned
    assert banned_with(None, "QmEve", "QmMe") == "QmEve"


def test_a_ban_holds_though_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bans = Bans(tmp_path / "bans.jsonl")
    with monkeypatch.context() as patch:
        patch.setattr(fileio, "append_jsonl", full)
        bans.add(EVE)
        assert list(bans.read()) == ["QmEve"]
        with pytest.raises(OSError, match="No space left"):
            bans.lift("eve")


def full(path: Path, record: object) -> None:
    raise OSError(28, "No space left on device")


pytestmark = pytest.mark.usefixtures("hivemind_here")


@pytest.mark.parametrize("submitted", [True, False])
def test_a_ban_is_kept_in_the_run_folder_even_before_it_has_a_key(tmp_path: Path, submitted: bool) -> None:
    """A submitted run has a folder before it has created its swarm."""
    from trainkit.swarm.access import Excluded

    key = Key.generate()
    if not submitted:
        keep_key(tmp_path, key)
    excluded = Excluded(own_pass(key, "owner"), "QmOwner", Admission(key.public))
    excluded.remember(tmp_path)
    excluded.bans.add(Ban("QmEve", "eve", "lied"))
    assert list(Bans(tmp_path / "bans.jsonl").read()) == ["QmEve"]


# What a reducer does about those that it had to leave out.

PEERS = {"QmEve": PeerProgress("eve", 3, 640, 80.0, 1.0, 3, 0.0)}


@dataclass
class Averager:
    """Stands for the averager's process."""

    pending: list[Findings] = field(default_factory=list)
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
        self.averager.pending.append(Findings(("QmAnn", "QmEve"), verdicts))
        self.sentry.after_round(index, PEERS)


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.mark.parametrize(
    ("verdict", "event", "line"),
    [
        (DROPPED, "peer_dropped", f"  eve was left out of round 7: {DROPPED.why}"),
        (LEFT_OUT, "peer_left_out", f"  eve was left out of round 7: {LEFT_OUT.why}"),
        (CLIPPED, "peer_clipped", None),
    ],
)
def test_a_verdict_is_an_event_and_a_line(watched: Watched, verdict: Verdict, event: str, line: str | None) -> None:
    watched.round(verdict, index=6)
    assert watched.events == [(event, {"peer": "QmEve", "name": "eve", "why": verdict.why, "round": 7})]
    assert watched.lines == [line] * (line is not None)


def test_the_third_time_in_a_row_shuts_the_door_on_the_invitation(watched: Watched) -> None:
    for index in range(STRIKES):
        assert watched.shut_out == []
        watched.round(DROPPED, index=index)
    assert watched.shut_out == [["invitation of QmEve"]]
    assert [kind for kind, _ in watched.events] == [*["peer_dropped"] * STRIKES, "peer_banned"]
    assert watched.lines[-1].endswith("To lift it: python -m jobs.swarm unban eve")


def test_nobody_is_banned_with_whom_nobody_can_be() -> None:
    """The owner, by a crowd of newcomers: it may be the one whose part is unlike the others'."""
    watched = Watched()
    watched.sentry.invitation_of = lambda peer: ""
    for index in range(STRIKES + 1):
        watched.round(DROPPED, index=index)
    assert [kind for kind, _ in watched.events] == ["peer_dropped"] * (STRIKES + 1)
    assert (watched.shut_out, watched.bans.read()) == ([], {})


def test_a_ban_that_is_lifted_by_hand_opens_the_door_before_the_next_round(watched: Watched) -> None:
    for index in range(STRIKES):
        watched.round(DROPPED, index=index)
    watched.bans.lift("eve")
    watched.sentry.before_round(PEERS, 4.0)
    assert watched.shut_out[-1] == []


def test_the_averager_learns_what_peers_can_have_trained_on(watched: Watched) -> None:
    """Of a newcomer nothing is expected until it has told of a round."""
    watched.sentry.before_round({**PEERS, "QmNew": PeerProgress("new", 3, 0, 0.0, 0.0, 0, 0.0)}, 4.0)
    assert watched.averager.expected == {"QmEve": 320.0}


def test_a_peer_is_named_by_its_invitation_as_revoke_takes_it(watched: Watched) -> None:
    watched.averager.pending.append(Findings(("QmAnn", "QmEve"), (DROPPED,), names={"QmEve": "mallory"}))
    watched.sentry.after_round(6, PEERS)
    assert watched.lines == ["  mallory was left out of round 7: sent values that are not finite"]


@pytest.mark.parametrize(("age", "is_news"), [(0, True), (60, False)])
def test_a_ban_by_another_of_the_owners_side_is_enforced(watched: Watched, age: int, is_news: bool) -> None:
    why = "claims 1e9 samples"
    watched.bans.merge([Ban("QmBob", "bob", why, time.time() - age)])
    watched.sentry.look()
    assert watched.shut_out == [["QmBob"]]
    assert watched.lines == [f"  bob is banned by another peer of the owner's side: {why}"] * is_news
    assert watched.events == [("peer_banned", {"peer": "QmBob", "name": "bob", "why": why})] * is_news


def test_a_crowd_of_liars_is_not_a_crowd_of_events(watched: Watched) -> None:
    watched.round(*(Verdict(f"Qm{index:09}", "dropped", "lied") for index in range(200)))
    assert len(watched.events) <= 20


def test_two_of_one_invitation_are_one_ban(watched: Watched) -> None:
    watched.sentry.invitation_of = lambda peer: "invitation of eve"
    for _ in range(STRIKES):
        watched.round(DROPPED, Verdict("QmSecond", "dropped", DROPPED.why))
    assert list(watched.bans.read()) == ["invitation of eve"]
    assert [kind for kind, _ in watched.events].count("peer_banned") == 1
    assert sum("is banned" in line for line in watched.lines) == 1


LIES = Verdict("QmEve", "dropped", "as a reducer gave back the opposite of what it got (cosine -0.90)")


@pytest.mark.parametrize(
    ("untrue", "judges", "banned"),
    [
        (LIES, False, False),  # whom the owner trusts nobody else bans
        (LIES, True, True),
        (Verdict("QmEve", "left out", "as a reducer gave back a long average"), True, False),
        (None, True, False),
    ],
)
def test_a_reducer_whose_averages_cannot_be_true_is_banned_by_the_owner(
    watched: Watched, untrue: Verdict | None, judges: bool, banned: bool
) -> None:
    watched.sentry = replace(watched.sentry, judges_reducers=judges)
    for index in range(STRIKES):  # in which she has contributed well
        watched.averager.pending.append(Findings(("QmAnn", "QmEve"), ()))
        told = (untrue,) if untrue else ()
        result = Round(3, "average", "", 1.0, drifted=False, reducers=("QmEve",), untrue=told)
        watched.sentry.after_round(index, PEERS, result)
    assert list(watched.bans.read()) == ["invitation of QmEve"] * banned
    if untrue == LIES:
        assert [kind for kind, _ in watched.events] == ["peer_dropped"] * STRIKES + ["peer_banned"] * banned
        assert watched.lines[0] == f"  What eve has averaged in round 1 is not used: {LIES.why}"
    if banned:
        assert watched.lines[-1].startswith(f"  eve is banned after {STRIKES} such rounds in a row.")
