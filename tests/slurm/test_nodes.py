"""Nodes that end attempts: the run does without them from then on, as long as enough others are left."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.slurm.conftest import DEVCLUSTER

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]

TWO_NODES = (
    *("train.epochs=3", "train.precision=fp32", "monitor.loggers=[jsonl]", "checkpoint.every_steps=3", "--again"),
    *("--nodes", "2", "--ntasks-per-node", "1", "--gpus-per-node", "0", "--time", "20"),
)


def submit(cluster: Cluster, name: str, *arguments: str) -> tuple[Path, str]:
    """Its folder and its job."""
    said = cluster.job("submit", "ddp", *TWO_NODES, "--run-dir", f"runs/{name}", *arguments).stdout
    match = re.search(r"Submitted job (\d+)", said)
    assert match, said
    return cluster.home / "runs" / name, match[1]


def excluded(cluster: Cluster, run: Path) -> list[tuple[str, str]]:
    return [(event["node"], event["why"]) for event in cluster.events(run, "excluded")]


def nodes(cluster: Cluster, run: Path) -> list[list[str]]:
    """Of each attempt."""
    return [event["hosts"] for event in cluster.events(run, "started")]


@pytest.fixture(scope="module", autouse=True)
def models(devcluster: Cluster) -> None:
    for name in ("troubled_model.py", "paced_model.py"):
        shutil.copy(Path(__file__).with_name(name), devcluster.home)


def test_a_node_whose_ranks_hang_twice_is_left_out_if_others_are_left(devcluster: Cluster) -> None:
    hanging = ("model.name=troubled_model:build", "model.troubles=hang,hang", "launch.hang_seconds=6")
    enough, job = submit(devcluster, "enough", *hanging, "--exclude", "n4")
    few, few_job = submit(devcluster, "few", *hanging, "--exclude", "n3,n4")
    assert devcluster.wait(job, timeout=400) == "COMPLETED", devcluster.logs()
    assert devcluster.wait(few_job, timeout=400) == "COMPLETED", devcluster.logs()
    assert nodes(devcluster, enough) == [["n1", "n2"], ["n1", "n2"], ["n1", "n3"]]
    assert excluded(devcluster, enough) == [("n2", "its ranks were behind in 2 hangs")]
    assert nodes(devcluster, few) == [["n1", "n2"]] * 3
    assert excluded(devcluster, few) == []
    said = (few / "logs" / "batch.out").read_text()
    assert "n2 should be left out, but too few nodes would be left: the run goes on with them." in said


def test_a_node_that_crashed_is_left_out_until_the_run_is_resumed(devcluster: Cluster) -> None:
    """Of the attempt there nobody can say a word: SLURM itself requeues the job when the first node is gone."""
    run, job = submit(devcluster, "crashed", "model.name=paced_model:build", "--exclude", "n4")
    (run / "pace").write_text("0.5")
    devcluster.wait_for("its first checkpoint", lambda: bool(devcluster.events(run, "saved")), timeout=200)
    assert nodes(devcluster, run) == [["n1", "n2"]]

    def node(verb: str) -> None:
        subprocess.run([str(DEVCLUSTER), verb, "n1"], env={**devcluster.env}, check=True, capture_output=True)

    node("crash")
    try:
        devcluster.wait_for("NODE_FAIL", lambda: "NODE_FAIL" in devcluster.states(job), timeout=120)
    finally:
        node("boot")
    devcluster.wait_for("the next attempt", lambda: len(nodes(devcluster, run)) > 1, timeout=200)
    assert nodes(devcluster, run)[1] == ["n2", "n3"]
    ((name, why),) = excluded(devcluster, run)
    assert name == "n1"
    assert re.search(r"slurmd was started at \S+, while attempt 0 ran there|SLURM says that it is down", why), why
    assert f"node=n1 why={why}" in devcluster.job("status", "crashed").stdout
    devcluster.job("cancel", "crashed")
    (run / "pace").unlink()
    said = devcluster.job("resume", "crashed", "--exclude", "n4").stdout
    assert "The run did without n1" in said
    assert "--exclude n1" in said
    again = devcluster.events(run, "submitted")[-1]["job_id"]
    assert devcluster.wait(again, timeout=200) == "COMPLETED", devcluster.logs()
    assert nodes(devcluster, run)[-1] == ["n1", "n2"]
