"""What a short command costs with `trainkit.workarounds`, and without them.

Both arms are the whole command, a small model trained for a few updates, with its CPU time and that of its children.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.measuring import Figure, against, take_turns
from tests.benchmarks.processes import environment, ran
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
    env = {**environment(folder), "OMP_NUM_THREADS": "1", SWITCH: switch}
    return ran([sys.executable, "-m", *COMMAND], env, folder).cpu
