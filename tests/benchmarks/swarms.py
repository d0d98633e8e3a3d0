"""Swarms of the kit's own commands on machines of their own, and what they have come to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from tests.benchmarks.arms.patient_task import SECONDS, TRAIN
from tests.benchmarks.machines import Machines, machines

TASK = (
    "data.name=tests.benchmarks.arms.patient_task:data",
    "model.name=tests.benchmarks.arms.patient_task:model",
    "data.workers=0",
    "train.precision=fp32",
    "monitor.loggers=[jsonl]",
    "launch.gpus_per_node=0",
)
TOKEN = r"TRAINKIT_TOKEN=(trainkit1\.\S+) python -m jobs\.join$"
_START_SECONDS = 120.0


@dataclass(frozen=True)
class Trained:
    """What peers have come to, and what it took."""

    peers: int
    """As many as were together in most rounds."""
    rounds: int
    """With an average, of the first peer."""
    samples: int
    """That any peer has trained on."""
    bytes: int
    """On the wire, from the start of the first peer to the end of the last: joining and control included."""
    utilisation: tuple[float, ...]
    """Of each peer: the share of the time in updates, from its first joint round to its last."""
    seconds: float
    """From the first peer's first update to its last average."""
    accuracy: float
    """In percent, of the validation of what they have in common in the end."""

    @property
    def bytes_a_sample(self) -> float:
        return self.bytes / self.samples


def trained(preset: str, rates: Sequence[float], *settings: str) -> Trained:
    """Peers of so many samples a second each, on a machine each; the first one has created the run."""
    with TemporaryDirectory() as folder, machines(len(rates), Path(folder)) as net:
        return _trained(net, preset, rates, settings)


def _trained(net: Machines, preset: str, rates: Sequence[float], settings: Sequence[str]) -> Trained:
    def at(rate: float) -> dict[str, str]:
        return {SECONDS: str(1 / rate)}

    runs = [net.folder / "runs" / f"peer-{number}" for number in range(len(rates))]
    create = ("jobs.swarm", "create", preset, *TASK, *settings, "--host", net.address(0), "--name", "peer-0")
    creator = net.start(0, *create, "--run-dir", str(runs[0]), env=at(rates[0]))
    token = creator.says(TOKEN, _START_SECONDS)[1]
    for number, rate in enumerate(rates[1:], 1):
        join = ("jobs.join", "--allow-code", "--name", f"peer-{number}", "--run-dir", str(runs[number]))
        net.start(number, *join, "data.workers=0", "train.precision=fp32", env={**at(rate), "TRAINKIT_TOKEN": token})
    for started in net.started:
        started.ends(1200)
    records = [_records(run) for run in runs]
    summary = json.loads((runs[0] / "summary.json").read_text(encoding="utf-8"))
    joint = [record["peers"] for record in records[0]]
    return Trained(
        peers=max(set(joint), key=joint.count),
        rounds=sum(peers > 1 or len(rates) == 1 for peers in joint),
        samples=sum(round(found[-1]["epoch"] * TRAIN) for found in records),
        bytes=sum(net.sent()),
        utilisation=tuple(_utilisation(found, len(rates)) for found in records),
        seconds=records[0][-1]["time"] - records[0][0]["time"] + _busy(records[0][0], 0.0),
        accuracy=summary["val"]["acc1"],
    )


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
