"""Commands on a real SLURM: waiting for a run, the modes of its files, a bench."""

import os
import re
import subprocess
import sys
import time

import pytest

from tests.jobs.test_submit import wrong_modes
from tests.slurm.conftest import Cluster, job_in

pytestmark = [pytest.mark.slurm, pytest.mark.long]

REFUSING = """\
from trainkit.common.errors import UserError


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
        devcluster.wait_for(f"the start of {name}", lambda: bool(devcluster.events(run, "started")))
        return str(devcluster.events(run, "submitted")[-1]["job_id"])

    devcluster.run("scancel", "--signal=USR2", job("requeued"))
    devcluster.run("scontrol", "update", f"jobid={job('limited')}", "endtime=now+2")
    devcluster.run("scancel", job("cancelled"))
    for name, process in waiting.items():
        said = process.communicate(timeout=240)[1]
        ends[name] = process.returncode, said
        assert SAID.get(name, "") in said
    assert {name: code for name, (code, _) in ends.items()} == {name: code for name, (code, _) in GIVEN.items()}
    assert len(devcluster.events(devcluster.home / "runs" / "requeued", "started")) == 2
    assert not (devcluster.home / "runs" / "not submitted").exists()


def test_all_of_a_job_is_as_open_as_its_mode_says(devcluster: Cluster) -> None:
    small = ["train.epochs=1", "monitor.loggers=[jsonl,tensorboard]"]
    flags = ["--nodes", "2", "--gpus-per-node", "0", "--run-dir", "runs/open", "--wait"]
    before = os.umask(0o077)
    try:
        devcluster.run(
            "python", "-m", "jobs.submit", "ddp", *small, *flags, env={"TRAINKIT_RUN_MODE": "2770"}, timeout=240
        )
    finally:
        os.umask(before)
    run = devcluster.home / "runs" / "open"
    assert {"batch.out", "0"} <= {path.name for path in (run / "logs").iterdir()}
    assert wrong_modes(run, 0o2770) == []


def test_a_bench_that_nears_its_time_limit_or_is_cancelled_tells_what_it_has(devcluster: Cluster) -> None:
    words = ("--seconds", "1", "--rounds", "400", "--run-dir", "runs/cut", "--nodes", "1", "--gpus-per-node", "1")
    job = job_in(devcluster.job("bench", "amp", "ddp", "monitor.loggers=[]", *words).stdout)
    samples = devcluster.home / "runs" / "cut" / "samples.jsonl"

    def has_three_rounds() -> bool:
        return samples.exists() and samples.read_text().count('"control"') >= 4

    devcluster.wait_for("three rounds", has_three_rounds, timeout=240)
    before = time.monotonic()
    devcluster.run("scancel", "--signal=USR2", job)  # as SLURM does before the time limit
    assert devcluster.wait(job) == "COMPLETED"
    assert time.monotonic() - before < 60
    table = devcluster.job("bench", "--show", "runs/cut").stdout
    assert re.search(r"Note: It was told to stop after \d+ of 400 rounds\.", table), table
    assert "fp32" in table
