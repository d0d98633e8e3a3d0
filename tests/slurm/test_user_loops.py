"""A user's own loop on a real SLURM: however it is interrupted, it ends with the weights of one that was not."""

import hashlib
import os
import random
import signal
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest

from tests.runs import wait_until
from tests.slurm.conftest import PROJECT, Cluster, Submitted, job_in
from tests.soak import cluster as soaked

pytestmark = [pytest.mark.slurm, pytest.mark.long]

INTERRUPTIONS = int(os.environ.get("INTERRUPTIONS", "25"))
EPOCHS = 14 * INTERRUPTIONS
KINDS = ("requeue", "kill", "usr2")


def submit(cluster: Cluster, name: str) -> Submitted:
    run = cluster.home / "runs" / name
    words = ("--nodes", "2", "--gpus-per-node", "0", "--run-dir", str(run))
    settings = ("checkpoint.every_steps=20", "monitor.loggers=[jsonl]", "strategy.name=ddp")
    said = cluster.job("submit", "classifier.py", *words, *settings, "--", "--epochs", str(EPOCHS)).stdout
    return Submitted(job_in(said), run, said)


def starts(run: Path) -> int:
    """Number of attempts whose ranks have met."""
    return sum("precision" in event for event in Cluster.events(run, "started"))


def wait_for_start(cluster: Cluster, run: Path, job_id: str, before: int) -> bool:
    """Wait for a further start, or the end of the job. Returns True for a start."""

    def has_come() -> bool:
        there = cluster.run("squeue", "-h", "-j", job_id, "-o", "%i", check=False).stdout.strip()
        return starts(run) > before or not there

    wait_until(has_come, 180, cluster.logs)
    return starts(run) > before


def tensors(run: Path) -> dict[str, str]:
    """SHA-256 of each file of tensors of the last checkpoint."""
    files = (run / "checkpoints" / "latest").glob("*.safetensors")
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def strike(cluster: Cluster, job_id: str, kind: str, draw: random.Random) -> None:
    if kind == "requeue":
        cluster.run("scontrol", "requeue", job_id)
    elif kind == "usr2":
        cluster.run("scancel", "--signal=USR2", f"{job_id}.0")
    else:
        nodes = soaked.Cluster(cluster.home, cluster.env, (), ("n1", "n2", "n3", "n4"))
        of_job = [item for item in nodes.processes() if item.env.get("SLURM_JOB_ID") == job_id]
        scripts = [item.pid for item in of_job if "/project/classifier.py" in item.command]
        with suppress(OSError):  # it has just ended
            os.kill(draw.choice(scripts), signal.SIGKILL)


def test_a_loop_that_is_interrupted_25_times_ends_with_the_same_tensors(devcluster: Cluster) -> None:
    (devcluster.home / "classifier.py").write_text((PROJECT / "docs/examples/classifier.py").read_text())
    draw = random.Random(53)
    whole = submit(devcluster, "whole")
    assert devcluster.wait(whole.job_id, timeout=900) == "COMPLETED"
    run = submit(devcluster, "struck")
    job_id = run.job_id
    struck: list[str] = []
    resumed = 0
    attempts = 0
    while len(struck) < INTERRUPTIONS:
        if not wait_for_start(
            devcluster, run.run, job_id, attempts
        ):  # ranks were killed more often than a submission puts up with
            assert devcluster.states(job_id)[-1] == "FAILED"
            job_id = job_in(devcluster.job("resume", str(run.run)).stdout)
            resumed += 1
            continue
        attempts = starts(run.run)
        time.sleep(draw.uniform(0.0, 2.0))
        struck.append(draw.choice(KINDS))
        strike(devcluster, job_id, struck[-1], draw)
    while devcluster.wait(job_id, timeout=900) == "FAILED":
        job_id = job_in(devcluster.job("resume", str(run.run)).stdout)
        resumed += 1
    expected = tensors(whole.run)
    print(f"{Counter(struck)}; {starts(run.run)} starts, resumed by hand {resumed} times; {expected}")
    assert tensors(run.run) == expected
    assert {"model.safetensors", "optimizer.safetensors"} <= set(expected)
