"""What do four unequal peers come to that send coarser numbers, in as many rounds of as many seconds?

The swarms of `swarm_accuracy`, each with several seeds, and one process with as many samples. 12 minutes a round.
"""

import statistics
from collections.abc import Sequence

from tests.benchmarks.machines import absent
from tests.benchmarks.measuring import Figure, Table
from tests.benchmarks.swarm_accuracy import BATCH, RATES, Trained, each, single, trained

ROUNDS = 2
CODECS = ("fp16", "8bit", "4bit")
HEAD = (
    "sent",
    "samples",
    "bytes a sample",
    "a peer's bytes a round",
    "utilisation",
    "accuracy",
    "to one process",
    "loss",
)


def measure(rounds: int = ROUNDS) -> Sequence[Figure | Table]:
    """The table."""
    if why := absent():
        return [Figure("numbers that a swarm sends", "", note=f"not measured: {why}")]
    found: dict[str, list[tuple[Trained, float]]] = {codec: [] for codec in CODECS}
    for seed in range(rounds):
        for codec, runs in found.items():
            swarm = trained(RATES[-1], seed, codec)
            runs.append((swarm, single(round(swarm.samples / BATCH), seed)))
    return [Table(HEAD, [row(codec, runs) for codec, runs in found.items()])]


def row(codec: str, runs: Sequence[tuple[Trained, float]]) -> list[str]:
    """Of runs, each with the accuracy of one process with as many samples."""
    swarms, mean = [swarm for swarm, _ in runs], statistics.mean
    used = [share for swarm in swarms for share in swarm.utilisation]
    return [
        codec, f"{mean(one.samples for one in swarms):,.0f}",
        f"{sum(one.bytes for one in swarms) / sum(one.samples for one in swarms):.0f}",
        f"{mean(one.bytes / one.rounds / len(one.utilisation) for one in swarms) / 1e3:.0f} kB",
        f"{100 * min(used):.1f} to {100 * max(used):.1f} %", each([one.accuracy for one in swarms]),
        f"{mean(swarm.accuracy - accuracy for swarm, accuracy in runs):+.2f} points",
        f"{mean(one.loss for one in swarms):.3f}",
    ]  # fmt: skip
