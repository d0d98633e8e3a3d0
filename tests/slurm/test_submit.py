"""The project's own commands on a real SLURM, as a user types them on a login node."""

import json
import re
import shlex
import sys
from datetime import datetime

import pytest

from tests.light_experiment import STATE, trained
from tests.slurm.conftest import Cluster, Submitted, job_in
from trainkit.config import yaml
from trainkit.config.slurm_options import objection

pytestmark = pytest.mark.slurm

TINY = ("train.epochs=2", "train.precision=fp32", "monitor.loggers=[jsonl]", "model.name=own_models:slow")
TWO_BY_TWO = ("--nodes", "2", "--gpus-per-node", "2")
TWO_NODES = ("--nodes", "2", "--gpus-per-node", "1")  # test_train_sbatch.py interrupts four ranks
ONE_RANK = ("--nodes", "1", "--gpus-per-node", "0")
LIGHT = ("model.name=light_model:build",)


def submit(cluster: Cluster, name: str, *arguments: str, env: dict[str, str] | None = None) -> Submitted:
    return cluster.submit(name, *TINY, *arguments, env=env)


@pytest.fixture(scope="module")
def uninterrupted(devcluster: Cluster) -> Submitted:
    """A finished run, real weights and all."""
    job = submit(devcluster, "uninterrupted", *TWO_NODES)
    assert devcluster.wait(job.job_id) == "COMPLETED", devcluster.logs()
    return job


def test_a_submitted_run_trains_on_two_nodes(devcluster: Cluster, uninterrupted: Submitted) -> None:
    run = uninterrupted.run
    assert str(run) in uninterrupted.said
    for verb in ("logs", "status", "cancel"):
        assert f"python -m jobs.{verb} {run}" in uninterrupted.said
    (started,) = devcluster.events(run, "started")
    assert (started["world_size"], len(started["hosts"])) == (2, 2)
    assert json.loads((run / "summary.json").read_text())["world_size"] == 2
    assert {entry.name for entry in run.iterdir()} >= {
        *("config.yaml", "plan.json", "submit.sbatch", "manifest.json", "code", "logs"),
        *("metrics.jsonl", "events.jsonl", "checkpoints", "summary.json"),
    }
    stored = devcluster.run("scontrol", "write", "batch_script", uninterrupted.job_id, "-").stdout
    assert stored.strip() == (run / "submit.sbatch").read_text().strip()


def test_a_run_that_is_told_to_save_ends_with_the_weights_of_one_that_is_not(
    devcluster: Cluster, uninterrupted: Submitted
) -> None:
    """The signal before a time limit does it. SLURM gives it itself in test_time_limit.py: its limits are minutes."""
    job = submit(devcluster, "told", *TWO_NODES, "--time", "20", "model.seconds=1")
    devcluster.wait_for_start(job.run)
    devcluster.run("scancel", "--signal=USR2", job.job_id)
    assert devcluster.wait(job.job_id) == "COMPLETED", devcluster.logs()
    assert devcluster.events(job.run, "handed_back")[0]["signals"] == ["SIGUSR2"]
    first, second, *_ = devcluster.events(job.run, "started")
    assert 0 < second["step"] < first["total_steps"]
    assert devcluster.final_weights(job.run) == devcluster.final_weights(uninterrupted.run)


def test_one_of_four_ranks_that_raises_fails_the_job_within_15_s(devcluster: Cluster, light: dict[str, str]) -> None:
    slow = ("model.bad_rank=3", "model.seconds=20")  # the others would train on
    job = submit(devcluster, "failing", *TWO_BY_TWO, *LIGHT, *slow, env=light)
    assert devcluster.wait(job.job_id) == "FAILED", devcluster.logs()
    assert len([*job.run.glob("logs/0/rank-*.err")]) == 4
    raised = (job.run / "logs" / "0" / "rank-3.err").stat().st_mtime
    end = devcluster.run("sacct", "-X", "-n", "-P", "-j", job.job_id, "-o", "End").stdout.strip()
    assert datetime.fromisoformat(end).timestamp() - raised < 15
    shown = devcluster.job("logs", "failing").stdout
    assert all(words in shown for words in ("rank 3", 'raise ValueError("bad labels")', "ValueError: bad labels"))


def test_a_preempted_run_goes_on_where_it_was_and_makes_each_update_once(
    devcluster: Cluster, light: dict[str, str]
) -> None:
    words = (*TWO_NODES, *LIGHT, "--partition", "low", "model.seconds=1.5")
    job = submit(devcluster, "preempted", *words, env=light)
    devcluster.wait_for_start(job.run)
    devcluster.sbatch("-p", "high", "--nodes=4", "--exclusive", "--output=/dev/null", "--wrap=true")
    assert devcluster.wait(job.job_id) == "COMPLETED", devcluster.logs()
    first, second, *_ = devcluster.events(job.run, "started")
    assert 0 < second["step"] < first["total_steps"]
    assert (first["world_size"], len(first["hosts"])) == (2, 2)
    assert json.loads((job.run / STATE).read_text())[1] == trained(first["total_steps"])


def test_status_and_cancel_reach_a_run_on_slurm_from_any_folder(
    devcluster: Cluster, light: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    job = submit(devcluster, "cancelled", *ONE_RANK, *LIGHT, "model.seconds=3", env=light)
    devcluster.wait_for_start(job.run)
    elsewhere = {"PYTHONPATH": str(devcluster.home)}
    folder = shlex.quote(str(tmp_path_factory.mktemp("elsewhere")))
    python = f"cd {folder} && {shlex.quote(sys.executable)} -m"
    assert "RUNNING" in devcluster.run("bash", "-c", f"{python} jobs.status cancelled", env=elsewhere).stdout
    devcluster.run("bash", "-c", f"{python} jobs.cancel cancelled", env=elsewhere)
    assert devcluster.wait(job.job_id) == "CANCELLED"
    assert devcluster.states(job.job_id) == ["CANCELLED"], "it saved on SIGTERM, and must not go back into the queue"
    assert "CANCELLED" in devcluster.job("status", "cancelled").stdout


def test_a_run_can_be_submitted_from_inside_a_job(devcluster: Cluster, light: dict[str, str]) -> None:
    words = [sys.executable, "-m", "jobs.submit", "ddp", *LIGHT, "--run-dir", "runs/nested", "--again", *ONE_RANK]
    # Inside a task, which has a rank's variables, of a job with other resources than the new one's.
    outer = ["srun", "--nodes=1", "--ntasks=1", "--cpus-per-task=3", "--mem=100", *words]
    said = devcluster.run(*outer, env=light).stdout
    assert devcluster.wait(job_in(said)) == "COMPLETED", devcluster.logs()
    (started,) = devcluster.events(devcluster.home / "runs" / "nested", "started")
    assert started["world_size"] == 1


@pytest.mark.parametrize("program", ["sbatch", "srun"])
def test_no_option_that_slurm_lists_is_refused_as_the_beginning_of_another(devcluster: Cluster, program: str) -> None:
    refused = [row["options"] for row in yaml.packaged("slurm_options")["refused"] if program in row["of"]]
    names = set(re.findall(r"--([a-z][a-z-]+)", devcluster.run(program, "--help").stdout))
    assert "ntasks-per-node" in names
    assert [name for name in names.difference(*map(str.split, refused)) if objection(program, name, "x")] == []
