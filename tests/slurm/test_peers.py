"""Peers from a cluster, for a swarm that somebody else has created: by `submit --join --array`, and by the template."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.swarm.conftest import TOKEN

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

PROJECT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slurm, pytest.mark.long]


class Creator:
    """A swarm's creator on the login node, which the nodes reach over the cluster's network."""

    def __init__(self, cluster: Cluster) -> None:
        self.out = cluster.home / "creator.txt"
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "jobs.swarm", "create", "hivemind", "--name", "creator"),
                    *("--host", f"{cluster.env['DEVCLUSTER_NET']}.254", "monitor.loggers=[jsonl]"),
                    *("collaborative.round_seconds=8", "collaborative.rounds=500", "data.workers=0"),
                ],
                stdout=out,
                stderr=subprocess.STDOUT,
                cwd=cluster.home,
                env={**os.environ, **cluster.env, "PYTHONPATH": str(PROJECT)},
            )

    @property
    def said(self) -> str:
        return self.out.read_text(encoding="utf-8")

    def token(self, cluster: Cluster) -> str:
        cluster.wait_for("the token", lambda: re.search(TOKEN, self.said, re.MULTILINE) is not None)
        found = re.search(TOKEN, self.said, re.MULTILINE)
        assert found is not None
        return found[1]


@pytest.fixture
def creator(devcluster: Cluster) -> Iterator[Creator]:
    creator = Creator(devcluster)
    yield creator
    creator.process.kill()
    creator.process.wait()


def template(cluster: Cluster) -> str:
    text = (PROJECT / "slurm" / "hivemind_peer.sbatch").read_text(encoding="utf-8")
    text = text.replace("--account=CHANGE_ME", "--account=thesis").replace("--partition=CHANGE_ME", "--partition=main")
    file = cluster.home / "peer.sbatch"
    file.write_text(text, encoding="utf-8")
    return str(file)


def test_an_array_of_peers_joins_comes_back_and_ends_with_the_run(devcluster: Cluster, creator: Creator) -> None:
    token = creator.token(devcluster)
    cpu = ("--gpus-per-node", "0", "data.workers=0")
    submitted = devcluster.job("submit", "hivemind", "--join", token, "--array", "2", *cpu).stdout
    assert "(array of 2): 1 node x 1 rank." in submitted
    by_template = devcluster.sbatch(
        "--array=0", "--gpus-per-node=0", template(devcluster), "launch.gpus_per_node=0", "data.workers=0",
        env={"TRAINKIT_TOKEN": token},
    )  # fmt: skip
    devcluster.wait_for("four peers", lambda: "4 peers averaged" in creator.said, timeout=240)

    run = devcluster.home / "runs" / f"hivemind-peer-job{by_template}" / "0"
    identity = (run / "identity").read_bytes()
    attempts = len(devcluster.events(run, "started"))
    devcluster.run("scontrol", "requeue", f"{by_template}_0")
    devcluster.wait_for("it comes back", lambda: len(devcluster.events(run, "started")) > attempts, timeout=240)
    assert (run / "identity").read_bytes() == identity

    creator.process.send_signal(signal.SIGINT)
    assert devcluster.wait(by_template) == "COMPLETED"
    found = re.search(r"Submitted job (\d+)", submitted)
    assert found is not None
    assert devcluster.wait(found[1]) == "COMPLETED"
    runs = sorted((devcluster.home / "runs").glob("hivemind-peer-0*/*/summary.json"))
    assert len(runs) == 2
