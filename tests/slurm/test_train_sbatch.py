"""The sbatch templates on a real SLURM, as a user without submitit runs them: account and partition edited, no more."""

import json
from pathlib import Path

import pytest

from tests.light_experiment import STATE
from tests.light_experiment import trained as word_after
from tests.slurm.conftest import Cluster

PROJECT = Path(__file__).parents[2]

pytestmark = pytest.mark.slurm

LIGHT = ("monitor.loggers=[jsonl]", "model.name=light_model:build")
TEMPLATES = ("train.sbatch", "train_torchrun.sbatch")


def edited(cluster: Cluster, template: str, partition: str = "main") -> str:
    """The template with the two lines edited that its header names; its path in the user's folder."""
    text = (PROJECT / "slurm" / template).read_text()
    text = text.replace("--account=CHANGE_ME", "--account=thesis")
    text = text.replace("--partition=CHANGE_ME", f"--partition={partition}")
    target = cluster.home / f"{partition}-{template}"
    target.write_text(text)
    return str(target)


def run_of(cluster: Cluster, job_id: str) -> Path:
    return cluster.home / "runs" / f"ddp-job{job_id}"


@pytest.fixture(scope="module")
def trained(devcluster: Cluster, light: dict[str, str]) -> dict[str, Path]:
    """The run folder of a finished run by each template; the one under torchrun was preempted on its way."""
    nodes = ("--nodelist=n3,n4",)
    plain = devcluster.sbatch("--nodelist=n1,n2", edited(devcluster, "train.sbatch"), "ddp", *LIGHT, env=light)
    low = edited(devcluster, "train_torchrun.sbatch", "low")
    preempted = devcluster.sbatch(*nodes, low, "ddp", *LIGHT, "model.seconds=1.5", env=light)
    devcluster.wait_for_start(run_of(devcluster, preempted))
    urgent = ("-p", "high", "--nodes=2", *nodes, "--exclusive", "--output=/dev/null", "--wrap=true")
    devcluster.sbatch(*urgent)
    for job in (plain, preempted):
        assert devcluster.wait(job) == "COMPLETED", devcluster.logs()
    return dict(zip(TEMPLATES, (run_of(devcluster, job) for job in (plain, preempted)), strict=True))


@pytest.mark.parametrize(("template", "nodes"), [(TEMPLATES[0], ["n1", "n2"]), (TEMPLATES[1], ["n3", "n4"])])
def test_a_template_trains_on_two_nodes_with_two_ranks_each(
    devcluster: Cluster, trained: dict[str, Path], template: str, nodes: list[str]
) -> None:
    run = trained[template]
    started = devcluster.events(run, "started")[0]
    assert (started["world_size"], started["hosts"]) == (4, nodes)
    assert (run / "summary.json").is_file()
    names = {f"rank-{rank}.{stream}" for rank in range(4) for stream in ("out", "err")}
    assert {file.name for file in (run / "logs" / "0").glob("rank-*")} == names
    said = devcluster.job("status", str(run)).stdout
    assert run.name.rpartition("job")[2] in said
    assert "COMPLETED" in said


def test_a_preempted_job_goes_on_where_it_was_and_makes_each_update_once(
    devcluster: Cluster, trained: dict[str, Path]
) -> None:
    """With torchrun between SLURM and the ranks. What becomes of real weights is seen in test_submit.py."""
    run = trained["train_torchrun.sbatch"]
    first, second, *_ = devcluster.events(run, "started")
    assert 0 < second["step"] < first["total_steps"]
    assert json.loads((run / STATE).read_text())[1] == word_after(first["total_steps"])


def test_a_rank_that_raises_fails_the_job_under_torchrun(devcluster: Cluster, light: dict[str, str]) -> None:
    script = edited(devcluster, "train_torchrun.sbatch")
    job = devcluster.sbatch("--nodes=1", script, "ddp", *LIGHT, "model.bad_rank=1", "model.seconds=2", env=light)
    assert devcluster.wait(job) == "FAILED", devcluster.logs()
    assert "ValueError: bad labels" in (run_of(devcluster, job) / "logs" / "0" / "rank-1.err").read_text()


def test_a_cancelled_job_of_a_template_is_not_queued_again(devcluster: Cluster, light: dict[str, str]) -> None:
    script = edited(devcluster, "train.sbatch")
    job = devcluster.sbatch("--nodes=1", script, "ddp", *LIGHT, "model.seconds=3", env=light)
    devcluster.wait_for_start(run_of(devcluster, job))
    devcluster.run("scancel", job)
    assert devcluster.wait(job) == "CANCELLED", devcluster.logs()
    assert devcluster.states(job) == ["CANCELLED"], "it saved on SIGTERM, and must not go back into the queue"
