"""What a swarm's run folder is told: rounds, and events while its disk is full."""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tests.swarm.test_screening import NAMES, SIZE, contributions
from trainkit.common.errors import DiskError, RunFailedError
from trainkit.config.task_metrics import metrics_of
from trainkit.run.events import Attempt, read_events
from trainkit.run.folder import RunDir
from trainkit.run.run_lease import StaleAttemptError
from trainkit.swarm.peer.records import PatientRecord, PeerRound
from trainkit.swarm.trust.reducers import Round
from trainkit.swarm.trust.screening import KnownSenders, Screen
from trainkit.training.progress import Progress
from trainkit.training.recorder import Instruments, Recorder

if TYPE_CHECKING:
    from trainkit.swarm.peer.records import RoundRecorder, RoundRole

pytestmark = pytest.mark.usefixtures("hivemind_here")


class Slow(Recorder):
    """Validation takes 20 ms, and saving no time."""

    def validate(self, where: Any, should_stop: Any = None) -> bool:
        self.instruments.hosts.append(where)  # type: ignore[attr-defined]
        time.sleep(0.02)
        return True

    def save(self, **options: Any) -> None:
        self.writer.saved.append(self.progress.step)  # type: ignore[attr-defined]

    def test(self, where: Any) -> dict[str, float]:
        return {}

    def summarize(self, *how: Any, **facts: Any) -> None: ...


@dataclass
class Session:
    """A peer's, that notes what it validates, says and writes as an event."""

    validated: list[Any] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)

    def recorder(self, role: RoundRole) -> RoundRecorder:
        from trainkit.swarm.peer.records import RoundRecorder

        def remark(kind: str, **facts: Any) -> None:
            self.events.append((kind, facts["round"], facts["why"]))

        nothing: Any = SimpleNamespace(over=lambda: None, go_on=lambda over: None, log=lambda record: None)
        writer: Any = SimpleNamespace(remark=remark, run=RunDir(Path("nowhere")), saved=self.saved)
        state: Any = SimpleNamespace(splits=SimpleNamespace(train=[0] * 10), metrics=metrics_of("classification"))
        progress = Progress(val={"loss": 1.0, "acc1": 10.0})
        recorder = Slow(state, writer, nothing, nothing, progress, Instruments(hosts=self.validated))
        common: Any = SimpleNamespace(in_model=nullcontext, theta=None, momentum=None, round=8)
        session: Any = SimpleNamespace(
            say=self.lines.append,
            clock=SimpleNamespace(count=10**6, seconds=60.0),
            watch=SimpleNamespace(others=lambda since: {}),
        )
        return RoundRecorder(session, recorder, common, role)


def test_validation_takes_a_quarter_of_the_time_at_most() -> None:
    """Rounds may be short, and models large."""
    session = Session()
    rounds = session.recorder("judge")
    began, index = time.monotonic(), 0
    while time.monotonic() - began < 0.5:
        rounds.after_round(PeerRound(index, peers=2, result=Round(2, "average", "", 0.0, False)))
        index += 1
        time.sleep(0.003)
    assert 3 <= len(session.validated) <= 7  # 0.5 s / 4 / 20 ms
    assert index > 3 * len(session.validated)
    # What is not saved is lost with the creator; and no step is saved twice, also of a peer that makes no updates.
    assert len(session.saved) > 3 * len(session.validated)
    assert session.saved == sorted(set(session.saved))


@pytest.mark.parametrize(
    ("role", "best", "times"), [("judge", None, 1), ("judge", 97.0, 0), ("anchor", None, 0), ("guest", 97.0, 1)]
)
def test_a_run_whose_best_model_is_forgotten_ends_with_another(role: RoundRole, best: float | None, times: int) -> None:
    session = Session()
    rounds = session.recorder(role)
    rounds._progress.best = best
    rounds.finish("finished")
    assert len(session.validated) == times


@pytest.mark.parametrize("is_undone", [False, True])
def test_what_was_taken_out_of_the_weights_at_the_end_is_not_saved(is_undone: bool) -> None:
    session = Session()
    rounds = session.recorder("judge")
    rounds.after_round(PeerRound(0, peers=2, result=Round(2, "average", "", 0.0, False)))
    before = len(session.saved)
    if is_undone:
        rounds.note_undone()
    rounds.finish("finished")
    assert (before, len(session.saved) - before) == (1, is_undone)


WHY = "by it the loss goes from 0.1 to 2"


def test_an_average_that_was_refused_is_told_with_its_reason() -> None:
    session, result = Session(), Round(0, "own", WHY, 0.0, False, refused=True)
    session.recorder("guest").after_round(PeerRound(7, peers=2, result=result))
    assert session.lines == [f"round 8/1000000  continued alone ({WHY})"]
    assert session.events == [("average_refused", 8, WHY)]


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


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(RunDir.create(tmp_path / "hivemind-0001", "seed: 0\n"))


@pytest.fixture
def record(disk: Disk) -> PatientRecord:
    return PatientRecord(Attempt(disk.run, 0, disk.room), disk, disk.said.append)


def test_what_a_full_disk_keeps_out_is_written_later_in_order_with_its_time(
    disk: Disk, record: PatientRecord, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, is_full in enumerate((False, True, True, False), 1):
        monkeypatch.setattr("time.time", lambda now=100.0 * number: now)
        disk.is_full = is_full
        record.log({"round": number})
        record.remark("peer_joined", name=str(number))
        assert [line["round"] for line in disk.records] == [[1], [1], [1], [1, 2, 3, 4]][number - 1]
    assert [line["time"] for line in disk.records] == [100.0, 200.0, 300.0, 400.0]
    events = [(event["event"], event["time"]) for event in read_events(disk.run)]
    joined = [("peer_joined", number) for number in (100.0, 200.0, 300.0, 400.0)]
    assert events == [joined[0], ("save_failed", 200.0), *joined[1:]]


def test_a_full_disk_is_told_of_once_and_so_is_its_end(disk: Disk, record: PatientRecord) -> None:
    disk.is_full = True
    assert [record.attempt(disk.room) for _ in range(3)] == [False] * 3
    disk.is_full = False
    assert record.attempt(disk.room)
    assert len(disk.said) == 1  # it was small; whether a checkpoint fits is not known
    assert [record.attempt(disk.room, proves=True) for _ in range(2)] == [True] * 2
    assert [line.strip()[:12] for line in disk.said] == ["cannot write", "there is roo"]
    assert [event["event"] for event in read_events(disk.run)] == ["save_failed", "save_recovered"]


def test_who_has_lost_the_run_folder_to_another_does_not_wait_for_it(record: PatientRecord) -> None:
    def another() -> None:
        raise StaleAttemptError("hivemind-0001 has another writer now.")

    with pytest.raises(RunFailedError, match="another writer"):
        record.attempt(another)


def test_what_was_believed_of_a_weight_in_time_is_credited_and_nothing_else() -> None:
    """No more than the median, and nothing of who was dropped or left out."""
    *honest, turned, long = contributions(6)
    screen, claims = Screen(NAMES[:6], KnownSenders(), SIZE), dict.fromkeys(range(6), 100.0)
    screen.average(0, dict(enumerate([*honest, -9 * turned, 23 * long])), {**claims, 2: 1e3}, torch.zeros(SIZE))
    assert screen.counted() == {f"peer-{index}": 100.0 for index in range(4)}
