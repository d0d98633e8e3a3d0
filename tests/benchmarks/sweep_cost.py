"""A sweep of 1,000 runs: how long the commands that submit it, and look at it, keep a login node's core."""

import statistics
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.measuring import Figure, describe
from tests.benchmarks.processes import environment, ran

POINTS, ROUNDS = 1000, 3


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The lines of the table."""
    written = []
    looked = []
    for _ in range(rounds):
        with TemporaryDirectory() as temporary:
            folder = Path(temporary)
            env = environment(folder)
            sweep = str(folder / "runs" / "sweep")
            arm = [sys.executable, "-m", "tests.benchmarks.arms.sweep", sweep, str(POINTS)]
            written.append(ran(arm, env, folder).cpu)
            looked.append(ran([sys.executable, "-m", "jobs.status", sweep], env, folder).cpu)
    return [
        _figure("CPU time to check, plan and write a sweep of 1,000 runs", written, 10.0),
        _figure("CPU time of `status` of a sweep of 1,000 runs", looked, 1.0),
    ]


def _figure(what: str, seconds: list[float], most: float) -> Figure:
    met = statistics.median(seconds) <= most
    return Figure(what, describe(seconds, "{:.2f} s".format), goal=f"at most {most:.1f} s", met=met)
