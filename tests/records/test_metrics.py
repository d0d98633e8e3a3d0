from __future__ import annotations

from pathlib import Path

import pytest

from trainkit.records import jsonl
from trainkit.records.metrics import read_metrics
from trainkit.records.rundir import RunDir


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", "seed: 0\n")


def test_records_are_in_order_of_step(run: RunDir) -> None:
    for step in (20, 10):
        jsonl.append(run.metrics, {"split": "train", "step": step})
    assert [record["step"] for record in read_metrics(run)] == [10, 20]


def test_one_split_can_be_read_alone(run: RunDir) -> None:
    for split in ("train", "val", "test"):
        jsonl.append(run.metrics, {"split": split, "step": 1})
    assert read_metrics(run, "val") == [{"split": "val", "step": 1}]


def test_after_a_restart_the_newer_record_of_a_step_counts(run: RunDir) -> None:
    for loss in (3.0, 2.0):
        jsonl.append(run.metrics, {"split": "train", "step": 1, "loss": loss})
    jsonl.append(run.metrics, {"split": "val", "step": 1, "loss": 1.0})
    assert [record["loss"] for record in read_metrics(run)] == [2.0, 1.0]


def test_unknown_keys_are_kept(run: RunDir) -> None:
    jsonl.append(run.metrics, {"split": "train", "step": 1, "new": "x"})
    assert read_metrics(run)[0]["new"] == "x"


@pytest.mark.parametrize("record", [{}, {"split": "train"}, {"step": 1}, {"split": "train", "step": "x"}])
def test_what_is_no_metrics_record_is_passed_over(run: RunDir, record: dict[str, object]) -> None:
    jsonl.append(run.metrics, record)
    assert read_metrics(run) == []


def test_a_run_without_metrics_has_none(run: RunDir) -> None:
    assert read_metrics(run) == []
