"""What `jobs.submit --wait` ends with, by how its job ended: a script goes by it. Ranks import no torch."""

from __future__ import annotations

import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.slurm.conftest import Cluster

pytestmark = [pytest.mark.slurm, pytest.mark.long]

REFUSING = """\
from trainkit.errors import UserError


def build(info: object) -> None:
    raise UserError("It cannot be so.", why="It is a test.", fix="Correct it.")
"""
GIVEN = {
    "finished": (0, ()),
    "requeued": (0, ("model.seconds=1.5",)),
    "limited": (1, ("model.seconds=1.5", "launch.requeue=false")),
    "cancelled": (1, ("model.seconds=1.5",)),
    "crashed": (1, ("model.luck=1", "launch.requeue=false")),
    "refused": (2, ("model.name=refusing_model:build",)),
    "not submitted": (4, ("--sbatch", "bogus=1")),
}
"""Exit code and settings."""
SAID = {"limited": "TIMEOUT", "cancelled": "CANCELLED", "crashed": "no luck", "refused": "FAILED. It cannot be so."}


def test_the_exit_code_of_wait_is_that_of_the_run(devcluster: Cluster, light: dict[str, str]) -> None:
    (devcluster.home / "refusing_model.py").write_text(REFUSING)
    ends: dict[str, tuple[int, str]] = {}
    waiting = {}
    for name, (_, given) in GIVEN.items():
        command = [
            sys.executable, "-m", "jobs.submit", "ddp", "--nodes", "1", "--gpus-per-node", "0", "--time", "20",
            "monitor.loggers=[jsonl]", "model.name=light_model:build", *given, "--again", "--wait",
            "--run-dir", f"runs/{name}",
        ]  # fmt: skip
        waiting[name] = subprocess.Popen(
            command, cwd=devcluster.home, env={**devcluster.env, **light}, text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip

    def job(name: str) -> str:
        run = devcluster.home / "runs" / name
        devcluster.wait_for(f"the start of {name}", lambda: bool(devcluster.events(run, "started")), timeout=150)
        return str(devcluster.events(run, "submitted")[-1]["job_id"])

    devcluster.run("scancel", "--signal=USR2", job("requeued"))
    devcluster.run("scontrol", "update", f"jobid={job('limited')}", "endtime=now")
    devcluster.run("scancel", job("cancelled"))
    for name, process in waiting.items():
        said = process.communicate(timeout=240)[1]
        ends[name] = process.returncode, said
        assert SAID.get(name, "") in said
    assert {name: code for name, (code, _) in ends.items()} == {name: code for name, (code, _) in GIVEN.items()}
    assert len(devcluster.events(devcluster.home / "runs" / "requeued", "started")) == 2
    assert not (devcluster.home / "runs" / "not submitted").exists()
