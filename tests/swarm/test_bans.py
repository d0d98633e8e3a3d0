"""Three strikes, the list of who is out, and what a reducer does about those that it had to leave out."""

import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jobs import swarm
from trainkit.common import jsonl
from trainkit.common.errors import UserError
from trainkit.run.contributions import Contributions, Counted
from trainkit.run.folder import RunDir
from trainkit.swarm.identity.admission import Admission, Member, revoked_list
from trainkit.swarm.identity.bans import STRIKES, Ban, Bans, Excluded, banned_with, bans_list, read_bans
from trainkit.swarm.identity.invitations import GUESTS, Key, Role, UntrustedError, grant
from trainkit.swarm.peer.owner import own_pass
from trainkit.swarm.peer.place import Hooks, PeerSpec
from trainkit.swarm.peer.session import Sentry, Session, Strikes
from trainkit.swarm.protocol.messages import PeerProgress
from trainkit.swarm.protocol.outer_step import ExchangeOutcome
from trainkit.swarm.trust.reducers import Round
from trainkit.swarm.trust.screening import Action, Findings, Verdict
from trainkit.training.progress import Progress

pytestmark = pytest.mark.usefixtures("hivemind_here")

OWNER = Key(b"o" * 32)
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


def test_what_was_said_before_there_is_a_run_folder_is_kept_in_it(tmp_path: Path) -> None:
    """By a guest, which hears of bans before it has one; and the later word of two counts."""
    later = Ban("QmAnn", "ann", "", time=200.0, lifted=True)
    Bans(tmp_path / "bans.jsonl").merge([later])
    heard = Bans()
    heard.merge([Ban("QmEve", "eve", "lies", time=100.0), Ban("QmAnn", "ann", "lies", time=100.0)])
    for _ in range(2):  # once is enough
        heard.keep_in(tmp_path)
        assert list(Bans(tmp_path / "bans.jsonl").read()) == list(heard.read()) == ["QmEve"]
    assert len((tmp_path / "bans.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("kept", [True, False])
def test_a_ban_holds_until_it_is_lifted_by_name_or_id(kept: bool, tmp_path: Path) -> None:
    """In a run folder for whoever opens it, and past a torn or foreign line; else as long as its peer lives."""
    file = tmp_path / "bans.jsonl"
    file.write_text('{"id": 5}\n["QmAnn"]\n{"name": "x"}\n{"id": "QmBob", "name"', encoding="utf-8")
    running = Bans(file if kept else None)
    command = Bans(file) if kept else running
    assert running.read() == {}
    with file.open("a") as damaged:
        damaged.write('\n{"id": "ann", "name": 7, "why": null, "time": null, "lifted": 1}\n')
    assert [(ban.id, ban.name, ban.why) for ban in running.read().values()] == [("ann", "", "")] * kept
    running.lift("ann")
    running.add(EVE)
    running.add(EVE)
    assert list(command.read()) == ["QmEve"]
    assert command.lift("bob") == []
    assert [(ban.id, ban.why) for ban in command.lift("eve" if kept else "QmEve")] == [("QmEve", EVE.why)]
    assert running.read() == {}


def test_unban_lifts_the_ban_of_a_run_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDir.create(tmp_path / "swarm-1", "seed: 0")
    Bans(run.path / "bans.jsonl").add(EVE)
    with pytest.raises(UserError, match="Nobody called bob is banned") as refused:
        swarm.main(["unban", "bob", str(run.path)], {})
    assert "Banned peers: eve." in str(refused.value)
    assert swarm.main(["unban", "eve", str(run.path)], {}) == 0
    assert capsys.readouterr().out == "eve may take part again from the next round of swarm-1.\n"
    assert Bans(run.path / "bans.jsonl").read() == {}


def told(role: Role, *bans: Ban, owner: Key = OWNER) -> bytes:
    return bans_list(grant(owner, "run", "anna", role, time.time() + 60), bans)


def test_a_ban_of_the_owners_side_holds_for_all_who_hear_of_it(tmp_path: Path) -> None:
    for role in ("owner", "reducer"):
        creator, ban = Bans(tmp_path / f"{role}.jsonl"), EVE._replace(time=5.0)
        creator.merge(read_bans(Admission(OWNER.public), told(role, ban)))
        assert creator.read() == Bans(tmp_path / f"{role}.jsonl").read() == {"QmEve": ban}  # also when it comes back


def test_the_last_word_about_somebody_counts_in_whatever_order() -> None:
    first, lifted, again = (EVE._replace(time=when, lifted=when == 20.0) for when in (10.0, 20.0, 30.0))
    for order, banned in (((first, lifted), False), ((lifted, first), False), ((again, first, lifted), True)):
        bans = Bans()
        for ban in order:
            bans.merge([ban])
        assert bool(bans.read()) == banned


@pytest.mark.parametrize(
    ("role", "owner", "content", "why"),
    [
        ("volunteer", OWNER, None, "a volunteer does not say such a thing"),
        ("owner", Key(b"s" * 32), None, "another run"),
        ("reducer", OWNER, "revoked", "revoked"),
        *(
            ("reducer", OWNER, rows, "no statement of that kind")
            for rows in (b"", b"5", b"[5]", b'[["id"]]', b'[["id","n","w",NaN,false]]', b'[[5,"n","w",1,false]]')
        ),
    ],
)
def test_who_may_not_ban_and_what_is_no_list_is_refused(
    role: Role, owner: Key, content: bytes | str | None, why: str
) -> None:
    admission, own = Admission(OWNER.public), grant(owner, "run", "anna", role, time.time() + 60)
    if content == "revoked":
        admission.revoke(revoked_list(own_pass(OWNER, "owner"), 1, [own.grant.id]))
    said = own.state("bans", content) if isinstance(content, bytes) else bans_list(own, [EVE])
    with pytest.raises(UntrustedError, match=why):
        read_bans(admission, said)


def test_a_word_from_the_future_is_passed_over_and_the_newest_are_told() -> None:
    ahead, now = EVE._replace(time=time.time() + 3600), EVE._replace(id="QmBob", time=time.time())
    assert read_bans(Admission(OWNER.public), told("reducer", ahead, now)) == [now]
    for letter in ("ü", "\x01"):  # of two bytes, and of six
        bans = [Ban(f"Qm{index:044}", letter * 64, letter * 200, float(index)) for index in range(1000)]
        statement = told("owner", *bans)
        found = read_bans(Admission(OWNER.public), statement)
        assert (20 < len(found) < 1000, found == bans[-len(found) :], len(statement) < 1 << 16) == (True, True, True)


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
    def full(path: Path, record: object) -> None:
        raise OSError(28, "No space left on device")

    bans = Bans(tmp_path / "bans.jsonl")
    monkeypatch.setattr(jsonl, "append_jsonl", full)
    bans.add(EVE)
    assert list(bans.read()) == ["QmEve"]
    with pytest.raises(OSError, match="No space left"):
        bans.lift("eve")


def test_a_ban_is_kept_in_the_run_folder_even_before_it_has_a_key(tmp_path: Path) -> None:
    """A submitted run has a folder before it has created its swarm."""
    key = Key.generate()
    excluded = Excluded(own_pass(key, "owner"), "QmOwner", Admission(key.public))
    excluded.remember(tmp_path, b"")
    excluded.bans.add(Ban("QmEve", "eve", "lied"))
    assert list(Bans(tmp_path / "bans.jsonl").read()) == ["QmEve"]


# What a reducer does about those that it had to leave out.

PEERS = {"QmEve": PeerProgress("eve", 3, 640, 80.0, 1.0, 3, 0.0)}


FINE = Round(3, "average", "", 1.0, drifted=False)


@dataclass
class Watched:
    """A sentry, the peer that it belongs to, the averager's process that it asks, and what came of it."""

    pending: list[Findings] = field(default_factory=list)
    bans: Bans = field(default_factory=lambda: Bans(None))
    credits: Contributions = field(default_factory=Contributions)
    events: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    shut_out: list[list[str]] = field(default_factory=list)
    undone: list[set[str]] = field(default_factory=list)
    progress: Progress = field(default_factory=lambda: Progress(best=97.0, best_step=8))
    earned: list[int] = field(default_factory=list)
    invitation: str = "invitation of {}"
    """Of each peer by its id, until one is shut out: then nobody is known any more."""
    role: Role = "reducer"

    def __post_init__(self) -> None:
        peer: Any = Session(ExitStack(), PeerSpec("me"), Hooks(lambda: False, self.lines.append))
        peer.averaging = SimpleNamespace(averager=self, undo=self.undo)
        peer.progress = self.progress
        peer.dht = SimpleNamespace(member=self.member)
        peer.bans = self.bans
        peer.peer_id = "QmOwn"
        peer.role = self.role
        peer.watch = SimpleNamespace(peers=PEERS)
        peer.remark = lambda kind, **facts: self.events.append((kind, facts))
        peer.shut_out = lambda banned: self.shut_out.append(sorted(banned))
        peer.credit = lambda counted: self.earned.append(len(counted))
        peer.withdraw = self.credits.withdraw
        self.sentry = Sentry(peer)

    def undo(self, peers: Sequence[str]) -> bool:
        self.undone.append(set(peers))
        return "QmEve" in peers

    def member(self, peer: str) -> Member | None:
        if self.shut_out:
            return None
        role: Role = "volunteer" if self.invitation else "owner"
        return Member(peer, "eve", role, 0, self.invitation.format(peer), b"")

    def findings(self) -> Collection[Any]:
        found, self.pending = self.pending, []
        return found

    def rounds(self, *verdicts: Verdict, count: int = 1, **known: Any) -> list[str]:
        """So many rounds with the same verdicts; the kinds of all events so far."""
        for index in range(count):
            self.pending.append(Findings(("QmAnn", "QmEve"), verdicts, **known))
            self.sentry.after_round(index, FINE)
        return [kind for kind, _ in self.events]


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.mark.parametrize(
    ("verdict", "names", "event", "line"),
    [
        (DROPPED, {}, "peer_dropped", f"  eve was left out of round 1: {DROPPED.why}"),
        (LEFT_OUT, {}, "peer_left_out", f"  eve was left out of round 1: {LEFT_OUT.why}"),
        (CLIPPED, {}, "peer_clipped", None),
        # By its invitation, as `revoke` takes it.
        (DROPPED, {"QmEve": "mallory"}, "peer_dropped", f"  mallory was left out of round 1: {DROPPED.why}"),
    ],
)
def test_a_verdict_is_an_event_and_a_line(
    watched: Watched, verdict: Verdict, names: dict[str, str], event: str, line: str | None
) -> None:
    watched.rounds(verdict, names=names)
    facts = {"peer": "QmEve", "name": names.get("QmEve", "eve"), "why": verdict.why, "round": 1}
    assert (watched.events, watched.lines) == ([(event, facts)], [line] * (line is not None))


def test_the_third_time_in_a_row_shuts_the_door_until_the_ban_is_lifted(watched: Watched) -> None:
    watched.rounds(DROPPED, count=STRIKES - 1)
    assert watched.shut_out == []
    assert watched.rounds(DROPPED) == [*["peer_dropped"] * STRIKES, "peer_banned"]
    assert watched.shut_out == [["invitation of QmEve"]]
    assert watched.lines[-1].endswith("To lift it: python -m jobs.swarm unban eve")
    watched.bans.lift("eve")
    watched.sentry.look()
    assert watched.shut_out[-1] == []


@pytest.mark.parametrize(("age", "is_news"), [(0, True), (60, False)])
def test_a_ban_by_another_of_the_owners_side_is_enforced(watched: Watched, age: int, is_news: bool) -> None:
    why = "claims 1e9 samples"
    watched.bans.merge([Ban("QmBob", "bob", why, time.time() - age)])
    watched.sentry.look()
    assert watched.shut_out == [["QmBob"]]
    assert watched.lines == [f"  bob is banned by another peer of the owner's side: {why}"] * is_news
    assert watched.events == [("peer_banned", {"peer": "QmBob", "name": "bob", "why": why})] * is_news


def test_a_ban_by_another_is_news_in_the_round_of_an_own_one_too(watched: Watched) -> None:
    watched.rounds(DROPPED, count=STRIKES - 1)
    watched.bans.merge([Ban("QmBob", "bob", "lied", time.time())])
    assert watched.rounds(DROPPED).count("peer_banned") == 2
    assert watched.shut_out[-1] == ["QmBob", "invitation of QmEve"]


def test_a_crowd_of_liars_is_not_a_crowd_of_events(watched: Watched) -> None:
    assert len(watched.rounds(*(Verdict(f"Qm{index:09}", "dropped", "lied") for index in range(200)))) <= 20


@pytest.mark.parametrize(("invitation", "banned"), [("invitation of eve", 1), ("", 0)])
def test_two_of_one_invitation_are_one_ban_and_of_the_owners_none(
    watched: Watched, invitation: str, banned: int
) -> None:
    """The owner's may be the only part that is unlike a crowd of newcomers'."""
    watched.invitation = invitation
    kinds = watched.rounds(DROPPED, Verdict("QmSecond", "dropped", DROPPED.why), count=STRIKES + 1)
    assert list(watched.bans.read()) == [invitation] * banned
    assert (kinds.count("peer_banned"), sum("is banned" in line for line in watched.lines)) == (banned, banned)


def test_who_is_out_with_another_of_its_invitation_is_not_banned_again(watched: Watched) -> None:
    """An audit bans at once, when others of that invitation may have two strikes each."""
    watched.invitation, second = "invitation of eve", Verdict("QmSecond", "dropped", DROPPED.why)
    watched.pending.append(Findings(("QmEve", "QmSecond"), (second,)))
    watched.sentry.after_round(0, FINE)
    watched.sentry.note_audit(0, DROPPED)
    for index in (1, 2):
        watched.pending.append(Findings(("QmSecond",), (second,)))
        watched.sentry.after_round(index, FINE)
    assert list(watched.bans.read()) == ["invitation of eve"]
    assert watched.undone == [{"QmEve", "QmSecond"}]  # what both have put into the weights


def test_who_spoils_three_rounds_is_banned_and_earns_nothing_by_them(
    watched: Watched,
) -> None:
    spoiled = Verdict("QmEve", "dropped", "by it the loss goes from 0.1 to 2")
    for index, harmful in enumerate([(spoiled,), None, (spoiled,), None, (spoiled,)]):  # None: she was not tried
        watched.pending.append(Findings(("QmAnn", "QmEve"), (), counted={"QmEve": 640.0}))
        refused = index != 3
        watched.sentry.after_round(index, Round(0, "own", "", 1.0, False, refused=refused, harmful=harmful))
    assert [kind for kind, _ in watched.events] == [*["peer_dropped"] * 3, "peer_banned"]
    assert watched.earned == [0, 0, 0, 1, 0]
    assert watched.lines[0] == f"  eve has harmed round 1: {spoiled.why}"


@pytest.mark.parametrize(
    ("action", "kinds", "lines"),
    [
        ("dropped", ["peer_dropped", "peer_banned"], 2),
        ("left out", ["peer_left_out"], 1),
        ("audited", ["peer_audited"], 0),
    ],
)
def test_who_fails_one_audit_is_banned_and_has_contributed_nothing(
    watched: Watched, action: Action, kinds: list[str], lines: int
) -> None:
    watched.credits.add(8.0, [Counted("eve", 640.0, 0), Counted("ann", 320.0, 0)])
    watched.rounds()
    watched.sentry.note_audit(0, Verdict("QmEve", action, "has not trained so"))
    assert watched.undone == [{"QmEve"}] * (action != "audited")
    assert (watched.progress.best is None) == (action != "audited"), "what was the best has her work in it"
    assert ([kind for kind, _ in watched.events], len(watched.lines)) == (kinds, lines)
    assert [one.name for one in watched.credits.best_first()] == (["ann"] if action == "dropped" else ["eve", "ann"])
    if action == "dropped":
        assert watched.lines[0] == "  The audit of eve in round 1: has not trained so"
        assert watched.lines[1] == "  eve is banned. To lift it: python -m jobs.swarm unban eve"


LIES = Verdict("QmEve", "dropped", "as a reducer returned the opposite of what it received (cosine -0.90)")


@pytest.mark.parametrize(
    ("untrue", "role", "banned"),
    [
        (LIES, "reducer", False),  # whom the owner trusts nobody else bans
        (LIES, "owner", True),
        (Verdict("QmEve", "left out", "as a reducer returned a long average"), "owner", False),
        (None, "owner", False),
    ],
)
def test_a_reducer_whose_averages_cannot_be_true_is_banned_by_the_owner(
    untrue: Verdict | None, role: Role, banned: bool
) -> None:
    watched = Watched(role=role)
    told, arrived = (untrue,) if untrue else (), ExchangeOutcome((1,), (1,), (True,), ("QmEve",))
    for index in range(STRIKES):  # in which she has contributed well
        watched.pending.append(Findings(("QmAnn", "QmEve"), ()))
        watched.sentry.after_round(index, replace(FINE, outcome=arrived, untrue=told))
    assert list(watched.bans.read()) == ["invitation of QmEve"] * banned
    if untrue == LIES:
        assert [kind for kind, _ in watched.events] == ["peer_dropped"] * STRIKES + ["peer_banned"] * banned
        assert watched.lines[0] == f"  What eve has averaged in round 1 is not used: {LIES.why}"
