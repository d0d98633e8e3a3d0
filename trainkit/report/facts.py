"""Everything the report says about a run, read from its folder. What is not there is None, never an error."""

import shlex
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from trainkit import fileio, plugins, terminal
from trainkit.config import yaml
from trainkit.config.checks import strategy_traits
from trainkit.errors import UserError
from trainkit.run import metrics as recorded
from trainkit.run.events import chosen_point, read_events, typed_event
from trainkit.run.folder import SAMPLER, RunDir
from trainkit.run.labels import shown_labels
from trainkit.run.metrics import Metric

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

_USES = {"waiting for data": "data", "start": "start", "saving": "checkpoint", "evaluation": "evaluation"}
"""Uses of processor-hours besides training, and the part of a rank's time that each is."""


def cpus_taken(taken: float | None) -> str:
    """Why speeds on the CPU are not compared: others had too much of it. Empty where they did not."""
    if taken is None or taken <= _TAKEN:
        return ""
    return f"the CPUs were taken: others had {taken:.0f} % of the time that it wanted"


def numbers(values: Iterable[Any]) -> list[float]:
    """Those that are numbers: whoever wrote the folder may have put anything there."""
    return [float(value) for value in values if fileio.is_number(value)]


def list_of(value: Any) -> list[Any]:
    """The value itself, or an empty list where whoever wrote the folder has put something else."""
    return value if isinstance(value, list) else []


class Usage(NamedTuple):
    """Mean and highest value of one hardware reading over a run."""

    mean: float
    highest: float


class HostSamples:
    """Hardware samples of one host: of the machine, and of each of its GPUs by NVML's index."""

    def __init__(self, host: str, samples: list[dict[str, Any]]) -> None:
        self.host, self.samples = host, samples
        self._curves = defaultdict[tuple[int | None, str], list[tuple[float, float]]](list)
        for sample in samples:
            gpus = [gpu for gpu in list_of(sample.get("gpus")) if isinstance(gpu, dict)]
            indexed = [(gpu["index"], gpu) for gpu in gpus if fileio.is_whole(gpu.get("index"))]
            for index, holder in [(None, sample), *indexed]:
                for key, value in holder.items():
                    if fileio.is_number(value):
                        self._curves[index, key].append((sample["time"], value))

    def gpus(self) -> list[int]:
        """The sampled GPUs."""
        return sorted({index for index, _ in self._curves if index is not None})

    def curve(self, key: str, gpu: int | None = None) -> list[tuple[float, float]]:
        """(time, value) of a reading: ``cpu_percent``, ``memory_used_mb``; of a GPU ``power_w`` ..."""
        return self._curves.get((gpu, key), [])

    def usage(self, key: str, gpu: int | None = None) -> Usage | None:
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
        return self.how.startswith(("finished", "told to stop", "requeued", "PREEMPTED"))

    def reach(self, record: Mapping[str, Any]) -> None:
        """It went on until then, at least."""
        self.ended = max(self.ended, record.get("time") or 0.0)
        self.to_step = max(self.to_step, record.get("step") or 0)

    def take_in(self, event: Mapping[str, Any]) -> None:
        """Take in an event of the attempt."""
        self.reach(event)
        kind, state = event["event"], event.get("state")
        if kind == "handed_back":
            signals = ", ".join(dict.fromkeys(event.get("signals") or ()))
            self.how = self.how or f"told to stop{f' ({signals})' if signals else ''}, saved"
        elif kind == "requeued":
            self.how = f"{self.how}, requeued".removeprefix(", ")
        elif kind == "failed" and not self.how.startswith("failed"):
            self.how = f"failed on rank {event.get('rank', '?')}: {event.get('error', 'unknown')}"
        elif kind == "ended" and not self.how:
            self.how = "finished" if state == "COMPLETED" else str(state or "ended")


class Facts:
    """One run, as far as its folder tells."""

    def __init__(self, run_dir: RunDir, label: str, point: Mapping[str, str] | None = None) -> None:
        self.run_dir, self.label = run_dir, label
        self.point = dict(point or {})
        """The settings that a sweep varied, with the values of this run."""
        self.manifest: dict[str, Any] = fileio.plain(fileio.read_object(run_dir.manifest))
        self.labels = shown_labels(run_dir)
        """Its tags and notes."""
        self.described = recorded.described(run_dir)
        """What the task measures."""
        self.contributions = recorded.Contributions.of(run_dir).best_first()
        """The contributors of a collaborative run, most samples first."""

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

    def count(self, key: str) -> int:
        """A setting that is a whole number, else 0."""
        value = self.setting(key)
        return value if fileio.is_whole(value) else 0

    @cached_property
    def summary(self) -> dict[str, Any]:
        """``summary.json``; empty for a run that did not get to its end. What events have too is as in these."""
        found = fileio.read_object(self.run_dir.summary)
        return (typed_event({**found, "event": "ended"}) or {}) if found else {}

    @property
    def headline(self) -> Metric:
        """The metric to judge by."""
        return self.described.metrics[self.described.headline]

    @cached_property
    def metrics(self) -> recorded.Thinned:
        """All records; of an enormous run some of the train records."""
        return recorded.read_thinned(self.run_dir)

    def of_split(self, split: str) -> list[dict[str, Any]]:
        return [record for record in self.metrics.records if record["split"] == split]

    def curve(self, key: str, by: str, split: str) -> tuple[list[tuple[float, float]], list[float]]:
        """What was recorded of a key in train or val, and the places where that was no number; not those of a key that
        never is. Of an enormous run with the extremes between the records that stand for others."""
        records = self.val if split == "val" else [*self.train, *self.metrics.outliers]
        placed = [record for record in records if fileio.is_number(record.get(by))]
        points = [(float(record[by]), float(record[key])) for record in placed if fileio.is_number(record.get(key))]
        lost = [float(record[by]) for record in placed if key in record and record[key] is None]
        return sorted(points), sorted(lost) if len(lost) < len(placed) else []

    @cached_property
    def train(self) -> list[dict[str, Any]]:
        return self.of_split("train")

    @cached_property
    def val(self) -> list[dict[str, Any]]:
        return self.of_split("val")

    @cached_property
    def test(self) -> dict[str, Any] | None:
        """The record at the end of training, else the last one that `evaluate` wrote of the best weights."""
        return next(reversed(self.of_split("test")), None) or recorded.best_evaluation(self.run_dir)

    @cached_property
    def events(self) -> list[dict[str, Any]]:
        return read_events(self.run_dir)

    @cached_property
    def setbacks(self) -> recorded.Divergence:
        """Lost updates, and the step from which on the loss is not a number."""
        return recorded.setbacks_of(self.events, self.train, self.steps)

    @cached_property
    def hosts(self) -> list[HostSamples]:
        """Hardware samples, by host."""
        found = []
        files = sorted(self.run_dir.path.glob("system-*.jsonl"))
        for file in files:
            records, _ = recorded.thinned(file, max(_MOST_SAMPLES // len(files), 500))
            if samples := [sample for sample, _ in records if fileio.is_time(sample.get("time"))]:
                found.append(HostSamples(terminal.one_line(file.stem.removeprefix("system-")), samples))
        return found

    @cached_property
    def gpus_shown(self) -> list[tuple[str, str]]:
        """For each host what `nvidia-smi` shows, from when its GPUs held most memory."""
        found = []
        for file in sorted(self.run_dir.path.glob("nvidia-smi-*.txt")):
            with suppress(OSError):
                host = terminal.one_line(file.stem.removeprefix("nvidia-smi-"))
                found.append((host, terminal.lines(fileio.read_end(file, _SHOWN_BYTES)).rstrip()))
        return found

    def events_of(self, *kinds: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["event"] in kinds]

    def last_event(self, *kinds: str) -> Mapping[str, Any]:
        """The newest event of these kinds; empty if there is none."""
        return next(reversed(self.events_of(*kinds)), {})

    def started(self, key: str) -> Any:
        """A field of the newest ``started`` event that has it, or of the summary, or None."""
        return next(
            (event[key] for event in reversed(self.events_of("started")) if key in event), self.summary.get(key)
        )

    @property
    def steps(self) -> int:
        """Optimizer updates that were done."""
        steps = self.summary.get("steps")
        return steps if fileio.is_whole(steps) else recorded.steps_done(self.events, self.train + self.val)

    @property
    def begun(self) -> bool:
        """Whether its ranks have met. Before that nothing is measured."""
        return self.started("world_size") is not None or bool(self.train or self.val)

    @property
    def is_simulated(self) -> bool:
        """Whether several nodes were one machine."""
        return len(self.started("hosts") or ()) == 1 and self.count("launch.nodes") > 1

    @property
    def finished(self) -> bool:
        return self.summary.get("outcome") == "finished"

    @property
    def pruned(self) -> bool:
        """Whether its sweep has stopped it, for it was behind the others."""
        return self.summary.get("outcome") == "pruned"

    @property
    def best_val(self) -> dict[str, Any] | None:
        """The validation record of the best checkpoint."""
        return recorded.best_of(self.val, self.summary.get("best_step"), self.described)

    @property
    def best(self) -> float | None:
        """The headline of the best checkpoint on validation data."""
        return self._headline_of(self.best_val)

    @property
    def tested(self) -> float | None:
        """The headline on test data."""
        return self._headline_of(self.test)

    def _headline_of(self, record: Mapping[str, Any] | None) -> float | None:
        return next(iter(numbers([(record or {}).get(self.described.headline)])), None)

    @property
    def rank(self) -> tuple[bool, float, int]:
        """For sorting: the best by validation first, runs without one last."""
        value, name = self.best or 0.0, self.run_dir.path.name
        better = -value if self.headline.higher_is_better else value
        return self.best is None, better, int(name) if name.isdecimal() else 0

    @property
    def speeds(self) -> list[float]:
        """Images a second, of each train record."""
        return numbers(record.get("images_per_sec") for record in self.train)

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
        usual, begun, still, before = self.images_per_sec or 0.0, [0, *self.restarts("step")], 0.0, 0
        for record in self.train:
            step, speed = record["step"], record.get("images_per_sec")
            is_first = any(before <= place < step for place in begun)
            if not is_first and fileio.is_number(speed) and 0 < speed < usual / 10:
                still += (step - before) * self.count("train.global_batch_size") * (1 / speed - 1 / usual)
            before = step
        return still if still > _STILL * (self.train_seconds or 0.0) else 0.0

    @cached_property
    def spent(self) -> dict[str, float]:
        """Seconds of rank 0 by activity, over all attempts; before the end, as far as recorded."""
        seconds = self.summary.get("seconds")
        if not isinstance(seconds, dict):
            seconds = defaultdict(float)
            for key, value in (item for record in self.train for item in record.items()):
                if key.startswith("seconds_") and fileio.is_number(value):
                    seconds[key.removeprefix("seconds_")] += value * self.metrics.every
        return {name: float(value) for name, value in seconds.items() if fileio.is_number(value) and value > 0}

    @property
    def wall_seconds(self) -> float | None:
        """From the first start to the last record or event, with the waits between attempts."""
        starts = numbers(event.get("time") for event in self.events_of("started"))
        times = numbers(item.get("time") for item in (*self.train, *self.val, *self.events))
        return max(times) - min(starts) if starts else None

    @property
    def max_memory_mb(self) -> float | None:
        """Peak memory of rank 0: of the GPU's allocator, or of the process on the CPU."""
        return max(numbers(item.get("max_memory_mb") for item in (self.summary, *self.train)), default=None)

    @property
    def memory_of_ranks(self) -> list[float]:
        """Peak memory of every rank in MB; of a run that has not ended that of rank 0, if it is known."""
        return numbers(list_of(self.summary.get("max_memory_mb_of_ranks"))) or numbers([self.max_memory_mb])

    @property
    def attempts(self) -> int:
        """How often it was started."""
        return max(len(self.run_dir.attempts()), len(self.events_of("started")))

    @property
    def requeues(self) -> int:
        """How often it was stopped and put back into the queue."""
        return len(self.events_of("requeued"))

    def restarts(self, by: str) -> list[float]:
        """The places, in "step" or "epoch", at which later attempts went on."""
        resumed = [event for event in self.events_of("started") if event.get("step")]
        if by == "step":
            return [event["step"] for event in resumed]
        return [event["step"] / event["steps_per_epoch"] for event in resumed if event.get("steps_per_epoch")]

    @property
    def processors(self) -> int | None:
        """How many ranks share the work, or GPUs where one process drives several by DataParallel."""
        strategy = str(self.setting("strategy.name"))
        # Only our own strategies are asked: the code of another may be gone, or a stranger's.
        known = strategy in plugins.available("trainkit.strategies")
        if known and strategy_traits(strategy).gpus_per_rank == "all":
            return sum(len(host.gpus()) for host in self.hosts) or 1
        count: int | None = self.started("world_size")
        return count

    @property
    def hindered_by(self) -> str:
        """Why the speed of a run on the CPU says nothing: its ranks did not have their CPUs. Empty where it does."""
        if self.started("device") != "cpu":
            return ""
        ranks, threads, cpus, hosts = (self.started(key) for key in ("world_size", "threads", "cpus", "hosts"))
        if ranks and hosts and fileio.is_whole(threads) and fileio.is_whole(cpus):
            each = -(-ranks // len(hosts))
            if each * threads > cpus:
                return f"the ranks of a node wanted {each * threads} CPUs and had {cpus}"
        taken = [usage.mean for host in self.hosts if (usage := host.usage("cpu_taken"))]
        return cpus_taken(max(taken, default=None))

    @cached_property
    def spans(self) -> list[Span]:
        """The attempts that began to train, in order."""
        spans: list[Span] = []
        for event in self.events:
            kind, time = event["event"], event.get("time")
            newest = spans[-1].number if spans and kind in ("handed_back", "requeued", "failed", "ended") else None
            attempt = event.get("attempt", newest)
            if kind == "started" and time is not None:
                number, step = len(spans) if attempt is None else attempt, event.get("step") or 0
                spans.append(Span(number, time, time, step, step, event.get("world_size"), event.get("hosts") or []))
            elif span := next((span for span in reversed(spans) if span.number == attempt), None):
                span.take_in(event)
        for span, until in zip(spans, [*(span.began for span in spans[1:]), float("inf")], strict=False):
            # After the last event of an attempt that was killed, or goes on, there are still its records.
            last = span.ended
            for record in self.metrics.records if not span.how else ():
                if last < record.get("time", 0.0) < until:
                    span.reach(record)
        return spans

    @property
    def processor_hours(self) -> float | None:
        """Hours of all processors for which the run held them: of every attempt, from the start of its processes."""
        if not self.spans or not self.processors:
            return None
        held = sum(span.seconds * self._held_by(span) for span in self.spans)
        return (held + self.spent.get("start", 0.0) * self.processors) / 3600

    def _held_by(self, span: Span) -> int:
        """Processors of an attempt; one process drives all GPUs under DataParallel."""
        return (self.started("world_size") == 1 and self.processors) or span.ranks or self.processors or 0

    @property
    def energy(self) -> dict[str, float]:
        """``gpu_kwh`` and ``cpu_kwh`` over all hosts and attempts, what nothing measures left out; of a run that has
        not ended as far as sampled."""
        told = self.summary.get("energy")
        found = [*(recorded.energy_of(self.run_dir) or {}).items(), *(told.items() if isinstance(told, dict) else ())]
        return {key: float(it) for key, it in found if key in recorded.KWH and fileio.is_number(it) and it >= 0}

    @property
    def lost_hours(self) -> float:
        """Hours of all processors from the last save of an attempt that failed, or was killed, to its end."""
        lost = 0.0
        for span, after in zip(self.spans, [*self.spans[1:], None], strict=True):
            if span.went_well or (after is None and not span.how):  # or goes on
                continue
            kept = [
                event.get("time") for event in self.events_of("saved") if event.get("attempt") == span.number
                and (after is None or (event.get("step") or 0) <= after.from_step)
            ]  # fmt: skip
            lost += max(span.ended - max([span.began, *numbers(kept)]), 0.0) * self._held_by(span)
        return lost / 3600

    @property
    def hours_by_use(self) -> dict[str, float]:
        """`processor_hours`, by what the processors did in them; empty where that is not known.

        What was kept is told by rank 0, in the words of `trainkit.training.timing`, for all of them. The rest is what
        is left: ends of attempts, and starts of those that saved nothing.
        """
        held, spent = self.processor_hours, dict(self.spent)
        if not held or not spent:
            return {}
        spent.pop("end", None)
        others = {use: spent.pop(part, 0.0) for use, part in _USES.items()}
        uses = {"training": sum(spent.values()), **others}
        found = {use: seconds * (self.processors or 0) / 3600 for use, seconds in uses.items()}
        found["lost to failures"] = self.lost_hours
        return {**found, "rest": max(held - sum(found.values()), 0.0)}

    @property
    def queue_hours(self) -> float:
        """Hours from every submission and requeueing to the processes of the attempt that came of it."""
        waited, since = 0.0, None
        for event in self.events_of("submitted", "requeued", "started"):
            if event["event"] != "started":
                since = event.get("time")
            elif since is not None:
                waited, since = waited + max((event.get("time") or since) - since, 0.0), None
        return max(waited - self.spent.get("start", 0.0), 0.0) / 3600


def collect(runs: Sequence[RunDir]) -> list[Facts]:
    """Facts of runs, each with its own label: runs of one name get their folder's as well, those of a sweep are named
    by the settings that it varied."""
    sweeps = {folder: points_of(folder) for folder in dict.fromkeys(run.path.parent for run in runs)}
    points = [sweeps[run.path.parent].get(run.path.name, {}) for run in runs]
    labels = [name_of(point) or terminal.one_line(run.name) for run, point in zip(runs, points, strict=True)]
    for longer in (
        [f"{run.path.parent.name}/{label}" for run, label in zip(runs, labels, strict=True)],
        [str(run.path) for run in runs],
    ):
        labels = [other if labels.count(label) > 1 else label for label, other in zip(labels, longer, strict=True)]
    return [Facts(*each) for each in zip(runs, labels, points, strict=True)]


def summary_lines(run_dir: RunDir) -> list[str]:
    """What a run came to and where its files are, for the end of a command.

    The first line holds results, as far as there are any; the others are ``what  path or command``.
    """
    facts = Facts(run_dir, run_dir.name)
    results, early = _results(facts), facts.summary.get("stopped_early")
    if results and facts.started("made_up") is True:
        results.insert(0, "made-up images")
    sent = facts.last_event("uploaded", "upload_recovered", "upload_failed", "not_uploaded")
    send = f"{terminal.command('resume', run_dir.path)} sends it to {sent.get('url', '?')}"
    places: list[tuple[str, Path | str, bool]] = [
        ("pruned" if facts.pruned else "stopped early", terminal.one_line(early), isinstance(early, str)),
        ("run folder", run_dir.path, True),
        ("metrics", run_dir.metrics, run_dir.metrics.exists()),
        ("best checkpoint", run_dir.checkpoints / "best", (run_dir.checkpoints / "best").exists()),
        ("tensorboard", f"tensorboard --logdir {shlex.quote(str(run_dir.tensorboard))}", run_dir.tensorboard.is_dir()),
        ("wandb", terminal.command("sync", run_dir.path), any(run_dir.wandb.glob("offline-run-*"))),
        ("log book", terminal.command("report", run_dir.path), run_dir.metrics.exists()),
        ("not sent yet", send, sent.get("event") in ("upload_failed", "not_uploaded")),
    ]
    found = [" · ".join(results) if results else "No results yet."]
    return found + [f"{name:16} {place}" for name, place, exists in places if exists]


def _results(facts: Facts) -> list[str]:
    metrics, setbacks, best = facts.described, facts.setbacks, facts.best_val
    words = [f"{'DIVERGED: ' if setbacks.diverged else ''}{told}"] if (told := setbacks.in_words()) else []
    if best is not None and facts.best is not None:
        words.append(f"val {metrics.words(metrics.headline, facts.best)} (best, step {best['step']})")
    elif facts.val and best is None:
        words.append(f"val loss is not finite (step {facts.val[-1]['step']}): no model is the best")
    if facts.tested is not None:
        words.append(f"test {metrics.words(metrics.headline, facts.tested)}")
    if fileio.is_number(seconds := facts.summary.get("train_seconds")):
        words.append(terminal.duration(seconds))
    if fileio.is_number(speed := facts.summary.get("images_per_sec")):
        words.append(f"{speed:,.0f} images/s")
    return words


def best_of(runs: Sequence[Facts], most: int) -> Sequence[Facts]:
    """The runs themselves, or of many the best by validation."""
    return runs if len(runs) <= most else sorted(runs, key=lambda facts: facts.rank)[:most]


def submitted_points(sweep: Path) -> dict[str, list[str]]:
    """By run the overrides that it was submitted with, by ``sweep.json``; empty for other folders."""
    try:
        told = fileio.parse(fileio.read_text(sweep / "sweep.json"))
        return {str(item["run"]): [terminal.one_line(str(word)) for word in item["overrides"]] for item in told}
    except (OSError, ValueError, TypeError, KeyError):
        return {}


def points_of(sweep: Path) -> dict[str, dict[str, str]]:
    """By run the settings that a sweep varied, as they were written; empty for other folders."""
    words = submitted_points(sweep)
    if (sweep / SAMPLER).is_file():
        words = {name: [*own, *chosen_point(RunDir(sweep / name))] for name, own in words.items()}
    found = {run: {key: value for key, _, value in (each.partition("=") for each in own)} for run, own in words.items()}
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
