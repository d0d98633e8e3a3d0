"""Run a bench: a job's ranks meet, rank 0 drives the arms in turns, tells the ranks what to do, and writes it down.

For an order a rank trains, loads, infers or exchanges messages for a while, and measures what that takes. Each order
runs in a process group of its ranks. The group stays for the next order of the same ranks, and is left when something
failed in it, so that no arm finds what another one broke. Orders and answers go over the store where the ranks have
met, so a rank that has nothing to do waits without a collective.
"""

from __future__ import annotations

import itertools
import json
import math
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistStoreError, Store  # type: ignore[attr-defined]

from trainkit import fileio
from trainkit.bench.base import CONTROL, Arm, Bench, BenchDir, LeftOut, Place, Request, Where
from trainkit.bench.beside import beside
from trainkit.bench.results import write_results
from trainkit.config.checks import micro_batch_sizes
from trainkit.config.loading import load
from trainkit.config.schema import Config
from trainkit.data import build_data
from trainkit.data.base import Batch, Splits, derive_seed
from trainkit.data.loader import resolve_workers
from trainkit.distributed.device import MemoryGauge, cpus_of_rank, synchronize
from trainkit.distributed.process_group import Distributed, distributed
from trainkit.errors import RefusedError, RunFailedError, TrainkitError, UserError
from trainkit.models import build_model
from trainkit.monitor.hardware import CpuWaits
from trainkit.ranks import RankEnv
from trainkit.ranks.signals import StopFlag
from trainkit.run.events import Attempt
from trainkit.training.build import TrainState, build
from trainkit.training.memory import check_batch_sizes, is_out_of_memory, probed
from trainkit.training.recorder import Progress
from trainkit.training.timing import clock_since
from trainkit.training.update import Updater

WARM_UP = 4
"""Updates before those that are measured: libraries choose their algorithms, and the allocator fills its cache."""
_SAID = 4096
"""Characters of an error, from its end, that rank 0 is told."""
_LAST = 10
"""Updates at the end over which the loss is averaged."""
_MB = 2**20
_PULSE = timedelta(seconds=20)
"""How often a rank that waits for an order says that it is alive."""
_COLLECTIVE = timedelta(minutes=5)
"""Longest wait in a collective: for a rank that fails alone."""
_TRIAL = 2
"""Updates of the trial, by which the number of updates in a turn is found."""
_FEWEST, _MOST = 5, 1000
"""Updates in a turn."""
_SLOWEST = 10
"""Where all arms make as many updates, a turn of the slowest takes at most this many times as long as asked for."""
_LARGEST = 1 << 16
"""Micro batch that is looked for."""
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
        room = None if gauge is None else (gauge.room() - held) / _MB
        model = build_model(config.model, splits.info, config.seed) if order.get("count") else None
        params = sum(item.numel() for item in model.parameters()) if model is not None else 0
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
        memory = made["memory_mb"]
        return made | {"images": count * made["images"], "memory_mb": None if memory is None else count * memory}

    def do_ceiling(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Make the same updates with a few images that are in memory."""
        parts = self._built(dist, order)
        with parts.batches(0, 1, workers=0) as batches:
            kept = itertools.cycle(list(itertools.islice(batches, parts.grad_accum_steps)))
        return self._trained(parts, order, batches=nullcontext(kept))

    def do_feed(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Load without training, then train."""
        parts, updates = self._built(dist, order), order["updates"]
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
        parts, passes = self._built(dist, order, micro=1), order["updates"]
        with parts.batches(0, 1, workers=0) as batches:
            images = next(batches).images[:1]
        images = images.expand(order["size"], *images.shape[1:]).contiguous()
        parts.model.eval()

        def infer() -> None:
            with torch.no_grad(), parts.precision.autocast():
                parts.model(parts.normalized(images)).float()

        seconds, memory_mb = self._timed(dist, passes, infer), _peak_mb(gauge, before)
        return {"seconds": seconds, "images": passes * len(images), "updates": passes, "memory_mb": memory_mb}

    def do_reduce(self, dist: Distributed, order: Order) -> dict[str, Any]:
        """Sum messages over the ranks. ``bytes``: 2 (n - 1) / n of the messages, the bus bandwidth of nccl-tests."""
        times, message = order["updates"], torch.zeros(max(order["size"] // 4, 1), device=dist.device)
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
        dist, config, total = parts.dist, parts.config, WARM_UP + order["updates"]
        clock = clock_since(time.perf_counter(), dist.device)
        update, spent = Updater(parts, beat=self.beat, clock=clock), Progress()
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
        last = [loss for each in dist.gather_json([loss.item() for loss in losses]) for loss in each]
        mean = sum(last) / len(last)
        return {
            "seconds": seconds,
            "images": order["updates"] * config.train.global_batch_size,
            "updates": order["updates"],
            "loss": mean if math.isfinite(mean) else None,
            "parts": {part: round(seconds, 6) for part, seconds in lap.seconds.items() if seconds},
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
    """What measures this rank's memory, and the bytes that it holds now."""
    with suppress(RefusedError):  # where this system does not tell
        gauge = MemoryGauge(dist, None)
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


@dataclass
class Driver:
    """Rank 0: find the arms, try each, then measure them in rounds."""

    bench: Bench
    request: Request
    config: Config
    where: Where
    team: Team
    writer: Attempt
    stop: StopFlag
    trials: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    micro: dict[str, int] = field(default_factory=dict)
    """Found micro batches, where they are to be found."""

    def begin(self) -> list[Arm]:
        """Open the data, and find the arms."""
        where = self.where
        hosts = list(dict.fromkeys(place.host for place in where.places))
        self.writer.started(world_size=where.world_size, hosts=hosts, device=where.places[0].device)
        data = self._ask(Arm("data", work="data"), count=self.bench.amount == "bytes")
        room = min((one["room_mb"] for one in data if one["room_mb"]), default=0.0)
        where = self.where = replace(
            where, train_images=data[0]["train_images"], params=data[0]["params"], room_mb=room
        )
        found = self.bench.arms(self.config, where, self.request.arms)
        arms = [arm for arm in found if isinstance(arm, Arm)]
        left_out = [asdict(one) for one in found if isinstance(one, LeftOut)]
        about = {"where": where.in_words(), "notes": self.bench.notes(self.config, where)}
        about |= {"place": where.nameless(), "hosts": hosts}
        self._write("began", arms=[asdict(arm) for arm in arms], left_out=left_out, **about)
        return arms

    def drive(self) -> str:
        """The whole bench; how it ended."""
        rounds, arms = self.request.rounds, self.begin()
        for arm in arms:
            if self.stop.requested:
                break
            self._write("trying", arm=arm.name)
            with self._failing(arm):
                self._try(arm)
        arms = [arm for arm in arms if arm.name in self.trials]
        if not arms:
            self._end("No arm could run.")
            raise RunFailedError(
                f"No arm of bench {self.bench.name} could run.",
                why=next(iter(self.failures.values()), "None makes sense here."),
                fix="Each one's reason stands in the table; try other settings.",
            )
        done = self._rounds(arms)
        stopped = done < rounds and self.stop.requested
        self._end(f"It was told to stop after {done} of {rounds} rounds." if stopped else "")
        self.writer.ended("COMPLETED")  # an early end is one as well: there is nothing to go on with
        return "stopped" if stopped else "finished"

    def _try(self, arm: Arm) -> None:
        """Run it once, for as long as tells what it costs."""
        if why := self.bench.stops(arm, self.trials, self.where.room_mb):
            raise ArmFailedError(why)
        if any(word.startswith("data.") and not word.startswith("data.workers") for word in arm.overrides):
            self._ask(Arm(arm.name, arm.overrides, work="data"))
        auto = self.config.train.micro_batch_size == "auto"
        if arm.work == "train" and (auto or (self.bench.largest and self.where.gpu)):
            self._find_largest(arm)
        self.trials[arm.name] = self._measured(arm, _TRIAL)
        self._write("trial", arm=arm.name, **self.trials[arm.name])

    def _find_largest(self, arm: Arm) -> None:
        """What fits; it also is what the arm trains with, where that was to be found."""
        train = self.config.train
        ranks = self.where.world_size if arm.ranks is None else len(arm.ranks)
        shares = micro_batch_sizes(train.global_batch_size // ranks, even=self.config.augment.mixes)
        sizes = sorted({1 << power for power in range(1, _LARGEST.bit_length())} | set(shares))
        size = min(one["size"] for one in self._ask(replace(arm, work="largest"), sizes=sizes))
        self._write("largest", arm=arm.name, size=size)
        if train.micro_batch_size == "auto":
            self.micro[arm.name] = max((one for one in shares if one <= size), default=1)

    def _rounds(self, arms: list[Arm]) -> int:
        """Measure the arms in turns, the first one twice; how many rounds were completed."""
        updates = self._updates(arms)
        for number in range(self.request.rounds):
            turns = [(arm, arm.name) for arm in arms] + [(arms[0], CONTROL)]
            for arm, name in turns if number % 2 == 0 else turns[::-1]:
                if self.stop.requested:
                    return number
                if arm.name not in self.failures:  # without the first the others go on, and get no ratio
                    waits = CpuWaits(self.where.world_size)
                    with self._failing(arm):
                        sample = self._measured(arm, updates[arm.name])
                        waited = {} if self.where.gpu else waits.since()
                        self._write("sample", arm=name, round=number, **waited, **sample)
        return self.request.rounds

    def _updates(self, arms: Sequence[Arm]) -> dict[str, int]:
        """How many each arm makes in a turn."""
        costs = {arm.name: self.trials[arm.name]["seconds"] / self.trials[arm.name]["updates"] for arm in arms}
        wanted = {name: self.request.seconds / max(cost, 1e-6) for name, cost in costs.items()}
        if self.bench.same_updates:
            most = _SLOWEST * min(wanted.values())
            wanted = dict.fromkeys(wanted, min(wanted[arms[0].name], most))
        return {name: self.request.updates or min(max(round(one), _FEWEST), _MOST) for name, one in wanted.items()}

    def _measured(self, arm: Arm, updates: int) -> dict[str, Any]:
        """One turn: the figures of all ranks together. The slowest one's time counts."""
        ranks = self._ask(arm, updates=updates)
        keys = ("images", "bytes", "updates", "loss", "skipped", "params", "parts")
        sample = {key: ranks[0][key] for key in keys if key in ranks[0]}
        sample |= {"extra": dict(ranks[0].get("extra", {})), "seconds": max(one["seconds"] for one in ranks)}
        if all(one.get("memory_mb") is not None for one in ranks):
            sample["memory_mb"] = [one["memory_mb"] for one in ranks]
        if parts := sample.get("parts"):
            exposed = max(one["parts"].get("exposed", 0.0) for one in ranks)
            shares = {"exposed_share": exposed, "data_share": parts.get("data", 0.0)}
            sample["extra"] |= {name: seconds / sum(parts.values()) for name, seconds in shares.items()}
        return sample

    def _ask(self, arm: Arm, **more: Any) -> list[dict[str, Any]]:
        overrides = list(arm.overrides)
        if arm.name in self.micro:
            overrides.append(f"train.micro_batch_size={self.micro[arm.name]}")
        ranks = list(arm.ranks or range(self.where.world_size))
        return self.team.ask({"work": arm.work, "ranks": ranks, "overrides": overrides, "size": arm.size, **more})

    @contextmanager
    def _failing(self, arm: Arm) -> Iterator[None]:
        """Write down that an arm failed, and go on without it."""
        try:
            yield
        except ArmFailedError as error:
            self.failures[arm.name] = str(error)
            self._write("failed", arm=arm.name, why=str(error))

    def _end(self, why: str) -> None:
        self._write("ended", why=why)
        write_results(BenchDir(self.writer.run.path))

    def _write(self, kind: str, **fields: Any) -> None:
        self.writer.may_write()
        line = {"kind": kind, "time": round(time.time(), 3), **fields}
        fileio.append_jsonl(BenchDir(self.writer.run.path).samples, line)


class ArmFailedError(Exception):
    """An order failed; the words of the rank that failed first."""

    def __init__(self, why: str, *, refused: bool = False, raised: str = "") -> None:
        super().__init__(why)
        self.refused = refused
        """It does not go with these settings, or this place."""
        self.raised = raised
        """The error as Python prints it, without what led to it; empty for the kit's own."""


@dataclass
class Team:
    """This rank among all of the job: rank 0 asks, the others serve. ``store``: where they have met."""

    worker: Worker
    store: Store
    places: Sequence[Place]
    use_gpu: bool
    interface: str | None

    def __post_init__(self) -> None:
        self._number = self._group = 0
        self._open: tuple[list[int], int, Distributed] | None = None
        self._held = ExitStack()

    def ask(self, order: Order) -> list[dict[str, Any]]:
        """Rank 0: have an order carried out; the answers of those who took part, in order of rank.

        Raises:
            ArmFailedError: it failed; with the reason.
        """
        self._number += 1
        order = {**order, "group": self._group}
        self.store.set(f"order/{self._number}", json.dumps(order))
        self._carry_out(order)
        answers = [json.loads(self._told(f"answer/{self._number}/{rank}")) for rank in order["ranks"]]
        failed = [answer for answer in answers if "error" in answer]
        if failed:
            self._group += 1  # nobody uses it again
            # The error that tells most: the other ranks only say that they have lost that rank.
            first = min(failed, key=lambda one: (-one["weight"], one["time"]))
            raise ArmFailedError(first["error"], refused=first["refused"], raised=first["raised"])
        return answers

    def end(self) -> None:
        """Rank 0: there is nothing more to do."""
        self._number += 1
        self.store.set(f"order/{self._number}", json.dumps({"work": None, "group": self._group}))
        self._leave(self._group)

    def serve(self) -> None:
        """All others: carry out orders until there are no more."""
        while True:
            self._number += 1
            order = json.loads(self._told(f"order/{self._number}"))
            if order["work"] is None:
                self._leave(order["group"])
                return
            self._carry_out(order)

    def _told(self, key: str) -> bytes:
        while True:
            self.worker.beat()
            try:
                self.store.wait([key], _PULSE)
                return bytes(self.store.get(key))
            except DistStoreError:  # not yet
                continue

    def _carry_out(self, order: Order) -> None:
        rank = self.worker.env.rank
        if rank not in order["ranks"]:
            self._leave(order["group"])  # no group may wait for this rank while the others are busy elsewhere
            return
        answer: dict[str, Any]
        try:
            answer = getattr(self.worker, f"do_{order['work']}")(self._joined(order), order)
        except Exception as error:
            answer = {"error": _in_words(error), "time": time.time()}
            answer["refused"] = isinstance(error, RefusedError | UserError)
            is_own = isinstance(error, TrainkitError)
            answer["raised"] = "" if is_own else "".join(traceback.format_exception_only(error))[-_SAID:]
            answer["weight"] = 2 if is_out_of_memory(error) else 1 if is_own else 0
            self._leave(None)
        self.store.set(f"answer/{self._number}/{rank}", json.dumps(answer))

    def _joined(self, order: Order) -> Distributed:
        ranks, group = order["ranks"], order["group"]
        if self._open is None or self._open[:2] != (ranks, group):
            self._leave(group)
            joining = distributed(
                env_among(self.worker.env, self.places, ranks), use_gpu=self.use_gpu, interface=self.interface,
                collective_timeout=_COLLECTIVE, met=(f"group/{group}/{self._number}", self.store),
            )  # fmt: skip
            self._open = ranks, group, self._held.enter_context(joining)
        return self._open[2]

    def _leave(self, group: int | None) -> None:
        """Leave the group: together with its other ranks if it is still ``group``, else at once."""
        held, together = self._held, self._open is not None and self._open[1] == group
        self._held, self._open = ExitStack(), None
        if together:
            held.close()
        else:  # as on an error: without a barrier, at which some may never arrive
            held.__exit__(RuntimeError, RuntimeError("left alone"), None)


def env_among(env: RankEnv, places: Sequence[Place], ranks: Sequence[int]) -> RankEnv:
    """This rank's place among those that take part."""
    chosen = [places[rank] for rank in ranks]
    nodes = sorted({place.node_rank for place in chosen})
    mine = [place.rank for place in chosen if place.node_rank == env.node_rank]
    return replace(
        env,
        rank=list(ranks).index(env.rank),
        world_size=len(ranks),
        local_rank=mine.index(env.rank),
        local_world_size=len(mine),
        node_rank=nodes.index(env.node_rank),
        num_nodes=len(nodes),
        hosts=tuple(env.hosts[node] for node in nodes) if env.hosts else (),
    )


def _in_words(error: Exception) -> str:
    if isinstance(error, TrainkitError):
        return f"{error.what} {error.why}".strip()
    first = " ".join(str(error).strip().partition("\n")[0].split())[:300]
    kind = "out of memory" if is_out_of_memory(error) else type(error).__name__
    return f"{kind}: {first}".removesuffix(": ")
