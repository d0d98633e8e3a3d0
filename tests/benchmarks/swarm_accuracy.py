"""Does a swarm of unequal peers reach what one process does?

1, 2 and 4 peers of the preset `hivemind`, all together always of the same speed; and the preset `single` in one process
with as many updates as their samples are, each with several seeds, for runs of one process differ too. A peer's update
is of a k-th of the batch where there are k, so that as many samples of all make one. 10 minutes a round.
"""

import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.arms.patient_task import SECONDS, TRAIN
from tests.benchmarks.machines import TOKEN, absent, machines
from tests.benchmarks.measuring import Figure, Table

ROUNDS = 2
RATES = ((1600.0,), (1000.0, 600.0), (750.0, 425.0, 275.0, 150.0))
"""Samples a second of each peer."""
SAMPLES, BATCH, ROUND_SECONDS = 200_000, 64, 8.0
PLAIN = ("data.workers=0", "train.precision=fp32")
TASK = (
    *PLAIN, "data.name=tests.benchmarks.arms.patient_task:data", "model.name=tests.benchmarks.arms.patient_task:model",
    "model.width=256", "optim.lr=2e-3", "monitor.loggers=[jsonl]", "launch.gpus_per_node=0",
)  # fmt: skip
POINTS = 0.5
HEAD = ("peers, samples a second", "rounds", "samples", "utilisation", "wall", "accuracy", "one process")
_START_SECONDS, _TRAIN_SECONDS = 120.0, 1200.0


@dataclass(frozen=True)
class Trained:
    """What peers have come to, and what it took."""

    rounds: int
    """With an average, of the first peer."""
    samples: int
    """That any peer has trained on."""
    utilisation: tuple[float, ...]
    """Of each peer: the share of the time in updates, from its first joint round to its last."""
    seconds: float
    """From the first peer's first update to its last average."""
    bytes: int
    """Of parts of the vector and of averages, that all have sent in all rounds."""
    wire: int
    """All bytes that went over the network, from the start of the first peer on."""
    accuracy: float
    """In percent, of the validation of what they have in common in the end; and its loss."""
    loss: float


Found = dict[tuple[float, ...], list[tuple[Trained, float]]]
"""Speeds of the peers -> each run, and the accuracy of one process with as many samples."""


def measure(rounds: int = ROUNDS) -> Sequence[Figure | Table]:
    """The table."""
    if why := absent():
        return [Figure("accuracy of a swarm", "", note=f"not measured: {why}")]
    found: Found = {rates: [] for rates in RATES}
    for seed in range(rounds):
        for rates in RATES:
            swarm = trained(rates, seed)
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
            each([one.accuracy for one in swarms]), each(singles),
        ])  # fmt: skip
        goals.append(
            Figure(f"{len(rates)} peers" if len(rates) > 1 else "1 peer",
                   f"{statistics.mean(apart):+.2f} points to the single run of as many samples "
                   f"({', '.join(f'{one:+.2f}' for one in apart)})",
                   goal=f"at most {POINTS} points less", met=statistics.mean(apart) >= -POINTS)
        )  # fmt: skip
    return Table(HEAD, rows, goals)


def each(values: Sequence[float]) -> str:
    """Their mean, and each of them."""
    return f"{statistics.mean(values):.2f} % ({', '.join(f'{value:.2f}' for value in values)})"


def trained(rates: Sequence[float], seed: int, codec: str = "fp16") -> Trained:
    """Peers of so many samples a second each, on a machine each; the first one has created the run."""
    # One more round, of which most is over before the others are there.
    rounds = 1 + round(SAMPLES / sum(rates) / ROUND_SECONDS)
    settings = (f"train.global_batch_size={BATCH // len(rates)}", f"collaborative.rounds={rounds}", f"seed={seed}",
                f"collaborative.compression={codec}")  # fmt: skip
    with TemporaryDirectory() as folder, machines(len(rates), Path(folder)) as net:
        runs = [net.folder / "runs" / f"peer-{number}" for number in range(len(rates))]
        create = ("jobs.swarm", "create", "hivemind", *TASK, *settings, "--host", net.address(0), "--name", "peer-0")
        creator = net.start(0, *create, "--run-dir", str(runs[0]), env={SECONDS: str(1 / rates[0])})
        token = creator.says(TOKEN, _START_SECONDS)[1]
        for number, rate in enumerate(rates[1:], 1):
            join = ("jobs.join", "--allow-code", "--name", f"peer-{number}", "--run-dir", str(runs[number]), *PLAIN)
            net.start(number, *join, env={SECONDS: str(1 / rate), "TRAINKIT_TOKEN": token})
        for started in net.started:
            started.ends(_TRAIN_SECONDS)
        records = [_records(run) for run in runs]
        return Trained(
            rounds=sum(record["peers"] > 1 or len(rates) == 1 for record in records[0]),
            samples=sum(round(found[-1]["epoch"] * TRAIN) for found in records),
            utilisation=tuple(_utilisation(found, len(rates)) for found in records),
            seconds=records[0][-1]["time"] - records[0][0]["time"] + _busy(records[0][0], 0.0),
            bytes=sum(record["bytes_up"] for found in records for record in found),
            wire=sum(net.sent()),
            accuracy=_validated(runs[0], "acc1"),
            loss=_validated(runs[0], "loss"),
        )


def single(updates: int, seed: int) -> float:
    """The accuracy of ordinary training, in which nobody sleeps."""
    with TemporaryDirectory() as name, machines(1, Path(name)) as net:
        run = net.folder / "run"
        own = (f"train.max_steps={updates}", f"train.global_batch_size={BATCH}", f"seed={seed}")
        words = ("jobs.train", "single", *TASK, *own, "checkpoint.every_epochs=null", "--run-dir", str(run))
        net.start(0, *words).ends(_TRAIN_SECONDS)
        return _validated(run, "acc1")


def _validated(run: Path, what: str) -> float:
    return float(json.loads((run / "summary.json").read_text(encoding="utf-8"))["val"][what])


def _records(run: Path) -> list[dict[str, Any]]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for line in lines if (record := json.loads(line))["split"] == "train"]


def _busy(record: dict[str, Any], epoch_before: float) -> float:
    """Seconds that a round's updates have taken."""
    return float((record["epoch"] - epoch_before) * TRAIN / record["images_per_sec"])


def _utilisation(records: Sequence[dict[str, Any]], peers: int) -> float:
    """From the first round with all peers in it on."""
    first = next(index for index, record in enumerate(records) if record["peers"] == peers)
    counted = records[first:]
    busy = sum(_busy(after, before["epoch"]) for before, after in pairwise(counted))
    return busy / float(counted[-1]["time"] - counted[0]["time"])
