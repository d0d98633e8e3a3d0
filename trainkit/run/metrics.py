"""A run's metrics: its records, whole or thinned, and what they say of its progress, its end and its divergence.

A record is a line of ``metrics.jsonl``: ``{"time", "step", "epoch", "split", "loss", <metrics>, "lr", ...}``. ``step``
counts optimizer updates, ``epoch`` is a float, and ``task.json`` describes the metrics (`described`).
``contributions.json`` of a collaborative run counts, by name, what went into the model (`Contributions`).
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainkit import fileio, terminal
from trainkit.config.components import LOSS, metrics_of
from trainkit.config.components import Metric as Metric
from trainkit.config.components import TaskMetrics as TaskMetrics
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir

MOST_BYTES = 1 << 32
"""Ten million records: the updates of a year."""
_HEAD = 1 << 16
_STRETCH = 10
"""Extremes are kept in stretches this many times as long as those that one record stands for."""
SPLITS = ("train", "val", "test")
MOST = 10_000
"""The number of train records beyond which a reader may thin them: no curve has more places."""
TAIL_BYTES = 8192
"""The end of the file, from which the pace is taken."""
LONGEST = 1 << 26
"""Most bytes of the end that are searched for the newest records."""
FORECAST_EVENTS = ("started", "handed_back")
SETBACK_EVENTS = ("started", "skipped", "nonfinite", "rolled_back")
_LOOKED_AT = 1 << 16
"""Bytes of the end that are read at first; more if no validation is among them."""
_NAME = re.compile(r"[A-Za-z]\w{0,40}")
_MOST_METRICS, _MOST_CLASSES = 50, 4000
_NUMBERS = ("lr", "images_per_sec", "image_size", "samples", "grad_norm", "max_memory_mb")
_DIVERGED_SHARE = 0.5
"""The share of lost updates that nobody calls bad luck."""
MOST_NAMES = 10_000
"""Names in ``contributions.json``; an open run may meet more, which are counted together as `OTHERS`."""
OTHERS = "(others)"
KWH = ("gpu_kwh", "cpu_kwh")


# Records


def thinned(
    path: Path, most: float, always: Callable[[bytes], bool] = lambda line: False, extremes_of: str = ""
) -> tuple[list[tuple[dict[str, Any], bool]], int]:
    """About ``most`` records of an enormous file, evenly spread, the last among them; all records of any other file.

    Returns each record with whether it is an outlier, which stands for itself alone; and how many records of the file
    each of the others stands for.

    Args:
        always: whether a line must not be left out; called for each, so it must be quick.
        extremes_of: a key: outliers are the records with its largest and its smallest value in each stretch of lines,
            and the first one whose value is no finite number.

    Raises UserError where there is something that cannot be read.
    """
    taken: dict[int, tuple[bytes, bool]] = {}  # by their number in the file
    stretch: list[tuple[float, int, bytes]] = []
    value = re.compile(rb'"' + re.escape(extremes_of.encode()) + rb'": ([^,}]+)')
    newest: dict[int, tuple[bytes, bool]] = {}
    try:
        with fileio.open_regular(path) as file:
            size, head = fileio.require_size(file, MOST_BYTES), file.read(_HEAD)
            lines_there = size / max(len(head) / max(head.count(b"\n"), 1), 1)  # by the length of the first ones
            every = max(1, round(lines_there / most))
            file.seek(0)
            for at, line in enumerate(fileio.lines_of(file)):
                if at % every == 0 or always(line):
                    taken[at] = line, False
                elif extremes_of and (found := value.search(line)):
                    stretch.append((_number(found[1]), at, line))
                if line.endswith(b"\n"):  # else it is still being written
                    newest = {at: (line, False)}
                if at % (_STRETCH * every) == 0:
                    taken |= _extremes(stretch)
                    stretch.clear()
    except FileNotFoundError:
        return [], 1
    except OSError as error:
        raise fileio.unreadable(path, error) from None
    taken |= _extremes(stretch) | newest
    parsed = [(fileio.parse_object(line), is_outlier) for _, (line, is_outlier) in sorted(taken.items())]
    return [(record, is_outlier) for record, is_outlier in parsed if record is not None], every


def _extremes(stretch: Sequence[tuple[float, int, bytes]]) -> dict[int, tuple[bytes, bool]]:
    """Of values with their lines, the lines of the smallest, the largest, and the first one that is not finite."""
    finite = [item for item in stretch if math.isfinite(item[0])]
    odd = [min(finite), max(finite)] if finite else []
    odd += [item for item in stretch if not math.isfinite(item[0])][:1]
    return {at: (line, True) for _, at, line in odd}


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:  # null
        return math.nan


def described(run_dir: RunDir) -> TaskMetrics:
    """The metrics of a run, from its ``task.json``; those of classification if that is missing or damaged."""
    told = fileio.read_object(run_dir.task)
    headline, items = told.get("headline"), told.get("metrics")
    found = {"loss": LOSS}
    for name, about in list(items.items())[:_MOST_METRICS] if isinstance(items, dict) else ():
        if _NAME.fullmatch(name) and isinstance(about, dict):
            unit, label = (terminal.one_line(about.get(key) or "", 40) for key in ("unit", "label"))
            found[name] = Metric(unit, about.get("higher_is_better") is not False, label or name)
    if not isinstance(headline, str) or headline not in found:
        return metrics_of("classification")
    return TaskMetrics(headline, found)


def describe(run_dir: RunDir, metrics: TaskMetrics) -> None:
    """Write ``task.json``, for `described`."""
    fileio.write(run_dir.task, json.dumps(asdict(metrics), indent=2) + "\n", run_dir.path)


def typed_record(raw: Mapping[str, Any], metrics: TaskMetrics) -> dict[str, Any] | None:
    """A record that readers may rely on; None without a split and a step.

    ``step`` is a count, everything measured a finite number or null (a loss that has diverged), percentages are 0 to
    100, other text is one line. Fields that are none of this are left out.
    """
    if raw.get("split") not in SPLITS or not fileio.is_whole(raw.get("step")):
        return None
    record: dict[str, Any] = {}
    for key, value in raw.items():
        metric = metrics.find(key)
        if key == "time":
            fits = fileio.is_time(value)
        elif key == "epoch":
            fits = fileio.is_number(value) and 0 <= value < 1e9
        elif metric is not None and metric.unit == "%":
            fits = value is None or (fileio.is_number(value) and metric.fits(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            fits, value = True, value if fileio.is_number(value) else None
        else:
            fits = value is None or (isinstance(value, str) and key not in _NUMBERS and metric is None)
            value = fileio.plain(value)
        if fits:
            record[key] = value
    return record


def read_metrics(run_dir: RunDir, split: str | None = None) -> list[dict[str, Any]]:
    """Records in order of step, of one split or of all; after a restart the newer record of a step counts.

    Raises UserError where the file is there and cannot be read.
    """
    return [record for record in read_thinned(run_dir, math.inf).records if split in (None, record["split"])]


class Thinned(NamedTuple):
    """Records in order of step. Of the train records each stands for ``every``; of all others none is left out."""

    records: list[dict[str, Any]]
    every: int
    outliers: list[dict[str, Any]]
    """Further train records, in order of step: extremes of the loss between those, and where it is no number."""


def read_thinned(run_dir: RunDir, most: float = MOST) -> Thinned:
    """`read_metrics` for drawing and summing up: of an enormous file only some of the train records.

    Raises UserError where the file is there and cannot be read.
    """
    raw, every = thinned(run_dir.metrics, most, lambda line: b'"split": "train"' not in line, extremes_of="loss")
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    outliers: dict[int, dict[str, Any]] = {}
    metrics, highest = described(run_dir), -1
    for item, is_outlier in raw:
        if (record := typed_record(item, metrics)) is None:
            continue
        step, is_train = record["step"], record["split"] == "train"
        if every > 1 and is_train:
            if step <= highest:  # a restart; what it does again need not be among what was picked before
                newest = {key: value for key, value in newest.items() if key[1] < step}
                outliers = {key: value for key, value in outliers.items() if key < step}
            highest = step
        if is_outlier and is_train:
            outliers[step] = record
        else:
            newest[record["split"], step] = record
    by_step = [sorted(found, key=lambda record: record["step"]) for found in (newest.values(), outliers.values())]
    return Thinned(by_step[0], every, by_step[1])


def best_evaluation(run_dir: RunDir) -> dict[str, Any] | None:
    """The newest record in ``evaluations.jsonl`` of the best weights on the test split, with the run's own settings."""
    own = {"split": "test", "checkpoint": "best", "settings": []}
    found = [raw for raw in fileio.read_jsonl(run_dir.evaluations) if own.items() <= raw.items()]
    return typed_record(found[-1], described(run_dir)) if found else None


def best_of(val: Iterable[dict[str, Any]], best_step: object, metrics: TaskMetrics) -> dict[str, Any] | None:
    """The validation of the best model: that of ``best_step`` (summary.json), without one the best by the headline.

    One whose loss is null (it was NaN or infinite) is never the best, as in training.
    """
    headline, sign = metrics.headline, 1 if metrics.metrics[metrics.headline].higher_is_better else -1
    finite = [record for record in val if fileio.is_number(record.get("loss", 0.0))]
    chosen = [record for record in finite if record["step"] == best_step]
    scored = [record for record in finite if fileio.is_number(record.get(headline))]
    return chosen[0] if chosen else max(scored, key=lambda record: sign * float(record[headline]), default=None)


def evaluation_of(told: Mapping[str, Any]) -> str:
    """``test, step 400``: the evaluation that a file is of."""
    step = told.get("step")
    return terminal.one_line(told.get("split", "?"), 20) + (f", step {step}" if fileio.is_whole(step) else "")


class TakenFor(NamedTuple):
    """``confusion.json``, as far as it can be true."""

    evaluation: str
    classes: list[str]
    counts: Counter[tuple[int, int]]
    """(class, what it was taken for) -> how often."""


def confusion_of(run_dir: RunDir) -> TakenFor:
    """Which class the best weights take for which; empty if the file is missing or damaged."""
    told = fileio.read_object(run_dir.confusion)
    names, items = told.get("classes"), told.get("raw") or told.get("ema")
    classes = [str(name) for name in names[:_MOST_CLASSES]] if isinstance(names, list) else []
    counts = Counter[tuple[int, int]]()
    for item in items if isinstance(items, list) else ():
        if isinstance(item, list) and len(item) == 3 and all(map(fileio.is_whole, item)):
            label, predicted, count = item
            if max(label, predicted) < len(classes) and count:
                counts[label, predicted] += count
    return TakenFor(evaluation_of(told), classes, counts)


def last_sample(file: Path) -> dict[str, Any]:
    """The newest hardware sample in a host's file; empty if there is none."""
    return next(reversed(fileio.last_records(file)), {})


def energy_of(run: RunDir) -> dict[str, float] | None:
    """``gpu_kwh`` and ``cpu_kwh`` of a run over all hosts whose samples are in its folder; None: not measured."""
    samples = [last_sample(file) for file in sorted(run.path.glob("system-*.jsonl"))]
    found = {key: [sample[key] for sample in samples if fileio.is_number(sample.get(key))] for key in KWH}
    return {key: round(sum(values), 6) for key, values in found.items() if values} or None


# How far a run is, and when it ends


@dataclass(frozen=True)
class RunProgress:
    """The newest records of a run. After a restart these may be of earlier steps than those before them."""

    last: Mapping[str, Any] = field(default_factory=dict)
    """Of training or validation; empty if there is none. A test measures the best weights, not how far the run is."""
    val: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    seconds_per_step: float | None = None
    """Of late, validation and saving included; None where too little is known."""
    longest_pause: float | None = None
    """Most seconds between two records of late; None where too little is known."""

    @property
    def step(self) -> int | None:
        return self.last.get("step")

    def seconds_to(self, total_steps: object) -> float | None:
        """From the last record to the end of the training, without pauses in the queue; None if that is unknown."""
        if self.seconds_per_step is None or self.step is None or not fileio.is_whole(total_steps):
            return None
        return max(total_steps - self.step, 0) * self.seconds_per_step


def progress_of(run: RunDir, *, pace_since: float | None = None) -> RunProgress:
    """Read the end of a run's metrics: few lines, for a list of a thousand runs.

    Args:
        pace_since: when the newest attempt started, in seconds since 1970: pace and pause are taken from its records
            only. None: nobody asks for them.

    Raises:
        UserError: there is a file that cannot be read.
    """
    metrics = described(run)
    try:
        with fileio.open_regular(run.metrics) as file:
            size = fileio.require_size(file, MOST_BYTES)
            for looked_at in (_LOOKED_AT, LONGEST):
                end = fileio.end_of(file, looked_at)
                newest = _newest(end, metrics)
                if len(newest) == 2 or looked_at >= size:
                    break
            if not newest and size > LONGEST:
                raise OSError(None, f"There is no record in its last {LONGEST:,} bytes")
    except FileNotFoundError:
        return RunProgress()
    except OSError as error:
        raise fileio.unreadable(run.metrics, error) from None
    pace, recent = None, _recent(end, pace_since) if pace_since is not None else []
    if len(recent) > 1:
        seconds, steps = recent[-1][0] - recent[0][0], recent[-1][1] - recent[0][1]
        pace = seconds / steps if steps > 0 and seconds > 0 else None
    pause = max((later[0] - earlier[0] for earlier, later in itertools.pairwise(recent)), default=None)
    last = next(iter(newest.values()), {})
    return RunProgress(last, newest.get("val", {}), newest.get("train", {}), pace, pause)


def _newest(content: bytes, metrics: TaskMetrics) -> dict[str, dict[str, Any]]:
    """The last whole record of training and that of validation, the newer one first."""
    wanted = {split: f'"split": "{split}"'.encode() for split in ("train", "val")}
    newest: dict[str, dict[str, Any]] = {}
    for line in reversed(content.split(b"\n")[:-1]):  # a line without its end is still being written
        if any(mark in line for mark in wanted.values()):
            record = _record(line, metrics)
            if record is not None and wanted.pop(record["split"], b""):
                newest[record["split"]] = record
    return newest


def _record(line: bytes, metrics: TaskMetrics) -> dict[str, Any] | None:
    raw = fileio.parse_object(line) if len(line) < fileio.LONGEST_LINE else None
    return typed_record(raw, metrics) if raw is not None else None


def _recent(content: bytes, since: float) -> list[tuple[float, int]]:
    """Time and step of the records near the end that were written since then."""
    records = [_record(line, TaskMetrics("", {})) for line in content[-TAIL_BYTES:].split(b"\n")]
    return [(each["time"], each["step"]) for each in records if each is not None and each.get("time", -1.0) >= since]


class Forecast(NamedTuple):
    """When a run will end that may need more attempts: time limits end some, and each start costs."""

    seconds: float
    """From now to the end of the training."""
    restarts: int
    """Among them; each is taken to cost what those before have cost."""
    restart_seconds: float | None
    """From the end of one attempt to the first update of the next, waits in the queue included; None: not known yet."""


def forecast(
    events: Sequence[Mapping[str, Any]], training_seconds: float, *, now: float, attempt_seconds: float, runs: bool
) -> Forecast:
    """Predict a run's end from its past.

    Args:
        events: of `FORECAST_EVENTS`, oldest first.
        training_seconds: what it still has to train, at its present pace.
        now: seconds since 1970.
        attempt_seconds: what its time limit allows an attempt, from its first update on; infinite without one.
        runs: an attempt runs now; else it waits for the next.
    """
    gaps, lasted = list[float](), list[float]()
    begun: float | None = None
    ended: float | None = None
    for event in events:
        when = event.get("time")
        if not isinstance(when, float | int):
            continue
        if event["event"] == "started":
            if ended is not None:
                gaps.append(when - ended)
            begun, ended = when, None
        elif begun is not None and ended is None:
            ended = when
            if "SIGUSR2" in event.get("signals", ()):  # sent by the time limit, and by few preemptions
                lasted.append(ended - begun)
    if math.isinf(attempt_seconds) and len(lasted) > 1:  # of a template nobody knows the limit but by what has been
        attempt_seconds = max(lasted)
    gap = sum(gaps) / len(gaps) if gaps else None
    used = now - begun if runs and begun is not None else 0.0
    left = max(attempt_seconds - used, 0.0) if runs else 0.0
    beyond = training_seconds - left
    restarts = 0 if runs and beyond <= 0 else max(math.ceil(beyond / attempt_seconds), 1)
    waited = max((gap or 0.0) - (now - ended), 0.0) if not runs and ended is not None else gap or 0.0
    more = waited + (restarts - 1) * (gap or 0.0) if restarts else 0.0
    return Forecast(training_seconds + more, restarts, gap)


# Whether it has diverged


class Divergence(NamedTuple):
    """What a run has lost to gradients and losses that were not finite."""

    nan_from: int | None
    """Step of the train record from which on the loss is no number, to the newest one; None if the newest is one."""
    lost: int
    """Updates that came to nothing: fp16 skipped them, or a gradient was infinite or not a number."""
    updates: int
    """All that were tried, these among them."""
    rollbacks: int

    @property
    def diverged(self) -> bool:
        """Whether what was trained is not worth its numbers."""
        return self.nan_from is not None or (self.lost > 2 and self.lost >= _DIVERGED_SHARE * self.updates)

    def in_words(self) -> str:
        """``loss nan from step 10, 38 of 40 updates skipped``; empty if all went well."""
        words = [f"loss nan from step {self.nan_from}"] * (self.nan_from is not None)
        words += [f"{self.lost} of {self.updates} updates skipped"] * (self.lost > 0)
        words += [f"rolled back {terminal.plural(self.rollbacks, 'time')}"] * (self.rollbacks > 0)
        return ", ".join(words)


def setbacks_of(events: Iterable[Mapping[str, Any]], train: Sequence[Mapping[str, Any]], steps: int) -> Divergence:
    """The setbacks in a run's events (of `SETBACK_EVENTS`) and its train records, in order of step.

    What was lost and then done again, after a restart, counts once.

    Args:
        steps: updates that were done.
    """
    lost: list[tuple[int, str]] = []
    rollbacks = undone = 0
    for event in events:
        kind, step = event["event"], event.get("step")
        if kind not in SETBACK_EVENTS or not isinstance(step, int):
            continue
        if kind == "started":
            # fp16's skips carry the step before them, which the checkpoint has; others their own.
            lost = [item for item in lost if item[0] <= step]
        elif kind == "rolled_back":
            rollbacks += 1
            before = event.get("from_step")
            undone += max(before - step, 0) if isinstance(before, int) else 0
        elif kind == "skipped" or lost[-1:] != [(step, "skipped")]:
            # The last skip of too many in a row has a second event, nonfinite, with its loss.
            lost.append((step, kind))
    nan = itertools.takewhile(lambda record: record.get("loss", 0.0) is None, reversed(train))
    skipped = sum(kind == "skipped" for _, kind in lost)  # by fp16, which does not count them as steps
    return Divergence(min((each["step"] for each in nan), default=None), len(lost), steps + skipped + undone, rollbacks)


def steps_done(events: Iterable[Mapping[str, Any]], records: Iterable[Mapping[str, Any]]) -> int:
    """Optimizer updates of a run, by its records and by what it has saved: the last ones may be in no record yet."""
    saved = (event for event in events if event["event"] == "saved" and event.get("step") is not None)
    return max((item["step"] for item in (*records, *saved)), default=0)


def divergence_of(run: RunDir) -> str:
    """How a run has diverged, in words; empty if it has not. Reads all of its records."""
    train = [record for record in read_thinned(run).records if record["split"] == "train"]
    events = read_events(run, (*SETBACK_EVENTS, "saved"))
    setbacks = setbacks_of(events, train, steps_done(events, train))
    return setbacks.in_words() if setbacks.diverged else ""


# Who has contributed


@dataclass
class Contribution:
    """What went into the model of a collaborative run under one name. Several peers may share a name."""

    name: str
    rounds: int = 0
    """Rounds in which something of it was averaged."""
    samples: float = 0.0
    """By their weight in the averages, after caps."""
    seconds: float = 0.0
    """Length of those rounds, for each of its peers."""
    bytes: int = 0
    """Bytes of it that the counting peer has received."""


@dataclass(frozen=True)
class Counted:
    """What one peer gave to one round."""

    name: str
    samples: float
    bytes: int = 0


class Contributions:
    """``contributions.json``: what was averaged, by name, as the peer that answers for the run counts it."""

    def __init__(self, known: Iterable[Contribution] = ()) -> None:
        self._known = {item.name: item for item in known}

    @classmethod
    def of(cls, run: RunDir) -> Contributions:
        """Those in the run's file; none if it is missing or damaged."""
        return cls(typed_contributions(fileio.read_object(run.contributions).get("contributions")))

    def add(self, seconds: float, counted: Iterable[Counted]) -> None:
        """Count one round of ``seconds``."""
        seen: set[str] = set()
        for item in counted:
            if not (fileio.is_number(item.samples) and item.samples > 0):
                continue
            name = terminal.name(item.name) or OTHERS
            if name not in self._known and len(self._known) >= MOST_NAMES:
                name = OTHERS
            total = self._known.setdefault(name, Contribution(name))
            total.rounds += name not in seen
            total.samples += item.samples
            total.seconds += seconds
            total.bytes += max(item.bytes, 0)
            seen.add(name)

    def withdraw(self, name: str) -> None:
        """Who has cheated has contributed nothing."""
        self._known.pop(name, None)

    def best_first(self) -> list[Contribution]:
        """Most samples first."""
        return sorted(self._known.values(), key=lambda item: (-item.samples, item.name))

    def rows(self) -> list[dict[str, Any]]:
        """As plain values, best first."""
        return [asdict(item) for item in self.best_first()]

    def write(self, run: RunDir) -> None:
        """Replace the run's file. Raises OSError."""
        content = json.dumps({"contributions": self.rows()}, allow_nan=False)
        fileio.write(run.contributions, content + "\n", run.path)


def typed_contributions(rows: Any) -> list[Contribution]:
    """The rows of a file or a message that are contributions, each name once; text is one line."""
    found: dict[str, Contribution] = {}
    for row in rows[: MOST_NAMES + 1] if isinstance(rows, list | tuple) else ():
        if not isinstance(row, Mapping) or not isinstance(row.get("name"), str):
            continue
        numbers: list[Any] = [row.get(key) for key in ("rounds", "samples", "seconds", "bytes")]
        if all(fileio.is_number(value) and value >= 0 for value in numbers):
            rounds, samples, seconds, size = numbers
            name = terminal.name(row["name"])
            found.setdefault(name, Contribution(name, int(rounds), float(samples), float(seconds), int(size)))
    return list(found.values())
