"""Credit is counted from what was averaged, after the screen; claims are worth nothing."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.swarm.test_robust import POSSIBLE, SIZE, contributions
from trainkit.config.task import metrics_of
from trainkit.errors import DiskError, RunFailedError
from trainkit.run.contributions import Contribution, Contributions
from trainkit.run.events import Attempt, Writer, read_events
from trainkit.run.folder import RunDir
from trainkit.run.lease import StaleAttemptError
from trainkit.swarm.bans import Bans, Sentry
from trainkit.swarm.messages import PeerProgress
from trainkit.swarm.records import Credits, PatientRecord
from trainkit.swarm.robust import Limits, Screen, Verdict
from trainkit.training.recorder import Progress, Recorder

if TYPE_CHECKING:
    from trainkit.swarm.records import Role, RoundRecorder


pytestmark = pytest.mark.usefixtures("hivemind_here")


class Slow(Recorder):
    """Validation takes 40 ms."""

    def validate(self, where: Any, should_stop: Any = None) -> bool:
        self.hosts.append(where)  # type: ignore[attr-defined]
        time.sleep(0.04)
        return True

    def save(self, **options: Any) -> None:
        """Takes no time."""


def round_recorder(role: Role, validated: list[Any], lines: list[str], events: list[Any]) -> RoundRecorder:
    """One that notes what it validates, says and writes as an event."""
    from trainkit.swarm.records import RoundRecorder

    def remark(kind: str, **facts: Any) -> None:
        events.append((kind, facts))

    nothing: Any = SimpleNamespace(over=lambda: None, go_on=lambda over: None, log=lambda record: None, remark=remark)
    writer: Any = SimpleNamespace(attempt=nothing, run=None)
    parts: Any = SimpleNamespace(splits=SimpleNamespace(train=[0] * 10), metrics=metrics_of("classification"))
    progress = Progress(val={"loss": 1.0, "acc1": 10.0})
    keeper = Slow(parts, writer, nothing, nothing, progress, hosts=validated)
    common: Any = SimpleNamespace(in_model=nullcontext, theta=None, momentum=None)
    clock: Any = SimpleNamespace(count=10**6, seconds=60.0)
    watch: Any = SimpleNamespace(peers={}, others=lambda since: {})
    return RoundRecorder(keeper, common, clock, watch, role=role, say=lines.append)


def test_validation_takes_a_quarter_of_the_time_at_most_however_short_the_rounds_are() -> None:
    """An update of a swarm that averages gradients can be over long before its limit."""
    from trainkit.swarm.records import PeerRound
    from trainkit.swarm.robust import Round

    validated: list[Any] = []
    rounds = round_recorder("judge", validated, [], [])
    average = Round(2, "average", "", 0.0, False)
    began, index = time.monotonic(), 0
    while time.monotonic() - began < 1.0:
        rounds.after_round(PeerRound(index, average, peers=2))
        index += 1
        time.sleep(0.005)
    assert 3 <= len(validated) <= 7  # 1 s / 4 / 40 ms
    assert index > 3 * len(validated)


def test_a_round_that_was_given_up_is_told_with_the_reason_and_is_an_event() -> None:
    from trainkit.swarm.records import PeerRound
    from trainkit.swarm.robust import Round

    lines: list[str] = []
    events: list[Any] = []
    rounds = round_recorder("guest", [], lines, events)
    why = "its loss rose from 2e-06 to 0.6"
    rounds.after_round(PeerRound(7, Round(2, "average", "", 0.0, False, collapsed=why), peers=2))
    rounds.after_round(PeerRound(8, Round(0, "nothing", "no group", 0.0, False, collapsed=why), peers=2))
    assert [line.split("  ", 1)[1] for line in lines] == [
        f"2 peers averaged, 0 of 0 parts  what was learned here is given up: {why}",
        f"no average (no group)  what was learned here is given up: {why}",
    ]
    assert [(kind, facts["round"], facts["why"]) for kind, facts in events] == [
        ("collapsed", 8, why),
        ("collapsed", 9, why),
    ]


@dataclass
class Disk:
    """A run folder whose disk is full at times."""

    run: RunDir
    is_full: bool = False
    records: list[Mapping[str, Any]] = field(default_factory=list)
    said: list[str] = field(default_factory=list)

    def room(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "events.jsonl")

    def log(self, record: Mapping[str, Any]) -> None:
        if self.is_full:
            raise DiskError("Cannot write metrics.jsonl.", why="No space left on device. A run needs a record.")
        self.records.append(record)

    def close(self) -> None: ...

    @property
    def kinds(self) -> list[str]:
        return [str(event["event"]) for event in read_events(self.run)]


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(RunDir.create(tmp_path / "hivemind-0001", "seed: 0\n"))


@pytest.fixture
def record(disk: Disk) -> PatientRecord:
    return PatientRecord(Attempt(disk.run, 0, disk.room), disk, disk.said.append)


def test_what_happens_while_the_disk_is_full_is_written_in_its_order_when_there_is_room(
    disk: Disk, record: PatientRecord
) -> None:
    record.log({"round": 1})
    disk.is_full = True
    record.log({"round": 2})
    record.remark("peer_joined", name="anna")
    record.log({"round": 3})
    assert [line["round"] for line in disk.records] == [1]
    disk.is_full = False
    record.log({"round": 4})
    assert [line["round"] for line in disk.records] == [1, 2, 3, 4]
    assert disk.kinds[:2] == ["save_failed", "peer_joined"]


def test_records_that_waited_bear_the_time_at_which_they_were_made(
    disk: Disk, record: PatientRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.is_full = True
    for now in (100.0, 200.0):
        monkeypatch.setattr("time.time", lambda now=now: now)
        record.log({"round": 1})
    disk.is_full = False
    monkeypatch.setattr("time.time", lambda: 300.0)
    record.log({"round": 2})
    assert [line["time"] for line in disk.records] == [100.0, 200.0, 300.0]
    assert [event["time"] for event in read_events(disk.run)] == [100.0]


def test_a_full_disk_is_told_of_once_and_so_is_its_end(disk: Disk, record: PatientRecord) -> None:
    disk.is_full = True
    assert [record.attempt(disk.room) for _ in range(3)] == [False] * 3
    disk.is_full = False
    assert record.attempt(disk.room)
    assert len(disk.said) == 1  # it was small; whether a checkpoint fits is not known
    assert record.attempt(disk.room, proves=True)
    assert record.attempt(disk.room, proves=True)
    assert [line.strip()[:12] for line in disk.said] == ["cannot write", "there is roo"]
    assert disk.kinds == ["save_failed", "save_recovered"]


def test_who_has_lost_the_run_folder_to_another_does_not_wait_for_it(record: PatientRecord) -> None:
    def another() -> None:
        raise StaleAttemptError("hivemind-0001 has another writer now.")

    with pytest.raises(RunFailedError, match="another writer"):
        record.attempt(another)


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
