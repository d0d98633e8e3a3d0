from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from trainkit.errors import DiskError, RunFailedError
from trainkit.run.events import Attempt, read_events
from trainkit.run.folder import RunDir
from trainkit.run.lease import StaleAttemptError
from trainkit.swarm.records import PatientRecord


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
