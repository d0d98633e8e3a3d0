from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs.status import age
from trainkit.config.loading import load, to_yaml
from trainkit.records import jsonl
from trainkit.records.events import append_event
from trainkit.records.process_id import ProcessId
from trainkit.records.rundir import RunDir

Command = Callable[..., Any]


def make(path: Path, **submitted: Any) -> RunDir:
    run = RunDir.create(path, to_yaml(load("ddp").config))
    if submitted:
        append_event(run, "submitted", **submitted)
    return run


def local(process: ProcessId) -> dict[str, Any]:
    return {
        "executor": "local", "job_id": str(process.pid), "host": process.host, "pid": process.pid,
        "process_started": process.started, "attempts_before": 0,
    }  # fmt: skip


def test_without_runs_it_says_how_to_start_one(command: Command, no_slurm: dict[str, str]) -> None:
    assert "python -m jobs.submit ddp" in command("status").out


def test_a_run_is_listed_with_state_progress_and_accuracy(
    command: Command, no_slurm: dict[str, str], tmp_path: Path
) -> None:
    run = make(tmp_path / "runs" / "ddp-0001", **local(ProcessId.of(os.getpid())))
    run.attempt_logs(0).mkdir()
    append_event(run, "started", attempt=0, total_steps=380)
    jsonl.append(run.metrics, {"split": "val", "step": 19, "epoch": 1.0, "acc1": 55.39})
    jsonl.append(run.metrics, {"split": "train", "step": 30, "epoch": 1.58, "acc1": 47.5})
    done = command("status")
    assert done.code == 0
    header, line = done.out.splitlines()
    assert header.split()[:3] == ["run", "state", "job"]
    assert line.split()[:8] == ["ddp-0001", "RUNNING", str(os.getpid()), "1", "30/380", "1.6", "acc1", "55.39"]


def test_runs_of_other_folders_are_listed_by_their_path(
    command: Command, no_slurm: dict[str, str], tmp_path: Path
) -> None:
    make(tmp_path / "elsewhere" / "mine-0004")
    assert str(tmp_path / "elsewhere" / "mine-0004") in command("status").out


def test_a_run_by_its_name_is_shown_from_any_folder_with_its_history(
    command: Command, no_slurm: dict[str, str], tmp_path: Path
) -> None:
    run = make(tmp_path / "elsewhere" / "mine-0004", **local(ProcessId("far", 1, "1")))
    append_event(run, "saved", step=19)
    done = command("status", "mine-0004")
    assert f"folder  {run.path}" in done.out
    assert "it runs on far; ask there" in done.out
    assert "saved      step=19" in done.out


def test_a_slurm_run_is_asked_from_the_queue(command: Command, fake_slurm: Path, tmp_path: Path) -> None:
    make(tmp_path / "runs" / "ddp-0001", executor="slurm", job_id="4711")
    assert command("status", "ddp-0001").out.splitlines()[1].split()[1:3] == ["PENDING", "4711"]


def test_a_sweep_is_shown_by_its_runs(command: Command, no_slurm: dict[str, str], tmp_path: Path) -> None:
    sweep = tmp_path / "runs" / "ddp-0001"
    for index in range(2):
        make(sweep / str(index))
    (sweep / "sweep.json").write_text(json.dumps([]))
    lines = command("status", "ddp-0001").out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == ["ddp-0001/0", "ddp-0001/1"]
    assert "ddp-0001/1" in command("status", "ddp-0001/1").out


def test_an_unknown_run_is_answered_with_the_nearest(
    command: Command, no_slurm: dict[str, str], tmp_path: Path
) -> None:
    make(tmp_path / "runs" / "ddp-0001")
    done = command("status", "ddp-001")
    assert done.code == 2
    assert "Did you mean 'ddp-0001'?" in done.err


def test_only_the_newest_runs_are_listed_unless_asked(
    command: Command, no_slurm: dict[str, str], tmp_path: Path
) -> None:
    for index in range(22):
        run = make(tmp_path / "runs" / f"ddp-{index:04}")
        os.utime(run.config, (time.time() - 1000 + index,) * 2)
    done = command("status")
    assert "2 older runs are not shown" in done.out
    assert "ddp-0021" in done.out
    assert "ddp-0000" not in done.out
    assert "ddp-0000" in command("status", "--all").out


@pytest.mark.parametrize(
    ("seconds", "text"), [(-1, "0 s"), (59, "59 s"), (60, "1 min"), (3 * 3600 + 5, "3 h"), (90000, "1 d")]
)
def test_ages_are_given_in_the_largest_unit_that_fits(seconds: float, text: str) -> None:
    assert age(seconds) == text
