"""A sweep on a real SLURM: more runs than an array may have, what failed queued again, and a job that waits for all."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.slurm.test_queries import first_in_path
from trainkit.run.events import history_of
from trainkit.run.folder import RunDir

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.slurm

TINY = ("train.max_steps=2", "monitor.loggers=[jsonl]")
ONE_RANK = ("--nodes", "1", "--gpus-per-node", "0", "--time", "5")


def job_ids(sweep: Path) -> list[str]:
    lives = [history_of(RunDir(sweep / str(index))) for index in range(3)]
    return [life.submission.job_id if life.submission is not None else "" for life in lives]


def test_a_sweep_over_the_limit_of_arrays_trains_and_resumes(devcluster: Cluster, light: dict[str, str]) -> None:
    limit = '[ "$2" = config ] && exec echo "MaxArraySize = 2"; exec $real "$@"'
    env = {**light, **first_in_path(devcluster, "small", scontrol=limit)}
    points = ("--sweep", "model.luck=0..2", "--max-parallel", "2")
    slow = ("model.name=light_model:build", "model.seconds=1")  # so that who waits for it is seen to wait
    words = ("ddp", *TINY, *ONE_RANK, *slow, "--run-dir", "runs/sweep")
    said = devcluster.job("submit", *words, *points, env=env).stdout
    sweep = devcluster.home / "runs" / "sweep"
    array, single = re.findall(r"job +(\d+)", said)
    assert job_ids(sweep) == [f"{array}_0", f"{array}_1", single]
    assert "ArrayTaskThrottle=2" in devcluster.run("scontrol", "show", "job", array).stdout
    assert f"Dependency=afterany:{array}" in devcluster.run("scontrol", "show", "job", single).stdout
    assert devcluster.wait(single) == "FAILED", devcluster.logs()
    # Accounting hears of each task by itself, and of the last one may hear first.
    devcluster.wait_for("both tasks", lambda: sorted(devcluster.states(array)) == ["COMPLETED", "FAILED"])
    for index in range(3):
        assert re.search(rf"luck: {index}\b", (sweep / str(index) / "config.yaml").read_text())

    again = devcluster.job("resume", "runs/sweep", "--sbatch", "begin=now+1hour", env=env).stdout
    found = re.search(r"Submitted job (\d+) for 2 of 3 runs: 1, 2", again)
    assert found, again
    assert job_ids(sweep) == [f"{array}_0", f"{found[1]}_0", f"{found[1]}_1"]
    waiting = devcluster.job(
        "submit", "ddp", *TINY, *ONE_RANK, "--run-dir", "runs/after", "-d", "afterany:sweep"
    ).stdout
    waiter = waiting.split()[2].rstrip(":")
    told = devcluster.run("scontrol", "show", "job", waiter).stdout
    for index in (0, 1):
        assert f"afterany:{found[1]}_{index}" in told
    devcluster.run("scancel", waiter)
    devcluster.run("scontrol", "update", f"JobId={found[1]}", "StartTime=now")
    assert devcluster.wait(found[1]) == "COMPLETED", devcluster.logs()
    assert all((sweep / str(index) / "summary.json").is_file() for index in range(3))
    assert "Attempt 1 on" in (sweep / "2" / "logs" / "batch.out").read_text()
    table = devcluster.job("report", "runs/sweep").stdout
    assert len(re.findall(r"^\| [012] +\| [012] +\| +\d+\.\d\d", table, flags=re.MULTILINE)) == 3, table
