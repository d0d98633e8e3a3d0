"""Run a bench: a job's ranks meet, rank 0 drives the arms in turns, tells the ranks what to do, and writes it down.

For an order a rank trains, loads, infers or exchanges messages for a while, and measures what that takes. Each order
runs in a process group of its ranks. The group stays for the next order of the same ranks, and is left when something
failed in it, so that no arm finds what another one broke. Orders and answers go over the store where the ranks have
met, so a rank that has nothing to do waits without a collective.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from trainkit.bench.base import CONTROL, Arm, Bench, BenchRequest, SkippedArm, Where, powers_of_two
from trainkit.bench.results import write_results
from trainkit.bench.team import ArmFailedError, Team
from trainkit.cluster.signals import StopFlag
from trainkit.common import jsonl
from trainkit.common.errors import RunFailedError
from trainkit.config.checks import micro_batch_sizes
from trainkit.config.schema import Config
from trainkit.monitor.hardware import CpuWaits
from trainkit.run.events import Attempt
from trainkit.run.folder import BenchDir

_TRIAL = 2
"""Updates of the trial, by which the number of updates in a turn is found."""
_FEWEST = 5
"""Updates in a turn, at least."""
_MOST = 1000
"""Updates in a turn, at most."""
_SLOWEST = 10
"""Times as long as asked for that a turn of the slowest arm may take, where all make as many updates."""
_LARGEST = 1 << 16
"""Micro batch that is looked for."""


@dataclass
class Driver:
    """Rank 0: find the arms, try each, then measure them in rounds."""

    bench: Bench
    request: BenchRequest
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
        self.writer.started(world_size=where.world_size, hosts=where.hosts, device=where.places[0].device)
        data = self._ask(Arm("data", work="data"), count=self.bench.amount == "bytes")
        rooms = [one["room_mb"] for one in data if one["room_mb"]]
        room_mb = min(rooms, default=0.0)
        where = replace(where, train_images=data[0]["train_images"], params=data[0]["params"], room_mb=room_mb)
        self.where = where
        arms = []
        left_out = []
        for one in self.bench.arms(self.config, where, self.request.arms):
            if isinstance(one, SkippedArm):
                left_out.append(asdict(one))
            else:
                arms.append(one)
        self._write(
            "began", arms=list(map(asdict, arms)), left_out=left_out, where=where.in_words(), place=where.nameless(),
            notes=self.bench.notes(self.config, where), hosts=where.hosts,
        )  # fmt: skip
        return arms

    def drive(self) -> str:
        """Run the whole bench and return how it ended."""
        rounds = self.request.rounds
        arms = self.begin()
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
                why=next(iter(self.failures.values()), "No arm applies here."),
                fix="The table gives the reason for each arm; try other settings.",
            )
        done = self._rounds(arms)
        outcome = "finished"
        why = ""
        if done < rounds and self.stop.requested:
            outcome = "stopped"
            why = f"It was told to stop after {done} of {rounds} rounds."
        self._end(why)
        self.writer.ended("COMPLETED")  # an early end is one as well: there is nothing to go on with
        return outcome

    def _try(self, arm: Arm) -> None:
        """Run it once, for as long as tells what it costs."""
        why = self.bench.stops(arm, self.trials, self.where.room_mb)
        if why:
            raise ArmFailedError(why)
        if _has_own_data(arm):
            self._ask(Arm(arm.name, arm.overrides, work="data"))
        auto = self.config.train.micro_batch_size == "auto"
        if arm.work == "train" and (auto or (self.bench.largest and self.where.gpu)):
            self._find_largest(arm)
        self.trials[arm.name] = self._measured(arm, _TRIAL)
        self._write("trial", arm=arm.name, **self.trials[arm.name])

    def _find_largest(self, arm: Arm) -> None:
        """Find the largest micro batch that fits. The arm trains with it, where it was to be found."""
        train = self.config.train
        ranks = len(arm.ranks or self.where.places)
        shares = micro_batch_sizes(train.global_batch_size // ranks, even=self.config.augment.mixes)
        sizes = sorted({*powers_of_two(_LARGEST), *shares})
        found = self._ask(replace(arm, work="largest"), sizes=sizes)
        size = min(one["size"] for one in found)
        self._write("largest", arm=arm.name, size=size)
        if train.micro_batch_size == "auto":
            fitting = [share for share in shares if share <= size]
            self.micro[arm.name] = max(fitting, default=1)

    def _rounds(self, arms: list[Arm]) -> int:
        """Measure the arms in turns, the first one twice; how many rounds were completed."""
        updates = self._updates(arms)
        turns = [(arm, arm.name) for arm in arms]
        turns.append((arms[0], CONTROL))
        for number in range(self.request.rounds):
            for arm, name in turns:
                if self.stop.requested:
                    return number
                if arm.name not in self.failures:  # without the first the others go on, and get no ratio
                    waits = CpuWaits(self.where.world_size)
                    with self._failing(arm):
                        sample = self._measured(arm, updates[arm.name])
                        if not self.where.gpu:
                            sample |= waits.since()
                        self._write("sample", arm=name, round=number, **sample)
            turns.reverse()
        return self.request.rounds

    def _updates(self, arms: Sequence[Arm]) -> dict[str, int]:
        """Return the number of updates of each arm in a turn."""
        wanted = {}
        for arm in arms:
            cost = self.trials[arm.name]["seconds"] / self.trials[arm.name]["updates"]
            wanted[arm.name] = self.request.seconds / max(cost, 1e-6)
        if self.bench.same_updates:
            most = _SLOWEST * min(wanted.values())
            wanted = dict.fromkeys(wanted, min(wanted[arms[0].name], most))
        updates = {}
        for name, number in wanted.items():
            updates[name] = self.request.updates or min(max(round(number), _FEWEST), _MOST)
        return updates

    def _measured(self, arm: Arm, updates: int) -> dict[str, Any]:
        """One turn: the figures of all ranks together. The slowest one's time counts."""
        ranks = self._ask(arm, updates=updates)
        sample = {"extra": {}, **ranks[0]}
        peaks = []
        exposed = 0.0
        for one in ranks:
            sample["seconds"] = max(sample["seconds"], one["seconds"])
            peaks.append(one.get("memory_mb"))
            exposed = max(exposed, one.get("parts", {}).get("exposed", 0.0))
        sample["memory_mb"] = None if None in peaks else peaks
        whole = sum(sample.get("parts", {}).values())
        if whole:
            sample["extra"]["exposed_share"] = exposed / whole
            sample["extra"]["data_share"] = sample["parts"].get("data", 0.0) / whole
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
        jsonl.append_jsonl(BenchDir(self.writer.run.path).samples, line)


def _has_own_data(arm: Arm) -> bool:
    """Return True where an arm sets more of the data than how many processes load it."""
    return any(word.startswith("data.") and not word.startswith("data.workers") for word in arm.overrides)
