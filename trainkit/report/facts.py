"""Everything the report says about a run, read from its folder. What is not there is None, never an error."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

from trainkit import fileio, plugins, terminal
from trainkit.config import yaml
from trainkit.config.checks import strategy_traits
from trainkit.errors import UserError
from trainkit.report.points import name_of, points_of
from trainkit.report.samples import HostSamples, cpus_taken
from trainkit.run.contributions import Contribution, Contributions
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import Setbacks, Thinned, best_evaluation, best_of, read_thinned, setbacks_of, steps_done

_SHOWN_BYTES = 16384
_STILL = 0.05
"""From this share of its training time on a time ratio would be one of pauses."""
_MOST_SAMPLES = 50_000
"""Of all hosts together: of a run of weeks on many nodes nobody looks at more."""


class Facts:
    """One run, as far as its folder tells."""

    def __init__(self, run_dir: RunDir, label: str, point: Mapping[str, str] | None = None) -> None:
        self.run_dir, self.label = run_dir, label
        self.point = dict(point or {})  # of a run of a sweep what was swept: keys and its values

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
        """Of the training's end; of a run without one what `evaluate` has measured last of its best weights."""
        own = next((record for record in reversed(self.metrics.records) if record["split"] == "test"), None)
        return own or best_evaluation(self.run_dir)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return read_events(self.run_dir)

    @cached_property
    def setbacks(self) -> Setbacks:
        """Updates that came to nothing, and from when on the loss was no number: whether it has diverged."""
        return setbacks_of(self.events, self.train, self.steps)

    @cached_property
    def contributions(self) -> list[Contribution]:
        """Of a collaborative run: who has contributed how much, most samples first."""
        return Contributions.of(self.run_dir).best_first()

    @cached_property
    def hosts(self) -> list[HostSamples]:
        """Hardware samples, by host."""
        found = []
        files = sorted(self.run_dir.path.glob("system-*.jsonl"))
        for file in files:
            records = fileio.read_thinned(file, max(_MOST_SAMPLES // len(files), 500)).records
            samples = [sample for sample in records if fileio.is_time(sample.get("time"))]
            if samples:
                found.append(HostSamples(terminal.one_line(file.stem.removeprefix("system-")), samples))
        return found

    @cached_property
    def gpus_shown(self) -> list[tuple[str, str]]:
        """For each host the text that shows its GPUs as `nvidia-smi` does, when they held most memory."""
        found = []
        for file in sorted(self.run_dir.path.glob("nvidia-smi-*.txt")):
            with suppress(OSError):
                lines = fileio.read_end(file, _SHOWN_BYTES).replace("`", "'").splitlines()
                host = terminal.one_line(file.stem.removeprefix("nvidia-smi-"))
                found.append((host, "\n".join(terminal.one_line(line, 200) for line in lines)))
        return found

    def started(self, key: str) -> Any:
        """A field of the newest ``started`` event, or of the summary, or None."""
        for event in reversed(self.events):
            if event.get("event") == "started" and key in event:
                return event[key]
        return self.summary.get(key)

    @property
    def memory_of_ranks(self) -> list[float]:
        """Peak memory of every rank in MB, by rank; of a run without an end that of rank 0, if it is known."""
        told = self.summary.get("max_memory_mb_of_ranks")
        known = [float(value) for value in told if fileio.is_number(value)] if isinstance(told, list) else []
        return known or ([self.max_memory_mb] if self.max_memory_mb is not None else [])

    def count(self, key: str) -> int:
        """A setting that is a whole number; 0 where it is none."""
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
        """Whether its ranks have met: before that nothing of it has been measured."""
        return self.started("world_size") is not None or bool(self.train or self.val)

    @property
    def finished(self) -> bool:
        return self.summary.get("outcome") == "finished"

    @property
    def best_val(self) -> dict[str, Any] | None:
        """The validation record of the best checkpoint."""
        return best_of(self.val, self.summary.get("best_step"))

    @property
    def speeds(self) -> list[float]:
        """Images a second, of each train record."""
        return [record["images_per_sec"] for record in self.train if fileio.is_number(record.get("images_per_sec"))]

    @property
    def images_per_sec(self) -> float | None:
        """Median over the train records: neither the first slow steps nor a pause count."""
        return statistics.median(self.speeds) if self.speeds else None

    @property
    def train_seconds(self) -> float | None:
        """Time in training steps, over all attempts; of a run without an end, from the speed of its records."""
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
        """Of the time in training steps, what a suspended job (or disk) took; 0 where that does not matter.

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
        """Seconds of rank 0 by what they went on, over all attempts; of a run without an end, as far as recorded."""
        told = self.summary.get("seconds")
        if not isinstance(told, dict):
            told = {}
            for record in self.train:
                for key, value in record.items():
                    if key.startswith("seconds_") and fileio.is_number(value):
                        name = key.removeprefix("seconds_")
                        told[name] = told.get(name, 0.0) + value * self.metrics.every
        return {name: float(value) for name, value in told.items() if fileio.is_number(value) and value > 0}

    @property
    def wall_seconds(self) -> float | None:
        """From the first start to the last word of the run, waiting between attempts included."""
        starts = [event["time"] for event in self.events if event.get("event") == "started" and "time" in event]
        times = [event["time"] for event in self.events if "time" in event]
        times += [record["time"] for record in self.train + self.val if fileio.is_number(record.get("time"))]
        return max(times) - min(starts) if starts else None

    @property
    def max_memory_mb(self) -> float | None:
        """Peak memory of rank 0: of the GPU's allocator, or of the process on CPU."""
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

    @property
    def restarted_at(self) -> list[float]:
        """Epochs at which later attempts went on."""
        resumed = [event for event in self.events if event.get("event") == "started" and event.get("step")]
        return [e["step"] / e["steps_per_epoch"] for e in resumed if e.get("steps_per_epoch")]

    @property
    def processors(self) -> int | None:
        """What the work was spread over: ranks, or the GPUs that one process with DataParallel drives."""
        if _takes_all_gpus(str(self.setting("strategy.name"))):
            return sum(len(host.gpu_indices()) for host in self.hosts) or 1
        world_size = self.started("world_size")
        return world_size if isinstance(world_size, int) else None

    @property
    def hindered_by(self) -> str:
        """Why the speed of a run on the CPU says nothing of its ranks: they had not the CPUs that they were to have."""
        if self.started("device") != "cpu":
            return ""
        ranks, threads, cpus, hosts = (self.started(key) for key in ("world_size", "threads", "cpus", "hosts"))
        known = all(fileio.is_whole(item) for item in (ranks, threads, cpus)) and isinstance(hosts, list) and hosts
        each = -(-ranks // len(hosts)) if known else 0
        if each * (threads or 0) > (cpus or 0):
            return f"{each} ranks of {threads} thread{'s' * (threads != 1)} shared {cpus} CPU{'s' * (cpus != 1)}"
        told = [taken.mean for host in self.hosts if (taken := host.machine("cpu_taken"))]
        load = max((load.mean for host in self.hosts if (load := host.machine("load"))), default=0.0)
        return cpus_taken(max(told, default=None), load)

    @property
    def missing(self) -> list[str]:
        """What a reader may look for and this run does not have, each with the reason; with `markdown.code` in it."""
        found = []
        if not self.train:
            found.append("training metrics: metrics.jsonl has none")
        if not self.val:
            found.append("validation metrics: no evaluation was reached")
        if self.test is None:
            measure = terminal.code(terminal.command("evaluate", self.run_dir.path))
            found.append(f"test metrics: {measure} measures them")
        if self.val and not self.run_dir.mistakes("val").exists():
            measure = terminal.code(terminal.command("evaluate", self.run_dir.path, "--split", "val"))
            found.append(f"images that were told wrong: {measure} keeps them")
        if not self.summary:
            found.append("final numbers (summary.json): the run has not ended, or was stopped; times are estimates")
        if self.summary.get("energy", 0) is None:
            found.append("energy: no GPU has told it, and processors tell it to root alone, where they do (RAPL)")
        if not self.hosts:
            found.append("hardware samples: no system-<host>.jsonl with a whole line in it")
        return found


Runs = Sequence[RunDir] | Sequence[Facts]


def collect(runs: Runs) -> list[Facts]:
    """Facts of runs, each under a name that no other has: runs of one name also get their folder's.

    A run of a sweep has its name from what was swept. Facts are given back as they are, for whoever writes several
    things of them.
    """
    if facts := [run for run in runs if isinstance(run, Facts)]:
        return facts
    runs = [run for run in runs if isinstance(run, RunDir)]
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
    # Of one of the user's own nothing is asked: its code may be gone, or be a stranger's.
    known = strategy in plugins.available("trainkit.strategies")
    return known and strategy_traits(strategy).gpus_per_rank == "all"
