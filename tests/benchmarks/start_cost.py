"""``python -m tests.benchmarks.start_cost``: what a short command costs with `trainkit.workarounds`, and without them.

Both arms are the whole command, a small model trained for a few updates, in a process of its own. CPU time is measured,
of the process and its children.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.measuring import Figure, against, take_turns
from trainkit.workarounds import SWITCH

ROUNDS = 5
COMMAND = ("jobs.train", "single", "train.max_steps=5", "train.precision=fp32", "monitor.loggers=[jsonl]")


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The line of the table."""
    with TemporaryDirectory() as folder:
        train(Path(folder), "on")  # files are in memory from here on
        arms = {"without": partial(train, Path(folder), "off"), "with": partial(train, Path(folder), "on")}
        measured = take_turns(arms, rounds)
    what = "CPU seconds of a whole short command with `trainkit.workarounds`, to that without"
    return [against(measured, "with", what=what, at_most=0.9)]


def train(folder: Path, switch: str) -> float:
    """Train in a process of its own; its CPU seconds."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRAINKIT_RUNS": str(folder),
        "CUDA_VISIBLE_DEVICES": "",
        SWITCH: switch,
    }
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", *COMMAND], env=env, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    from tests.benchmarks.__main__ import main

    raise SystemExit(main(["--only", "start_cost"]))
