"""``python -m tests.benchmarks.start_cost``: what a short command costs with `trainkit.lifetime`, and without it.

Both arms are the whole command, a small model trained for one epoch, in a process of its own; in one of them the
functions of `trainkit.lifetime` do nothing but exit. The arms alternate (A B B A) and CPU time is measured, of the
process and its children. A control of the arm without against itself must lie within 0.95 to 1.05, or the run is void.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.step_cost import describe

ROUNDS = 5
COMMAND = ("single", "train.epochs=1", "train.precision=fp32", "monitor.loggers=[jsonl]")
WITHOUT = """
from trainkit import lifetime
lifetime.begin = lifetime.settled = lambda: None
lifetime.leave = exit
"""
TRAIN = """
from jobs import cli, train
cli.run(train.main)
"""


def main() -> int:
    """Measure and print; 1 if the control says that the run is void."""
    with TemporaryDirectory() as folder:
        train(TRAIN, Path(folder))  # files are in memory from here on
        ratios, controls, saved = [], [], []
        for _ in range(ROUNDS):
            a1, b1, b2, a2, a3 = (
                train(code, Path(folder)) for code in (WITHOUT + TRAIN, TRAIN, TRAIN, WITHOUT + TRAIN, WITHOUT + TRAIN)
            )
            ratios.append((b1 + b2) / (a1 + a2))
            controls.append(a3 / a2)
            saved.append((a1 + a2 - b1 - b2) / 2)
    control = statistics.median(controls)
    print(f"{' '.join(COMMAND)}, one thread, {ROUNDS} rounds")
    print(f"with / without     {describe(ratios)}")
    print(f"without / without  {describe(controls)}  (control)")
    print(f"it saves {statistics.median(saved):.2f} s of CPU time a process")
    if not 0.95 <= control <= 1.05:
        print("void: the control is off; the machine is busy")
        return 1
    return 0


def train(code: str, folder: Path) -> float:
    """Train in a process of its own; its CPU seconds."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TRAINKIT_RUNS": str(folder), "CUDA_VISIBLE_DEVICES": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-c", code, *COMMAND], env=env, stdout=subprocess.DEVNULL, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
