"""What do four unequal peers come to that send coarser numbers, in as many rounds of as many seconds?

The swarms of `swarm_accuracy`, each with several seeds, and one process with as many samples. Beside them
`hivemind.Optimizer` as it comes, where peers exchange after as many samples: gradients, or weights that each peer has
updated by itself. 18 minutes a round.
"""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.arms.patient_task import SECONDS
from tests.benchmarks.arms.stock_swarm import Job
from tests.benchmarks.machines import absent, machines
from tests.benchmarks.measuring import Figure, Table
from tests.benchmarks.swarm_accuracy import BATCH, RATES, ROUND_SECONDS, SAMPLES, Trained, each, single, trained

ROUNDS = 2
CODECS = ("fp16", "8bit", "4bit")
STOCK = {"hivemind.Optimizer, gradients": False, "hivemind.Optimizer, local updates": True}
"""Whether each peer makes updates of its own."""
LR, STOCK_SECONDS = 2e-3, 900.0
HEAD = (
    "sent", "samples", "bytes a sample", "with all else on the wire", "of these a peer's, a round", "utilisation",
    "accuracy", "to one process", "loss",
)  # fmt: skip


def measure(rounds: int = ROUNDS) -> Sequence[Figure | Table]:
    """The table."""
    if why := absent():
        return [Figure("numbers that a swarm sends", "", note=f"not measured: {why}")]
    found: dict[str, list[tuple[Trained, float]]] = {name: [] for name in (*CODECS, *STOCK)}
    for seed in range(rounds):
        for name, runs in found.items():
            swarm = stock(seed, local=STOCK[name]) if name in STOCK else trained(RATES[-1], seed, name)
            runs.append((swarm, single(round(swarm.samples / BATCH), seed)))
    return [Table(HEAD, [row(name, runs) for name, runs in found.items()])]


def stock(seed: int, *, local: bool) -> Trained:
    """hivemind's own peers, which exchange as often as the kit's do."""
    rates, began = RATES[-1], time.monotonic()
    target = round(sum(rates) * ROUND_SECONDS)
    with TemporaryDirectory() as name, machines(len(rates), Path(name)) as net:
        for place, rate in enumerate(rates):
            job = Job(
                net.address(place), place, name, len(rates), round(SAMPLES / target), target, BATCH // len(rates), LR,
                seed, local,
            )  # fmt: skip
            started = net.start(place, *job.words, env={SECONDS: str(1 / rate)})
            while not (net.folder / "address").exists():
                assert started.process.poll() is None, started.output
                time.sleep(0.1)
        for started in net.started:
            started.ends(STOCK_SECONDS)
        told = [json.loads((net.folder / f"done-{place}").read_text()) for place in range(len(rates))]
        samples = sum(one["samples"] for one in told)
        used = tuple(one["utilisation"] for one in told)
        wire = sum(net.sent())
    seconds = time.monotonic() - began
    return Trained(round(SAMPLES / target), samples, used, seconds, 0, wire, told[0]["accuracy"], told[0]["loss"])


def row(codec: str, runs: Sequence[tuple[Trained, float]]) -> list[str]:
    """Of runs, each with the accuracy of one process with as many samples."""
    swarms, mean = [swarm for swarm, _ in runs], statistics.mean
    used = [share for swarm in swarms for share in swarm.utilisation]
    return [
        codec, f"{mean(one.samples for one in swarms):,.0f}",
        f"{sum(one.bytes for one in swarms) / sum(one.samples for one in swarms):.0f}" if swarms[0].bytes else "",
        f"{sum(one.wire for one in swarms) / sum(one.samples for one in swarms):.0f}",
        f"{mean(one.wire / one.rounds / len(one.utilisation) for one in swarms) / 1e6:.1f} MB",
        f"{100 * min(used):.1f} to {100 * max(used):.1f} %", each([one.accuracy for one in swarms]),
        f"{mean(swarm.accuracy - accuracy for swarm, accuracy in runs):+.2f} points",
        f"{mean(one.loss for one in swarms):.3f}",
    ]  # fmt: skip
