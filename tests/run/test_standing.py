from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainkit import fileio
from trainkit.run import metrics
from trainkit.run.folder import RunDir
from trainkit.run.metrics import Standing, standing_of


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", "seed: 0\n")


def test_a_run_without_metrics_stands_nowhere(run: RunDir) -> None:
    assert standing_of(run) == Standing()
    run.metrics.touch()
    assert standing_of(run, pace_since=0.0) == Standing()


def test_the_newest_records_count_and_a_torn_line_does_not(run: RunDir) -> None:
    fileio.append_jsonl(run.metrics, {"split": "val", "step": 20, "acc1": 50.0})
    fileio.append_jsonl(run.metrics, {"split": "train", "step": 90, "loss": 1.0})
    fileio.append_jsonl(run.metrics, {"split": "train", "step": 30, "loss": 2.0})  # after a restart
    with run.metrics.open("a") as file:
        file.write('{"split": "val", "step": 40')
    found = standing_of(run)
    assert (found.step, found.val["step"]) == (30, 20)


def test_what_was_measured_after_training_does_not_tell_how_far_it_is(run: RunDir) -> None:
    """Folders in which `evaluate` has written into the training's records."""
    fileio.append_jsonl(run.metrics, {"split": "train", "step": 90, "epoch": 9.0, "loss": 1.0})
    fileio.append_jsonl(run.metrics, {"split": "test", "step": 50, "acc1": 80.0})
    assert standing_of(run).last["epoch"] == 9.0


def test_a_validation_long_ago_is_found(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "TAIL_BYTES", 100)
    fileio.append_jsonl(run.metrics, {"split": "val", "step": 0, "acc1": 10.0})
    for step in range(100):
        fileio.append_jsonl(run.metrics, {"split": "train", "step": step, "loss": 1.0})
    assert standing_of(run).val["acc1"] == 10.0


def test_the_pace_is_that_of_the_newest_attempt(run: RunDir) -> None:
    for time, step in ((0.0, 10), (1000.0, 20), (2000.0, 20), (2010.0, 25), (2030.0, 30)):
        fileio.append_jsonl(run.metrics, {"time": time, "split": "train", "step": step, "loss": 1.0})
    found = standing_of(run, pace_since=1999.0)
    assert found.seconds_per_step == 3.0
    assert found.seconds_to(130) == 300.0
    assert found.seconds_to(20) == 0.0
    assert found.seconds_to(None) is None
    assert standing_of(run).seconds_per_step is None, "nobody has asked for it"


def test_one_record_has_no_pace(run: RunDir) -> None:
    fileio.append_jsonl(run.metrics, {"time": 5.0, "split": "train", "step": 10, "loss": 1.0})
    assert standing_of(run, pace_since=0.0).seconds_per_step is None


def test_for_the_pace_few_records_are_read_also_where_an_attempt_has_none_or_few(
    run: RunDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A list of a thousand runs that go on has the pace of each."""
    for step in range(300):
        fileio.append_jsonl(
            run.metrics, {"time": 1000.0 + 2 * step, "split": "train", "step": step, "epoch": step / 10}
        )
    parsed: list[str | bytes] = []
    really = fileio.parse_object

    def parse(text: str | bytes) -> dict[str, Any] | None:
        parsed.append(text)
        return really(text)

    monkeypatch.setattr(fileio, "parse_object", parse)
    paces = [standing_of(run, pace_since=since).seconds_per_step for since in (0.0, 1500.0, 1590.0, 1598.0, 9999.0)]
    assert paces == [2.0, 2.0, 2.0, None, None]
    assert len(parsed) < 5 * 20
