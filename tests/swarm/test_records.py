"""What a swarm's run folder is told: rounds, events while its disk is full, and who has contributed how much.

Credit is counted from what was averaged, after the screen; claims are worth nothing.
"""

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
from trainkit.config.components import metrics_of
from trainkit.errors import DiskError, RunFailedError
from trainkit.run.events import Attempt, StaleAttemptError, Writer, read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import Contribution, Contributions
from trainkit.swarm.access import Bans
from trainkit.swarm.messages import PeerProgress
from trainkit.swarm.records import Credits, PatientRecord, PeerRound
from trainkit.swarm.robust import Limits, Round, Screen, Sentry, Verdict
from trainkit.training.recorder import Progress, Recorder

if TYPE_CHECKING:
    from trainkit.swarm.records import Role, RoundRecorder

pytestmark = pytest.mark.usefixtures("hivemind_here")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "hivemind-0001", "seed: 0\n")


class Slow(Recorder):
    """Validation takes 40 ms, and saving no time."""

    def validate(self, where: Any, should_stop: Any = None) -> bool:
        self.hosts.append(where)  # type: ignore[attr-defined]
        time.sleep(0.04)
        return True

    def save(self, **options: Any) -> None: ...


@dataclass
class Session:
    """A peer's, that notes what it validates, says and writes as an event."""

    validated: list[Any] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)

    def recorder(self, role: Role) -> RoundRecorder:
        from trainkit.swarm.records import RoundRecorder

        def remark(kind: str, **facts: Any) -> None:
            self.events.append((kind, facts["round"], facts["why"]))

        nothing: Any = SimpleNamespace(over=lambda: None, go_on=lambda over: None, log=lambda record: None)
        writer: Any = SimpleNamespace(attempt=SimpleNamespace(remark=remark), run=None)
        parts: Any = SimpleNamespace(splits=SimpleNamespace(train=[0] * 10), metrics=metrics_of("classification"))
        progress = Progress(val={"loss": 1.0, "acc1": 10.0})
        session: Any = SimpleNamespace(
            recorder=Slow(parts, writer, nothing, nothing, progress, hosts=self.validated),
            progress=progress,
            writer=writer,
            hooks=SimpleNamespace(say=self.lines.append),
            common=SimpleNamespace(in_model=nullcontext, theta=None, momentum=None),
            clock=SimpleNamespace(count=10**6, seconds=60.0),
            watch=SimpleNamespace(peers={}, others=lambda since: {}),
        )
        return RoundRecorder(session, role)


def test_validation_takes_a_quarter_of_the_time_at_most() -> None:
    """An update of a swarm that averages gradients can be over long before its limit."""
    session = Session()
    rounds = session.recorder("judge")
    began, index = time.monotonic(), 0
    while time.monotonic() - began < 1.0:
        rounds.after_round(PeerRound(index, peers=2, result=Round(2, "average", "", 0.0, False)))
        index += 1
        time.sleep(0.005)
    assert 3 <= len(session.validated) <= 7  # 1 s / 4 / 40 ms
    assert index > 3 * len(session.validated)


@pytest.mark.parametrize(
    ("used", "says"), [("average", "2 peers averaged, 0 of 0 parts"), ("nothing", "no average (no group)")]
)
def test_a_round_that_was_given_up_is_told_with_its_reason(used: str, says: str) -> None:
    session, why = Session(), "its loss rose from 2e-06 to 0.6"
    result = Round(2, used, "no group", 0.0, False, collapsed=why)
    session.recorder("guest").after_round(PeerRound(7, peers=2, result=result))
    assert session.lines == [f"round 8/1000000  {says}  what was learned here is given up: {why}"]
    assert session.events == [("collapsed", 8, why)]


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
def disk(run: RunDir) -> Disk:
    return Disk(run)


@pytest.fixture
def record(disk: Disk) -> PatientRecord:
    return PatientRecord(Attempt(disk.run, 0, disk.room), disk, disk.said.append)


def test_what_a_full_disk_keeps_out_is_written_later_in_its_order(disk: Disk, record: PatientRecord) -> None:
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


def test_what_was_believed_of_a_weight_in_time_is_credited() -> None:
    screen = Screen(["peer-0", "peer-1", "peer-2"], Limits(possible=POSSIBLE), SIZE)
    screen.average(0, dict(enumerate(contributions(3))), {0: 100.0, 1: 100.0, 2: 1000.0}, torch.zeros(SIZE))
    assert screen.counted() == {"peer-0": 100.0, "peer-1": 100.0, "peer-2": 150.0}
    # A part that came too late is not.
    first, second = (dict(enumerate(contributions(2, SIZE // 2))) for _ in range(2))
    screen, whole = Screen(["peer-0", "peer-1"], Limits(possible=POSSIBLE), SIZE), torch.zeros(SIZE)
    screen.average(0, first, {0: 100.0, 1: 100.0}, whole[: SIZE // 2])
    screen.average(SIZE // 2, {0: second[0]}, {0: 100.0}, whole[SIZE // 2 :])
    assert screen.counted() == {"peer-0": 100.0, "peer-1": 50.0}


def test_who_was_dropped_or_has_trained_nothing_is_credited_with_nothing() -> None:
    *honest, last = contributions(5)
    screen = Screen([f"peer-{index}" for index in range(5)], Limits(possible=POSSIBLE), SIZE)
    weights = {0: 0.0, 1: 100.0, 2: 100.0, 3: 100.0, 4: 100.0}
    screen.average(0, dict(enumerate([*honest, -9 * last])), weights, torch.zeros(SIZE))
    assert set(screen.counted()) == {"peer-1", "peer-2", "peer-3"}


@dataclass(frozen=True)
class Findings:
    """As `trainkit.swarm.averager` has them, which needs hivemind."""

    members: tuple[str, ...]
    counted: Mapping[str, float]
    received: Mapping[str, int] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    verdicts: tuple[Verdict, ...] = ()


def anna(samples: float = 640.0, *, peer: str = "QmAnna", received: int = 0, invited: str | None = None) -> Findings:
    return Findings((peer,), {peer: samples}, {peer: received}, {} if invited is None else {peer: invited})


PEERS = {"QmAnna": PeerProgress("anna", 3, 640, 80.0, 1.0, 3, 0.0)}


@dataclass
class Account:
    """The account of a run, by a process that may be killed; what it tells the swarm."""

    run: RunDir
    told: list[Sequence[Contribution]] = field(default_factory=list)
    found: list[Findings] = field(default_factory=list)

    def __post_init__(self) -> None:
        credits = Credits(Writer(Attempt(self.run, 0), lambda: None), lambda: 60.0, self.told.append)
        averager = SimpleNamespace(expect=lambda possible: None, findings=lambda: [self.found.pop()])
        self.sentry = Sentry(averager, Bans(None), credit=credits.count)

    def after_round(self, found: Findings, peers: Mapping[str, PeerProgress] = PEERS) -> list[Contribution]:
        """Count one; what is in the run folder then."""
        self.found.append(found)
        self.sentry.after_round(0, peers)
        return Contributions.of(self.run).best_first()


def test_each_round_goes_into_the_run_folder_and_to_the_swarm(run: RunDir) -> None:
    account, expected = Account(run), [Contribution("anna", 1, 640.0, 60.0)]
    assert account.after_round(anna()) == expected
    assert account.told == [expected]
    # One that was killed goes on counting.
    assert Account(run).after_round(anna()) == [Contribution("anna", 2, 1280.0, 120.0)]


def test_a_newcomers_first_round_is_credited_once_its_name_is_known(run: RunDir) -> None:
    account = Account(run)
    assert account.after_round(anna(), {}) == []
    assert account.after_round(anna(60.0)) == [Contribution("anna", 2, 700.0, 120.0)]


@pytest.mark.parametrize(("said", "invited", "name"), [("best", "anna", "anna"), ("carl", "guest", "guest carl")])
def test_credit_goes_to_the_name_that_the_owner_has_signed(run: RunDir, said: str, invited: str, name: str) -> None:
    """Where many use one invitation, what each says of itself tells them apart."""
    found = anna(received=57_000, invited=invited)
    peers = {"QmAnna": replace(PEERS["QmAnna"], name=said)}
    assert Account(run).after_round(found, peers) == [Contribution(name, 1, 640.0, 60.0, 57_000)]


def test_who_was_invited_by_name_is_credited_at_once_and_with_a_new_key(run: RunDir) -> None:
    account = Account(run)
    account.after_round(anna(100.0, peer="QmBefore", invited="anna"), {})
    (row,) = account.after_round(anna(100.0, peer="QmAfter", invited="anna"), {})
    assert (row.name, row.rounds, row.samples) == ("anna", 2, 200.0)


def test_a_full_disk_stops_no_round(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Contributions, run: RunDir) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Contributions, "write", full)
    account = Account(run)
    account.after_round(anna())
    assert [item.samples for item in account.told[0]] == [640.0]
