"""Nodes and ranks that end attempts: the run goes on, and does without bad nodes as long as enough others are left."""

import re
import subprocess
from pathlib import Path

import pytest

from tests.slurm.conftest import DEVCLUSTER, Cluster, job_in
from tests.slurm.test_check import mounted

pytestmark = pytest.mark.slurm

TWO_NODES = (
    *("train.epochs=3", "train.precision=fp32", "monitor.loggers=[jsonl]", "checkpoint.every_steps=3"),
    *("--nodes", "2", "--ntasks-per-node", "1", "--gpus-per-node", "0", "--time", "20"),
)


def excluded(cluster: Cluster, run: Path) -> list[tuple[str, str]]:
    return [(event["node"], event["why"]) for event in cluster.events(run, "excluded")]


def nodes(cluster: Cluster, run: Path) -> list[list[str]]:
    """Return the nodes of each attempt."""
    return [event["hosts"] for event in cluster.events(run, "started")]


@pytest.mark.long
def test_a_node_whose_ranks_hang_twice_is_left_out_if_others_are_left(devcluster: Cluster) -> None:
    troubled = (*TWO_NODES, "model.name=own_models:troubled", "launch.hang_seconds=6")
    job, enough, _ = devcluster.submit("enough", *troubled, "model.troubles=hang,hang", "--exclude", "n4")
    few_job, few, _ = devcluster.submit("few", *troubled, "model.troubles=hang,hang", "--exclude", "n3,n4")
    killed_job, killed, _ = devcluster.submit("killed", *troubled, "model.troubles=hang,kill", "--exclude", "n3,n4")
    for one in (job, few_job, killed_job):
        assert devcluster.wait(one, timeout=400) == "COMPLETED", devcluster.logs()
    assert {event["attempt"] for event in devcluster.events(killed, "failed")} == {0, 1}
    assert nodes(devcluster, killed) == [["n1", "n2"]] * 3
    assert nodes(devcluster, enough) == [["n1", "n2"], ["n1", "n2"], ["n1", "n3"]]
    assert excluded(devcluster, enough) == [("n2", "its ranks were behind in 2 hangs")]
    hang = devcluster.events(enough, "failed")[0]
    assert (hang["attempt"], hang["rank"], hang["host"]) == (0, 1, "n2")
    assert "own_models.py" in hang["error"]
    assert "in fall_into_it" in (enough / "logs/0/rank-1.err").read_text(), "the stacks of all ranks are kept"
    assert "has made no progress" in (enough / "logs/0/rank-0.err").read_text()
    assert nodes(devcluster, few) == [["n1", "n2"]] * 3
    assert excluded(devcluster, few) == []
    said = (few / "logs" / "batch.out").read_text()
    assert "n2 should be left out, but too few nodes would be left: the run goes on with them." in said


@pytest.mark.long
def test_a_node_that_crashed_is_left_out_until_the_run_is_resumed(devcluster: Cluster) -> None:
    """Nobody records the end of the attempt there: SLURM itself requeues the job when the first node is gone."""
    job, run, _ = devcluster.submit("crashed", *TWO_NODES, "model.name=own_models:paced", "--exclude", "n4")
    (run / "pace").write_text("0.5")
    devcluster.wait_for("its first checkpoint", lambda: bool(devcluster.events(run, "saved")))
    assert nodes(devcluster, run) == [["n1", "n2"]]

    def node(verb: str) -> None:
        subprocess.run([str(DEVCLUSTER), verb, "n1"], env={**devcluster.env}, check=True, capture_output=True)

    node("crash")
    try:
        devcluster.wait_for("NODE_FAIL", lambda: "NODE_FAIL" in devcluster.states(job))
    finally:
        node("boot")
    devcluster.wait_for("the next attempt", lambda: len(nodes(devcluster, run)) > 1)
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
    assert devcluster.wait(again) == "COMPLETED", devcluster.logs()
    assert nodes(devcluster, run)[-1] == ["n1", "n2"]


@pytest.mark.long
def test_a_lost_node_is_replaced_by_a_spare_one_and_a_script_by_the_queue(devcluster: Cluster) -> None:
    """SLURM would leave a job with --no-kill that has lost its script as it is, up to its time limit."""
    job, run, said = devcluster.submit("spare", *TWO_NODES, "--spare-nodes", "1", "model.name=own_models:paced")
    assert "2 nodes x 1 rank, 1 spare node." in said
    (run / "pace").write_text("0.5")
    devcluster.wait_for("its first checkpoint", lambda: bool(devcluster.events(run, "saved")))
    (first,) = nodes(devcluster, run)

    def node(verb: str, name: str) -> None:
        subprocess.run([str(DEVCLUSTER), verb, name], env={**devcluster.env}, check=True, capture_output=True)

    script = devcluster.run("squeue", "-h", "-j", job, "-o", "%B").stdout.strip()
    assert script not in first, "the node of the script has the least to do"
    crashed = [first[1]]
    try:
        node("crash", first[1])
        devcluster.wait_for("a start in place", lambda: len(nodes(devcluster, run)) > 1)
        assert set(nodes(devcluster, run)[1]) == {script, first[0]}
        assert devcluster.states(job)[-1] == "RUNNING", "it has not been in the queue"
        assert excluded(devcluster, run)[0][0] == first[1]
        (requeued,) = devcluster.events(run, "requeued")
        assert (requeued["in_place"], requeued["spare_nodes"]) == (True, 0)
        assert "started again in place" in devcluster.job("why", "spare").stdout
        crashed.append(script)
        node("crash", script)
        devcluster.wait_for("a start from the queue", lambda: len(nodes(devcluster, run)) > 2, timeout=400)
        assert "REQUEUED" in devcluster.states(job)
        assert not set(nodes(devcluster, run)[2]) & set(crashed)
    finally:
        for name in crashed:
            node("boot", name)
        (run / "pace").unlink()
    assert devcluster.wait(job) == "COMPLETED", devcluster.logs()


def test_a_job_goes_on_without_the_node_that_fails_its_preflight(devcluster: Cluster, light: dict[str, str]) -> None:
    full = devcluster.home / "full"
    full.mkdir()
    arguments = ("single", "--preflight", "--cluster", "devcluster", "--exclude", "n3,n4", "--run-dir", "preflight")
    devcluster.wait_for_node("n1", "idle")  # the first of those that are idle is taken
    with mounted(devcluster, "n1", full, "-t tmpfs -o size=2m tmpfs"):
        submitted = devcluster.job("submit", *arguments, "train.max_steps=1", env={**light, "TMPDIR": str(full)}).stdout
        assert devcluster.wait(job_in(submitted)) == "COMPLETED"
    run = devcluster.home / "preflight"
    words = f"failed preflight: disk: {full}: 2 MB free"
    assert [(event["node"], event["why"]) for event in devcluster.events(run, "excluded")] == [("n1", words)]
    assert [event["hosts"] for event in devcluster.events(run, "started")] == [["n2"]]
