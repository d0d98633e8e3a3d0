"""``python -m tests.benchmarks.swarm_accuracy``: does a swarm of unequal peers reach what one process does?

1, 2 and 4 peers of the preset `hivemind`, all together always of the same speed; and the preset `single` in one process
with as many updates as their samples are. Each with several seeds, for runs of one process differ too. An update of k
peers is of a k-th of the batch, so that it takes as many samples of all of them as of one process. 10 minutes a round.
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
HEAD = ("peers, samples a second", "rounds", "samples", "utilisation", "wall", "accuracy", "to the single run")


def measure(rounds: int = ROUNDS) -> Sequence[Figure | Table]:
    """The table."""
    if why := absent():
        return [Figure("accuracy of a swarm", "", note=f"not measured: {why}")]
    # One more round, of which most is over before the others are there.
    in_time = f"collaborative.rounds={1 + round(SAMPLES / sum(RATES[0]) / ROUND_SECONDS)}"
    found: dict[tuple[float, ...], list[Trained]] = {rates: [] for rates in RATES}
    for seed in range(rounds):
        for rates in RATES:
            batch = f"train.global_batch_size={BATCH // len(rates)}"
            found[rates].append(trained("hivemind", rates, *SAME, batch, in_time, f"seed={seed}"))
    samples = statistics.mean(one.samples for runs in found.values() for one in runs)
    return [table(found, [single(round(samples / BATCH), seed) for seed in range(rounds + 1)])]


def table(found: dict[tuple[float, ...], list[Trained]], singles: Sequence[tuple[float, float]]) -> Table:
    """Of what swarms have come to, and of the accuracy and seconds of the single runs."""
    alone = statistics.mean(accuracy for accuracy, _ in singles)
    spread = max(accuracy for accuracy, _ in singles) - min(accuracy for accuracy, _ in singles)
    seconds = statistics.median(seconds for _, seconds in singles)
    samples = statistics.mean(one.samples for runs in found.values() for one in runs)
    rows = [["one process", "", f"{samples:,.0f}", "", f"{seconds:.0f} s", _each([one for one, _ in singles]), ""]]
    goals = []
    for rates, runs in found.items():
        used = [share for run in runs for share in run.utilisation]
        better = statistics.mean(one.accuracy for one in runs) - alone
        rows.append([
            f"{len(rates)}: {', '.join(f'{rate:.0f}' for rate in rates)}",
            f"{statistics.median(one.rounds for one in runs):.0f}",
            f"{statistics.mean(one.samples for one in runs):,.0f}",
            f"{100 * min(used):.1f} to {100 * max(used):.1f} %",
            f"{statistics.median(one.seconds for one in runs):.0f} s",
            _each([one.accuracy for one in runs]), f"{better:+.2f} points",
        ])  # fmt: skip
        goals.append(
            Figure(f"{len(rates)} of unequal speed" if len(rates) > 1 else "1 peer",
                   f"{better:+.2f} points to the single run, whose own seeds are up to {spread:.2f} apart",
                   goal=f"at most {POINTS} points less", met=better >= -POINTS)
        )  # fmt: skip
    return Table(HEAD, rows, goals)


def _each(values: Sequence[float]) -> str:
    return f"{statistics.mean(values):.2f} % ({', '.join(f'{value:.2f}' for value in values)})"


def single(updates: int, seed: int) -> tuple[float, float]:
    """Accuracy and seconds of ordinary training: nobody sleeps in it."""
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
        return summary["val"]["acc1"], summary["train_seconds"]


if __name__ == "__main__":
    from tests.benchmarks.__main__ import main

    raise SystemExit(main(["--only", "swarm_accuracy"]))
