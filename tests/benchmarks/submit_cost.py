"""From the command to the first update, on 2 nodes with 2 ranks each.

One arm is `jobs.submit`; the other is what a user would write by hand, an sbatch script with srun and a bare DDP loop
over the same digits with a network of the same size. On the development cluster (root, Debian). Wall time is measured.
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
ROUNDS = 5
WHAT = "command to the first update on 2 nodes with 2 ranks each, to an sbatch script with srun and a bare loop"
PATIENCE_SECONDS = 180.0

LOOP = """
import os, sys, time
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

rank, world_size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", rank=rank, world_size=world_size)
digits = load_digits()
data = TensorDataset(torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16, torch.tensor(digits.target))
loader = DataLoader(data, batch_size=64 // world_size, sampler=DistributedSampler(data))
nn = torch.nn
model = DistributedDataParallel(nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.GELU(), nn.AvgPool2d(2),
    nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.GELU(), nn.AvgPool2d(2),
    nn.Flatten(), nn.Linear(256, 128), nn.GELU(), nn.Linear(128, 10),
))
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
for images, labels in loader:
    loss = cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    loss.item()
    break
if rank == 0:
    with open(sys.argv[1], "w") as file:
        print(time.time(), file=file)
dist.destroy_process_group()
"""

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --ntasks-per-node=2 --cpus-per-task=1 --time=5 --output=/dev/null
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=12321
srun --kill-on-bad-exit=1 {python} {folder}/loop.py {folder}/first
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
    lines = wait_for(run / "metrics.jsonl")
    wait_for_queue(env)
    return float(json.loads(lines[0])["time"]) - began


def by_hand(folder: Path, env: dict[str, str]) -> float:
    """Seconds until the first update of the script; waits for the end of the job."""
    first = folder / "first"
    first.unlink(missing_ok=True)
    (folder / "loop.py").write_text(LOOP)
    (folder / "job.sbatch").write_text(SCRIPT.format(python=sys.executable, folder=folder))
    began = time.time()
    subprocess.run(["sbatch", f"{folder}/job.sbatch"], env=env, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    lines = wait_for(first)
    wait_for_queue(env)
    return float(lines[0]) - began


def wait_for(file: Path) -> list[str]:
    """The file's lines, once it has a whole one."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (file.exists() and file.read_text().endswith("\n")):
        assert time.monotonic() < deadline, f"no {file}"
        time.sleep(0.05)
    return file.read_text().splitlines()


def wait_for_queue(env: dict[str, str]) -> None:
    """Until no job is left."""
    while subprocess.run(["squeue", "-h"], env=env, capture_output=True, text=True, check=True).stdout:
        time.sleep(0.2)
