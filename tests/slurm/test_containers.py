"""A run whose ranks are in a container of apptainer's, on a real SLURM."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests import containers
from tests.slurm.test_submit import TINY

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.slurm


def test_ranks_in_a_container_meet_are_told_to_save_and_are_requeued_from_outside(
    devcluster: Cluster, tmp_path: Path
) -> None:
    tools, run = devcluster.home / "tools", tmp_path / "contained"  # beside the folder of the submission
    tools.mkdir()
    image = containers.install(tools)
    arguments = ("ddp", *TINY, "--run-dir", str(run), "--nodes", "2", "--gpus-per-node", "0", "--time", "5")
    inside = ("--container-image", str(image), f"launch.container_python={sys.executable}", "model.seconds=1")
    path = f"{tools}:{devcluster.env['PATH']}"
    said = devcluster.job("submit", *arguments, *inside, env={"PATH": path}).stdout
    job_id = said.split()[2].rstrip(":")
    devcluster.wait_for("the start", lambda: bool(devcluster.events(run, "started")))
    devcluster.run("scancel", "--signal=USR2", job_id)
    assert devcluster.wait(job_id) == "COMPLETED", devcluster.logs()
    assert len(devcluster.events(run, "requeued")) == 1
    starts = devcluster.events(run, "started")
    assert [start["world_size"] for start in starts] == [2, 2]
    assert starts[1]["step"] > 0
