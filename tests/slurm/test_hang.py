"""What becomes of a training on SLURM that hangs, and whose rank is killed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]

TROUBLED = ("model.name=troubled_model:build", "model.troubles=hang,kill", "launch.hang_seconds=5")
SETTINGS = ("train.epochs=2", "train.precision=fp32", "monitor.loggers=[jsonl]", *TROUBLED)
TWO_NODES = ("--nodes", "2", "--gpus-per-node", "0", "-w", "n1,n2", "--time", "20")


@pytest.fixture(scope="module")
def troubled(devcluster: Cluster) -> Path:
    """A run that hangs, goes on, is killed, goes on, and has ended."""
    shutil.copy(Path(__file__).with_name("troubled_model.py"), devcluster.home)
    said = devcluster.job("submit", "ddp", *SETTINGS, *TWO_NODES, "--run-dir", "runs/troubled").stdout
    match = re.search(r"Submitted job (\d+)", said)
    assert match, said
    assert devcluster.wait(match[1], timeout=240) == "COMPLETED", devcluster.logs()
    return devcluster.home / "runs" / "troubled"


def test_a_run_that_hangs_and_is_killed_is_started_again_each_time(devcluster: Cluster, troubled: Path) -> None:
    assert [event["attempt"] for event in devcluster.events(troubled, "requeued")] == [0, 1]
    assert [event["attempt"] for event in devcluster.events(troubled, "started")] == [0, 1, 2]


def test_a_hang_names_the_rank_that_is_behind_and_keeps_all_stacks(devcluster: Cluster, troubled: Path) -> None:
    hang = devcluster.events(troubled, "failed")[0]
    assert (hang["attempt"], hang["rank"], hang["host"]) == (0, 1, "n2")
    assert "troubled_model.py" in hang["error"]
    assert "in _fall_into_it" in (troubled / "logs/0/rank-1.err").read_text()
    assert "has made no progress" in (troubled / "logs/0/rank-0.err").read_text()
