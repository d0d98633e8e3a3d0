"""Why a run failed or does not start, where a real SLURM did it. Their ranks import no torch, and start all at once."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.conftest import DEVCLUSTER, Cluster

pytestmark = pytest.mark.slurm

TWO = "nodes:2;gpus_per_node:0;ntasks_per_node:1"
ONE = "nodes:1;gpus_per_node:0;ntasks_per_node:1"
GIVEN = {
    "limit": f"{ONE};requeue:no",
    "preempted": f"{ONE};requeue:no;partition:low;nodelist:n3",
    "hidden/launch": f"{ONE};nodelist:n2",
    "hidden/half": f"{TWO};nodelist:n1,n2",
    "killed": f"{TWO};requeue:no",
    "again": TWO,
    "raises": TWO,
    "unseen": "nodes:1;gpus_per_node:1",
    "full": ONE,
    "ends": f"{ONE};sbatch:export=NONE",
    "cancelled": ONE,
    "crashed": f"{ONE};requeue:no;nodelist:n4",
    "held": f"{ONE};sbatch:hold=",
    "never": f"{ONE};dependency:afterok:{{failed}}",
    "limited": f"{TWO};partition:low;sbatch:hold=",
}
Jobs = dict[str, str]


@pytest.fixture(scope="module")
def jobs(devcluster: Cluster) -> Iterator[Jobs]:
    """The jobs of these runs, all submitted; n2 does not see what is in ``runs/hidden``."""
    home = devcluster.home
    shutil.copy(Path(__file__).with_name("light_ranks.py"), home)
    hidden = home / "runs" / "hidden"
    hidden.mkdir(parents=True)
    devcluster.run(str(DEVCLUSTER), "exec", "n2", "mount", "-t", "tmpfs", "none", str(hidden))
    failed = devcluster.sbatch("-o", "/dev/null", "--wrap", "exit 3")
    given = [f"{name}={flags.format(failed=failed)}" for name, flags in GIVEN.items()]
    told = devcluster.run(sys.executable, "light_ranks.py", *given, env={"PYTHONPATH": str(home)}).stdout
    yield dict(line.split() for line in told.splitlines())
    devcluster.run(str(DEVCLUSTER), "exec", "n2", "umount", "--lazy", str(hidden))


def why(cluster: Cluster, name: str, *arguments: str) -> str:
    return cluster.job("why", f"runs/{name}", *arguments).stdout


def running(cluster: Cluster, name: str, *, word: str = "Attempt") -> None:
    """Wait until the run's ranks may have started."""
    log = cluster.home / "runs" / name / "logs" / "batch.out"
    cluster.wait_for(f"{word} in {log}", lambda: log.exists() and re.search(word, log.read_text()) is not None)


@pytest.fixture(scope="module", autouse=True)
def interrupted(devcluster: Cluster, jobs: Jobs) -> Iterator[None]:
    """End jobs from outside: at their time limit, for a job of higher priority, with their node."""
    for name in ("limit", "preempted", "cancelled", "crashed"):
        running(devcluster, name)
    end_now = ("scontrol", "update", f"jobid={jobs['limit']}", "endtime=now+2")
    # A controller that reads it later than that calls the time invalid.
    devcluster.wait_for("a time limit", lambda: devcluster.run(*end_now, check=False).returncode == 0)
    devcluster.run("scontrol", "update", "partitionname=low", "gracetime=0")
    devcluster.sbatch("-p", "high", "-w", "n3", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 1")
    devcluster.job("cancel", "runs/cancelled")
    devcluster.run("scontrol", "update", "partitionname=low", "maxnodes=1")
    devcluster.run("scontrol", "release", jobs["limited"])
    devcluster.run("scontrol", "update", "nodename=n4", "state=down", "reason=test")
    devcluster.run("scontrol", "update", "nodename=n4", "state=idle")
    yield
    devcluster.run("scontrol", "update", "partitionname=low", "gracetime=10", "maxnodes=unlimited")


def test_a_job_that_was_queued_again_after_a_failure_says_what_ended_it(devcluster: Cluster, jobs: Jobs) -> None:
    running(devcluster, "again", word="REQUEUE")
    said = why(devcluster, "again")
    assert re.search(r"^Attempt \d failed and was queued again. Rank 1 on n\d was killed", said, re.MULTILINE), said


@pytest.mark.parametrize(
    ("name", "state", "says", "fix"),
    [
        ("killed", "FAILED", "Rank 1 on n{} was killed (SIGKILL)", "jobs.resume {run}`"),
        ("raises", "FAILED", "Rank 1 on n{} raised ValueError: bad labels, at light_ranks.py:", "jobs.submit {run}`"),
        ("unseen", "FAILED", "Rank 0 on n{} needs a GPU, and torch sees none.", "jobs.resume {run} --exclude n"),
        ("full", "FAILED", "The disk is full{0}: Rank 0 on n{0} could not write", " df -h "),
        ("hidden/launch", "FAILED", "n2 could not start its part of the job: it does not see {run}/logs", "-w n2 ls"),
        ("cancelled", "CANCELLED", "Somebody cancelled the job.", "jobs.resume {run}`"),
        ("crashed", "NODE_FAIL", "n4 went down or stopped answering", "jobs.resume {run}`"),
        ("preempted", "PREEMPTED", "The job was preempted", "jobs.resume {run}`"),
        ("limit", "TIMEOUT", "The job reached its time limit", "jobs.resume {run} --time 2:00:00`"),
    ],
)
def test_the_cause_of_an_ended_job_is_named(
    devcluster: Cluster, jobs: Jobs, name: str, state: str, says: str, fix: str
) -> None:
    def has_ended() -> bool:
        return devcluster.states(jobs[name])[-1:] == [state] and why(devcluster, name).startswith(
            f"{Path(name).name}: {state} (job {jobs[name]}). "
        )

    devcluster.wait_for(f"{name} is {state}", has_ended)
    said, run = why(devcluster, name), str(devcluster.home / "runs" / name)
    assert all(part in said for part in says.format("\0", run=run).split("\0")), said
    assert fix.format(run=run) in said.splitlines()[-1], said


@pytest.mark.parametrize(
    ("name", "says", "fix"),
    [
        ("held", "The job is held", "`scontrol release {job}`"),
        ("never", "which has failed or is gone", "`scontrol update JobId={job} Dependency=`"),
        ("limited", "more nodes than its partition allows, or for another kind (PartitionNodeLimit)", "`sinfo"),
    ],
)
def test_what_a_job_waits_for_in_vain_is_named(devcluster: Cluster, jobs: Jobs, name: str, says: str, fix: str) -> None:
    devcluster.wait_for(f"{name} is not started", lambda: says in why(devcluster, name))
    assert fix.format(job=jobs[name]) in why(devcluster, name)


def test_a_rank_that_never_started_is_named_at_once(devcluster: Cluster, jobs: Jobs) -> None:
    """While the others wait for it; since 23.02 SLURM starts it with a folder of the node's own, and it fails."""
    running(devcluster, "hidden/half", word="launch failed|n2: task 1: Exited")
    said = why(devcluster, "hidden/half")
    state = rf"half: (RUNNING|FAILED) \(job {jobs['hidden/half']}\)"  # on a busy machine it has ended by now
    assert re.search(rf"^({state}|Attempt \d failed and was queued again)\. n2 could not start", said, re.MULTILINE), (
        said
    )


def test_a_job_submitted_without_an_environment_runs(devcluster: Cluster, jobs: Jobs) -> None:
    assert devcluster.wait(jobs["ends"]) == "COMPLETED", why(devcluster, "ends")
    assert "nothing failed" in why(devcluster, "ends")


def test_the_command_that_is_printed_can_be_pasted_and_the_run_goes_on(devcluster: Cluster, jobs: Jobs) -> None:
    devcluster.wait_for("the crash", lambda: "jobs.resume" in why(devcluster, "crashed"))
    command = why(devcluster, "crashed").rpartition("`")[0].rpartition("`")[2]
    devcluster.run("bash", "-c", f'python() {{ "{sys.executable}" "$@"; }}; {command}')

    def goes_on() -> bool:
        said = why(devcluster, "crashed")
        return ": RUNNING (job " in said and f"(job {jobs['crashed']})" not in said

    devcluster.wait_for(f"it goes on after {command}", goes_on)
    jobs_of_run = [event["job_id"] for event in devcluster.events(devcluster.home / "runs" / "crashed", "submitted")]
    assert (jobs_of_run[0], len(jobs_of_run)) == (jobs["crashed"], 2)
    devcluster.job("cancel", "runs/crashed")
