"""A run whose ranks are in a container of apptainer's, on a real SLURM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import containers

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]

EIGHT_STEPS = ("train.epochs=2", "data.name=synthetic", "data.train_size=256", "data.val_size=16", "data.workers=0")


def test_ranks_in_a_container_meet_are_told_to_save_and_are_requeued_from_outside(
    devcluster: Cluster, tmp_path: Path
) -> None:
    tools, run = devcluster.home / "tools", tmp_path / "contained"  # beside the folder of the submission
    tools.mkdir()
    image = containers.install(tools)
    arguments = ("ddp", *EIGHT_STEPS, "--run-dir", str(run), "--nodes", "2", "--gpus-per-node", "0", "--time", "5")
    slow = ("model.name=slow_model:build", "model.seconds=2", "monitor.loggers=[jsonl]")
    inside = ("--container-image", str(image), f"launch.container_python={sys.executable}", *slow)
    path = f"{tools}:{devcluster.env['PATH']}"
    said = devcluster.job("submit", *arguments, *inside, env={"PATH": path}).stdout
    job_id = said.split()[2].rstrip(":")
    devcluster.wait_for("the start", lambda: bool(devcluster.events(run, "started")))
    devcluster.run("scancel", "--signal=USR2", job_id)
    pending = ("squeue", "-h", "-j", job_id, "-t", "PD", "-o", "%T")
    devcluster.wait_for("its way back into the queue", lambda: bool(devcluster.run(*pending).stdout.strip()))
    devcluster.run("scancel", job_id)  # that a requeued run goes on is seen elsewhere
    assert len(devcluster.events(run, "requeued")) == 1
    (started,) = devcluster.events(run, "started")
    saved, _ = devcluster.events(run, "handed_back")  # by the first rank of each node
    assert (started["world_size"], saved["signals"]) == (2, ["SIGUSR2"])
    assert saved["step"] > 0
