"""What becomes of a job whose scheduler does not answer, whose ranks are killed or hang, whose node is lost."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]

TINY = ("train.epochs=2", "train.precision=fp32", "monitor.loggers=[jsonl]")
SLOW = ("model.name=slow_model:build", "model.seconds=0.3")
ONE_RANK = ("--nodes", "1", "--gpus-per-node", "0")
TWO_NODES = ("--nodes", "2", "--gpus-per-node", "0")

FAILING = """#!/bin/bash
# A scheduler that fails in a job: each command of it so often, and a requeue always if that is forbidden.
name=${0##*/}
if [ -n "${SLURM_JOB_ID:-}" ] && [ "$name" != sbatch ]; then
    if [ "${FORBIDDEN:-}" ] && [ "$1" = requeue ]; then echo "Requeue is disabled here" >&2; exit 1; fi
    echo "$*" >> "$FAILURES/$SLURM_JOB_ID.$name"
    if [ "$(wc -l < "$FAILURES/$SLURM_JOB_ID.$name")" -le 2 ]; then
        echo "slurm_load_jobs error: Unable to contact slurm controller (connect failure)" >&2; exit 1
    fi
fi
PATH=${PATH#*:} exec "$name" "$@"
"""


class Runs:
    """Runs that were submitted at once, by name: their jobs wait for one another no longer than they must."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.jobs: dict[str, str] = {}

    def submit(self, name: str, *arguments: str, env: dict[str, str] | None = None) -> None:
        command = ("ddp", *TINY, "--again", "--run-dir", f"runs/{name}", "--time", "20", *arguments)
        said = self.cluster.job("submit", *command, env=env).stdout
        match = re.search(r"Submitted job (\d+)", said)
        assert match, said
        self.jobs[name] = match[1]

    def path(self, name: str) -> Path:
        return self.cluster.home / "runs" / name

    def wait_for_start(self, name: str) -> None:
        path = self.path(name)
        self.cluster.wait_for(f"the start of {name}", lambda: bool(self.cluster.events(path, "started")), timeout=150)

    def wait(self, name: str) -> str:
        """The state in which the run's newest job has ended."""
        return self.cluster.wait(self.cluster.events(self.path(name), "submitted")[-1]["job_id"], timeout=240)


@pytest.fixture(scope="module")
def runs(devcluster: Cluster) -> Runs:
    """Each of the runs of this file, submitted, and interrupted as its test says."""
    shutil.copy(Path(__file__).with_name("troubled_model.py"), devcluster.home)
    commands, failures = devcluster.home / "commands", devcluster.home / "failures"
    commands.mkdir()
    failures.mkdir()
    for name in ("squeue", "scontrol"):
        (commands / name).write_text(FAILING)
        (commands / name).chmod(0o755)
    broken = {"PATH": f"{commands}:{devcluster.env['PATH']}", "FAILURES": str(failures)}
    all_runs = Runs(devcluster)
    all_runs.submit("silent", *ONE_RANK, "-w", "n3", *SLOW, env=broken)
    all_runs.submit("forbidden", *ONE_RANK, "-w", "n3", *SLOW, env={**broken, "FORBIDDEN": "yes"})
    troubled = ("model.name=troubled_model:build", "model.troubles=hang,kill", "launch.hang_seconds=5")
    all_runs.submit("troubled", *TWO_NODES, "-w", "n1,n2", *troubled)
    after = ("--wrap", "date +%s > after-silent", "-o", "/dev/null", "-d", f"afterok:{all_runs.jobs['silent']}")
    devcluster.sbatch(*after)
    for name in ("silent", "forbidden"):
        all_runs.wait_for_start(name)
        devcluster.run("scancel", "--signal=USR2", all_runs.jobs[name])
    return all_runs


def test_a_scheduler_that_does_not_answer_at_the_end_of_an_attempt_loses_no_training(
    devcluster: Cluster, runs: Runs
) -> None:
    assert runs.wait("silent") == "COMPLETED", devcluster.logs()
    path = runs.path("silent")
    assert len(devcluster.events(path, "started")) == 2
    assert json.loads((path / "summary.json").read_text())["outcome"] == "finished"
    devcluster.wait_for("the job after it", (devcluster.home / "after-silent").exists)
    ended = devcluster.events(path, "ended")[-1]
    assert ended["state"] == "COMPLETED"
    assert int((devcluster.home / "after-silent").read_text()) >= int(ended["time"]), "it must not start before"


def test_where_requeueing_is_forbidden_a_chain_of_jobs_trains_the_run(devcluster: Cluster, runs: Runs) -> None:
    assert runs.wait("forbidden") == "COMPLETED", devcluster.logs()
    first, second = devcluster.events(runs.path("forbidden"), "submitted")
    assert second["continues"] == first["job_id"] == runs.jobs["forbidden"]
    assert devcluster.wait(first["job_id"]) == "FAILED", "what waits for a finished training must not start"
    assert devcluster.final_weights(runs.path("forbidden")) == devcluster.final_weights(runs.path("silent"))


def test_a_run_that_hangs_and_is_killed_is_started_again_each_time(devcluster: Cluster, runs: Runs) -> None:
    assert runs.wait("troubled") == "COMPLETED", devcluster.logs()
    path = runs.path("troubled")
    assert [event["attempt"] for event in devcluster.events(path, "requeued")] == [0, 1]
    assert [event["attempt"] for event in devcluster.events(path, "started")] == [0, 1, 2]


def test_of_a_hang_the_rank_that_is_behind_is_named_and_the_stacks_of_all_are_there(
    devcluster: Cluster, runs: Runs
) -> None:
    runs.wait("troubled")
    path = runs.path("troubled")
    hang = devcluster.events(path, "failed")[0]
    assert (hang["attempt"], hang["rank"], hang["host"]) == (0, 1, "n2")
    assert "troubled_model.py" in hang["error"]
    assert "in _fall_into_it" in (path / "logs/0/rank-1.err").read_text()
    assert "has made no progress" in (path / "logs/0/rank-0.err").read_text()
