"""Runs whose SLURM does not answer, or answers late; and the number of questions to it."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runs import script
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
LATER = ("--sbatch", "begin=now+1hour")
COMMANDS = ("sbatch", "scontrol", "squeue", "sacct", "sinfo", "sacctmgr", "scancel")


def first_in_path(cluster: Cluster, name: str, **scripts: str) -> dict[str, str]:
    """An environment in which scripts stand before commands; ``$real`` is the command itself."""
    folder = cluster.home / name
    for command, body in scripts.items():
        script(folder / command, f"real={shutil.which(command, path=cluster.env['PATH'])}\n{body}")
    return {"PATH": f"{folder}:{cluster.env['PATH']}"}


def submit(
    cluster: Cluster, name: str, *more: str, env: dict[str, str], check: bool = True
) -> subprocess.CompletedProcess[str]:
    """`jobs.submit` of a run, or sweep, of that name with one light rank."""
    return cluster.job("submit", *of_one_rank(name), *more, env=env, check=check)


def of_one_rank(name: str) -> tuple[str, ...]:
    return ("ddp", *TINY, "--again", "--run-dir", f"runs/{name}", *ONE_RANK)


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
    submit(devcluster, "later", *LATER, env=env)
    assert len(said := calls.read_text().splitlines()) <= 4, said
    for verb, most in (("status", 1), ("cancel", 2)):
        calls.write_text("")
        devcluster.job(verb, "later", env=env)
        assert len(calls.read_text().splitlines()) <= most, calls.read_text()


def test_a_cancelled_sweep_is_cancelled_in_all_its_runs(devcluster: Cluster, light: dict[str, str]) -> None:
    """One run alone first, then those that have not begun: SLURM has a row of neither's number."""
    submit(devcluster, "sweep", "--sweep", "seed=0..5", *LATER, env=light)
    devcluster.job("cancel", "sweep/3")
    devcluster.job("cancel", "sweep")
    said = devcluster.job("status", "sweep").stdout
    assert said.count("CANCELLED") == 6, said


def test_a_user_s_habits_change_neither_what_is_read_nor_what_is_ended(devcluster: Cluster) -> None:
    said = submit(devcluster, "habits", *LATER, env=HABITS)
    assert "SLURM_CLUSTERS=elsewhere is not passed on" in said.stdout + said.stderr
    (job_id,) = jobs_of(devcluster, devcluster.home / "runs" / "habits")
    told = devcluster.job("status", "habits", env=HABITS).stdout
    assert "PENDING" in told
    assert "to start about 20" in told, "a time that can be read"
    assert f"cancelled job {job_id}" in devcluster.job("cancel", "habits", env=HABITS).stdout
    assert devcluster.wait(job_id) == "CANCELLED"


def test_cancel_ends_every_job_of_a_run_though_nobody_can_tell_which_live(
    devcluster: Cluster, silent: dict[str, str], light: dict[str, str]
) -> None:
    run = devcluster.home / "runs" / "twice"
    submit(devcluster, "twice", *LATER, env=light)
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
    slow = ("model.seconds=1", "train.max_steps=600", *LATER)  # nobody but `status` finds it
    words = (sys.executable, "-m", "jobs.submit", *of_one_rank("adopted"), *slow)  # a process, which can be killed
    assert devcluster.run(*words, env={**light, **killed}, check=False).returncode == -9
    assert jobs_of(devcluster, run) == []
    assert "adopted=true" in devcluster.job("status", "adopted").stdout
    (job_id,) = jobs_of(devcluster, run)
    devcluster.run("scontrol", "update", f"jobid={job_id}", "starttime=now")
    # Its rank finds what it has to run, though nobody could name that after the job.
    devcluster.wait_for("the start of the adopted run", lambda: bool(devcluster.events(run, "started")))
    refused = devcluster.job("resume", "adopted", "--force", env=silent, check=False)
    assert refused.returncode == 2, "whoever has the lease renews it, and so lives"
    assert f"is being written by job {job_id}" in refused.stderr
    devcluster.run("scancel", job_id)


def test_a_follower_goes_on_while_nobody_answers_and_says_so(devcluster: Cluster, silent: dict[str, str]) -> None:
    soon = ("--sbatch", "begin=now+5")  # a follower asks for a job that has not started, and after one that has
    done = submit(devcluster, "followed", "--follow", *soon, env=silent, check=False)
    assert "Nobody can tell what job" in done.stderr
    assert "Unable to contact slurm controller" in done.stderr
    assert "val acc1" in done.stdout, "what it came to, by its own record"
    assert done.returncode == 0


TIMED_OUT = "echo 'sbatch: error: Batch job submission failed: Socket timed out on send/recv operation' >&2; exit 1"
SBATCH = {
    "timed out": f'$real "$@" > /dev/null; {TIMED_OUT}',
    "killed": '$real "$@" > /dev/null; kill -9 $$',
    "mute": '$real "$@" > /dev/null; exit 1',
    "wrong": '$real "$@" > /dev/null; echo "sbatch: error: Batch job submission failed: Invalid qos" >&2; exit 1',
    "late": f'(sleep 3; $real "$@") > /dev/null 2>&1 & {TIMED_OUT}',
}


def held_back(cluster: Cluster, go: Path) -> dict[str, str]:
    """An environment whose sbatch times out, and queues the job once there is a file ``go``."""
    late = f'(until [ -e {go} ]; do sleep 0.2; done; $real "$@") > /dev/null 2>&1 & {TIMED_OUT}'
    return first_in_path(cluster, f"sbatch-{go.name}", sbatch=late)


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
    done = submit(devcluster, f"there {name}", *LATER, env=env)
    (job_id,) = in_queue(devcluster, run)
    assert f"Submitted job {job_id}" in done.stdout
    assert "sbatch failed" in done.stderr
    assert jobs_of(devcluster, run) == [job_id]
    devcluster.job("cancel", f"there {name}")
    if name == "timed out":  # a job that continues the run is found likewise
        devcluster.job("resume", f"there {name}", env=env)
        assert len(in_queue(devcluster, run)) == 1
        devcluster.job("cancel", f"there {name}")
    assert in_queue(devcluster, run) == []


def test_a_job_that_comes_later_is_unknown_until_it_is_found(devcluster: Cluster, light: dict[str, str]) -> None:
    """Nothing queues a second one in the meantime; of a sweep as of a run."""
    sweep, go = devcluster.home / "runs" / "unknown", devcluster.home / "go"
    env = {**light, **held_back(devcluster, go)}
    words = ("submit", "ddp", *TINY, "--run-dir", str(sweep), "--sweep", "seed=71,72", *ONE_RANK, *LATER)
    done = devcluster.job(*words, env=env, check=False)
    assert done.returncode == 4
    assert done.stderr.startswith(f"It is unknown whether SLURM has accepted the job of {sweep}.")
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
def test_a_job_that_was_cancelled_before_it_came_ends_before_it_trains(
    devcluster: Cluster, light: dict[str, str]
) -> None:
    """Though nobody looks for it: it looks for itself."""
    run, go = devcluster.home / "runs" / "unborn", devcluster.home / "go-unborn"
    env = {**light, **held_back(devcluster, go)}
    submit(devcluster, "unborn", env=env, check=False)
    assert "one that comes is cancelled" in devcluster.job("cancel", "unborn").stdout
    go.touch()
    devcluster.wait_for("the job", lambda: (run / "logs" / "batch.out").exists())
    devcluster.wait_for("its end", lambda: in_queue(devcluster, run) == [])
    assert devcluster.events(run, "started") == []
    assert "CANCELLED" in devcluster.job("status", "unborn").stdout
