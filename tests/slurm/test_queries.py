"""What becomes of a run when SLURM does not answer, or nobody wrote down what it said; and how much it is asked."""

from __future__ import annotations

import shutil
import stat
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.slurm

# What users set so that squeue, sacct, sinfo and scancel show them, or end, what they want to.
HABITS = {
    "SQUEUE_FORMAT": "%j", "SQUEUE_USERS": "nobody", "SQUEUE_PARTITION": "low", "SACCT_FORMAT": "User",
    "SINFO_PARTITION": "low", "SCANCEL_STATE": "RUNNING", "SCANCEL_NAME": "other",
    "SLURM_TIME_FORMAT": "relative", "SLURM_CLUSTERS": "elsewhere",
}  # fmt: skip
TINY = ("model.name=light_model:build", "monitor.loggers=[jsonl]")
ONE_RANK = ("--nodes", "1", "--gpus-per-node", "0")
COMMANDS = ("sbatch", "scontrol", "squeue", "sacct", "sinfo", "sacctmgr", "scancel")


def first_in_path(cluster: Cluster, name: str, **scripts: str) -> dict[str, str]:
    """An environment in which scripts stand before commands; ``$real`` is the command itself."""
    folder = cluster.home / name
    folder.mkdir()
    for command, body in scripts.items():
        real = shutil.which(command, path=cluster.env["PATH"])
        file = folder / command
        file.write_text(f"#!/bin/bash\nreal={real}\n{body}\n")
        file.chmod(file.stat().st_mode | stat.S_IXUSR)
    return {"PATH": f"{folder}:{cluster.env['PATH']}"}


def jobs_of(cluster: Cluster, run: Path) -> list[str]:
    return [str(event["job_id"]) for event in cluster.events(run, "submitted")]


@pytest.fixture(scope="module")
def silent(devcluster: Cluster, light: dict[str, str]) -> dict[str, str]:
    """An environment in which nobody can be asked for jobs, whose ranks are light."""
    words = "echo 'Unable to contact slurm controller' >&2; exit 1"
    return {**light, **first_in_path(devcluster, "silent", squeue=words, sacct=words)}


def test_submit_status_and_cancel_ask_little(devcluster: Cluster, light: dict[str, str]) -> None:
    calls = devcluster.home / "calls"
    counted = {command: f'echo "{command} $*" >> {calls}; exec $real "$@"' for command in COMMANDS}
    env = {**light, **first_in_path(devcluster, "counted", **counted)}
    later = ("--sbatch", "begin=now+1hour")
    devcluster.job("submit", "ddp", *TINY, "--again", "--run-dir", "runs/later", *ONE_RANK, *later, env=env)
    assert len(said := calls.read_text().splitlines()) <= 4, said
    for verb, most in (("status", 1), ("cancel", 2)):
        calls.write_text("")
        devcluster.job(verb, "later", env=env)
        assert len(calls.read_text().splitlines()) <= most, calls.read_text()


def test_a_user_s_habits_change_neither_what_is_read_nor_what_is_ended(devcluster: Cluster) -> None:
    later = ("--sbatch", "begin=now+1hour", *ONE_RANK, "--again", "--run-dir", "runs/habits")
    said = devcluster.job("submit", "ddp", *TINY, *later, env=HABITS)
    assert "SLURM_CLUSTERS=elsewhere is not passed on" in said.stdout + said.stderr
    (job_id,) = jobs_of(devcluster, devcluster.home / "runs" / "habits")
    told = devcluster.job("status", "habits", env=HABITS).stdout
    assert "PENDING" in told
    assert "to start about 20" in told, "a time that can be read"
    assert f"cancelled job {job_id}" in devcluster.job("cancel", "habits", env=HABITS).stdout
    assert devcluster.wait(job_id) == "CANCELLED"


def test_cancel_ends_every_job_of_a_run_though_nobody_can_tell_which_live(
    devcluster: Cluster, silent: dict[str, str]
) -> None:
    run = devcluster.home / "runs" / "twice"
    later = ("--sbatch", "begin=now+1hour")
    devcluster.job("submit", "ddp", *TINY, "--again", "--run-dir", str(run), *ONE_RANK, *later)
    refused = devcluster.job("resume", "twice", env=silent, check=False)
    assert (refused.returncode, "--force" in refused.stderr) == (2, True)
    devcluster.job("resume", "twice", "--force", env=silent)
    ids = jobs_of(devcluster, run)
    assert len(ids) == 2
    devcluster.job("cancel", "twice", env=silent)
    assert [devcluster.wait(job_id) for job_id in ids] == ["CANCELLED"] * 2


@pytest.mark.long
def test_a_run_whose_submitter_was_killed_is_adopted_and_trains(
    devcluster: Cluster, silent: dict[str, str], light: dict[str, str]
) -> None:
    run = devcluster.home / "runs" / "adopted"
    killed = first_in_path(devcluster, "killed", sbatch='$real "$@" > /dev/null; kill -9 $PPID; sleep 1')
    slow = (*TINY, "--again", "model.seconds=1", "train.max_steps=600", "--run-dir", str(run), *ONE_RANK)
    later = ("--sbatch", "begin=now+1hour")  # nobody but `status` finds it
    assert devcluster.job("submit", "ddp", *slow, *later, env={**light, **killed}, check=False).returncode == -9
    assert jobs_of(devcluster, run) == []
    assert "adopted=true" in devcluster.job("status", "adopted").stdout
    (job_id,) = jobs_of(devcluster, run)
    devcluster.run("scontrol", "update", f"jobid={job_id}", "starttime=now")
    # Its rank finds what it has to run, though nobody could name that after the job.
    devcluster.wait_for("the start of the adopted run", lambda: bool(devcluster.events(run, "started")), timeout=60)
    refused = devcluster.job("resume", "adopted", "--force", env=silent, check=False)
    assert refused.returncode == 2, "whoever has the lease renews it, and so lives"
    assert f"is being written by job {job_id}" in refused.stderr
    devcluster.run("scancel", job_id)


def test_a_follower_goes_on_while_nobody_answers_and_says_so(devcluster: Cluster, silent: dict[str, str]) -> None:
    begun = ("submit", "ddp", *TINY, "--again", "--run-dir", "runs/followed", *ONE_RANK, "--follow")
    soon = ("--sbatch", "begin=now+5")  # a follower asks for a job that has not started, and after one that has
    done = devcluster.job(*begun, *soon, env=silent, check=False)
    assert "Nobody can tell what job" in done.stderr
    assert "Unable to contact slurm controller" in done.stderr
    assert "val acc1" in done.stdout, "what it came to, by its own record"
    assert done.returncode == 0
