"""``metrics.jsonl``: ``{"time", "step", "epoch", "split", "loss", <metrics>, "lr", "images_per_sec", ...}``.

``step`` counts optimizer updates, ``epoch`` is a float. ``task.json`` describes the metrics (`described`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from trainkit import reading, terminal
from trainkit.config.task import LOSS
from trainkit.config.task import Described as Described
from trainkit.config.task import Metric as Metric
from trainkit.records import files, jsonl
from trainkit.records.rundir import RunDir

SPLITS = ("train", "val", "test")
_CLASSIFICATION = Described(
    "acc1", {"loss": LOSS, "acc1": Metric("%", True, "Top-1 accuracy"), "acc5": Metric("%", True, "Top-5 accuracy")}
)
_NAME = re.compile(r"[A-Za-z]\w{0,40}")
_MOST_METRICS = 50


def described(run_dir: RunDir) -> Described:
    """The metrics of a run, from its ``task.json``; those of classification where that is missing or damaged."""
    told = reading.read_object(run_dir.task)
    headline, items = told.get("headline"), told.get("metrics")
    found = {"loss": LOSS}
    for name, about in list(items.items())[:_MOST_METRICS] if isinstance(items, dict) else ():
        if _NAME.fullmatch(name) and isinstance(about, dict):
            unit, label = (terminal.one_line(about.get(key) or "", 40) for key in ("unit", "label"))
            found[name] = Metric(unit, about.get("higher_is_better") is not False, label or name)
    return Described(headline, found) if isinstance(headline, str) and headline in found else _CLASSIFICATION


def describe(run_dir: RunDir, metrics: Described) -> None:
    """Write ``task.json``, for `described`."""
    content = {"headline": metrics.headline, "metrics": {name: asdict(each) for name, each in metrics.metrics.items()}}
    files.write(run_dir.task, json.dumps(content, indent=2) + "\n", run_dir.path)


def read_metrics(run_dir: RunDir, split: str | None = None) -> list[dict[str, Any]]:
    """Records in order of step, of one split or of all; after a restart the newer record of a step counts.

    Raises UserError where the file is there and cannot be read.
    """
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    metrics = described(run_dir)
    for raw in jsonl.read(run_dir.metrics, most=jsonl.LONGEST_THINNED):
        record = typed(raw, metrics)
        if record is not None and split in (None, record["split"]):
            newest[record["split"], record["step"]] = record
    return sorted(newest.values(), key=lambda record: record["step"])


def best_evaluation(run_dir: RunDir) -> dict[str, Any] | None:
    """The newest record in ``evaluations.jsonl`` of the best weights on the test split, with the run's own settings."""
    own = {"split": "test", "checkpoint": "best", "settings": []}
    found = [raw for raw in jsonl.read(run_dir.evaluations) if all(raw.get(key) == own[key] for key in own)]
    return typed(found[-1], described(run_dir)) if found else None


MOST = 10_000
"""Train records from which on a reader may do with fewer: no curve has more places, and a median hardly moves."""


class Thinned(NamedTuple):
    """Records in order of step. Of the train records each stands for ``every``; of all others none is left out."""

    records: list[dict[str, Any]]
    every: int
    outliers: list[dict[str, Any]]
    """Further train records, in order of step: extremes of the loss between those, and where it is no number."""


def read_thinned(run_dir: RunDir, most: int = MOST) -> Thinned:
    """As `read_metrics`, of an enormous file some of the train records only: for whoever draws and sums up.

    Raises UserError where the file is there and cannot be read.
    """
    raw, every, extra = jsonl.read_thinned(
        run_dir.metrics, most, lambda line: b'"split": "train"' not in line, extremes_of="loss"
    )
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    metrics, highest = described(run_dir), -1
    outliers: dict[int, dict[str, Any]] = {}
    for place, item in enumerate(raw):
        record = typed(item, metrics)
        if record is None:
            continue
        if every > 1 and record["split"] == "train":
            if record["step"] <= highest:  # a restart; what it does again need not be among what was picked before
                newest = {key: value for key, value in newest.items() if key[1] < record["step"]}
                outliers = {step: value for step, value in outliers.items() if step < record["step"]}
            highest = record["step"]
        if place in extra and record["split"] == "train":
            outliers[record["step"]] = record
        else:
            newest[record["split"], record["step"]] = record
    return Thinned(_by_step(newest.values()), every, _by_step(outliers.values()))


def _by_step(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(records, key=lambda record: record["step"])


def best_of(
    val: Iterable[dict[str, Any]], best_step: object, metrics: Described = _CLASSIFICATION
) -> dict[str, Any] | None:
    """The validation of the best model: that of ``best_step`` (summary.json), without one the best by the headline.

    One whose loss is null (it was NaN or infinite) is never the best, as in training.
    """
    finite = [record for record in val if reading.is_number(record.get("loss", 0.0))]
    chosen = [record for record in finite if record["step"] == best_step]
    headline, sign = metrics.headline, 1 if metrics.metrics[metrics.headline].higher_is_better else -1
    scored = [record for record in finite if reading.is_number(record.get(headline))]
    return chosen[0] if chosen else max(scored, key=lambda record: sign * float(record[headline]), default=None)


def typed(raw: Mapping[str, Any], metrics: Described = _CLASSIFICATION) -> dict[str, Any] | None:
    """A record as others may rely on it; None without a split and a step.

    ``step`` is a count, everything measured a finite number or null (a loss that has diverged), percentages are 0 to
    100, other text is one line. Fields that are none of this are left out.
    """
    if raw.get("split") not in SPLITS or not reading.is_whole(raw.get("step")):
        return None
    record: dict[str, Any] = {}
    for key, value in raw.items():
        if key == "time":
            fits = reading.is_time(value)
        elif key == "epoch":
            fits = reading.is_number(value) and 0 <= value < 1e9
        elif (metric := metrics.find(key)) is not None and metric.unit == "%":
            fits = value is None or (reading.is_number(value) and 0 <= value <= 100)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            fits, value = True, value if reading.is_number(value) else None
        else:
            is_text = isinstance(value, str) and key not in NUMBERS and metrics.find(key) is None
            fits, value = value is None or is_text, reading.plain(value)
        if fits:
            record[key] = value
    return record


NUMBERS = ("lr", "images_per_sec", "samples", "grad_norm", "max_memory_mb")
