from collections.abc import Callable
from pathlib import Path

import pytest

from trainkit import fileio
from trainkit.report.facts import Facts, collect
from trainkit.run.folder import RunDir

MakeRun = Callable[..., RunDir]


def facts_of(run_dir: RunDir) -> Facts:
    return Facts(run_dir, run_dir.name)


def test_speed_is_the_median_of_the_train_records(make_run: MakeRun) -> None:
    run_dir = make_run(speed=2000.0)
    fileio.append_jsonl(run_dir.metrics, {"step": 5, "split": "train", "images_per_sec": 3.0})  # the slow first step
    assert facts_of(run_dir).images_per_sec == pytest.approx(2010.0)


def test_time_steps_and_attempts_of_an_interrupted_run_are_in_its_records(make_run: MakeRun) -> None:
    run_dir = make_run(speed=2000.0, steps=200, finished=False, restarts=(50, 150))
    fileio.append_jsonl(run_dir.events, {"time": 1.7e9, "event": "saved", "step": 207})
    facts = facts_of(run_dir)
    assert facts.train_seconds == pytest.approx(64 * 200 / 2000, rel=0.02)
    assert facts.steps == 207, "those between the last record and the last checkpoint count"
    assert (facts.finished, facts.attempts, facts.requeues) == (False, 3, 2)
    assert (facts.restarts("epoch"), facts.restarts("step")) == ([2.5, 7.5], [50.0, 150.0])


def test_dataparallel_counts_the_gpus_that_it_drives(make_run: MakeRun) -> None:
    facts = facts_of(make_run(preset="dp", ranks=1, gpus=4))
    assert facts.processors == 4
    assert facts.processor_hours == pytest.approx(4 * facts.spans[0].seconds / 3600)
    assert facts_of(make_run("ddp-0002", ranks=2, gpus=4)).processors == 2


def test_runs_of_one_name_are_told_apart_by_their_folder(tmp_path: Path) -> None:
    runs = [RunDir(tmp_path / "a" / "ddp-0001"), RunDir(tmp_path / "b" / "ddp-0001"), RunDir(tmp_path / "dp-0002")]
    assert [facts.label for facts in collect(runs)] == ["a/ddp-0001", "b/ddp-0001", "dp-0002"]
