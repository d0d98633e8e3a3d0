"""What the loop costs on top of a bare PyTorch loop, where batches are given.

Both arms train the same model on the same batch again and again, with AdamW, on one thread, alone and on two ranks with
DDP. What differs is what the kit's loop does besides (meters, schedule, seeding, looking for what is not finite, the
vote on stopping, marks of where the time goes, records) and what it does in another way: the update itself. The bare
loop is what one writes by hand, with torch's fused optimizer.

The arms take turns of some 20 ms (140 with the larger model) in the same process, without Python's garbage collector,
and in the end must have the same weights, bit for bit. In each turn are as many records as in any other. Figure and
control of a small model are CPU time of the fastest tenth of the turns: nothing makes a turn faster than it is, and a
busy machine makes it slower. Those of a model whose update takes 10 ms are medians of wall time: some have a vote.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from tests.benchmarks.measuring import CONTROL, Figure, Turn, control_of, describe, loaded, ratios, side_by_side
from tests.rank_functions import run_ranks
from trainkit.checkpoint.save import Checkpoints
from trainkit.cluster.ranks import RankEnv
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.data.base import Batch, normalize
from trainkit.data.registry import build_data
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.monitor.base import Loggers
from trainkit.run.events import Attempt
from trainkit.run.folder import RunDir
from trainkit.training.loop import train
from trainkit.training.optim import set_lr
from trainkit.training.progress import Progress
from trainkit.training.recorder import Recorder
from trainkit.training.schedule import lr_at
from trainkit.training.train_state import build

ROUNDS = 20
"""Each of so many turns of every arm as there are in `TURNS`, of the small model and the large one."""
TURNS = 10, 5
SMALL, LARGE = 50, 10
"""Updates in a turn: a multiple of those between two records."""
GOAL_US, GOAL_RATIO = 45, 1.01
CPU, WALL = "CPU", "wall"
_NOISE = "0.3 % are the cost of the loop; the rest is no more than what else the machine does moves both arms by"
_PUBLIC = "each update calls torch's own step, for two groups, and get_total_norm, in place of their kernels"
_MESSAGES = "a record and the votes are messages more, and each wakes threads of gloo on cores that the ranks fill"

Measured = dict[str, dict[str, list[float]]]


def measure(rounds: int = ROUNDS) -> list[Figure]:
    """The lines of the table.

    Raises AssertionError where the arms do not make the same updates.
    """
    small, large = run_ranks(1, measured, rounds)[0]
    small_2, large_2 = run_ranks(2, measured, rounds, timeout=1200)[0]
    return [
        _microseconds("the loop's cost an update over a bare loop", small, at_most=GOAL_US, headline=True),
        _ratio("the same for a model whose update takes 10 ms", large, note=_NOISE),
        _microseconds("the loop's cost an update on each of 2 ranks, ddp, over bare DDP", small_2),
        _ratio("the same for a model whose update takes 10 ms, 2 ranks", large_2, note=_MESSAGES),
    ]


def _microseconds(what: str, measured: Measured, *, at_most: float | None = None, headline: bool = False) -> Figure:
    times = measured[CPU]
    bare, kit, control = _fastest(times)
    extra = (kit - bare) / SMALL * 1e6
    numbers = (
        f"{extra:.0f} us on {bare / SMALL * 1e6:.0f}; ratio {describe(ratios(times, 'kit'))}; {_by(WALL, measured)}"
    )
    goal, met = ("", None) if at_most is None else (f"at most {at_most} us", extra <= at_most)
    note = _PUBLIC if met is False else ""
    return Figure(what, numbers, control, goal, met, 0.03, note, headline=what if headline else "")


def _ratio(what: str, measured: Measured, *, note: str = "") -> Figure:
    """Of the median turns: in the fastest no vote falls."""
    times = measured[WALL]
    found = ratios(times, "kit")
    numbers = f"{describe(found)}, of {statistics.median(times['bare']) / LARGE * 1e3:.1f} ms; {_by(CPU, measured)}"
    met = statistics.median(found) <= GOAL_RATIO
    return Figure(what, numbers, control_of(times), f"at most {GOAL_RATIO}", met, 0.01, "" if met else note)


def _fastest(times: dict[str, list[float]]) -> tuple[float, float, float]:
    """Seconds of a turn of the bare loop and of the kit's, and the ratio of the bare loop's two."""
    best = {name: sorted(turns)[len(turns) // 10] for name, turns in times.items()}
    return (best["bare"] + best[CONTROL]) / 2, best["kit"], best[CONTROL] / best["bare"]


def _by(clock: str, measured: Measured) -> str:
    return f"by {clock} time {statistics.median(ratios(measured[clock], 'kit')):.3f}"


def measured(env: RankEnv, rounds: int) -> tuple[Measured, Measured]:
    """On one of the ranks: the turns of the arms with the small model, and with the large one."""
    clocks = {CPU: time.process_time, WALL: time.perf_counter}
    found = []
    with distributed(env, use_gpu=False) as dist:
        torch.set_num_threads(1)  # CPU time of several threads would also count their waiting
        for make, updates, turns in zip((_small, _large), (SMALL, LARGE), TURNS, strict=True):
            steps = 1 + rounds * turns * updates
            settings = ["train.precision=fp32", f"train.max_steps={steps}", "train.eval_every_epochs=100000"]
            settings += ["optim.weight_decay=0", f"train.global_batch_size={64 * env.world_size}"]
            work = _Work(load("single" if env.world_size == 1 else "ddp", settings).config, dist, make, steps, updates)
            found.append(side_by_side({"bare": work.bare, "kit": work.kit}, clocks))
            one, *others = work.weights
            assert all(torch.equal(one, other) for other in others), "the loops do not make the same updates"
    return found[0], found[1]


def _small() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.GELU(), nn.Linear(32, 10))


def _large() -> nn.Module:
    convolutions = (nn.Conv2d(1, 64, 3, padding=1), nn.GELU(), nn.Conv2d(64, 64, 3, padding=1), nn.GELU())
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(4096, 10))


class _Work:
    """What both arms do. ``weights`` has those of each that has come to its end."""

    def __init__(
        self, config: Config, dist: Distributed, make: Callable[[], nn.Module], steps: int, in_turn: int
    ) -> None:
        self.config, self.dist, self.make, self.steps, self.in_turn = config, dist, make, steps, in_turn
        self.splits = build_data(config.data)
        self.weights: list[torch.Tensor] = []
        of_rank: Any = {"rank": dist.rank, "world_size": dist.world_size, "device": dist.device}
        with loaded(self.splits, 0, 1, 64, **of_rank) as batches:
            self.batch = next(batches)

    def model(self) -> nn.Module:
        torch.set_num_threads(1)  # of this thread
        torch.manual_seed(0)
        return self.make()

    def given(self, turn: Turn) -> Iterator[Batch]:
        """The first batch makes everything that is made once."""
        for step in range(self.steps):
            if step % self.in_turn == 1:
                turn()
            yield self.batch

    def bare(self, turn: Turn) -> None:
        """The shortest loop that makes the same updates."""
        optim, info, model = self.config.optim, self.splits.info, self.model()
        if self.dist.world_size > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters(), betas=optim.given()["betas"], weight_decay=0.0, fused=True)
        schedule = {"steps_per_epoch": len(self.splits.train) // (64 * self.dist.world_size), "total_steps": self.steps}
        for step, batch in enumerate(self.given(turn)):
            set_lr(optimizer, lr_at(step, optim=optim, schedule=self.config.schedule, **schedule))
            functional.cross_entropy(model(normalize(batch.images, info)), batch.labels).backward()
            optimizer.step()
            optimizer.zero_grad()
        self.weights.append(weights_of(model))

    def kit(self, turn: Turn) -> None:
        """The kit's loop without files. Its votes are as far apart as where no other arm takes turns with it: the clock
        that they go by stands still meanwhile."""
        waited = 0.0

        def turn_by_the_clock() -> None:
            nonlocal waited
            began = time.monotonic()
            turn()
            waited += time.monotonic() - began

        def clock() -> float:
            return time.monotonic() - waited

        votes_go_by = SimpleNamespace(**{**vars(time), "monotonic": clock})
        parts = build(self.config, self.dist, self.splits, model=self.model())
        writer = Attempt(RunDir(Path()), 0)
        keeper = NoFiles(parts, writer, Checkpoints(Path(), keep=1, dist=self.dist), Loggers(lambda: None), Progress())
        batches = nullcontext(self.given(turn_by_the_clock))
        with (
            mock.patch("trainkit.training.train_state.train_batches", return_value=batches),
            mock.patch("trainkit.distributed.process_group.time", votes_go_by),
        ):
            train(parts, keeper, lambda: False)
        self.weights.append(weights_of(parts.model))


class NoFiles(Recorder):
    def save(self, **more: Any) -> None: ...

    def validate(self, *args: Any, **more: Any) -> bool:
        return False


def weights_of(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
