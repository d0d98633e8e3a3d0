"""Credit is counted from what was averaged, after the screen; claims are worth nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch

from tests.swarm.test_screening import POSSIBLE, SIZE, contributions
from trainkit.run.contributions import Contribution, Contributions
from trainkit.run.events import Attempt, Writer
from trainkit.run.folder import RunDir
from trainkit.swarm.bans import Bans, Sentry
from trainkit.swarm.messages import PeerProgress
from trainkit.swarm.records import Credits
from trainkit.swarm.robust import Limits, Screen, Verdict


def test_a_sender_is_credited_with_what_was_believed_of_its_weight() -> None:
    screen = Screen(["peer-0", "peer-1", "peer-2"], Limits(possible=POSSIBLE), SIZE)
    screen.average(0, dict(enumerate(contributions(3))), {0: 100.0, 1: 100.0, 2: 1000.0}, torch.zeros(SIZE))
    assert screen.counted() == {"peer-0": 100.0, "peer-1": 100.0, "peer-2": 150.0}


def test_who_was_dropped_or_has_trained_nothing_is_credited_with_nothing() -> None:
    *honest, last = contributions(5)
    screen = Screen([f"peer-{index}" for index in range(5)], Limits(possible=POSSIBLE), SIZE)
    weights = {0: 0.0, 1: 100.0, 2: 100.0, 3: 100.0, 4: 100.0}
    screen.average(0, dict(enumerate([*honest, -9 * last])), weights, torch.zeros(SIZE))
    assert set(screen.counted()) == {"peer-1", "peer-2", "peer-3"}


def test_parts_that_came_too_late_are_not_credited() -> None:
    first, second = (dict(enumerate(contributions(2, SIZE // 2))) for _ in range(2))
    screen = Screen(["peer-0", "peer-1"], Limits(possible=POSSIBLE), SIZE)
    whole = torch.zeros(SIZE)
    screen.average(0, first, {0: 100.0, 1: 100.0}, whole[: SIZE // 2])
    screen.average(SIZE // 2, {0: second[0]}, {0: 100.0}, whole[SIZE // 2 :])
    assert screen.counted() == {"peer-0": 100.0, "peer-1": 50.0}


@dataclass(frozen=True)
class Findings:
    """As `trainkit.swarm.averager` has them, which needs hivemind."""

    members: tuple[str, ...]
    verdicts: tuple[Verdict, ...]
    counted: Mapping[str, float]
    received: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


PEERS = {"QmAnna": PeerProgress("anna", 3, 640, 80.0, 1.0, 3, 0.0)}


class Averager:
    """Has found out what it is told."""

    def __init__(self, *found: Findings) -> None:
        self.found = list(found)

    def expect(self, possible: object) -> None:
        """Nothing is asked here."""

    def findings(self) -> list[Findings]:
        found, self.found = self.found, []
        return found


def credits(run: RunDir, told: list[Sequence[Contribution]]) -> Credits:
    return Credits(Writer(Attempt(run, 0), lambda: None), lambda: 60.0, told.append)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", "seed: 0\n")


def test_each_round_goes_into_the_run_folder_and_to_the_swarm(run: RunDir) -> None:
    told: list[Sequence[Contribution]] = []
    found = Findings(("QmAnna", "QmBo"), (), {"QmAnna": 640.0})
    sentry = Sentry(Averager(found), Bans(None), credit=credits(run, told).count)
    sentry.after_round(0, PEERS)
    expected = [Contribution("anna", 1, 640.0, 60.0)]
    assert Contributions.of(run).best_first() == expected
    assert told == [expected]


def test_a_creator_that_was_killed_goes_on_counting(run: RunDir) -> None:
    for _ in range(2):  # a new process each time
        found = Findings(("QmAnna",), (), {"QmAnna": 640.0})
        Sentry(Averager(found), Bans(None), credit=credits(run, []).count).after_round(0, PEERS)
    assert Contributions.of(run).best_first() == [Contribution("anna", 2, 1280.0, 120.0)]


def test_a_newcomers_first_round_is_credited_once_its_name_is_known(run: RunDir) -> None:
    averager = Averager(Findings(("QmAnna",), (), {"QmAnna": 640.0}))
    sentry = Sentry(averager, Bans(None), credit=credits(run, []).count)
    sentry.after_round(0, {})
    assert Contributions.of(run).best_first() == []
    averager.found = [Findings(("QmAnna",), (), {"QmAnna": 60.0})]
    sentry.after_round(1, PEERS)
    assert Contributions.of(run).best_first() == [Contribution("anna", 2, 700.0, 120.0)]


def credited(run: RunDir, said: str, invited: str) -> list[Contribution]:
    found = Findings(("QmAnna",), (), {"QmAnna": 640.0}, {"QmAnna": 57_000}, {"QmAnna": invited})
    peers = {"QmAnna": replace(PEERS["QmAnna"], name=said)}
    Sentry(Averager(found), Bans(None), credit=credits(run, []).count).after_round(0, peers)
    return Contributions.of(run).best_first()


def test_credit_goes_to_the_name_that_the_owner_has_signed_not_to_what_a_peer_calls_itself(run: RunDir) -> None:
    assert credited(run, "the best of all", "anna") == [Contribution("anna", 1, 640.0, 60.0, 57_000)]


def test_where_many_use_one_invitation_what_each_says_of_itself_tells_them_apart(run: RunDir) -> None:
    assert [item.name for item in credited(run, "carl", "guest")] == ["guest carl"]


def test_who_was_invited_by_name_is_credited_at_once(run: RunDir) -> None:
    found = Findings(("QmAnna",), (), {"QmAnna": 640.0}, {}, {"QmAnna": "anna"})
    Sentry(Averager(found), Bans(None), credit=credits(run, []).count).after_round(0, {})
    assert [item.name for item in Contributions.of(run).best_first()] == ["anna"]


def test_a_full_disk_stops_no_round(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Contributions, run: RunDir) -> None:
        raise OSError(28, "No space left on device")

    told: list[Sequence[Contribution]] = []
    monkeypatch.setattr(Contributions, "write", full)
    found = Findings(("QmAnna",), (), {"QmAnna": 640.0})
    Sentry(Averager(found), Bans(None), credit=credits(run, told).count).after_round(0, PEERS)
    assert [item.samples for item in told[0]] == [640.0]


def test_who_comes_back_with_a_new_key_is_credited_on_under_its_name(run: RunDir) -> None:
    told: list[Sequence[Contribution]] = []
    counting = credits(run, told).count
    for peer in ("QmBefore", "QmAfter"):
        found = Findings((peer,), (), {peer: 100.0}, {peer: 10}, {peer: "anna"})
        Sentry(Averager(found), Bans(None), credit=counting).after_round(0, {})
    assert [(row.name, row.rounds, row.samples) for row in told[-1]] == [("anna", 2, 200.0)]
