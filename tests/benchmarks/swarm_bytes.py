"""What two peers send for a sample that they train on, in four ways.

The kit's presets `hivemind` (fp16, and 8 bit) and `hivemind_gradients`, and `hivemind.Optimizer` as it comes
(`arms/stock_hivemind.py`), without compression and in fp16. Each peer is on a machine of its own, whose network counts
what goes over the wire. The same model, optimizer, schedule, and about as many samples. 15 minutes.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.benchmarks.arms import stock_hivemind
from tests.benchmarks.arms.patient_task import SECONDS
from tests.benchmarks.machines import absent, machines
from tests.benchmarks.measuring import Figure, Table
from tests.benchmarks.swarms import Trained, trained

ROUNDS = 1
RATES = (800.0, 400.0)
SAMPLES, UPDATE, MICRO, LR, ROUND_SECONDS = 72_000, 1024, 64, 2e-3, 12.0
HEAD = (
    "arm", "rounds or updates", "samples", "MB", "bytes a sample", "stock's to it", "utilisation", "wall", "accuracy"
)  # fmt: skip


def measure(rounds: int = ROUNDS) -> Sequence[Figure | Table]:
    """The table; medians, where it is measured more than once."""
    if why := absent():
        return [Figure("bytes a sample in a swarm", "", note=f"not measured: {why}")]
    diloco = partial(trained, "hivemind", RATES, f"optim.lr={LR}", f"train.global_batch_size={MICRO}")
    # One more round, of which most is over before the second peer is there.
    count = 1 + round(SAMPLES / sum(RATES) / ROUND_SECONDS)
    in_time = (f"collaborative.round_seconds={ROUND_SECONDS:g}", f"collaborative.rounds={count}")
    of_updates = (f"collaborative.rounds={SAMPLES // UPDATE}", f"train.global_batch_size={UPDATE}")
    arms: dict[str, Callable[..., Trained]] = {
        "diloco fp16": partial(diloco, *in_time),
        "diloco 8 bit": partial(diloco, *in_time, "collaborative.compression=8bit"),
        "gradients fp16": partial(trained, "hivemind_gradients", RATES, f"optim.lr={LR}", *of_updates),
        "stock": partial(stock, fp16=False),
        "stock fp16": partial(stock, fp16=True),
    }
    found: dict[str, list[Trained]] = {name: [] for name in arms}
    for seed in range(rounds):
        for name, arm in arms.items():
            found[name].append(arm(f"seed={seed}"))
    return [table(found)]


def table(found: dict[str, list[Trained]]) -> Table:
    """Of what each arm has come to."""
    stock_bytes = _median(found["stock"], lambda one: one.bytes_a_sample)
    stock_accuracy = _median(found["stock"], lambda one: one.accuracy)
    rows, goals = [], []
    for name, runs in found.items():
        mine = _median(runs, lambda one: one.bytes_a_sample)
        used = [share for run in runs for share in run.utilisation]
        rows.append([
            name, *(f"{_median(runs, ask):,.0f}" for ask in (lambda one: one.rounds, lambda one: one.samples)),
            f"{_median(runs, lambda one: one.bytes / 1e6):.1f}", f"{mine:,.0f}", f"{stock_bytes / mine:.1f} x",
            f"{100 * min(used):.1f} to {100 * max(used):.1f} %", f"{_median(runs, lambda one: one.seconds):.0f} s",
            f"{_median(runs, lambda one: one.accuracy):.2f} %",
        ])  # fmt: skip
        if name.startswith("diloco"):
            fewer, better = stock_bytes / mine, _median(runs, lambda one: one.accuracy) - stock_accuracy
            goals += [
                Figure(f"{name}, fewer bytes a sample than stock", f"{fewer:.1f} x, at {better:+.2f} points of its "
                       "accuracy", goal="at least 20 x at no less", met=fewer >= 20 and better >= -0.5),
                Figure(f"{name}, utilisation of the peer that is used least", f"{100 * min(used):.1f} %",
                       goal="at least 95 %", met=min(used) >= 0.95),
            ]  # fmt: skip
    return Table(HEAD, rows, goals)


def _median(runs: list[Trained], ask: Callable[[Trained], float]) -> float:
    return statistics.median(map(ask, runs))


def stock(seed: str, *, fp16: bool) -> Trained:
    """As many updates as the kit's arm with gradients makes."""
    with TemporaryDirectory() as name, machines(len(RATES), Path(name)) as net:
        for number, rate in enumerate(RATES):
            job = stock_hivemind.Job(
                net.address(number), str(number), name, len(RATES), SAMPLES // UPDATE, UPDATE, MICRO, LR,
                int(seed.partition("=")[2]), fp16,
            )  # fmt: skip
            first = net.start(number, *stock_hivemind.words(job), env={SECONDS: str(1 / rate)})
            while not (net.folder / "address").exists():
                assert first.process.poll() is None, first.output
                time.sleep(0.1)
        for started in net.started:
            started.ends(1200)
        told = [json.loads((net.folder / f"done-{number}").read_text()) for number in range(len(RATES))]
        return Trained(
            peers=len(RATES),
            rounds=told[0]["joint"],
            samples=sum(one["samples"] for one in told),
            bytes=sum(net.sent()),
            utilisation=tuple(one["busy"] / one["seconds"] for one in told),
            seconds=told[0]["seconds"],
            accuracy=told[0]["accuracy"],
        )
