"""The sbatch templates on a real SLURM, as a user without submitit runs them: account and partition edited, no more."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

PROJECT = Path(__file__).parents[2]

pytestmark = pytest.mark.slurm

TINY = ("train.epochs=2", "train.precision=fp32", "monitor.loggers=[jsonl]", "model.name=own_models:slow")
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
def trained(devcluster: Cluster) -> dict[str, Path]:
    """The run folder of a finished run by each template; the one under torchrun was preempted on its way."""
    nodes = ("--nodelist=n3,n4",)
    plain = devcluster.sbatch("--nodelist=n1,n2", edited(devcluster, "train.sbatch"), "ddp", *TINY)
    low = edited(devcluster, "train_torchrun.sbatch", "low")
    preempted = devcluster.sbatch(*nodes, low, "ddp", *TINY, "model.seconds=0.5")
    devcluster.wait_for_start(run_of(devcluster, preempted))
    urgent = ("-p", "high", "--nodes=2", *nodes, "--exclusive", "--output=/dev/null", "--wrap=true")
    devcluster.sbatch(*urgent)
    for job in (plain, preempted):
        assert devcluster.wait(job, timeout=150) == "COMPLETED", devcluster.logs()
    return dict(zip(TEMPLATES, (run_of(devcluster, job) for job in (plain, preempted)), strict=True))


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_trains_on_two_nodes_with_two_ranks_each(
    devcluster: Cluster, trained: dict[str, Path], template: str
) -> None:
    started = devcluster.events(trained[template], "started")[0]
    nodes = {"train.sbatch": ["n1", "n2"], "train_torchrun.sbatch": ["n3", "n4"]}
    assert (started["world_size"], started["hosts"]) == (4, nodes[template])
    assert (trained[template] / "summary.json").is_file()


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_gives_every_rank_its_own_logs(trained: dict[str, Path], template: str) -> None:
    names = {f"rank-{rank}.{stream}" for rank in range(4) for stream in ("out", "err")}
    assert {file.name for file in (trained[template] / "logs" / "0").glob("rank-*")} == names


@pytest.mark.parametrize("template", TEMPLATES)
def test_status_knows_the_job_of_a_template(devcluster: Cluster, trained: dict[str, Path], template: str) -> None:
    run = trained[template]
    said = devcluster.job("status", str(run)).stdout
    assert run.name.rpartition("job")[2] in said
    assert "COMPLETED" in said


def test_a_preempted_job_ends_with_the_weights_of_an_uninterrupted_run(
    devcluster: Cluster, trained: dict[str, Path]
) -> None:
    """With torchrun between SLURM and the ranks; test_submit.py has it without. How both end is the same text."""
    first, second, *_ = devcluster.events(trained["train_torchrun.sbatch"], "started")
    assert 0 < second["step"] < first["total_steps"], "the second attempt goes on where the first one saved"
    assert len({devcluster.final_weights(run) for run in trained.values()}) == 1


def test_a_rank_that_raises_fails_the_job_under_torchrun(devcluster: Cluster, light: dict[str, str]) -> None:
    script, model = edited(devcluster, "train_torchrun.sbatch"), ("model.name=light_model:build", "model.bad_rank=1")
    job = devcluster.sbatch("--nodes=1", script, "ddp", *TINY, *model, "model.seconds=10", env=light)
    assert devcluster.wait(job) == "FAILED", devcluster.logs()
    assert "ValueError: bad labels" in (run_of(devcluster, job) / "logs" / "0" / "rank-1.err").read_text()


def test_a_cancelled_job_does_not_come_back(devcluster: Cluster, light: dict[str, str]) -> None:
    small = ("--nodes=1", "--ntasks-per-node=1", "--gpus-per-node=1")
    slow = ("model.name=light_model:build", "model.seconds=3")
    job = devcluster.sbatch(*small, edited(devcluster, "train.sbatch"), "ddp", *TINY, *slow, env=light)
    devcluster.wait_for_start(run_of(devcluster, job))
    devcluster.run("scancel", job)
    assert devcluster.wait(job) == "CANCELLED"
    assert devcluster.states(job) == ["CANCELLED"], "it saved on SIGTERM, and must not go back into the queue"
