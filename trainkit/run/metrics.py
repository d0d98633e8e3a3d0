"""Metrics of a run: its records, whole or thinned.

A record is a line of ``metrics.jsonl``: ``{"time", "step", "epoch", "split", "loss", <metrics>, "lr", ...}``. ``step``
counts optimizer updates, ``epoch`` is a float, and ``task.json`` describes the metrics (`task_metrics`).
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

from trainkit.common import fileio, jsonl, terminal
from trainkit.config.task_metrics import LOSS, Metric, TaskMetrics, metrics_of
from trainkit.run.folder import RunDir

MOST_BYTES = 1 << 32
"""Ten million records: the updates of a year."""
_HEAD = 1 << 16
_STRETCH = 10
"""Extremes are kept in stretches this many times as long as those that one record stands for."""
SPLITS = ("train", "val", "test")
MOST = 10_000
"""The number of train records beyond which a reader may thin them: no curve has more places."""
_NAME = re.compile(r"[A-Za-z]\w{0,40}")
_MOST_METRICS = 50
_MOST_CLASSES = 4000
_NUMBERS = ("lr", "images_per_sec", "image_size", "samples", "grad_norm", "max_memory_mb")
KWH = ("gpu_kwh", "cpu_kwh")


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
            size = fileio.require_size(file, MOST_BYTES)
            head = file.read(_HEAD)
            lines_there = size / max(len(head) / max(head.count(b"\n"), 1), 1)  # by the length of the first ones
            every = max(1, round(lines_there / most))
            file.seek(0)
            for at, line in enumerate(jsonl.lines_of(file)):
                found = value.search(line) if extremes_of else None
                if at % every == 0 or always(line):
                    taken[at] = line, False
                elif found:
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
    parsed: list[tuple[dict[str, Any], bool]] = []
    for _, (line, is_outlier) in sorted(taken.items()):
        record = fileio.parse_object(line)
        if record is not None:
            parsed.append((record, is_outlier))
    return parsed, every


def _extremes(stretch: Sequence[tuple[float, int, bytes]]) -> dict[int, tuple[bytes, bool]]:
    """Return the lines of the smallest value, the largest, and the first one that is not finite."""
    finite: list[tuple[float, int, bytes]] = []
    odd: list[tuple[float, int, bytes]] = []
    for item in stretch:
        if math.isfinite(item[0]):
            finite.append(item)
        elif not odd:
            odd.append(item)
    if finite:
        odd += [min(finite), max(finite)]
    return {at: (line, True) for _, at, line in odd}


def _number(text: bytes) -> float:
    try:
        return float(text)
    except ValueError:  # null
        return math.nan


def task_metrics(run_dir: RunDir) -> TaskMetrics:
    """The metrics of a run, from its ``task.json``; those of classification if that is missing or damaged."""
    told = fileio.read_object(run_dir.task)
    headline = told.get("headline")
    items = told.get("metrics")
    found = {"loss": LOSS}
    for name, about in list(items.items())[:_MOST_METRICS] if isinstance(items, dict) else ():
        if _NAME.fullmatch(name) and isinstance(about, dict):
            unit = terminal.one_line(about.get("unit") or "", 40)
            label = terminal.one_line(about.get("label") or name, 40)
            found[name] = Metric(unit, about.get("higher_is_better") is not False, label)
    if not isinstance(headline, str) or headline not in found:
        return metrics_of("classification")
    return TaskMetrics(headline, found)


_NOT_MEASURED = ("step", "epoch", "time", "split", "mfu", "round", "peers", *_NUMBERS)
_PARTS = re.compile("ema_|seconds_")
_LESS_IS_BETTER = re.compile(r"loss|err|perplexity|ppl|mae|mse|nll|fid|lpips|wer|cer|bpd|bpc|kl", re.IGNORECASE)


def measured_in(record: Mapping[str, Any]) -> list[str]:
    """Return the names of a record's metrics, also of those that no ``task.json`` describes yet."""
    found = []
    for name, value in record.items():
        if jsonl.is_number(value) and name not in _NOT_MEASURED and _PARTS.match(name) is None:
            found.append(name)
    return found


def metric_named(name: str) -> Metric:
    """A metric of which only the name is known: of losses, errors and distances less is better."""
    return Metric("", _LESS_IS_BETTER.search(name) is None, name)


def describe_names(run_dir: RunDir, names: Iterable[str], headline: str = "") -> None:
    """Add metrics to ``task.json`` by their names, as far as they are not there.

    Args:
        headline: the one to judge by, where the file does not say it yet; empty: the loss.
    """
    known = TaskMetrics(headline or "loss", {"loss": LOSS})
    if run_dir.task.is_file():
        known = task_metrics(run_dir)
    wanted = [name for name in (known.headline, *names) if _NAME.fullmatch(name) and name not in _NOT_MEASURED]
    new = {name: metric_named(name) for name in wanted if name not in known.metrics}
    if new or not run_dir.task.is_file():
        describe(run_dir, TaskMetrics(known.headline, {**known.metrics, **new}))


def describe(run_dir: RunDir, metrics: TaskMetrics) -> None:
    """Write ``task.json``, for `task_metrics`."""
    fileio.write(run_dir.task, json.dumps(asdict(metrics), indent=2) + "\n", run_dir.path)


def typed_record(raw: Mapping[str, Any], metrics: TaskMetrics) -> dict[str, Any] | None:
    """A record that readers may rely on; None without a split and a step.

    ``step`` is a count, everything measured a finite number or null (a loss that has diverged), percentages are 0 to
    100, other text is one line. Fields that are none of this are left out.
    """
    if raw.get("split") not in SPLITS or not jsonl.is_whole(raw.get("step")):
        return None
    record: dict[str, Any] = {}
    for key, value in raw.items():
        metric = metrics.find(key)
        if key == "time":
            fits = jsonl.is_time(value)
        elif key == "epoch":
            fits = jsonl.is_number(value) and 0 <= value < 1e9
        elif metric is not None and metric.unit == "%":
            fits = value is None or (jsonl.is_number(value) and metric.fits(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            fits = True
        else:
            fits = value is None or (isinstance(value, str) and key not in _NUMBERS and metric is None)
        if fits:
            record[key] = jsonl.plain(value)
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
    metrics = task_metrics(run_dir)
    highest = -1
    for item, is_outlier in raw:
        record = typed_record(item, metrics)
        if record is None:
            continue
        step = record["step"]
        is_train = record["split"] == "train"
        if every > 1 and is_train:
            if step <= highest:  # a restart; what it does again need not be among what was picked before
                newest = {key: value for key, value in newest.items() if key[1] < step}
                outliers = {key: value for key, value in outliers.items() if key < step}
            highest = step
        if is_outlier and is_train:
            outliers[step] = record
        else:
            newest[record["split"], step] = record
    step_of = itemgetter("step")
    return Thinned(sorted(newest.values(), key=step_of), every, sorted(outliers.values(), key=step_of))


def best_evaluation(run_dir: RunDir) -> dict[str, Any] | None:
    """The newest record in ``evaluations.jsonl`` of the best weights on the test split, with the run's own settings."""
    own = {"split": "test", "checkpoint": "best", "settings": []}
    newest: dict[str, Any] = {}
    for raw in jsonl.read_jsonl(run_dir.evaluations):
        if raw | own == raw:
            newest = raw
    return typed_record(newest, task_metrics(run_dir))


def best_of(val: Iterable[dict[str, Any]], best_step: object, metrics: TaskMetrics) -> dict[str, Any] | None:
    """The validation of the best model: that of ``best_step`` (summary.json), without one the best by the headline.

    One whose loss is null (it was NaN or infinite) is never the best, as in training.
    """
    headline = metrics.headline
    scored: list[dict[str, Any]] = []
    for record in val:
        if jsonl.is_number(record.get("loss", 0.0)):
            if record["step"] == best_step:
                return record
            if jsonl.is_number(record.get(headline)):
                scored.append(record)
    best = max if metrics.metrics[headline].higher_is_better else min
    return best(scored, key=itemgetter(headline), default=None)


def evaluation_of(told: Mapping[str, Any]) -> str:
    """``test, step 400``: the evaluation that a file is of."""
    split = terminal.one_line(told.get("split", "?"), 20)
    step = told.get("step")
    return f"{split}, step {step}" if jsonl.is_whole(step) else split


class TakenFor(NamedTuple):
    """``confusion.json``, as far as it can be true."""

    evaluation: str
    classes: list[str]
    counts: Counter[tuple[int, int]]
    """(class, what it was taken for) -> how often."""


def confusion_of(run_dir: RunDir) -> TakenFor:
    """Read the confusion matrix of the best weights; empty if the file is missing or damaged."""
    told = fileio.read_object(run_dir.confusion)
    names = told.get("classes")
    items = told.get("raw") or told.get("ema")
    classes = list(map(str, names[:_MOST_CLASSES])) if isinstance(names, list) else []
    counts = Counter[tuple[int, int]]()
    for item in items if isinstance(items, list) else ():
        if isinstance(item, list) and len(item) == 3 and all(map(jsonl.is_whole, item)):
            label, predicted, count = item
            if max(label, predicted) < len(classes) and count:
                counts[label, predicted] += count
    return TakenFor(evaluation_of(told), classes, counts)


def last_sample(file: Path) -> dict[str, Any]:
    """The newest hardware sample in a host's file; empty if there is none."""
    return next(reversed(jsonl.last_records(file)), {})


def energy_of(run: RunDir) -> dict[str, float] | None:
    """``gpu_kwh`` and ``cpu_kwh`` of a run over all hosts whose samples are in its folder; None: not measured."""
    found: dict[str, float] = {}
    for file in run.path.glob("system-*.jsonl"):
        sample = last_sample(file)
        for key in KWH:
            if jsonl.is_number(sample.get(key)):
                found[key] = round(found.get(key, 0.0) + sample[key], 6)
    return found or None
