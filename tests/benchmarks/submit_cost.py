"""From the command to the first update, on 2 nodes with 2 ranks each.

One arm is `jobs.submit`; the other is what a user would write by hand, an sbatch script with srun and the bare DDP loop
of `arms/bare.py`. On the development cluster (root, Debian). Wall time is measured.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.benchmarks.measuring import Figure, against, take_turns
from tests.benchmarks.processes import PROJECT, environment

DEVCLUSTER = PROJECT / "slurm" / "devcluster"
BARE = Path(__file__).parent / "arms" / "bare.py"
ROUNDS = 5
WHAT = "command to the first update on 2 nodes with 2 ranks each, to an sbatch script with srun and a bare loop"
PATIENCE_SECONDS = 180.0

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=1 --time=5 --output=/dev/null
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=12321
srun --kill-on-bad-exit=1 bash -c 'RANK=$SLURM_PROCID WORLD_SIZE=$SLURM_NTASKS {python} {bare} 1 {out}'
"""


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The line of the table."""
    if os.geteuid() != 0 or shutil.which("slurmctld") is None:
        return [Figure(WHAT, "", note="not measured: it needs root and SLURM's programs")]
    folder = Path(tempfile.mkdtemp(prefix="submit-cost-"))
    place = {"DEVCLUSTER_DIR": f"{folder}/cluster", "DEVCLUSTER_NET": f"10.229.{os.getpid() % 256}"}
    env = {**environment(folder), **place, "SLURM_CONF": f"{folder}/cluster/etc/slurm.conf", "OMP_NUM_THREADS": "1"}
    up = [str(DEVCLUSTER), "up", "--nodes", "2", "--until-exit", str(os.getpid())]
    subprocess.run(up, env=env, check=True, stdout=subprocess.DEVNULL)
    try:
        by_hand(folder, env), by_submit(folder, env)  # files are in memory from here on
        arms = {"by hand": lambda: by_hand(folder, env), "submit": lambda: by_submit(folder, env)}
        measured = take_turns(arms, rounds)
    finally:
        subprocess.run([str(DEVCLUSTER), "down", "--purge"], env=env, check=True, stdout=subprocess.DEVNULL)
        shutil.rmtree(folder)
    return [against(measured, "submit", what=WHAT, at_most=1.0, tolerance=0.1)]


def by_submit(folder: Path, env: dict[str, str]) -> float:
    """Seconds until the first update of `jobs.submit` is written down; waits for the end of the job."""
    began = time.time()
    settings = ("train.max_steps=1", "train.precision=fp32", "monitor.log_every=1", "monitor.loggers=[jsonl]")
    resources = ("--nodes", "2", "--ntasks-per-node", "2", "--gpus-per-node", "0", "--cpus-per-task", "1")
    run = folder / "runs" / f"ours-{time.monotonic_ns()}"
    command = [sys.executable, "-m", "jobs.submit", "ddp", "--again", "--run-dir", str(run), *resources, "--time", "5"]
    command += settings
    subprocess.run(command, env=env, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    wait_for_queue(env)
    first = (run / "metrics.jsonl").read_text().splitlines()[0]
    return float(json.loads(first)["time"]) - began


def by_hand(folder: Path, env: dict[str, str]) -> float:
    """Seconds until the first update of the script; waits for the end of the job."""
    told = folder / "told.json"
    told.unlink(missing_ok=True)
    (folder / "job.sbatch").write_text(SCRIPT.format(python=sys.executable, bare=BARE, out=told))
    began = time.time()
    subprocess.run(["sbatch", f"{folder}/job.sbatch"], env=env, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    wait_for_queue(env)
    return float(json.loads(told.read_text())["last"]) - began


def wait_for_queue(env: dict[str, str]) -> None:
    """Until no job is left."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while subprocess.run(["squeue", "-h"], env=env, capture_output=True, text=True, check=True).stdout:
        assert time.monotonic() < deadline, "a job is still there"
        time.sleep(0.2)
