"""sbatch that has no answer from the scheduler, which has taken the job, or takes it later, or was not there."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.slurm.test_queries import ONE_RANK, TINY, first_in_path, jobs_of

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.slurm

TIMED_OUT = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
SBATCH = {
    "timed out": f'$real "$@" > /dev/null; {TIMED_OUT}',
    "killed": '$real "$@" > /dev/null; kill -9 $$',
    "mute": '$real "$@" > /dev/null; exit 1',
    "wrong": '$real "$@" > /dev/null; echo "sbatch: error: Batch job submission failed: Invalid qos" >&2; exit 1',
    "late": f'(sleep 3; $real "$@") > /dev/null 2>&1 & {TIMED_OUT}',
}
LATER = ("--sbatch", "begin=now+1hour")


def in_queue(cluster: Cluster, run: Path) -> list[str]:
    """Jobs of a run or sweep, by what SLURM says of their scripts."""
    lines = cluster.run("squeue", "-h", "-r", "-t", "PD,R,CF", "-o", "%i|%o").stdout.splitlines()
    return sorted(line.partition("|")[0] for line in lines if f"{run}/" in line)


@pytest.mark.parametrize(
    "name", ["timed out", *(pytest.param(name, marks=pytest.mark.long) for name in list(SBATCH)[1:])]
)
def test_a_job_that_is_there_is_submitted_whatever_sbatch_says(
    devcluster: Cluster, light: dict[str, str], name: str
) -> None:
    run = devcluster.home / "runs" / f"there {name}"
    env = {**light, **first_in_path(devcluster, f"sbatch {name}", sbatch=SBATCH[name])}
    words = ("submit", "ddp", *TINY, "--again", "--run-dir", str(run), *ONE_RANK, *LATER)
    done = devcluster.job(*words, env=env)
    (job_id,) = in_queue(devcluster, run)
    assert f"Submitted job {job_id}" in done.stdout
    assert "sbatch has failed" in done.stderr
    assert jobs_of(devcluster, run) == [job_id]
    devcluster.run("scancel", job_id)


def test_a_job_that_comes_later_is_unknown_until_it_is_found(devcluster: Cluster, light: dict[str, str]) -> None:
    """Nothing queues a second one in the meantime; of a sweep as of a run."""
    sweep = devcluster.home / "runs" / "unknown"
    go = devcluster.home / "go"
    script = f'(until [ -e {go} ]; do sleep 0.2; done; $real "$@") > /dev/null 2>&1 & {TIMED_OUT}'
    env = {**light, **first_in_path(devcluster, "sbatch-much-later", sbatch=script)}
    words = ("submit", "ddp", *TINY, "--run-dir", str(sweep), "--sweep", "seed=71,72", *ONE_RANK, *LATER)
    done = devcluster.job(*words, env=env, check=False)
    assert (done.returncode, done.stderr.splitlines()[0]) == (
        4,
        f"Nobody can tell whether SLURM has taken the job of {sweep}.",
    )
    assert "Socket timed out on send/recv operation" in done.stderr
    assert [line.split()[1] for line in devcluster.job("status", "unknown").stdout.splitlines()[1:3]] == ["UNKNOWN"] * 2
    for verb in (("resume", "unknown"), ("resume", "unknown/0"), words):
        again = devcluster.job(*verb, check=False)
        assert again.returncode in (2, 3), again.stderr
        assert "Socket timed out" in again.stderr or verb == words, again.stderr
    assert in_queue(devcluster, sweep) == []
    go.touch()
    devcluster.wait_for("the job", lambda: len(in_queue(devcluster, sweep)) == 2)
    assert "PENDING" in devcluster.job("status", "unknown").stdout
    ids = in_queue(devcluster, sweep)
    assert [jobs_of(devcluster, sweep / number) for number in "01"] == [[job_id] for job_id in ids]
    devcluster.job("cancel", "unknown")
    assert in_queue(devcluster, sweep) == []


@pytest.mark.long
def test_resume_whose_job_is_there_queues_no_second_one(devcluster: Cluster, light: dict[str, str]) -> None:
    run = devcluster.home / "runs" / "resumed"
    devcluster.job("submit", "ddp", *TINY, "--again", "--run-dir", str(run), *ONE_RANK, *LATER, env=light)
    devcluster.job("cancel", "resumed")
    env = first_in_path(devcluster, "sbatch-resume", sbatch=f'$real "$@" > /dev/null; {TIMED_OUT}')
    devcluster.job("resume", "resumed", env={**light, **env})
    assert len(in_queue(devcluster, run)) == 1
    refused = devcluster.job("resume", "resumed", check=False)
    assert (refused.returncode, "is PENDING" in refused.stderr) == (2, True)
    devcluster.job("cancel", "resumed")
    assert in_queue(devcluster, run) == []


@pytest.mark.long
def test_a_job_that_was_cancelled_before_it_came_ends_before_it_trains(
    devcluster: Cluster, light: dict[str, str]
) -> None:
    """Though nobody looks for it: it looks for itself."""
    run = devcluster.home / "runs" / "unborn"
    go = devcluster.home / "go-unborn"
    script = f'(until [ -e {go} ]; do sleep 0.2; done; $real "$@") > /dev/null 2>&1 & {TIMED_OUT}'
    env = {**light, **first_in_path(devcluster, "sbatch-unborn", sbatch=script)}
    devcluster.job("submit", "ddp", *TINY, "--again", "--run-dir", str(run), *ONE_RANK, env=env, check=False)
    assert "one that comes is cancelled" in devcluster.job("cancel", "unborn").stdout
    go.touch()
    devcluster.wait_for("the job", lambda: (run / "logs" / "batch.out").exists(), timeout=60)
    devcluster.wait_for("its end", lambda: in_queue(devcluster, run) == [], timeout=60)
    assert devcluster.events(run, "started") == []
    assert "CANCELLED" in devcluster.job("status", "unborn").stdout


@pytest.mark.long
def test_what_sbatch_refuses_leaves_nothing(devcluster: Cluster) -> None:
    run = devcluster.home / "runs" / "no-account"
    done = devcluster.job(
        "submit", "ddp", *TINY, "--again", "--run-dir", str(run), *ONE_RANK, "--reservation", "nosuch", check=False
    )
    assert done.returncode == 4, done.stdout
    assert not run.exists()


@pytest.mark.long
def test_a_controller_that_is_gone_leaves_a_run_that_nobody_knows_the_job_of(
    devcluster: Cluster, light: dict[str, str]
) -> None:
    """sbatch reaches nobody, nor does the one who looks; when SLURM is back and has no job, resume queues one."""
    run = devcluster.home / "runs" / "gone"
    words = "echo 'slurm_load_jobs error: Unable to contact slurm controller (connect failure)' >&2; exit 1"
    env = first_in_path(devcluster, "gone-bin", sbatch=TIMED_OUT, squeue=words, sacct=words)
    command = ("submit", "ddp", *TINY, "--again", "--run-dir", str(run), *ONE_RANK, *LATER)
    done = devcluster.job(*command, env={**light, **env}, check=False)
    assert (done.returncode, "SLURM cannot be asked" in done.stderr) == (4, True)
    began = time.monotonic()
    devcluster.wait_for("no job", lambda: "NOT SUBMITTED" in devcluster.job("status", "gone").stdout, timeout=150)
    assert time.monotonic() - began > 90, "what was on its way might have arrived"
    devcluster.job("resume", "gone", env=light)
    assert len(in_queue(devcluster, run)) == 1
    devcluster.job("cancel", "gone")


@pytest.mark.long
def test_what_a_controller_that_hangs_takes_afterwards_is_the_runs_job(
    devcluster: Cluster, light: dict[str, str]
) -> None:
    """The request waits for it in its socket, while sbatch and squeue time out."""
    run = devcluster.home / "runs" / "hung"
    controller = Path(devcluster.env["DEVCLUSTER_DIR"], "run", "slurmctld.pid").read_text().split()[0]
    env = first_in_path(devcluster, "hung-bin", sbatch=f'kill -STOP {controller}; exec $real "$@"')
    command = ("submit", "ddp", *TINY, "--again", "--run-dir", str(run), *ONE_RANK, *LATER)
    try:
        done = devcluster.job(*command, env={**light, **env}, check=False)
        assert (done.returncode, "SLURM cannot be asked" in done.stderr) == (4, True)
        again = devcluster.job("resume", "hung", env=light, check=False)
        assert (again.returncode, "Socket timed out" in again.stderr) == (2, True)
    finally:
        os.kill(int(controller), signal.SIGCONT)
    devcluster.wait_for("the job", lambda: len(in_queue(devcluster, run)) == 1)
    assert "PENDING" in devcluster.job("status", "hung").stdout
    devcluster.job("cancel", "hung")
    assert in_queue(devcluster, run) == []


@pytest.mark.long
def test_a_bench_whose_job_is_there_is_submitted_too(devcluster: Cluster, light: dict[str, str]) -> None:
    run = devcluster.home / "runs" / "bench"
    env = first_in_path(devcluster, "bench-bin", sbatch=SBATCH["timed out"])
    words = ("bench", "loader", "single", "--run-dir", str(run), *ONE_RANK, *LATER)
    said = devcluster.job(*words, env={**light, **env}).stdout
    assert [f"Submitted job {job_id}" in said for job_id in in_queue(devcluster, run)] == [True]
    devcluster.job("cancel", "bench")
