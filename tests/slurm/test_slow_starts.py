"""Each way of starting on a real SLURM, where a rank takes longer to load than it may take without a word."""

from pathlib import Path

import pytest

from tests import light_experiment
from tests.slurm.conftest import Cluster, job_in
from tests.slurm.test_train_sbatch import LIGHT, TEMPLATES, edited, run_of
from trainkit.training.startup import QUIET_SECONDS

pytestmark = [pytest.mark.slurm, pytest.mark.long]


@pytest.fixture(scope="module")
def slowly(devcluster: Cluster) -> dict[str, str]:
    """An environment to submit in whose ranks are light, and slow to load."""
    return {"PYTHONPATH": light_experiment.hook(devcluster.home / "slow", QUIET_SECONDS + 4)}


def require_trained(cluster: Cluster, run: Path, job: str) -> None:
    assert cluster.wait(job) == "COMPLETED", cluster.logs()
    assert (run / "summary.json").is_file()
    assert "so far to load torch" in (run / "logs" / "0" / "rank-0.out").read_text()
    assert cluster.events(run, "starting")


def require_known_while_it_starts(cluster: Cluster, run: Path, job: str) -> None:
    """Every verb knows the run, and what its ranks say, before they train; nobody may begin a second job on it."""
    log = run / "logs" / "0" / "rank-0.out"
    cluster.wait_for("a slow start", lambda: log.is_file() and "so far to load torch" in log.read_text())
    assert job in cluster.job("status", run.name).stdout
    assert "so far to load torch" in cluster.job("logs", run.name).stdout
    assert "RUNNING" in cluster.job("why", run.name).stdout
    refused = cluster.job("resume", run.name, check=False)
    assert (refused.returncode, "is RUNNING" in refused.stderr) == (2, True), refused.stderr
    assert not cluster.events(run, "started"), "the test was too slow to see it start"


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_trains_that_loads_slowly(devcluster: Cluster, slowly: dict[str, str], template: str) -> None:
    job = devcluster.sbatch("--nodes=1", edited(devcluster, template), "ddp", *LIGHT, env=slowly)
    run = run_of(devcluster, job)
    require_known_while_it_starts(devcluster, run, job)
    require_trained(devcluster, run, job)
    assert len(devcluster.events(run, "started")) == 1


@pytest.mark.parametrize("template", TEMPLATES)
def test_a_template_that_is_ended_while_it_loads_begins_again(
    devcluster: Cluster, slowly: dict[str, str], template: str
) -> None:
    """A node that fails requeues the job: the second start finds the folder of the first, and completes the run."""
    job = devcluster.sbatch("--nodes=1", edited(devcluster, template), "ddp", *LIGHT, env=slowly)
    run = run_of(devcluster, job)
    log = run / "logs" / "0" / "rank-0.out"
    devcluster.wait_for("a slow start", lambda: log.is_file() and "so far to load torch" in log.read_text())
    devcluster.run("scontrol", "requeue", job)
    require_trained(devcluster, run, job)
    assert (run / "logs" / "1").is_dir()


def test_torchruns_template_trains_on_nodes_without_gpus(devcluster: Cluster, light: dict[str, str]) -> None:
    script = edited(devcluster, "train_torchrun.sbatch")
    job = devcluster.sbatch("--nodes=2", "--gpus-per-node=0", script, "ddp", *LIGHT, env=light)
    assert devcluster.wait(job) == "COMPLETED", devcluster.logs()
    assert devcluster.events(run_of(devcluster, job), "started")[0]["world_size"] == 2


def test_a_submitted_run_trains_that_loads_slowly_and_so_it_is_resumed(
    devcluster: Cluster, slowly: dict[str, str]
) -> None:
    submitted = devcluster.submit("slow", *LIGHT, "--nodes", "2", "model.seconds=1", env=slowly)
    require_known_while_it_starts(devcluster, submitted.run, submitted.job_id)
    devcluster.wait_for_start(submitted.run)
    devcluster.job("cancel", "slow")
    assert devcluster.wait(submitted.job_id) == "CANCELLED", devcluster.logs()
    again = job_in(devcluster.job("resume", "slow", env=slowly).stdout)
    assert devcluster.wait(again) == "COMPLETED", devcluster.logs()
    assert "so far to load torch" in (submitted.run / "logs" / "1" / "rank-0.out").read_text()


def test_a_templates_run_that_was_cancelled_is_resumed_by_name(devcluster: Cluster, slowly: dict[str, str]) -> None:
    job = devcluster.sbatch(
        "--nodes=1", edited(devcluster, "train.sbatch"), "ddp", *LIGHT, "model.seconds=1", env=slowly
    )
    run = run_of(devcluster, job)
    devcluster.wait_for_start(run)
    devcluster.job("cancel", run.name)
    assert devcluster.wait(job) == "CANCELLED", devcluster.logs()
    said = devcluster.job("resume", run.name, "--account", "thesis", env=slowly).stdout
    assert f"{run.name} has no copy of its code" in said
    assert devcluster.wait(job_in(said)) == "COMPLETED", devcluster.logs()
    assert (run / "code" / "light_model.py").is_file()
