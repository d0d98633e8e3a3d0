"""``python -m tests.benchmarks.loop_cost``: what the loop costs on top of a bare PyTorch loop, where batches are given.

Both arms train the same small model on the same batch again and again with the same optimizer, on one thread; what
differs is what the kit's loop does besides: meters, schedule, seeding, looking for what is not finite, the vote on
stopping, marks of where the time goes, records. CPU time is measured, in blocks of 50 updates of which the fastest
tenth counts: nothing makes a block faster than it is, and a busy machine makes it slower. The weights of both arms must
be the same in the end, bit for bit. Then the same with a model whose update takes 10 ms.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional

from tests.benchmarks.measuring import CONTROL, Figure, describe, ratios, take_turns
from trainkit.checkpoint.saving import Checkpoints
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.data.base import Splits, normalize
from trainkit.data.loader import train_batches
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.monitor.base import NullLogger
from trainkit.ranks.env import RankEnv
from trainkit.records.attempts import Attempt
from trainkit.records.rundir import RunDir
from trainkit.records.writer import Writer
from trainkit.training.building import build
from trainkit.training.loop import train
from trainkit.training.optim import set_lr
from trainkit.training.outcome import Keeper
from trainkit.training.progress import Progress
from trainkit.training.schedule import lr_at

BLOCK = 50
ROUNDS = 9
SMALL, LARGE = 800, 100
GOAL_US, GOAL_RATIO = 45, 1.01


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The lines of the table.

    Raises AssertionError where the arms do not make the same updates.
    """
    figures = []
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        torch.set_num_threads(1)  # CPU time of several threads would also count their waiting
        for steps, make in ((SMALL, _small), (LARGE, _large)):
            settings = ["train.precision=fp32", f"train.max_steps={steps}", "train.eval_every_epochs=100000"]
            work = _Work(load("single", settings).config, dist, make, steps)
            assert torch.equal(work.bare(), work.kit()), "the loops do not make the same updates"
            measured = take_turns({"bare": work.timed(work.bare), "kit": work.timed(work.kit)}, rounds)
            figures.append(_figure(measured, steps))
    return figures


def _figure(measured: dict[str, list[float]], steps: int) -> Figure:
    best = {name: sorted(values)[len(values) // 10] for name, values in measured.items()}
    shortest = min(best["bare"], best[CONTROL])
    control, ratio, extra = best[CONTROL] / best["bare"], best["kit"] / shortest, (best["kit"] - shortest) * 1e6
    numbers = (
        f"{extra:.0f} us on {shortest * 1e6:.0f}; ratio {ratio:.3f}, by rounds {describe(ratios(measured, 'kit'))}"
    )
    if steps == SMALL:
        what, goal, met = "the loop's cost an update over a bare loop", f"at most {GOAL_US} us", extra <= GOAL_US
    else:
        what, goal, met = "the same for a model whose update takes 10 ms", f"at most {GOAL_RATIO}", ratio <= GOAL_RATIO
    return Figure(what, numbers, control, goal, met, 0.03, headline=what if steps == SMALL else "")


def _small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))


def _large() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 64, 3, padding=1),
        nn.GELU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.GELU(),
        nn.Flatten(),
        nn.Linear(4096, 10),
    )


class _Work:
    """What both arms do."""

    def __init__(self, config: Config, dist: Distributed, make: Callable[[], nn.Module], steps: int) -> None:
        self.config, self.dist, self.make, self.steps = config, dist, make, steps
        self.splits: Splits = build_data(config.data)
        self.marks: list[float] = []
        parts = self.parts()
        with train_batches(
            parts.splits,
            seed=0,
            start_step=0,
            stop_step=1,
            global_batch_size=64,
            micro_batch_size=64,
            rank=0,
            world_size=1,
            workers=0,
            device=dist.device,
        ) as batches:
            self.batch = next(batches)

    def parts(self) -> Any:
        torch.manual_seed(0)
        return build(self.config, self.dist, self.splits, model=self.make())

    def given(self) -> Iterator[Any]:
        for step in range(self.steps):
            if step % BLOCK == 0:
                self.marks.append(time.process_time())
            yield self.batch

    def bare(self) -> torch.Tensor:
        """The shortest loop that makes the same updates; the weights."""
        parts, config, info = self.parts(), self.config, self.splits.info
        model, optimizer = parts.model, parts.optimizer
        schedule = {"steps_per_epoch": parts.steps_per_epoch, "total_steps": self.steps}
        for step, batch in enumerate(self.given()):
            set_lr(optimizer, lr_at(step, optim=config.optim, schedule=config.schedule, **schedule))
            functional.cross_entropy(model(normalize(batch.images, info)), batch.labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
        return weights_of(model)

    def kit(self) -> torch.Tensor:
        """The kit's loop without files; the weights."""
        parts = self.parts()
        writer = Writer(Attempt(RunDir(Path()), 0), lambda: None)
        keeper = NoFiles(parts, writer, Checkpoints(Path(), keep=1, dist=self.dist), NullLogger(), Progress())
        with mock.patch("trainkit.training.loop.train_batches", return_value=nullcontext(self.given())):
            train(parts, keeper, lambda: False)
        return weights_of(parts.model)

    def timed(self, arm: Callable[[], torch.Tensor]) -> Callable[[], float]:
        """Seconds an update, of the fastest tenth of blocks."""

        def seconds() -> float:
            self.marks.clear()
            arm()
            blocks = sorted(after - before for before, after in pairwise(self.marks))
            return blocks[len(blocks) // 10] / BLOCK

        return seconds


class NoFiles(Keeper):
    def save(self, **more: Any) -> None: ...

    def validate(self, *args: Any, **more: Any) -> bool:
        return False


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


if __name__ == "__main__":
    from tests.benchmarks.__main__ import main

    raise SystemExit(main(["--only", "loop_cost"]))
