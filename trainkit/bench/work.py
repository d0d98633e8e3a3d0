"""What a rank does for an order: train, load, infer or exchange messages for a while, and measure what that takes."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.data.base import Batch, Splits
from trainkit.data.loader import resolve_workers
from trainkit.data.order import derive_seed
from trainkit.distributed.device import MemoryGauge, cpus_of_rank
from trainkit.distributed.process_group import Distributed
from trainkit.errors import RefusedError
from trainkit.ranks.env import RankEnv
from trainkit.training.build import TrainState, build, build_hollow
from trainkit.training.memory import check_batch_sizes, probed
from trainkit.training.recorder import Progress
from trainkit.training.timing import PARTS, Clock, StreamClock
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
    """Carries out orders on one rank. ``run``: the folder of the bench; ``env``: this rank's place in the whole job."""

    run: Path
    env: RankEnv
    beat: Callable[[], None]
    _configs: dict[tuple[str, ...], Config] = field(default_factory=dict)
    _splits: dict[str, Splits] = field(default_factory=dict)

    def perform(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Carry out an order; its figures, in JSON's own types."""
        work: Callable[[Distributed, Order], dict[str, Any]] = getattr(self, f"do_{order['work']}")
        return work(dist, order)

    def do_data(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Open the data, all ranks together, for the orders to come."""
        config = self._config(order)
        splits = build_data(config.data, dist)
        self._splits[_data_key(config)] = splits
        gauge, held = _gauge(dist)
        room = None if gauge is None else (gauge.room() - held) / _MB
        model = build_hollow(config, splits.info) if order.get("count") else None
        params = sum(item.numel() for item in model.parameters()) if model is not None else 0
        return {"train_images": len(splits.train), "room_mb": room, "params": params}

    def do_train(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Make ``updates`` updates, as training makes them."""
        gauge, before = _gauge(dist)
        parts = self._built(dist, order)
        made = _updates(parts, int(order["updates"]), gauge, self.beat)
        return made | {"memory_mb": _peak_mb(gauge, before), "params": parts.num_parameters}

    def do_ceiling(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Make the same updates with a few images that are in memory."""
        parts = self._built(dist, order)
        with parts.batches(0, 1, workers=0) as batches:
            kept = list(itertools.islice(batches, parts.grad_accum_steps))
        return _updates(parts, int(order["updates"]), None, self.beat, batches=nullcontext(itertools.cycle(kept)))

    def do_feed(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Load without training, then train."""
        parts = self._built(dist, order)
        updates = int(order["updates"])
        with parts.batches(0, WARM_UP + updates) as batches:

            def load() -> None:
                for _ in range(parts.grad_accum_steps):
                    next(batches)

            seconds = max(dist.gather_json(self._timed(dist, updates, load)))
        made = _updates(parts, updates, None, self.beat)
        return made | {"extra": {"loads_per_sec": made["images"] / seconds}}

    def do_infer(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Make forward passes of one batch that is in memory."""
        gauge, before = _gauge(dist)
        parts = self._built(dist, order, micro=1)
        with parts.batches(0, 1, workers=0) as batches:
            images = next(batches).images[:1]
        images = images.expand(int(order["size"]), *images.shape[1:]).contiguous()
        passes = int(order["updates"])
        parts.model.eval()

        def infer() -> None:
            with torch.no_grad(), parts.precision.autocast():
                parts.model(parts.normalized(images)).float()

        seconds, memory_mb = self._timed(dist, passes, infer), _peak_mb(gauge, before)
        return {"seconds": seconds, "images": passes * len(images), "updates": passes, "memory_mb": memory_mb}

    def do_reduce(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Sum messages over the ranks. ``bytes``: 2 (n - 1) / n of the messages, the bus bandwidth of nccl-tests."""
        times = int(order["updates"])
        message = torch.zeros(max(int(order["size"]) // 4, 1), device=dist.device)
        seconds = self._timed(dist, times, lambda: dist.all_reduce_sum(message))
        moved = 2 * (dist.world_size - 1) / dist.world_size * 4 * len(message) * times
        return {"seconds": seconds, "bytes": moved, "updates": times, "extra": {"seconds": seconds / times}}

    def do_largest(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """The largest of ``sizes`` that fits as a micro batch."""
        config, splits = self._prepared(dist, order, micro=order["sizes"][0])
        found = probed(config, dist, lambda one: build(one, dist, splits), order["sizes"])
        return {"size": found.micro_batch_size, "peak_mb": found.peak_mb, "room_mb": found.room_mb}

    def _config(self, order: Order) -> Config:
        key = tuple(order["overrides"])
        if key not in self._configs:
            self._configs[key] = load(str(self.run), key).config
        return self._configs[key]

    def _timed(self, dist: Distributed, times: int, step: Callable[[], object]) -> float:
        """Seconds for so many steps, after some that warm up."""
        began = 0.0
        for number in range(WARM_UP + times):
            if number == WARM_UP:
                _wait(dist)
                dist.barrier()
                began = time.perf_counter()
            self.beat()
            step()
        _wait(dist)
        return time.perf_counter() - began

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
    """What measures this rank's memory, and the bytes that it holds now."""
    try:
        gauge = MemoryGauge(dist, None)
    except RefusedError:  # this system does not tell
        return None, 0
    return gauge, gauge.held()


def _peak_mb(gauge: MemoryGauge | None, before: int) -> float | None:
    """The peak of a turn, beyond the bytes that were held before it."""
    return None if gauge is None else round((gauge.peak() - before) / _MB, 1)


def _data_key(config: Config) -> str:
    """Equal for the same data, however many processes load it."""
    return config.data.model_dump_json(exclude={"workers"})


def _updates(
    parts: TrainState,
    updates: int,
    gauge: MemoryGauge | None,
    beat: Callable[[], None],
    *,
    batches: AbstractContextManager[Iterator[Batch]] | None = None,
) -> dict[str, Any]:
    """Make ``updates`` updates after some that warm up; their time, loss and parts."""
    dist, config = parts.dist, parts.config
    clock = (StreamClock if dist.device.type == "cuda" else Clock)(time.perf_counter())
    update, spent = Updater(parts, beat=beat, clock=clock), Progress()
    last: list[torch.Tensor] = []
    parts.model.train()
    total = WARM_UP + updates
    loader = batches or parts.batches(0, total)
    step = ema_updates = 0
    began = 0.0
    with loader as given:
        for position in range(total):
            if position == WARM_UP // 2 and gauge is not None:
                gauge.start()  # libraries have tried their algorithms by now
            if position == WARM_UP:
                _wait(dist)
                dist.barrier()
                clock.lap(spent)
                began = time.perf_counter()
            made = update(given, lr=parts.lr_at(step), seed=derive_seed(config.seed, position))
            counts = made.stepped.skip is None
            if parts.ema is not None and counts:
                parts.ema.update(made.stepped.nonfinite, updates=ema_updates)
                ema_updates += 1
            step += counts
            if total - position <= _LAST:
                last.append(made.loss)
        _wait(dist)
        seconds = time.perf_counter() - began
        lap = clock.lap(spent)
    losses = dist.gather_json([value.item() for value in last])
    mean = sum(sum(each) for each in losses) / sum(map(len, losses))
    return {
        "seconds": seconds,
        "images": updates * config.train.global_batch_size,
        "updates": updates,
        "loss": mean if math.isfinite(mean) else None,
        "parts": {name: round(lap.seconds[part], 6) for part, name in enumerate(PARTS) if lap.seconds[part]},
        "skipped": total - step,
    }


def _wait(dist: Distributed) -> None:
    """Wait until the device is idle."""
    if dist.device.type == "cuda":
        torch.cuda.synchronize(dist.device)
