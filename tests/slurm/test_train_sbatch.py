"""The sbatch templates on a real SLURM, as a user without submitit runs them: account and partition edited, no more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

PROJECT = Path(__file__).parents[2]

pytestmark = [pytest.mark.slurm, pytest.mark.xdist_group("slurm")]

TINY = ("train.epochs=2", "train.precision=fp32", "monitor.loggers=[jsonl]")
OWN_MODEL = (*TINY, "model.name=slow_model:build")


def edited(cluster: Cluster, template: str, partition: str = "main") -> str:
    """The template with the two lines edited that its header names; its path in the user's folder."""
    text = (PROJECT / "slurm" / template).read_text()
    text = text.replace("--account=CHANGE_ME", "--account=thesis").replace(
        "--partition=CHANGE_ME", f"--partition={partition}"
    )
    target = cluster.home / f"{partition}-{template}"
    target.write_text(text)
    return str(target)


def run_of(cluster: Cluster, job_id: str) -> Path:
    return cluster.home / "runs" / f"ddp-job{job_id}"


@pytest.mark.parametrize("template", ["train.sbatch", "train_torchrun.sbatch"])
def test_a_template_trains_on_two_nodes_with_two_ranks_each(devcluster: Cluster, template: str) -> None:
    job = devcluster.sbatch(edited(devcluster, template), "ddp", *TINY)
    assert devcluster.wait(job) == "COMPLETED", devcluster.logs()
    (started,) = devcluster.events(run_of(devcluster, job), "started")
    assert (started["world_size"], started["hosts"]) == (4, ["n1", "n2"])
    assert {file.name for file in (run_of(devcluster, job) / "logs" / "0").iterdir()} == {
        f"rank-{rank}.{stream}" for rank in range(4) for stream in ("out", "err")
    }
    assert (run_of(devcluster, job) / "summary.json").is_file()


def test_preempted_template_jobs_end_with_the_weights_of_an_uninterrupted_run(devcluster: Cluster) -> None:
    templates = ("train.sbatch", "train_torchrun.sbatch")
    jobs = [
        devcluster.sbatch(edited(devcluster, template, "low"), "ddp", *OWN_MODEL, "model.seconds=0.5")
        for template in templates
    ]
    # By default SLURM preempts with SIGTERM: every rank has to be training, not just starting, to be told to save.
    devcluster.wait_for(
        "the start of training", lambda: all(devcluster.events(run_of(devcluster, job), "started") for job in jobs)
    )
    devcluster.sbatch("-p", "high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true")
    assert [devcluster.wait(job, timeout=120) for job in jobs] == ["COMPLETED"] * 2, devcluster.logs()
    for job in jobs:
        first, second, *_ = devcluster.events(run_of(devcluster, job), "started")
        assert 0 < second["step"] < first["total_steps"], "the second attempt goes on where the first one saved"

    reference = devcluster.sbatch(edited(devcluster, "train.sbatch"), "ddp", *OWN_MODEL)
    assert devcluster.wait(reference) == "COMPLETED", devcluster.logs()
    assert len(devcluster.events(run_of(devcluster, reference), "started")) == 1
    for job in jobs:
        assert devcluster.final_weights(run_of(devcluster, job)) == devcluster.final_weights(
            run_of(devcluster, reference)
        )


@pytest.mark.parametrize("template", ["train.sbatch", "train_torchrun.sbatch"])
def test_a_rank_that_raises_fails_a_templates_job(devcluster: Cluster, template: str) -> None:
    job = devcluster.sbatch(edited(devcluster, template), "ddp", *TINY, "model.name=failing_model:build")
    assert devcluster.wait(job) == "FAILED", devcluster.logs()
    assert "RuntimeError: rank 3 fails" in (run_of(devcluster, job) / "logs" / "0" / "rank-3.err").read_text()


def test_a_cancelled_template_job_does_not_come_back(devcluster: Cluster) -> None:
    job = devcluster.sbatch(edited(devcluster, "train.sbatch"), "ddp", *OWN_MODEL, "model.seconds=0.5")
    devcluster.wait_for("the start of training", lambda: bool(devcluster.events(run_of(devcluster, job), "started")))
    devcluster.run("scancel", job)
    assert devcluster.wait(job) == "CANCELLED"
    assert devcluster.states(job) == ["CANCELLED"]
