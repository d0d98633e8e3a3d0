"""Peers from a cluster, for a swarm that somebody else has created: by `submit --join --array`, and by the template."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.slurm.conftest import PROJECT, Cluster, job_in
from tests.slurm.test_train_sbatch import edited
from tests.swarm.conftest import TOKEN

pytestmark = [pytest.mark.slurm, pytest.mark.long]


@pytest.fixture
def creator(devcluster: Cluster) -> Iterator[subprocess.Popen[bytes]]:
    """A swarm's creator on the login node, which the nodes reach over the cluster's network; see creator.txt."""
    words = (
        *(sys.executable, "-m", "jobs.swarm", "create", "hivemind", "--name", "creator"),
        *("--host", f"{devcluster.env['DEVCLUSTER_NET']}.254", "monitor.loggers=[jsonl]"),
        *("collaborative.round_seconds=8", "collaborative.rounds=500", "data.workers=0"),
    )
    env = {**os.environ, **devcluster.env, "PYTHONPATH": str(PROJECT)}
    with (devcluster.home / "creator.txt").open("wb") as out:
        process = subprocess.Popen(words, stdout=out, stderr=subprocess.STDOUT, cwd=devcluster.home, env=env)
    yield process
    process.kill()
    process.wait()


def test_an_array_of_peers_joins_comes_back_and_ends_with_the_run(
    devcluster: Cluster, creator: subprocess.Popen[bytes]
) -> None:
    said = (devcluster.home / "creator.txt").read_text
    devcluster.wait_for("the token", lambda: re.search(TOKEN, said(), re.MULTILINE) is not None)
    token = re.findall(TOKEN, said(), re.MULTILINE)[0]
    cpu = ("--gpus-per-node", "0", "data.workers=0")
    submitted = devcluster.job("submit", "hivemind", "--join", token, "--array", "2", *cpu).stdout
    assert "(array of 2): 1 node x 1 rank." in submitted
    by_template = devcluster.sbatch(
        "--array=0", "--gpus-per-node=0", edited(devcluster, "hivemind_peer.sbatch"), "launch.gpus_per_node=0",
        "data.workers=0", env={"TRAINKIT_TOKEN": token},
    )  # fmt: skip
    devcluster.wait_for("four peers", lambda: "4 peers averaged" in said(), timeout=240)

    run = devcluster.home / "runs" / f"hivemind-peer-job{by_template}" / "0"
    identity = (run / "identity").read_bytes()
    attempts = len(devcluster.events(run, "started"))
    devcluster.run("scontrol", "requeue", f"{by_template}_0")
    devcluster.wait_for("it comes back", lambda: len(devcluster.events(run, "started")) > attempts, timeout=240)
    assert (run / "identity").read_bytes() == identity

    creator.send_signal(signal.SIGINT)
    assert devcluster.wait(by_template) == "COMPLETED"
    assert devcluster.wait(job_in(submitted)) == "COMPLETED"
    runs = sorted((devcluster.home / "runs").glob("hivemind-peer-0*/*/summary.json"))
    assert len(runs) == 2
