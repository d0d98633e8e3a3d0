"""``python -m tests.benchmarks.step_cost``: what the loop costs on top of a bare PyTorch loop.

Both arms train the same small model on the same batches with the same optimizer, on one thread; what differs is what
the kit's loop does besides: meters, schedule, seeding, the vote on stopping, records. The arms alternate (A B B A), CPU
time is measured, and a control of bare against bare must lie within 0.97 to 1.03, or the run is void.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trainkit.checkpoint.saving import Checkpoints
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.data.base import Splits, normalize
from trainkit.data.loader import train_batches
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.experiment import build
from trainkit.monitor.base import NullLogger
from trainkit.ranks.env import RankEnv
from trainkit.records.attempts import Attempt
from trainkit.records.rundir import RunDir
from trainkit.records.writer import Writer
from trainkit.training.evaluate import evaluate
from trainkit.training.loop import train
from trainkit.training.optim import set_lr
from trainkit.training.outcome import Keeper, Progress
from trainkit.training.schedule import lr_at

STEPS = 114  # 6 epochs of digits
ROUNDS = 9


def main() -> int:
    """Measure and print; 1 if the control says that the run is void."""
    settings = [f"train.max_steps={STEPS}", "train.precision=fp32", "train.eval_every_epochs=1000"]
    config = load("single", settings).config
    splits = build_data(config.data)
    with distributed(RankEnv.single(), use_gpu=False) as dist:
        torch.set_num_threads(1)  # CPU time of several threads would also count their waiting
        (bare_weights, _), (kit_weights, _) = bare(config, splits, dist), kit(config, splits, dist)
        if not torch.equal(bare_weights, kit_weights):
            print("The two loops do not make the same updates, so their times say nothing.")
            return 1
        ratios, controls, extra = [], [], []
        for _ in range(ROUNDS):
            a1, b1, b2, a2, a3 = (arm(config, splits, dist)[1] for arm in (bare, kit, kit, bare, bare))
            ratios.append((b1 + b2) / (a1 + a2))
            controls.append(a3 / a2)
            extra.append((b1 + b2 - a1 - a2) / 2 / STEPS * 1e6)
    control = statistics.median(controls)
    batch = config.train.global_batch_size
    print(f"torch {torch.__version__}, one thread, batch {batch}, {ROUNDS} rounds of {STEPS} steps")
    print(f"kit / bare   {describe(ratios)}")
    print(f"bare / bare  {describe(controls)}  (control)")
    print(f"the kit adds {statistics.median(extra):.0f} us per step")
    if not 0.97 <= control <= 1.03:
        print("void: the control is off; the machine is busy")
        return 1
    return 0


def bare(config: Config, splits: Splits, dist: Distributed) -> tuple[torch.Tensor, float]:
    """The shortest loop that makes the same updates, and one validation at the end: final weights, CPU seconds."""
    parts, step = build(config, dist, splits), 0
    model, optimizer = parts.model, parts.optimizer
    began = time.process_time()
    with batches_of(config, splits) as batches:
        for images, labels, _ in batches:
            per_epoch = len(splits.train) // config.train.global_batch_size
            schedule = {"steps_per_epoch": per_epoch, "total_steps": STEPS}
            set_lr(optimizer, lr_at(step, optim=config.optim, schedule=config.schedule, **schedule))
            functional.cross_entropy(model(normalize(images, splits.info)), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            step += 1
    evaluate(parts, splits.val)
    return weights_of(model), time.process_time() - began


def kit(config: Config, splits: Splits, dist: Distributed) -> tuple[torch.Tensor, float]:
    """The kit's loop without files: final weights, CPU seconds."""
    parts = build(config, dist, splits)
    writer = Writer(Attempt(RunDir(Path()), 0), lambda: None)
    keeper = _NoFiles(parts, writer, Checkpoints(Path(), keep=1, dist=dist), NullLogger(), Progress())
    began = time.process_time()
    train(parts, keeper, lambda: False)
    return weights_of(parts.model), time.process_time() - began


class _NoFiles(Keeper):
    def save(self, **more: Any) -> None: ...


def batches_of(config: Config, splits: Splits):  # type: ignore[no-untyped-def]  # an iterator of (images, labels)
    size = config.train.global_batch_size
    return train_batches(
        splits,
        seed=config.seed,
        start_step=0,
        stop_step=STEPS,
        global_batch_size=size,
        micro_batch_size=size,
        rank=0,
        world_size=1,
        workers=0,
    )


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def describe(values: list[float]) -> str:
    ordered = sorted(values)
    return f"{statistics.median(ordered):.3f}  (of {len(ordered)}: {ordered[0]:.3f} to {ordered[-1]:.3f})"


if __name__ == "__main__":
    raise SystemExit(main())
