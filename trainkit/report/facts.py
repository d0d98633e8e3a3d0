"""Everything the report says about a run, read from its folder. What is not there is None, never an error."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from trainkit import fileio, plugins, terminal
from trainkit.config import yaml
from trainkit.config.checks import strategy_traits
from trainkit.errors import UserError
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import (
    Contribution,
    Contributions,
    Divergence,
    Metric,
    TaskMetrics,
    Thinned,
    best_evaluation,
    best_of,
    described,
    read_thinned,
    setbacks_of,
    steps_done,
    thinned,
)

_SHOWN_BYTES = 16384
_STILL = 0.05
"""A share of the training time: with longer pauses, a time ratio would be one of pauses."""
_MOST_SAMPLES = 50_000
"""Of all hosts together."""


_TAKEN = 10.0
"""Percent of the CPU time that a run wanted and others had (`trainkit.monitor.hardware`), beyond which its speed is
not compared.

Measured on two cores: runs of 1, 2 and 4 ranks come to 0 or 1 alone, to 27 to 43 beside one busy program, and to 79 to
81 beside eight.
"""


def cpus_taken(taken: float | None, load: float | None = None) -> str:
    """Why speeds on the CPU are not compared: others had too much of it. Empty where they did not."""
    if taken is None or taken <= _TAKEN:
        return ""
    told = f" (load {load:.1f})" if load is not None else ""
    return f"the CPUs were taken: others had {taken:.0f} % of the time that it wanted{told}"


class Usage(NamedTuple):
    """Mean and highest value of one hardware reading over a run."""

    mean: float
    highest: float


@dataclass(frozen=True)
class HostSamples:
    """Hardware samples of one host: of the machine, and of each of its GPUs by NVML's index."""

    host: str
    samples: list[dict[str, Any]]

    @cached_property
    def _curves(self) -> dict[tuple[int | None, str], list[tuple[float, float]]]:
        found: dict[tuple[int | None, str], list[tuple[float, float]]] = {}
        for sample in self.samples:
            gpus = sample.get("gpus")
            holders = [item for item in gpus if isinstance(item, dict)] if isinstance(gpus, list) else []
            for holder in (sample, *(gpu for gpu in holders if fileio.is_whole(gpu.get("index")))):
                index = None if holder is sample else holder["index"]
                for key, value in holder.items():
                    if fileio.is_number(value):
                        found.setdefault((index, key), []).append((sample["time"], value))
        return found

    def gpus(self) -> list[int]:
        """The sampled GPUs."""
        return sorted({index for index, _ in self._curves if index is not None})

    def curve(self, key: str, gpu: int | None = None) -> list[tuple[float, float]]:
        """(time, value) of a reading: ``cpu_percent``, ``memory_used_mb``; of a GPU ``power_w`` ..."""
        return self._curves.get((gpu, key), [])

    def usage(self, key: str, gpu: int | None = None) -> Usage | None:
        """Mean and highest value of a reading."""
        values = [float(value) for _, value in self.curve(key, gpu)]
        return Usage(statistics.fmean(values), max(values)) if values else None


@dataclass
class Span:
    """One attempt, from the meeting of its ranks to its last event or record."""

    number: int
    began: float
    ended: float
    from_step: int
    to_step: int
    ranks: int | None
    hosts: list[str]
    how: str = ""
    """How it ended; empty for one that was killed, or goes on."""

    @property
    def seconds(self) -> float:
        return max(self.ended - self.began, 0.0)

    @property
    def went_well(self) -> bool:
        """Whether it ended as it should."""
        return self.how.startswith(("finished", "told to stop", "requeued", "PREEMPTED"))


class Facts:
    """One run, as far as its folder tells."""

    def __init__(self, run_dir: RunDir, label: str, point: Mapping[str, str] | None = None) -> None:
        self.run_dir, self.label = run_dir, label
        self.point = dict(point or {})
        """The settings that a sweep varied, with the values of this run."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration as plain values; empty if it cannot be read."""
        try:
            return dict(fileio.plain(yaml.read(self.run_dir.config, follow=False)[0], 8))
        except UserError:
            return {}

    def setting(self, key: str) -> Any:
        """A value of the configuration by its dotted key, or None."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    @cached_property
    def summary(self) -> dict[str, Any]:
        """``summary.json``; empty for a run that did not get to its end."""
        return dict(fileio.plain(fileio.read_object(self.run_dir.summary)))

    @cached_property
    def manifest(self) -> dict[str, Any]:
        return dict(fileio.plain(fileio.read_object(self.run_dir.manifest)))

    @cached_property
    def described(self) -> TaskMetrics:
        """What the task measures."""
        return described(self.run_dir)

    @property
    def headline(self) -> Metric:
        """The metric to judge by."""
        return self.described.metrics[self.described.headline]

    def headline_of(self, record: Mapping[str, Any] | None) -> float | None:
        """Its value in a record; None where there is none."""
        value = record.get(self.described.headline) if record else None
        return float(value) if fileio.is_number(value) else None

    @cached_property
    def metrics(self) -> Thinned:
        """All records; of an enormous run some of the train records."""
        return read_thinned(self.run_dir)

    @cached_property
    def train(self) -> list[dict[str, Any]]:
        return [record for record in self.metrics.records if record["split"] == "train"]

    @cached_property
    def drawn(self) -> list[dict[str, Any]]:
        """The train records for curves: of an enormous run also the extremes between those that stand for others."""
        outliers = self.metrics.outliers
        return sorted([*self.train, *outliers], key=lambda record: record["step"]) if outliers else self.train

    @cached_property
    def val(self) -> list[dict[str, Any]]:
        return [record for record in self.metrics.records if record["split"] == "val"]

    @cached_property
    def test(self) -> dict[str, Any] | None:
        """The record at the end of training, else the last one that `evaluate` wrote of the best weights."""
        own = next((record for record in reversed(self.metrics.records) if record["split"] == "test"), None)
        return own or best_evaluation(self.run_dir)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return read_events(self.run_dir)

    @cached_property
    def setbacks(self) -> Divergence:
        """Lost updates, and the step from which on the loss is not a number."""
        return setbacks_of(self.events, self.train, self.steps)

    @cached_property
    def contributions(self) -> list[Contribution]:
        """The contributors of a collaborative run, most samples first."""
        return Contributions.of(self.run_dir).best_first()

    @cached_property
    def hosts(self) -> list[HostSamples]:
        """Hardware samples, by host."""
        found = []
        files = sorted(self.run_dir.path.glob("system-*.jsonl"))
        for file in files:
            records, *_ = thinned(file, max(_MOST_SAMPLES // len(files), 500))
            samples = [sample for sample in records if fileio.is_time(sample.get("time"))]
            if samples:
                found.append(HostSamples(terminal.one_line(file.stem.removeprefix("system-")), samples))
        return found

    @cached_property
    def gpus_shown(self) -> list[tuple[str, str]]:
        """For each host what `nvidia-smi` shows, from when its GPUs held most memory."""
        found = []
        for file in sorted(self.run_dir.path.glob("nvidia-smi-*.txt")):
            with suppress(OSError):
                lines = fileio.read_end(file, _SHOWN_BYTES).replace("`", "'").splitlines()
                host = terminal.one_line(file.stem.removeprefix("nvidia-smi-"))
                found.append((host, "\n".join(terminal.one_line(line, 200) for line in lines)))
        return found

    def last_event(self, *kinds: str) -> Mapping[str, Any]:
        """The newest event of these kinds; empty if there is none."""
        return next((event for event in reversed(self.events) if event.get("event") in kinds), {})

    def started(self, key: str) -> Any:
        """A field of the newest ``started`` event, or of the summary, or None."""
        for event in reversed(self.events):
            if event.get("event") == "started" and key in event:
                return event[key]
        return self.summary.get(key)

    @property
    def memory_of_ranks(self) -> list[float]:
        """Peak memory of every rank in MB; of a run that has not ended that of rank 0, if it is known."""
        told = self.summary.get("max_memory_mb_of_ranks")
        known = [float(value) for value in told if fileio.is_number(value)] if isinstance(told, list) else []
        return known or ([self.max_memory_mb] if self.max_memory_mb is not None else [])

    def count(self, key: str) -> int:
        """A setting that is a whole number, else 0."""
        value = self.setting(key)
        return value if fileio.is_whole(value) else 0

    @property
    def steps(self) -> int:
        """Optimizer updates that were done."""
        steps = self.summary.get("steps")
        if fileio.is_whole(steps):
            return steps
        return steps_done(self.events, self.train + self.val)

    @property
    def begun(self) -> bool:
        """Whether its ranks have met. Before that nothing is measured."""
        return self.started("world_size") is not None or bool(self.train or self.val)

    @property
    def is_simulated(self) -> bool:
        """Whether several nodes were one machine."""
        hosts, nodes = self.started("hosts"), self.setting("launch.nodes")
        return isinstance(hosts, list) and len(hosts) == 1 and isinstance(nodes, int) and nodes > 1

    @property
    def finished(self) -> bool:
        return self.summary.get("outcome") == "finished"

    @property
    def best_val(self) -> dict[str, Any] | None:
        """The validation record of the best checkpoint."""
        return best_of(self.val, self.summary.get("best_step"), self.described)

    @property
    def best(self) -> float | None:
        """The headline of the best checkpoint on validation data."""
        return self.headline_of(self.best_val)

    @property
    def tested(self) -> float | None:
        """The headline on test data."""
        return self.headline_of(self.test)

    @property
    def rank(self) -> tuple[bool, float, int]:
        """For sorting: the best by validation first, runs without one last."""
        value, name = self.best or 0.0, self.run_dir.path.name
        better = -value if self.headline.higher_is_better else value
        return self.best is None, better, int(name) if name.isdecimal() else 0

    @property
    def speeds(self) -> list[float]:
        """Images a second, of each train record."""
        return [record["images_per_sec"] for record in self.train if fileio.is_number(record.get("images_per_sec"))]

    @property
    def images_per_sec(self) -> float | None:
        """Median over the train records, so that neither slow first steps nor pauses count."""
        return statistics.median(self.speeds) if self.speeds else None

    @property
    def train_seconds(self) -> float | None:
        """Time in training steps over all attempts; before the end, from the speed of the records."""
        seconds = self.summary.get("train_seconds")
        if fileio.is_number(seconds):
            return float(seconds)
        batch, total, before = self.setting("train.global_batch_size"), 0.0, 0
        for record in self.train:
            speed = record.get("images_per_sec")
            if not (fileio.is_number(batch) and fileio.is_number(speed) and speed > 0):
                return None
            total += (record["step"] - before) * batch / speed
            before = record["step"]
        return total or None

    @property
    def still_seconds(self) -> float:
        """Time in training steps for which the job was suspended; 0 where that does not matter.

        Those are records at a tenth of the usual speed; the first one of an attempt is slow by itself.
        """
        begins = [step for event in read_events(self.run_dir, "started") if fileio.is_whole(step := event.get("step"))]
        batch, usual, still, before = self.count("train.global_batch_size"), self.images_per_sec, 0.0, 0
        for record in self.train:
            step, speed = record["step"], record.get("images_per_sec")
            is_first = any(before <= begun < step for begun in begins)
            if usual and fileio.is_number(speed) and 0 < speed < usual / 10 and not is_first:
                still += (step - before) * batch * (1 / speed - 1 / usual)
            before = step
        return still if still > _STILL * (self.train_seconds or 0.0) else 0.0

    @cached_property
    def spent(self) -> dict[str, float]:
        """Seconds of rank 0 by activity, over all attempts; before the end, as far as recorded."""
        told = self.summary.get("seconds")
        if not isinstance(told, dict):
            told = defaultdict(float)
            for key, value in (item for record in self.train for item in record.items()):
                if key.startswith("seconds_") and fileio.is_number(value):
                    told[key.removeprefix("seconds_")] += value * self.metrics.every
        return {name: float(value) for name, value in told.items() if fileio.is_number(value) and value > 0}

    @property
    def wall_seconds(self) -> float | None:
        """From the first start to the last record or event, with the waits between attempts."""
        timed = [event for event in self.events if "time" in event]
        starts = [event["time"] for event in timed if event.get("event") == "started"]
        times = [record["time"] for record in self.train + self.val if fileio.is_number(record.get("time"))]
        return max([*times, *(event["time"] for event in timed)]) - min(starts) if starts else None

    @property
    def max_memory_mb(self) -> float | None:
        """Peak memory of rank 0: of the GPU's allocator, or of the process on the CPU."""
        found = [self.summary.get("max_memory_mb"), *(record.get("max_memory_mb") for record in self.train)]
        return max((float(value) for value in found if fileio.is_number(value)), default=None)

    @property
    def attempts(self) -> int:
        """How often it was started."""
        return max(len(self.run_dir.attempts()), len(read_events(self.run_dir, "started")))

    @property
    def requeues(self) -> int:
        """How often it was stopped and put back into the queue."""
        return len(read_events(self.run_dir, "requeued"))

    def restarts(self, by: str) -> list[float]:
        """The places, in "step" or "epoch", at which later attempts went on."""
        resumed = [event for event in self.events if event.get("event") == "started" and event.get("step")]
        each = [1 if by == "step" else event.get("steps_per_epoch") for event in resumed]
        return [event["step"] / steps for event, steps in zip(resumed, each, strict=True) if steps]

    @property
    def processors(self) -> int | None:
        """How many ranks share the work, or GPUs where one process drives several by DataParallel."""
        if _takes_all_gpus(str(self.setting("strategy.name"))):
            return sum(len(host.gpus()) for host in self.hosts) or 1
        world_size = self.started("world_size")
        return world_size if isinstance(world_size, int) else None

    @property
    def hindered_by(self) -> str:
        """Why the speed of a run on the CPU says nothing: its ranks did not have their CPUs. Empty where it does."""
        if self.started("device") != "cpu":
            return ""
        ranks, threads, cpus, hosts = (self.started(key) for key in ("world_size", "threads", "cpus", "hosts"))
        known = all(map(fileio.is_whole, (ranks, threads, cpus))) and isinstance(hosts, list) and hosts
        each = -(-ranks // len(hosts)) if known else 0
        if each * (threads or 0) > (cpus or 0):
            return f"{each} ranks of {threads} thread{'s' * (threads != 1)} shared {cpus} CPU{'s' * (cpus != 1)}"
        taken = [usage.mean for host in self.hosts if (usage := host.usage("cpu_taken"))]
        load = [usage.mean for host in self.hosts if (usage := host.usage("load"))]
        return cpus_taken(max(taken, default=None), max(load, default=0.0))


def collect(runs: Sequence[RunDir]) -> list[Facts]:
    """Facts of runs, each with its own label: runs of one name get their folder's as well, those of a sweep are named
    by the settings that it varied."""
    sweeps = {folder: points_of(folder) for folder in dict.fromkeys(run.path.parent for run in runs)}
    points = [sweeps[run.path.parent].get(run.path.name, {}) for run in runs]
    names = [name_of(point) or terminal.one_line(run.name) for run, point in zip(runs, points, strict=True)]
    labels = [
        name if names.count(name) == 1 else f"{run.path.parent.name}/{name}"
        for run, name in zip(runs, names, strict=True)
    ]
    unique = [label if labels.count(label) == 1 else str(run.path) for label, run in zip(labels, runs, strict=True)]
    return [Facts(run, label, point) for run, label, point in zip(runs, unique, points, strict=True)]


def _takes_all_gpus(strategy: str) -> bool:
    # Only our own strategies are asked: the code of another may be gone, or a stranger's.
    known = strategy in plugins.available("trainkit.strategies")
    return known and strategy_traits(strategy).gpus_per_rank == "all"


def points_of(sweep: Path) -> dict[str, dict[str, str]]:
    """By run the settings that a sweep varied, as they were written in ``sweep.json``; empty for other folders."""
    try:
        told = fileio.parse(fileio.read_text(sweep / "sweep.json"))
        found = {str(item["run"]): dict(_pair(str(word)) for word in item["overrides"]) for item in told}
    except (OSError, ValueError, TypeError, KeyError):
        return {}
    first = next(iter(found.values()), {})
    shared = {key for key in first if len(found) > 1 and all(other.get(key) == first[key] for other in found.values())}
    return {run: {key: value for key, value in point.items() if key not in shared} for run, point in found.items()}


def name_of(point: Mapping[str, str]) -> str:
    """``lr=1e-3, schedule=wsd``: the last part of each key, or all of it where two would be alike."""
    short = [key.removesuffix(".name").rpartition(".")[2] for key in point]
    return ", ".join(
        f"{last if short.count(last) == 1 else key}={value}"
        for last, (key, value) in zip(short, point.items(), strict=True)
    )


def _pair(override: str) -> tuple[str, str]:
    key, _, value = terminal.one_line(override).partition("=")
    return key, value


def spans(facts: Facts) -> list[Span]:
    """The attempts of a run that began to train, in order."""
    found: list[Span] = []
    for event in facts.events:
        kind, time = event.get("event"), event.get("time")
        newest = found[-1].number if found and kind in ("handed_back", "requeued", "failed", "ended") else None
        attempt = event.get("attempt", newest)
        step = event["step"] if isinstance(event.get("step"), int) else None
        if kind == "started" and time is not None:
            hosts = [host for host in event.get("hosts") or () if isinstance(host, str)]
            number = attempt if isinstance(attempt, int) else len(found)
            found.append(Span(number, time, time, step or 0, step or 0, event.get("world_size"), hosts))
            continue
        span = next((span for span in reversed(found) if span.number == attempt), None)
        if span is None:
            continue
        span.ended = max(span.ended, time or 0.0)
        span.to_step = max(span.to_step, step or 0)
        span.how = _how(span.how, kind, event)
    ends = [*(span.began for span in found[1:]), float("inf")]
    for before, until in zip(found, ends, strict=False):
        # After the last event of an attempt that was killed, or goes on, there are still its records.
        late = [] if before.how else [r for r in facts.metrics.records if before.ended < r.get("time", 0.0) < until]
        for record in late:
            before.ended, before.to_step = max(before.ended, record["time"]), max(before.to_step, record["step"])
    return found


def _how(before: str, kind: Any, event: Mapping[str, Any]) -> str:
    if kind == "handed_back":
        signals = ", ".join(dict.fromkeys(event.get("signals") or ()))
        return before or f"told to stop{f' ({signals})' if signals else ''}, saved"
    if kind == "requeued":
        return f"{before}, requeued" if before else "requeued"
    if kind == "failed" and not before.startswith("failed"):
        return f"failed on rank {event.get('rank', '?')}: {event.get('error', 'unknown')}"
    if kind == "ended" and not before:
        state = event.get("state")
        return "finished" if state == "COMPLETED" else str(state or "ended")
    return before


def processor_hours(facts: Facts) -> float | None:
    """Hours of all processors for which the run held them: of every attempt, from the start of its processes."""
    found, now = spans(facts), facts.processors
    if not found or not now:
        return None
    one_process = facts.started("world_size") == 1  # which drives all GPUs under DataParallel
    seconds = sum(span.seconds * (now if one_process else span.ranks or now) for span in found)
    return (seconds + facts.spent.get("start", 0.0) * now) / 3600
