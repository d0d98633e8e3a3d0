"""Does a swarm of unequal peers reach what one process does?

1, 2 and 4 peers of the preset `hivemind`, all together always of the same speed; and the preset `single` in one process
with as many updates as their samples are, each with several seeds, for runs of one process differ too. A peer's update
is of a k-th of the batch where there are k, so that as many samples of all make one. 10 minutes a round.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.machines import absent, machines
from tests.benchmarks.measuring import Figure, Table
from tests.benchmarks.swarms import TASK, Trained, trained

ROUNDS = 2
RATES = ((1600.0,), (1000.0, 600.0), (750.0, 425.0, 275.0, 150.0))
"""Samples a second of each peer."""
SAMPLES, BATCH, LR, ROUND_SECONDS = 200_000, 64, 2e-3, 8.0
SAME = ("model.width=256", f"optim.lr={LR}")
POINTS = 0.5
HEAD = ("peers, samples a second", "rounds", "samples", "utilisation", "wall", "accuracy", "one process")

Found = dict[tuple[float, ...], list[tuple[Trained, float]]]
"""Speeds of the peers -> each run, and the accuracy of one process with as many samples."""


def measure(rounds: int = ROUNDS) -> Sequence[Figure | Table]:
    """The table."""
    if why := absent():
        return [Figure("accuracy of a swarm", "", note=f"not measured: {why}")]
    # One more round, of which most is over before the others are there.
    in_time = f"collaborative.rounds={1 + round(SAMPLES / sum(RATES[0]) / ROUND_SECONDS)}"
    found: Found = {rates: [] for rates in RATES}
    for seed in range(rounds):
        for rates in RATES:
            batch = f"train.global_batch_size={BATCH // len(rates)}"
            swarm = trained("hivemind", rates, *SAME, batch, in_time, f"seed={seed}")
            found[rates].append((swarm, single(round(swarm.samples / BATCH), seed)))
    return [table(found)]


def table(found: Found) -> Table:
    """Of what each swarm has come to, and the single run of as many samples."""
    rows, goals = [], []
    for rates, runs in found.items():
        swarms, singles = [swarm for swarm, _ in runs], [accuracy for _, accuracy in runs]
        used = [share for swarm in swarms for share in swarm.utilisation]
        apart = [swarm.accuracy - accuracy for swarm, accuracy in runs]
        rows.append([
            f"{len(rates)}: {', '.join(f'{rate:.0f}' for rate in rates)}",
            f"{statistics.median(one.rounds for one in swarms):.0f}",
            f"{statistics.mean(one.samples for one in swarms):,.0f}",
            f"{100 * min(used):.1f} to {100 * max(used):.1f} %",
            f"{statistics.median(one.seconds for one in swarms):.0f} s",
            _each([one.accuracy for one in swarms]), _each(singles),
        ])  # fmt: skip
        goals.append(
            Figure(f"{len(rates)} peers" if len(rates) > 1 else "1 peer",
                   f"{statistics.mean(apart):+.2f} points to the single run of as many samples "
                   f"({', '.join(f'{one:+.2f}' for one in apart)})",
                   goal=f"at most {POINTS} points less", met=statistics.mean(apart) >= -POINTS)
        )  # fmt: skip
    return Table(HEAD, rows, goals)


def _each(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f} % ({', '.join(f'{value:.2f}' for value in values)})"


def single(updates: int, seed: int) -> float:
    """The accuracy of ordinary training, in which nobody sleeps."""
    with TemporaryDirectory() as name, machines(1, Path(name)) as net:
        run = net.folder / "run"
        own = (
            f"train.max_steps={updates}",
            f"train.global_batch_size={BATCH}",
            f"seed={seed}",
            "checkpoint.every_epochs=null",
            "--run-dir",
            str(run),
        )
        started = net.start(0, "jobs.train", "single", *TASK, *SAME, *own)
        started.ends(1200)
        summary = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        return float(summary["val"]["acc1"])
