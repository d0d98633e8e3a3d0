"""A run's metrics: records, progress, a volunteer's share, and fewer points for charts."""

from __future__ import annotations

import bisect
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from operator import itemgetter
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from trainkit import fileio, terminal
from trainkit.config.components import LOSS, metrics_of
from trainkit.config.components import Metric as Metric
from trainkit.config.components import TaskMetrics as TaskMetrics
from trainkit.run.events import read_events
from trainkit.run.folder import RunDir

# Read some of the records of an enormous JSON lines file: evenly spread ones, and the extremes between those.

MOST_BYTES = 1 << 32
"""Ten million records: the updates of a year."""
_BLOCK = 1 << 24
_HEAD = 1 << 16
_STRETCH = 10
"""Stretches whose extremes are kept are this many times as long as those that one record stands for."""


def thinned(
    path: Path, most: int, always: Callable[[bytes], bool] = lambda line: False, extremes_of: str = ""
) -> tuple[list[dict[str, Any]], int, frozenset[int]]:
    """About ``most`` records of an enormous file, evenly spread, the last among them; all records of any other file.

    With them: how many records of the file one stands for, and the places of those that stand for themselves alone.

    Args:
        always: whether a line must not be left out; called for each, so it must be quick.
        extremes_of: a key: the records with its largest and its smallest value in each stretch of lines are kept, and
            the first one whose value is no finite number.

    Raises UserError where there is something that cannot be read.
    """
    taken: list[bytes] = []
    outliers: set[int] = set()  # places in `taken`
    number, last, rest = 0, b"", b""
    try:
        with fileio.open_regular(path) as file:
            fileio.require_size(file, MOST_BYTES)
            every = _every(file, most)
            while block := file.read(_BLOCK):
                *lines, rest = (rest + block).split(b"\n")
                even = {at for at, line in enumerate(lines, number) if at % every == 0 or always(line)}
                wanted = extremes_of.encode() if every > 1 else b""
                extremes = {number + at for at in _extremes(lines, wanted, _STRETCH * every)} if wanted else set()
                for place, at in enumerate(sorted(even | extremes), len(taken)):
                    taken.append(lines[at - number])
                    if at not in even:
                        outliers.add(place)
                number += len(lines)
                last = lines[-1] if lines and number - 1 not in even else b""
                rest = rest if len(rest) < fileio.LONGEST_LINE else b""  # neither a record nor worth its memory
    except FileNotFoundError:
        return [], 1, frozenset()
    except OSError as error:
        raise fileio.unreadable(path, error) from None
    lines_of = enumerate([*taken, last, rest])
    parsed = [(place, fileio.parse_object(line)) for place, line in lines_of if 0 < len(line) < fileio.LONGEST_LINE]
    whole = [(place, record) for place, record in parsed if record is not None]
    places = frozenset(at for at, (place, _) in enumerate(whole) if place in outliers)
    return [record for _, record in whole], every, places


def _extremes(lines: Sequence[bytes], key: bytes, stretch: int) -> set[int]:
    """Places of the lines with the smallest and the largest value of each stretch, and with the first that is no finite
    number."""
    value = re.compile(rb'"' + re.escape(key) + rb'": ([^,}]+)')
    found = [(at, _number(match[1])) for at, line in enumerate(lines) if (match := value.search(line))]
    places: set[int] = set()
    for begin in range(0, len(found), stretch):
        part = found[begin : begin + stretch]
        if not math.isfinite(sum(number for _, number in part)):
            places |= {at for at, number in [item for item in part if not math.isfinite(item[1])][:1]}
            part = [item for item in part if math.isfinite(item[1])]
        if part:
            places |= {min(part, key=itemgetter(1))[0], max(part, key=itemgetter(1))[0]}
    return places


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:  # null
        return math.nan


def _every(file: BinaryIO, most: int) -> int:
    """One of how many lines is to be read, by the length of the first ones."""
    size, head = os.fstat(file.fileno()).st_size, file.read(_HEAD)
    file.seek(0)
    lines = size / max(len(head) / max(head.count(b"\n"), 1), 1)
    return max(1, round(lines / most))


# ``metrics.jsonl``: ``{"time", "step", "epoch", "split", "loss", <metrics>, "lr", "images_per_sec", ...}``.
#
# ``step`` counts optimizer updates, ``epoch`` is a float. ``task.json`` describes the metrics (`described`).

SPLITS = ("train", "val", "test")
MOST = 10_000
"""Train records from which on a reader may do with fewer: no curve has more places, and a median hardly moves."""
TAIL_BYTES = 8192
"""The end of the file, from which the pace is taken."""
LONGEST = 1 << 26
"""Most bytes of the end that are searched for the newest records."""
FORECAST_EVENTS = ("started", "handed_back")
SETBACK_EVENTS = ("started", "skipped", "nonfinite", "rolled_back")
_LOOKED_AT = 1 << 16
"""Bytes of the end that are read at first; more where no validation is among them."""
_NAME = re.compile(r"[A-Za-z]\w{0,40}")
_MOST_METRICS = 50
_MOST_TRIES = 10_000
_NUMBERS = ("lr", "images_per_sec", "samples", "grad_norm", "max_memory_mb")
_NO_METRICS = TaskMetrics("", {})
"""Enough for reading when a step was recorded."""
_DIVERGED_SHARE = 0.5
"""The share of lost updates that nobody calls bad luck."""


def described(run_dir: RunDir) -> TaskMetrics:
    """The metrics of a run, from its ``task.json``; those of classification where that is missing or damaged."""
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
    content = {"headline": metrics.headline, "metrics": {name: asdict(each) for name, each in metrics.metrics.items()}}
    fileio.write(run_dir.task, json.dumps(content, indent=2) + "\n", run_dir.path)


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
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    metrics = described(run_dir)
    for raw in fileio.read_jsonl(run_dir.metrics, most=MOST_BYTES):
        record = typed_record(raw, metrics)
        if record is not None and split in (None, record["split"]):
            newest[record["split"], record["step"]] = record
    return _by_step(newest.values())


class Thinned(NamedTuple):
    """Records in order of step. Of the train records each stands for ``every``; of all others none is left out."""

    records: list[dict[str, Any]]
    every: int
    outliers: list[dict[str, Any]]
    """Further train records, in order of step: extremes of the loss between those, and where it is no number."""


def read_thinned(run_dir: RunDir, most: int = MOST) -> Thinned:
    """`read_metrics` for drawing and summing up: of an enormous file only some of the train records.

    Raises UserError where the file is there and cannot be read.
    """
    raw, every, extra = thinned(run_dir.metrics, most, lambda line: b'"split": "train"' not in line, extremes_of="loss")
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    outliers: dict[int, dict[str, Any]] = {}
    metrics, highest = described(run_dir), -1
    for place, item in enumerate(raw):
        record = typed_record(item, metrics)
        if record is None:
            continue
        step, is_train = record["step"], record["split"] == "train"
        if every > 1 and is_train:
            if step <= highest:  # a restart; what it does again need not be among what was picked before
                newest = {key: value for key, value in newest.items() if key[1] < step}
                outliers = {key: value for key, value in outliers.items() if key < step}
            highest = step
        if place in extra and is_train:
            outliers[step] = record
        else:
            newest[record["split"], step] = record
    return Thinned(_by_step(newest.values()), every, _by_step(outliers.values()))


def _by_step(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(records, key=lambda record: record["step"])


def best_evaluation(run_dir: RunDir) -> dict[str, Any] | None:
    """The newest record in ``evaluations.jsonl`` of the best weights on the test split, with the run's own settings."""
    own = {"split": "test", "checkpoint": "best", "settings": []}
    found = [raw for raw in fileio.read_jsonl(run_dir.evaluations) if all(raw.get(key) == own[key] for key in own)]
    return typed_record(found[-1], described(run_dir)) if found else None


def best_of(
    val: Iterable[dict[str, Any]], best_step: object, metrics: TaskMetrics | None = None
) -> dict[str, Any] | None:
    """The validation of the best model: that of ``best_step`` (summary.json), without one the best by the headline.

    One whose loss is null (it was NaN or infinite) is never the best, as in training.
    """
    metrics = metrics or metrics_of("classification")
    headline, sign = metrics.headline, 1 if metrics.metrics[metrics.headline].higher_is_better else -1
    finite = [record for record in val if fileio.is_number(record.get("loss", 0.0))]
    chosen = [record for record in finite if record["step"] == best_step]
    scored = [record for record in finite if fileio.is_number(record.get(headline))]
    return chosen[0] if chosen else max(scored, key=lambda record: sign * float(record[headline]), default=None)


# How far a run is, from the end of its metrics: a list of a thousand runs must not read all that they hold.


@dataclass(frozen=True)
class RunProgress:
    """The newest records of a run. After a restart these may be of earlier steps than those before them."""

    last: Mapping[str, Any] = field(default_factory=dict)
    """Of training or validation; empty if there is none. A test measures the best weights, not how far the run is."""
    val: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    seconds_per_step: float | None = None
    """Of late, validation and saving included; None where too little is known."""

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
        pace_since: when the newest attempt started, in seconds since 1970: the pace is taken from its records only.
            None: nobody asks for the pace.

    Raises:
        UserError: there is a file that cannot be read.
    """
    metrics, looked_at = described(run), _LOOKED_AT
    try:
        with fileio.open_regular(run.metrics) as file:
            size = fileio.require_size(file, MOST_BYTES)
            while True:
                end = fileio.end_of(file, looked_at)
                last = _newest(end, b"\n", ("train", "val"), metrics)
                found = {"train": last, "val": last}
                for split in {"train", "val"} - {last.get("split")}:
                    found[split] = _newest(end, f'"split": "{split}"'.encode(), (split,), metrics)
                if all(found.values()) or looked_at >= min(size, LONGEST):
                    break
                looked_at = min(16 * looked_at, LONGEST)
            if not last and size > LONGEST:
                raise OSError(None, f"There is no record in its last {LONGEST:,} bytes")
    except FileNotFoundError:
        return RunProgress()
    except OSError as error:
        raise fileio.unreadable(run.metrics, error) from None
    return RunProgress(last, found["val"], found["train"], None if pace_since is None else _pace(end, pace_since))


def _newest(content: bytes, holding: bytes, splits: Sequence[str], metrics: TaskMetrics) -> dict[str, Any]:
    """The last whole record of one of the splits, on a line that holds this; empty if there is none."""
    end = content.rfind(b"\n") + 1  # a line without its end is still being written
    for _ in range(_MOST_TRIES):
        if (found := content.rfind(holding, 0, end)) < 0:
            break
        begin = content.rfind(b"\n", 0, found) + 1
        record = _record(content[begin : content.find(b"\n", found)], metrics)
        if record is not None and record["split"] in splits:
            return record
        end = begin
    return {}


def _record(line: bytes, metrics: TaskMetrics) -> dict[str, Any] | None:
    raw = fileio.parse_object(line) if len(line) < fileio.LONGEST_LINE else None
    return typed_record(raw, metrics) if raw is not None else None


def _timed(line: bytes) -> tuple[float, int] | None:
    """When a step was recorded, and which; None for a line that is no record."""
    record = _record(line, _NO_METRICS)
    return (record["time"], record["step"]) if record is not None and "time" in record else None


def longest_pause(run: RunDir, since: float) -> float | None:
    """Most seconds between two records of late that were written since then; None where too little is known."""
    try:
        text = fileio.read_end(run.metrics, TAIL_BYTES)
    except OSError:
        return None
    timed = [item[0] for line in text.encode().split(b"\n") if (item := _timed(line)) is not None and item[0] >= since]
    return max((later - earlier for earlier, later in itertools.pairwise(timed)), default=None)


def _pace(content: bytes, since: float) -> float | None:
    """Seconds per step, from the first and the last record near the end: few of those between are looked at."""
    lines = content[max(len(content) - TAIL_BYTES, 0) :].split(b"\n")
    last = next((found for line in reversed(lines) if (found := _timed(line)) is not None), None)
    if last is None or last[0] < since:
        return None  # an attempt that has recorded nothing yet
    begin = bisect.bisect_left(lines, since, key=lambda line: (_timed(line) or (0.0, 0))[0])
    late = (found for line in lines[begin:] if (found := _timed(line)) is not None and found[0] >= since)
    first = next(late, last)
    if last[1] <= first[1] or last[0] <= first[0]:
        return None
    return (last[0] - first[0]) / (last[1] - first[1])


# When a run will have ended that needs more attempts than it has had: time limits end some, and each start costs.


@dataclass(frozen=True)
class Forecast:
    """Until the training's end."""

    seconds: float
    """From now."""
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
        training_seconds: as long as it still has to train, at its present pace.
        now: seconds since 1970.
        attempt_seconds: as long as its time limit allows an attempt, from its first update on; infinite without one.
        runs: an attempt does now; else it waits for the next.
    """
    lasted, gaps, limited = [], [], attempt_seconds
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
    # SLURM sends it early, up to a minute; what ended in half of the time was something else.
    whole = [seconds for seconds in lasted if seconds >= max(lasted) / 2]
    if len(whole) > 1 if math.isinf(limited) else whole and max(whole) >= limited / 2:
        limited = sum(whole) / len(whole)
    gap = sum(gaps) / len(gaps) if gaps else None
    used = now - begun if runs and begun is not None else 0.0
    left = max(limited - used, 0.0) if runs else 0.0
    restarts = 0 if training_seconds <= left and runs else max(math.ceil((training_seconds - left) / limited), 1)
    waited = max((gap or 0.0) - (now - ended), 0.0) if not runs and ended is not None else gap or 0.0
    more = waited + (restarts - 1) * (gap or 0.0) if restarts else 0.0
    return Forecast(training_seconds + more, restarts, gap)


# Updates that came to nothing, and a loss that is no number any more: whether a run that looks fine has diverged.


@dataclass(frozen=True)
class Divergence:
    """What a run has lost to gradients and losses that were not finite."""

    nan_from: int | None = None
    """Step of the train record from which on the loss is no number, to the newest one; None if the newest is one."""
    skipped: int = 0
    """Updates that fp16 skipped because a gradient overflowed, to try the next data with a smaller scale."""
    nonfinite: int = 0
    """Other updates that came to nothing because a gradient was infinite or not a number."""
    updates: int = 0
    """All that were tried, these among them."""
    rollbacks: int = 0

    @property
    def lost(self) -> int:
        """Updates that came to nothing."""
        return self.skipped + self.nonfinite

    @property
    def diverged(self) -> bool:
        """Whether what was trained is not worth its numbers."""
        return self.nan_from is not None or (self.lost > 2 and self.lost >= _DIVERGED_SHARE * self.updates)

    def in_words(self) -> str:
        """``loss nan from step 10, 38 of 40 updates skipped``; empty where all went well."""
        words = [f"loss nan from step {self.nan_from}"] * (self.nan_from is not None)
        words += [f"{self.lost} of {self.updates} updates skipped"] * (self.lost > 0)
        words += [f"rolled back {self.rollbacks} time{'s' * (self.rollbacks > 1)}"] * (self.rollbacks > 0)
        return ", ".join(words)


def setbacks_of(events: Iterable[Mapping[str, Any]], train: Sequence[Mapping[str, Any]], steps: int) -> Divergence:
    """The setbacks in a run's events (of `SETBACK_EVENTS`) and its train records, in order of step.

    What was lost and then done again, after a restart, counts once.

    Args:
        steps: updates that were done.
    """
    lost: list[Mapping[str, Any]] = []
    rollbacks = undone = 0
    for event in events:
        kind, step = event["event"], event.get("step")
        if kind not in SETBACK_EVENTS or not isinstance(step, int):
            continue
        if kind == "started":
            # fp16's skips carry the step before them, which the checkpoint has; others their own.
            lost = [item for item in lost if item["step"] <= step]
        elif kind == "rolled_back":
            rollbacks += 1
            before = event.get("from_step")
            undone += max(before - step, 0) if isinstance(before, int) else 0
        # The last skip of too many in a row is told a second time, as nonfinite, with its loss.
        elif kind == "skipped" or not (lost and lost[-1]["event"] == "skipped" and lost[-1]["step"] == step):
            lost.append(event)
    skipped = sum(item["event"] == "skipped" for item in lost)
    nan_from = None
    for record in reversed(train):
        if "loss" not in record or record["loss"] is not None:
            break
        nan_from = record["step"]
    # An update that fp16 skips is none of the steps.
    return Divergence(nan_from, skipped, len(lost) - skipped, steps + skipped + undone, rollbacks)


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


# ``contributions.json``: what was contributed to a collaborative run, by name.
#
# The peer that answers for the run counts what was averaged, round by round; what peers say of themselves is not in
# it. It goes on over restarts.

MOST_NAMES = 10_000
"""An open run may meet many; those that come later are counted together."""
OTHERS = "(others)"


@dataclass(frozen=True)
class Contribution:
    """What went into the model under one name. Several peers may share a name."""

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
    """All names of a run."""

    def __init__(self, known: Iterable[Contribution] = ()) -> None:
        self._known = {item.name: item for item in known}

    @classmethod
    def of(cls, run: RunDir) -> Contributions:
        """As the run's file has it; of one without, or with a broken one, none."""
        return cls(typed_contributions(fileio.read_object(file_of(run)).get("contributions")))

    def add(self, seconds: float, counted: Iterable[Counted]) -> None:
        """Count one round of ``seconds``."""
        seen: set[str] = set()
        for item in counted:
            if not (fileio.is_number(item.samples) and item.samples > 0):
                continue
            name = terminal.name(item.name) or OTHERS
            if name not in self._known and len(self._known) >= MOST_NAMES:
                name = OTHERS
            before = self._known.get(name, Contribution(name))
            self._known[name] = replace(
                before,
                rounds=before.rounds + (name not in seen),
                samples=before.samples + item.samples,
                seconds=before.seconds + seconds,
                bytes=before.bytes + max(item.bytes, 0),
            )
            seen.add(name)

    def best_first(self) -> list[Contribution]:
        """Most samples first."""
        return sorted(self._known.values(), key=lambda item: (-item.samples, item.name))

    def write(self, run: RunDir) -> None:
        """Write the file anew; a reader finds it whole. Raises OSError."""
        fileio.write(file_of(run), json.dumps({"contributions": self.rows()}, allow_nan=False) + "\n", run.path)

    def rows(self) -> list[dict[str, Any]]:
        """As plain values, best first."""
        return [asdict(item) for item in self.best_first()]


def file_of(run: RunDir) -> Path:
    """Where a run has it."""
    return run.path / "contributions.json"


def typed_contributions(rows: Any) -> list[Contribution]:
    """Of what a file or a message holds, that which can be one, each name once; text is one line."""
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
