from __future__ import annotations

import time
from pathlib import Path

import pytest

from trainkit.run.events import append_event, read_events
from trainkit.run.folder import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", "seed: 0\n")


def test_an_event_has_its_kind_its_fields_and_the_present_time(run: RunDir) -> None:
    append_event(run, "saved", step=7)
    (event,) = read_events(run)
    assert (event["event"], event["step"]) == ("saved", 7)
    assert abs(event["time"] - time.time()) < 60


def test_a_text_of_any_length_leaves_a_record_that_can_be_read(run: RunDir) -> None:
    append_event(run, "unanswered", error="x" * 100_000_000)
    assert run.events.stat().st_size < 100_000
    assert [event["event"] for event in read_events(run)] == ["unanswered"]


def test_events_are_in_the_order_they_happened(run: RunDir) -> None:
    for kind in ("submitted", "started", "saved"):
        append_event(run, kind)
    assert [event["event"] for event in read_events(run)] == ["submitted", "started", "saved"]


def test_one_kind_can_be_read_alone(run: RunDir) -> None:
    append_event(run, "started")
    append_event(run, "saved")
    assert [event["event"] for event in read_events(run, "saved")] == ["saved"]
