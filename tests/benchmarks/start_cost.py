"""``python -m tests.benchmarks.start_cost``: what a short command costs with `trainkit.lifetime`, and without it.

Both arms are the whole command, a small model trained for a few updates, in a process of its own; in one of them the
functions of `trainkit.lifetime` do nothing but exit. CPU time is measured, of the process and its children.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.measuring import Figure, against, take_turns

ROUNDS = 5
COMMAND = ("single", "train.max_steps=5", "train.precision=fp32", "monitor.loggers=[jsonl]")
WITHOUT = """
from trainkit import lifetime
lifetime.begin = lifetime.settled = lambda: None
lifetime.leave = exit
"""
TRAIN = """
from jobs import cli, train
cli.run(train.main)
"""


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The line of the table."""
    with TemporaryDirectory() as folder:
        train(TRAIN, Path(folder))  # files are in memory from here on
        arms = {
            "without": lambda: train(WITHOUT + TRAIN, Path(folder)),
            "with": lambda: train(TRAIN, Path(folder)),
        }
        measured = take_turns(arms, rounds)
    what = "CPU seconds of a whole short command with `trainkit.lifetime`, to that without"
    return [against(measured, "with", what=what, at_most=1.0)]


def train(code: str, folder: Path) -> float:
    """Train in a process of its own; its CPU seconds."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRAINKIT_RUNS": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, *COMMAND], env=env, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    from tests.benchmarks.__main__ import main

    raise SystemExit(main(["--only", "start_cost"]))
