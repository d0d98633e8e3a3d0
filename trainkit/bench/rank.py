"""One rank of a bench: it does what it is told, and measures."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainkit.bench.beside import MOST_SAID, READY, beside
from trainkit.cluster.ranks import RankEnv
from trainkit.common import fileio, terminal
from trainkit.common.errors import RefusedError
from trainkit.common.jsonl import finite
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.data.base import Batch, Splits
from trainkit.data.loader import resolve_workers
from trainkit.data.order import derive_seed
from trainkit.data.registry import build_data
from trainkit.distributed.device import MemoryGauge, cpus_of_rank, synchronize
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.models.library import build_model
from trainkit.training.batch_size import check_batch_sizes, probed
from trainkit.training.clock import clock_since
from trainkit.training.placement import wants_gpu
from trainkit.training.progress import Progress
from trainkit.training.train_state import TrainState, build
from trainkit.training.update import Updater

WARM_UP = 4
"""Updates before those that are measured: libraries choose their algorithms, and the allocator fills its cache."""
_LAST = 10
"""Updates at the end over which the loss is averaged."""
_MB = 2**20
Order = dict[str, Any]
"""``work``, ``ranks``, ``overrides`` and the arguments of that work; JSON's own types."""


@dataclass
class Worker:
    """Carries out orders on one rank: each ``do_...`` is a work, and returns its figures in JSON's own types.

    ``run``: the folder of the bench; ``env``: this rank's place in the whole job.
    """

    run: Path
    env: RankEnv
    beat: Callable[[], None]
    _configs: dict[tuple[str, ...], Config] = field(default_factory=dict)
    _splits: dict[str, Splits] = field(default_factory=dict)

    def do_data(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Open the data, all ranks together, for the orders to come."""
        config = self._config(order)
        splits = self._splits[_data_key(config)] = build_data(config.data, dist)
        gauge, held = _gauge(dist)
        room = None
        if gauge is not None:
            room = (gauge.room() - held) / _MB
        params = 0
        if order.get("count"):
            for parameter in build_model(config.model, splits.info, config.seed).parameters():
                params += parameter.numel()
        return {"train_images": len(splits.train), "room_mb": room, "params": params}

    def do_train(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Make ``updates`` updates, as training makes them."""
        gauge, before = _gauge(dist)
        parts = self._built(dist, order)
        made = self._trained(parts, order, gauge)
        return made | {"memory_mb": _peak_mb(gauge, before), "params": parts.num_parameters}

    def do_beside(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Make the same updates while others do so on this device; the figures of ``size`` together."""
        count = order["size"]
        with beside(self.run, order["overrides"], count - 1):
            made = self.do_train(dist, order)
        made["images"] *= count
        if made["memory_mb"] is not None:
            made["memory_mb"] *= count
        return made

    def do_ceiling(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Make the same updates with a few images that are in memory."""
        parts = self._built(dist, order)
        with parts.batches(0, 1, workers=0) as batches:
            kept = itertools.cycle(list(itertools.islice(batches, parts.grad_accum_steps)))
        return self._trained(parts, order, batches=nullcontext(kept))

    def do_feed(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Load without training, then train."""
        parts = self._built(dist, order)
        updates = order["updates"]
        with parts.batches(0, WARM_UP + updates) as batches:

            def load() -> None:
                for _ in range(parts.grad_accum_steps):
                    next(batches)

            seconds = max(dist.gather_json(self._timed(dist, updates, load)))
        made = self._trained(parts, order)
        return made | {"extra": {"loads_per_sec": made["images"] / seconds}}

    def do_infer(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Make forward passes of one batch that is in memory."""
        gauge, before = _gauge(dist)
        parts = self._built(dist, order, micro=1)
        passes = order["updates"]
        with parts.batches(0, 1, workers=0) as batches:
            images = next(batches).images[:1]
        images = images.expand(order["size"], *images.shape[1:]).contiguous()
        parts.model.eval()

        def infer() -> None:
            with torch.no_grad(), parts.precision.autocast():
                parts.model(parts.normalized(images)).float()

        seconds = self._timed(dist, passes, infer)
        memory_mb = _peak_mb(gauge, before)
        return {"seconds": seconds, "images": passes * len(images), "updates": passes, "memory_mb": memory_mb}

    def do_reduce(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Sum messages over the ranks. ``bytes``: 2 (n - 1) / n of the messages, the bus bandwidth of nccl-tests."""
        times = order["updates"]
        message = torch.zeros(max(order["size"] // 4, 1), device=dist.device)
        seconds = self._timed(dist, times, lambda: dist.all_reduce_sum(message))
        moved = 2 * (dist.world_size - 1) / dist.world_size * 4 * len(message) * times
        return {"seconds": seconds, "bytes": moved, "updates": times, "extra": {"seconds": seconds / times}}

    def do_largest(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """The largest of ``sizes`` that fits as a micro batch."""
        config, splits = self._prepared(dist, order, micro=order["sizes"][0])
        found = probed(config, dist, lambda one: build(one, dist, splits), order["sizes"])
        return {"size": found.micro_batch_size, "peak_mb": found.peak_mb, "room_mb": found.room_mb}

    def _config(self, order: Order) -> Config:
        """Read once for each arm: its turns must not differ, nor wait for a shared file system."""
        overrides = tuple(order["overrides"])
        if overrides not in self._configs:
            self._configs[overrides] = load(str(self.run), overrides).config
        return self._configs[overrides]

    def _timed(self, dist: Distributed, times: int, step: Callable[[], object]) -> float:
        """Seconds that the steps take, after some that warm up."""
        began = 0.0
        for number in range(WARM_UP + times):
            if number == WARM_UP:
                _meet(dist)
                began = time.perf_counter()
            self.beat()
            step()
        synchronize(dist.device)
        return time.perf_counter() - began

    def _trained(
        self, parts: TrainState, order: Order, gauge: MemoryGauge | None = None, *,
        batches: AbstractContextManager[Iterator[Batch]] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """Make the updates of an order, after some that warm up; their time, loss and parts."""
        dist = parts.dist
        config = parts.config
        total = WARM_UP + order["updates"]
        clock = clock_since(time.perf_counter(), dist.device)
        update = Updater(parts, beat=self.beat, clock=clock)
        spent = Progress()
        losses: list[torch.Tensor] = []
        parts.model.train()
        step = ema_updates = 0
        began = 0.0
        with batches or parts.batches(0, total) as given:
            for position in range(total):
                if position == WARM_UP // 2 and gauge is not None:
                    gauge.start()  # libraries have tried their algorithms by now
                if position == WARM_UP:
                    _meet(dist)
                    clock.lap(spent)
                    began = time.perf_counter()
                made = update(given, lr=parts.lr_at(step), seed=derive_seed(config.seed, position))
                counts = made.stepped.skip is None
                if parts.ema is not None and counts:
                    parts.ema.update(made.stepped.nonfinite, updates=ema_updates)
                    ema_updates += 1
                step += counts
                if total - position <= _LAST:
                    losses.append(made.loss)
            synchronize(dist.device)
            seconds = time.perf_counter() - began
            lap = clock.lap(spent)
        means = dist.gather_json(torch.stack(losses).mean().item())  # as many updates on each rank
        parts_of_time = {}
        for part, taken in lap.seconds.items():
            if taken:
                parts_of_time[part] = round(taken, 6)
        return {
            "seconds": seconds,
            "images": order["updates"] * config.train.global_batch_size,
            "updates": order["updates"],
            "loss": finite(sum(means) / len(means)),
            "parts": parts_of_time,
            "skipped": total - step,
        }

    def _built(self, dist: Distributed, order: Order, micro: int | None = None) -> TrainState:
        config, splits = self._prepared(dist, order, micro)
        return build(config, dist, splits)

    def _prepared(self, dist: Distributed, order: Order, micro: int | None = None) -> tuple[Config, Splits]:
        config = self._config(order)
        splits = self._splits[_data_key(config)]
        # As many loader processes as in the whole job: fewer ranks must not get more of the machine each.
        workers = resolve_workers(config.data.workers, splits, cpus_of_rank(self.env))
        config = config.model_copy(update={"data": config.data.model_copy(update={"workers": workers})})
        if config.train.compile != "off":  # torch limits how often it compiles one model, and then gives up in silence
            import torch._dynamo

            torch._dynamo.reset()
        if micro is None:
            check_batch_sizes(config, dist.world_size, splits)
        return config, splits


def _gauge(dist: Distributed) -> tuple[MemoryGauge | None, int]:
    """Return a gauge of this rank's memory, and the bytes that it holds now."""
    with suppress(RefusedError):  # where this system does not tell
        gauge = MemoryGauge(dist.device, dist.env.local_world_size)
        return gauge, gauge.held()
    return None, 0


def _peak_mb(gauge: MemoryGauge | None, before: int) -> float | None:
    """The peak of a turn, beyond the bytes that were held before it."""
    return None if gauge is None else round((gauge.peak() - before) / _MB, 1)


def _data_key(config: Config) -> str:
    """Equal for the same data, however many processes load it."""
    return config.data.model_dump_json(exclude={"workers"})


def _meet(dist: Distributed) -> None:
    """Wait until all ranks are ready."""
    synchronize(dist.device)
    dist.barrier()


def main(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Train without end beside a rank, see `trainkit.bench.beside`, and say when it has warmed up."""
    run, overrides, threads = arguments
    made = itertools.count()

    def beat() -> None:
        if next(made) == 2 * WARM_UP:
            terminal.say(READY)

    order = {"overrides": fileio.parse(overrides), "updates": 1 << 40}
    try:
        with distributed(RankEnv.single(), use_gpu=wants_gpu(load(run).config)) as dist:
            torch.set_num_threads(int(threads))
            worker = Worker(Path(run), RankEnv.single(), beat)
            worker.do_data(dist, order)
            worker.do_train(dist, order)
    except Exception as error:
        terminal.say(terminal.one_line(str(error) or repr(error), MOST_SAID))
        raise
    return 0
