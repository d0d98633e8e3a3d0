"""``python -m tests.benchmarks.watch_cost``: what it costs to know where the time goes.

Two answers. The marks of an update alone, many times over, as `Updater` and the loop make them: exact, and little. And
the kit's loop with a clock and with one that stands still, arms interleaved (A B B A), CPU time on one thread, with a
control: whatever else the marks may do to a training. The weights are the same in both arms, or nothing is printed.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from tests.benchmarks.loop_cost import NoFiles, weights_of
from tests.benchmarks.measuring import describe
from trainkit.checkpoint.saving import Checkpoints
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.data.base import Splits
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.monitor.base import NullLogger
from trainkit.ranks.env import RankEnv
from trainkit.records.attempts import Attempt
from trainkit.records.rundir import RunDir
from trainkit.records.writer import Writer
from trainkit.training.building import build
from trainkit.training.clock import BACKWARD, COPY, FORWARD, OPTIMIZER, OTHER, Clock
from trainkit.training.loop import train
from trainkit.training.progress import Progress

ROUNDS = 9
STEPS = 114  # 6 epochs of digits
STEP_US = 10_000
"""Of the promise: at most 1 % of a step of 10 ms."""


class Still(Clock):
    """A clock that nobody winds up."""

    def to(self, part: int) -> None: ...

    def wait(self) -> None: ...


def marks(clock: Clock, updates: int = 20_000) -> float:
    """CPU microseconds for the marks of one update."""
    progress = Progress()
    began = time.process_time()
    for update in range(updates):
        clock.wait()
        for part in (COPY, FORWARD, BACKWARD, OTHER, OPTIMIZER, OTHER):
            clock.to(part)
        clock.step()
        if update % 10 == 9:
            clock.lap(progress).fields(ranks=1)
    return (time.process_time() - began) / updates * 1e6


def arm(clock: Clock, config: Config, splits: Splits, dist: Distributed) -> tuple[torch.Tensor, float]:
    """The kit's loop without files: final weights, CPU seconds."""
    parts = build(config, dist, splits)
    writer = Writer(Attempt(RunDir(Path()), 0), lambda: None)
    keeper = NoFiles(parts, writer, Checkpoints(Path(), keep=1, dist=dist), NullLogger(), Progress())
    keeper = replace(keeper, clock=clock)
    began = time.process_time()
    train(parts, keeper, lambda: False)
    return weights_of(parts.model), time.process_time() - began


def main() -> int:
    """Measure and print; 1 if the control says that the comparison is void."""
    settings = [f"train.max_steps={STEPS}", "train.precision=fp32", "train.eval_every_epochs=1000"]
    config = load("single", settings).config
    splits = build_data(config.data)
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        torch.set_num_threads(1)
        alone = statistics.median(marks(Clock()) for _ in range(ROUNDS))
        (with_clock, _), (without, _) = arm(Clock(), config, splits, dist), arm(Still(), config, splits, dist)
        if not torch.equal(with_clock, without):
            print("The two arms do not make the same updates, so their times say nothing.")
            return 1
        ratios, controls = [], []
        for _ in range(ROUNDS):
            a1, b1, b2, a2, a3 = (
                arm(clock, config, splits, dist)[1] for clock in (Still(), Clock(), Clock(), Still(), Still())
            )
            ratios.append((b1 + b2) / (a1 + a2))
            controls.append(a3 / a2)
    print(f"torch {torch.__version__}, one thread, {ROUNDS} rounds of {STEPS} steps")
    print(f"marks of an update, a record each 10   {alone:.1f} us: {alone / STEP_US:.3%} of 10 ms")
    print(f"with the clock / without               {describe(ratios)}")
    print(f"without / without                      {describe(controls)}  (control)")
    if not 0.97 <= statistics.median(controls) <= 1.03:
        print("void: the control is off; the machine is busy")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
