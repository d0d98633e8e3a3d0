"""What SLURM opens for a job, and what its ranks write, is as open as the run folder."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from tests.jobs.test_submit import wrong_modes

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

pytestmark = pytest.mark.slurm


@pytest.mark.long
@pytest.mark.parametrize(("umask", "mode"), [(0o000, "750"), (0o077, "2770")])
def test_all_of_a_job_is_as_open_as_its_mode_says(umask: int, mode: str, devcluster: Cluster) -> None:
    small = ["train.epochs=1", "monitor.loggers=[jsonl,tensorboard]"]
    flags = ["--nodes", "2", "--gpus-per-node", "0", "--run-dir", f"runs/mode-{mode}", "--wait"]
    before = os.umask(umask)
    try:
        devcluster.run(
            "python", "-m", "jobs.submit", "ddp", *small, *flags, env={"TRAINKIT_RUN_MODE": mode}, timeout=240
        )
    finally:
        os.umask(before)
    run = devcluster.home / "runs" / f"mode-{mode}"
    assert {"batch.out", "0"} <= {path.name for path in (run / "logs").iterdir()}
    assert wrong_modes(run, int(mode, 8)) == []
