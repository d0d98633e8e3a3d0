"""Everything the report says about a run, read from its folder. What is not there is None, never an error."""

import math
import statistics
from collections import defaultdict
from collections.abc import Mapping
from functools import cached_property
from typing import Any

from trainkit.common import fileio, jsonl, terminal
from trainkit.common.errors import UserError
from trainkit.config import plugins, yaml
from trainkit.config.checks import strategy_traits
from trainkit.config.task_metrics import Metric
from trainkit.report.hardware_samples import HostSamples, cpus_taken
from trainkit.report.spans import Span
from trainkit.report.values import list_of, numbers, numbers_of
from trainkit.run import metrics as recorded
from trainkit.run.contributions import Contributions
from trainkit.run.events import read_events, typed_event
from trainkit.run.folder import RunDir
from trainkit.run.labels import shown_labels
from trainkit.run.run_progress import Divergence, setbacks_of, steps_done

_STILL = 0.05
"""A share of the training time: with longer pauses, a time ratio would be one of pauses."""
_MOST_SAMPLES = 50_000
"""Samples of all hosts together."""
_OF_NEWEST = ("handed_back", "requeued", "failed", "ended")
"""Events that belong to the newest attempt where they name none."""
_USES = {"waiting for data": "data", "start": "start", "saving": "checkpoint", "evaluation": "evaluation"}
"""Uses of processor-hours besides training, and the part of a rank's time that each is."""


class Facts:
    """One run, as far as its folder tells."""

    def __init__(self, run_dir: RunDir, label: str, point: Mapping[str, str] | None = None) -> None:
        self.run_dir = run_dir
        self.label = label
        self.point = dict(point or {})
        """The settings that a sweep varied, with the values of this run."""
        self.manifest: dict[str, Any] = jsonl.plain(fileio.read_object(run_dir.manifest))
        self.labels = shown_labels(run_dir)
        """Its tags and notes."""
        self.task_metrics = recorded.task_metrics(run_dir)
        """Metrics of the task."""
        self.contributions = Contributions.of(run_dir).best_first()
        """The contributors of a collaborative run, most samples first."""

    @cached_property
    def config(self) -> dict[str, Any]:
        """The resolved configuration as plain values; empty if it cannot be read."""
        try:
            return dict(jsonl.plain(yaml.read(self.run_dir.config, follow=False)[0], 8))
        except UserError:
            return {}

    def setting(self, key: str) -> Any:
        """A value of the configuration by its dotted key, or None."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def count(self, key: str) -> int:
        """A setting that is a whole number, else 0."""
        value = self.setting(key)
        return value if jsonl.is_whole(value) else 0

    @cached_property
    def summary(self) -> dict[str, Any]:
        """``summary.json``; empty for a run that did not get to its end. What events have too is as in these."""
        found = fileio.read_object(self.run_dir.summary)
        if not found:
            return {}
        return typed_event({**found, "event": "ended"}) or {}

    def require_readable(self) -> None:
        """Read all records now. Raises UserError where one cannot be read."""
        _ = self.events, self.metrics, self.hosts, self.test

    @property
    def headline(self) -> Metric:
        """Metric to judge by."""
        return self.task_metrics.metrics[self.task_metrics.headline]

    @cached_property
    def metrics(self) -> recorded.Thinned:
        """Records of all splits; of an enormous run only some of the train records."""
        return recorded.read_thinned(self.run_dir)

    def of_split(self, split: str) -> list[dict[str, Any]]:
        """Records of one split, by step."""
        return [record for record in self.metrics.records if record["split"] == split]

    def curve(self, key: str, by: str, split: str) -> tuple[list[tuple[float, float]], list[float]]:
        """Points of a key in train or val, and the places where its value was not finite.

        A key that is never a number has no such places. Of an enormous run the points include the extremes between the
        records that stand for others.

        Args:
            by: the horizontal axis, "step" or "epoch".
        """
        records = self.val if split == "val" else [*self.train, *self.metrics.outliers]
        points: list[tuple[float, float]] = []
        lost: list[float] = []
        is_always_lost = True
        for record in records:
            if not jsonl.is_number(record.get(by)):
                continue
            if key in record and record[key] is None:
                lost.append(float(record[by]))
                continue
            is_always_lost = False
            if jsonl.is_number(record.get(key)):
                points.append((float(record[by]), float(record[key])))
        if is_always_lost:
            lost = []
        return sorted(points), sorted(lost)

    @cached_property
    def train(self) -> list[dict[str, Any]]:
        return self.of_split("train")

    @cached_property
    def val(self) -> list[dict[str, Any]]:
        return self.of_split("val")

    @cached_property
    def test(self) -> dict[str, Any] | None:
        """Record at the end of training, else the last one that `evaluate` wrote of the best weights."""
        records = self.of_split("test")
        return records[-1] if records else recorded.best_evaluation(self.run_dir)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return read_events(self.run_dir)

    @cached_property
    def setbacks(self) -> Divergence:
        """Lost updates, and the step from which on the loss is not a number."""
        return setbacks_of(self.events, self.train, self.steps)

    @cached_property
    def hosts(self) -> list[HostSamples]:
        """Hardware samples, by host."""
        found = []
        files = sorted(self.run_dir.path.glob("system-*.jsonl"))
        for file in files:
            records, _ = recorded.thinned(file, max(_MOST_SAMPLES // len(files), 500))
            samples = [sample for sample, _ in records if jsonl.is_time(sample.get("time"))]
            if samples:
                found.append(HostSamples(terminal.one_line(file.stem.removeprefix("system-")), samples))
        return found

    def events_of(self, *kinds: str) -> list[dict[str, Any]]:
        """Events of these kinds, in order."""
        return [event for event in self.events if event["event"] in kinds]

    def last_event(self, *kinds: str) -> Mapping[str, Any]:
        """Newest event of these kinds; empty if there is none."""
        return next(reversed(self.events_of(*kinds)), {})

    def started(self, key: str) -> Any:
        """A field of the newest ``started`` event that has it, or of the summary, or None."""
        for event in reversed(self.events_of("started")):
            if key in event:
                return event[key]
        return self.summary.get(key)

    @property
    def steps(self) -> int:
        """Optimizer updates that were done."""
        steps = self.summary.get("steps")
        if jsonl.is_whole(steps):
            return steps
        return steps_done(self.events, self.train + self.val)

    @property
    def begun(self) -> bool:
        """True once its ranks have met. Before that nothing is measured."""
        return self.started("world_size") is not None or bool(self.train or self.val)

    @property
    def is_simulated(self) -> bool:
        """True if several nodes were one machine."""
        return len(self.started("hosts") or ()) == 1 and self.count("launch.nodes") > 1

    @property
    def finished(self) -> bool:
        if self.is_script and not self.summary:
            return self.last_event("ended").get("state") == "COMPLETED"
        return self.summary.get("outcome") == "finished"

    @property
    def is_script(self) -> bool:
        """True for a run whose ranks are a script of the user's own."""
        return isinstance(self.setting("script"), Mapping)

    @property
    def pruned(self) -> bool:
        """True if its sweep has stopped it, for it was behind the others."""
        return self.summary.get("outcome") == "pruned"

    @property
    def best_val(self) -> dict[str, Any] | None:
        """Validation record of the best checkpoint."""
        return recorded.best_of(self.val, self.summary.get("best_step"), self.task_metrics)

    @property
    def best(self) -> float | None:
        """Headline of the best checkpoint on validation data."""
        return self._headline_of(self.best_val)

    @property
    def tested(self) -> float | None:
        """Headline on test data."""
        return self._headline_of(self.test)

    def _headline_of(self, record: Mapping[str, Any] | None) -> float | None:
        value = (record or {}).get(self.task_metrics.headline)
        return float(value) if jsonl.is_number(value) else None

    @property
    def rank(self) -> tuple[bool, float, int]:
        """Key for sorting: the best by validation first, runs without one last."""
        value = self.best or 0.0
        if self.headline.higher_is_better:
            value = -value
        name = self.run_dir.path.name
        return self.best is None, value, int(name) if name.isdecimal() else 0

    @property
    def speeds(self) -> list[float]:
        """Images a second, of each train record."""
        return numbers_of(self.train, "images_per_sec")

    @property
    def images_per_sec(self) -> float | None:
        """Median over the train records, so that neither slow first steps nor pauses count."""
        if not self.speeds:
            return None
        return statistics.median(self.speeds)

    @property
    def train_seconds(self) -> float | None:
        """Seconds in training steps over all attempts; before the end, estimated from the speed of the records."""
        seconds = self.summary.get("train_seconds")
        if jsonl.is_number(seconds):
            return float(seconds)
        batch = self.setting("train.global_batch_size")
        total = 0.0
        before = 0
        for record in self.train:
            speed = record.get("images_per_sec")
            if not (jsonl.is_number(batch) and jsonl.is_number(speed) and speed > 0):
                return None
            total += (record["step"] - before) * batch / speed
            before = record["step"]
        return total or None

    @property
    def still_seconds(self) -> float:
        """Seconds in training steps for which the job was suspended; 0 where that does not matter.

        Those are records at a tenth of the usual speed; the first one of an attempt is slow by itself.
        """
        usual = self.images_per_sec or 0.0
        batch = self.count("train.global_batch_size")
        begun = [0, *self.restarts("step")]
        still = 0.0
        before = 0
        for record in self.train:
            step = record["step"]
            speed = record.get("images_per_sec")
            is_first = any(before <= place < step for place in begun)
            if not is_first and jsonl.is_number(speed) and 0 < speed < usual / 10:
                still += (step - before) * batch * (1 / speed - 1 / usual)
            before = step
        return still if still > _STILL * (self.train_seconds or 0.0) else 0.0

    @cached_property
    def spent(self) -> dict[str, float]:
        """Seconds of rank 0 by activity, over all attempts; before the end, as far as recorded."""
        seconds = self.summary.get("seconds")
        if not isinstance(seconds, dict):
            seconds = defaultdict(float)
            for record in self.train:
                for key, value in record.items():
                    if key.startswith("seconds_") and jsonl.is_number(value):
                        seconds[key.removeprefix("seconds_")] += value * self.metrics.every
        return {name: float(value) for name, value in seconds.items() if jsonl.is_number(value) and value > 0}

    @property
    def wall_seconds(self) -> float | None:
        """Seconds from the first start to the last record or event, with the waits between attempts."""
        starts = numbers_of(self.events_of("started"), "time")
        if not starts:
            return None
        times = numbers_of([*self.train, *self.val, *self.events], "time")
        return max(times) - min(starts)

    @property
    def max_memory_mb(self) -> float | None:
        """Peak memory of rank 0: of the GPU's allocator, or of the process on the CPU."""
        return max(numbers_of([self.summary, *self.train], "max_memory_mb"), default=None)

    @property
    def memory_of_ranks(self) -> list[float]:
        """Peak memory of every rank in MB; of a run that has not ended that of rank 0, if it is known."""
        return self.of_ranks("max_memory_mb_of_ranks") or numbers([self.max_memory_mb])

    def of_ranks(self, key: str) -> list[float]:
        """Numbers of every rank that the summary has under a key."""
        return numbers(list_of(self.summary.get(key)))

    @property
    def attempts(self) -> int:
        """Number of times it was started."""
        return max(len(self.run_dir.attempts()), len(self.events_of("started")))

    @property
    def requeues(self) -> int:
        """Number of times it was stopped and put back into the queue."""
        return sum(not event.get("in_place") for event in self.events_of("requeued"))

    def restarts(self, by: str) -> list[float]:
        """Places, in "step" or "epoch", at which later attempts went on."""
        places = []
        for event in self.events_of("started"):
            steps_per_unit = 1 if by == "step" else event.get("steps_per_epoch")
            if event.get("step") and steps_per_unit:
                places.append(event["step"] / steps_per_unit)
        return places

    @property
    def processors(self) -> int | None:
        """Number of ranks that share the work, or of GPUs where one process drives several by DataParallel."""
        strategy = str(self.setting("strategy.name"))
        # Only our own strategies are asked: the code of another may be gone, or a stranger's.
        known = strategy in plugins.available("trainkit.distributed.strategies")
        if known and strategy_traits(strategy).gpus_per_rank == "all":
            return sum(len(host.gpus()) for host in self.hosts) or 1
        count: int | None = self.started("world_size")
        return count

    @property
    def hindered_by(self) -> str:
        """Why the speed of a run on the CPU says nothing: its ranks did not have their CPUs. Empty where it does."""
        if self.started("device") != "cpu":
            return ""
        ranks = self.started("world_size")
        threads = self.started("threads")
        cpus = self.started("cpus")
        hosts = self.started("hosts")
        if ranks and hosts and jsonl.is_whole(threads) and jsonl.is_whole(cpus):
            wanted = math.ceil(ranks / len(hosts)) * threads
            if wanted > cpus:
                return f"the ranks of a node wanted {wanted} CPUs and had {cpus}"
        taken = None
        for host in self.hosts:
            usage = host.usage("cpu_taken")
            if usage and usage.mean > (taken or 0.0):
                taken = usage.mean
        return cpus_taken(taken)

    @cached_property
    def spans(self) -> list[Span]:
        """Attempts that began to train, in order."""
        spans: list[Span] = []
        for event in self.events:
            if event["event"] == "started" and event.get("time") is not None:
                spans.append(Span.begun_by(event, default_number=len(spans)))
                continue
            attempt = event.get("attempt")
            if "attempt" not in event and spans and event["event"] in _OF_NEWEST:
                attempt = spans[-1].number
            for span in reversed(spans):
                if span.number == attempt:
                    span.take_in(event)
                    break
        until = math.inf
        for span in reversed(spans):
            if not span.how:  # it was killed, or goes on: after its last event there are still its records
                last = span.ended
                for record in self.metrics.records:
                    if last < record.get("time", 0.0) < until:
                        span.reach(record)
            until = span.began
        return spans

    @property
    def processor_hours(self) -> float | None:
        """Hours for which the run held its processors, over every attempt, from the start of its processes."""
        if not self.spans or not self.processors:
            return None
        held = sum(span.seconds * self._held_by(span) for span in self.spans)
        return (held + self.spent.get("start", 0.0) * self.processors) / 3600 + self.spare_hours

    @property
    def spare_hours(self) -> float:
        """Hours for which the run held the processors of spare nodes, while its ranks trained on others."""
        held = 0.0
        for span in self.spans:
            spare = self.count("launch.spare_nodes")
            for event in self.events_of("requeued"):
                if (event.get("attempt") or 0) < span.number:
                    spare = (
                        event.get("spare_nodes", spare) if event.get("in_place") else self.count("launch.spare_nodes")
                    )
            held += span.seconds * self._held_by(span) * spare / max(self.count("launch.nodes"), 1)
        return held / 3600

    def _held_by(self, span: Span) -> int:
        """Processors of an attempt; one process drives all GPUs under DataParallel."""
        if self.started("world_size") == 1 and self.processors:
            return self.processors
        return span.ranks or self.processors or 0

    @property
    def energy(self) -> dict[str, float]:
        """``gpu_kwh`` and ``cpu_kwh`` over all hosts and attempts, as far as measured."""
        found = dict(recorded.energy_of(self.run_dir) or {})
        told = self.summary.get("energy")
        if isinstance(told, dict):
            found |= told
        return {key: float(found[key]) for key in recorded.KWH if jsonl.is_number(found.get(key)) and found[key] >= 0}

    @property
    def lost_hours(self) -> float:
        """Hours of all processors from the last save of an attempt that failed, or was killed, to its end."""
        lost = 0.0
        most_steps = math.inf
        for span in reversed(self.spans):
            goes_on = span is self.spans[-1] and not span.how
            if not span.went_well and not goes_on:
                saved = [span.began]
                for event in self.events_of("saved"):
                    is_used = (event.get("step") or 0) <= most_steps  # else the next attempt has begun before it
                    if event.get("attempt") == span.number and is_used:
                        saved += numbers([event.get("time")])
                lost += max(span.ended - max(saved), 0.0) * self._held_by(span)
            most_steps = span.from_step
        return lost / 3600

    @property
    def hours_by_use(self) -> dict[str, float]:
        """Hours of `processor_hours` by what the processors did in them; empty where that is not known.

        What was kept is told by rank 0, in the words of `trainkit.training.clock`, for all of them. The rest is what
        is left: ends of attempts, and starts of those that saved nothing.
        """
        held = self.processor_hours
        spent = dict(self.spent)
        if not held or not spent:
            return {}
        spent.pop("end", None)
        ranks_per_hour = (self.processors or 0) / 3600
        hours = {"training": 0.0}
        for use, part in _USES.items():
            hours[use] = spent.pop(part, 0.0) * ranks_per_hour
        hours["training"] = sum(spent.values()) * ranks_per_hour
        hours["lost to failures"] = self.lost_hours
        if self.count("launch.spare_nodes"):
            hours["spare nodes"] = self.spare_hours
        hours["rest"] = max(held - sum(hours.values()), 0.0)
        return hours

    @property
    def queue_hours(self) -> float:
        """Hours from every submission and requeueing to the processes of the attempt that came of it."""
        waited = 0.0
        since = None
        for event in self.events_of("submitted", "requeued", "started"):
            if event.get("in_place"):
                continue
            if event["event"] != "started":
                since = event.get("time")
            elif since is not None:
                waited += max((event.get("time") or since) - since, 0.0)
                since = None
        return max(waited - self.spent.get("start", 0.0), 0.0) / 3600
