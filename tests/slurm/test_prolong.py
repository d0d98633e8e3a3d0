"""A finished training that goes on longer, on real nodes, and is interrupted there: as if trained so from the start."""

import hashlib
from pathlib import Path

import pytest

from tests.light_experiment import PAUSE, STATE, STEPS, trained
from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.slurm

CONSTANT = ("schedule.name=constant", "schedule.warmup_epochs=0", "monitor.loggers=[jsonl]")
TWO_NODES = ("--nodes", "2", "--gpus-per-node", "0", "--time", "20")


def weights(run: Path) -> dict[str, str]:
    """SHA-256 of the newest checkpoint's model, average and optimizer."""
    files = sorted((run / "checkpoints" / "latest").glob("*.safetensors"))
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.mark.long
def test_a_prolonged_job_is_requeued_though_its_run_had_finished(devcluster: Cluster, light: dict[str, str]) -> None:
    env = {**light, PAUSE: "0.2"}
    words = (*CONSTANT, "--nodes", "1", "--gpus-per-node", "0", "--time", "20")
    first, run, _ = devcluster.submit("short", *words, f"train.max_steps={STEPS}", env=env)
    assert devcluster.wait(first) == "COMPLETED", devcluster.logs()
    (run / "checkpoints" / f"step-{STEPS:08}").mkdir(parents=True)  # which a training without torch does not write
    longer = f"train.max_steps={STEPS + 100}"
    said = devcluster.job("resume", "short", longer, env=env).stdout
    assert f"continues to {STEPS + 100}, with the rates" in said
    second = devcluster.events(run, "submitted")[-1]["job_id"]
    devcluster.wait_for_start(run, attempts=2)
    assert "RUNNING" in devcluster.job("status", "short").stdout
    devcluster.run("scancel", "--signal=USR2", second)
    devcluster.wait_for("the requeue", lambda: bool(devcluster.events(run, "requeued")), timeout=60)
    assert devcluster.wait(second) == "COMPLETED", devcluster.logs()
    assert devcluster.states(second) == ["REQUEUED", "COMPLETED"]
    assert trained(STEPS + 100) in (run / STATE).read_text()
    assert "short is up to date" in devcluster.job("submit", "ddp", *words, longer, env=env).stdout


@pytest.mark.long
def test_on_two_nodes_it_ends_with_the_weights_of_the_long_training(devcluster: Cluster) -> None:
    settings = (*CONSTANT, *TWO_NODES, "train.precision=fp32", "train.ema_decay=0.9", "model.name=own_models:paced")
    jobs = {n: devcluster.submit(f"epochs-{n}", *settings, f"train.epochs={n}") for n in (1, 2)}
    for job in jobs.values():
        assert devcluster.wait(job.job_id) == "COMPLETED", devcluster.logs()
    short, long = jobs[1].run, jobs[2].run
    (short / "pace").write_text("1")
    devcluster.job("resume", "epochs-1", "train.epochs=2")
    second = devcluster.events(short, "submitted")[-1]["job_id"]
    devcluster.wait_for_start(short, attempts=2)
    devcluster.run("scancel", "--signal=USR2", second)
    devcluster.wait_for("the requeue", lambda: bool(devcluster.events(short, "requeued")))
    (short / "pace").unlink()
    assert devcluster.wait(second) == "COMPLETED", devcluster.logs()
    assert 19 < devcluster.events(short, "started")[2]["step"] < 38
    assert len(weights(long)) == 3
    assert weights(short) == weights(long)
