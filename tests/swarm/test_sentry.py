"""What a reducer does about those that it had to leave out."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from trainkit.swarm.bans import STRIKES, Ban, Bans, Sentry
from trainkit.swarm.messages import PeerProgress
from trainkit.swarm.robust import Round, Verdict

EVE = "QmEveEveEve"
PEERS = {EVE: PeerProgress("eve", 3, 640, 80.0, 1.0, 3, 0.0)}


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
        self.averager.pending.append(Found(("QmAnn", EVE), verdicts))
        self.sentry.after_round(index, PEERS)


DROPPED = Verdict(EVE, "dropped", "sent values that are not finite")


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_who_was_dropped_in_which_round_and_why_is_an_event_and_a_line(watched: Watched) -> None:
    watched.round(DROPPED, index=6)
    facts = {"peer": EVE, "name": "eve", "why": DROPPED.why, "round": 7}
    assert watched.events == [("peer_dropped", facts)]
    assert watched.lines == ["  eve was left out of round 7: sent values that are not finite"]


def test_who_was_left_out_for_its_length_is_told_of_and_never_banned(watched: Watched) -> None:
    for index in range(STRIKES + 1):
        watched.round(Verdict(EVE, "left out", "was 23 times longer than the group's median"), index=index)
    assert [kind for kind, _ in watched.events] == ["peer_left_out"] * (STRIKES + 1)
    assert watched.lines[0] == "  eve was left out of round 1: was 23 times longer than the group's median"
    assert watched.shut_out == []


def test_who_was_clipped_is_an_event_alone(watched: Watched) -> None:
    watched.round(Verdict(EVE, "clipped", "was 3.0 times longer than the group's median"))
    assert [kind for kind, _ in watched.events] == ["peer_clipped"]
    assert watched.lines == []


def test_the_third_time_in_a_row_shuts_the_door_on_the_invitation(watched: Watched) -> None:
    for index in range(STRIKES):
        assert watched.shut_out == []
        watched.round(DROPPED, index=index)
    assert watched.shut_out == [[f"invitation of {EVE}"]]
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
    watched.sentry.before_round(PEERS, 4.0)
    assert watched.averager.expected == {EVE: 320.0}


def test_of_a_newcomer_nothing_is_expected_until_it_has_told_of_a_round() -> None:
    watched = Watched()
    watched.sentry.before_round({**PEERS, "QmNew": PeerProgress("new", 3, 0, 0.0, 0.0, 0, 0.0)}, 4.0)
    assert watched.averager.expected == {EVE: 320.0}


def test_who_was_left_out_is_named_by_its_invitation_as_revoke_takes_it(watched: Watched) -> None:
    watched.averager.pending.append(Found(("QmAnn", EVE), (DROPPED,), names={EVE: "mallory"}))
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
        watched.round(DROPPED, Verdict("QmSecond", "dropped", DROPPED.why))
    assert list(watched.bans.read()) == ["invitation of eve"]
    assert [kind for kind, _ in watched.events].count("peer_banned") == 1
    assert sum("is banned" in line for line in watched.lines) == 1


LIES = Verdict(EVE, "dropped", "as a reducer gave back the opposite of what it got (cosine -0.90)")


def averaged_by_eve(watched: Watched, *untrue: Verdict) -> None:
    """Rounds in which she has contributed well, and averaged for this peer."""
    for index in range(STRIKES):
        watched.averager.pending.append(Found(("QmAnn", EVE), ()))
        result = Round(3, "average", "", 1.0, drifted=False, reducers=(EVE,), untrue=untrue)
        watched.sentry.after_round(index, PEERS, result)


def test_a_reducer_whose_averages_cannot_be_true_is_named_in_every_round(watched: Watched) -> None:
    averaged_by_eve(watched, LIES)
    assert [kind for kind, _ in watched.events] == ["peer_dropped"] * STRIKES
    assert watched.lines[0] == f"  What eve has averaged in round 1 is not used: {LIES.why}"
    assert list(watched.bans.read()) == []  # whom the owner trusts nobody else bans for it


def test_and_is_banned_by_the_owner_who_has_trusted_it(watched: Watched) -> None:
    watched.sentry = replace(watched.sentry, judges_reducers=True)
    averaged_by_eve(watched, LIES)
    assert list(watched.bans.read()) == [f"invitation of {EVE}"]
    assert watched.lines[-1].startswith(f"  eve is banned after {STRIKES} such rounds in a row.")


@pytest.mark.parametrize("untrue", [(), (Verdict(EVE, "left out", "as a reducer gave back a long average"),)])
def test_one_whose_averages_are_true_or_only_long_is_not(watched: Watched, untrue: tuple[Verdict, ...]) -> None:
    watched.sentry = replace(watched.sentry, judges_reducers=True)
    averaged_by_eve(watched, *untrue)
    assert list(watched.bans.read()) == []
