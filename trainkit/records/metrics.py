"""``metrics.jsonl``: ``{"time", "step", "epoch", "split", "loss", "acc1", "acc5", "lr", "images_per_sec", ...}``.

Accuracy is in percent, ``step`` counts optimizer updates, ``epoch`` is a float.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from trainkit import reading
from trainkit.records import jsonl
from trainkit.records.rundir import RunDir

SPLITS = ("train", "val", "test")


def read_metrics(run_dir: RunDir, split: str | None = None) -> list[dict[str, Any]]:
    """Records in order of step, of one split or of all; after a restart the newer record of a step counts.

    Raises UserError where the file is there and cannot be read.
    """
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    for raw in jsonl.read(run_dir.metrics, most=jsonl.LONGEST_THINNED):
        record = typed(raw)
        if record is not None and split in (None, record["split"]):
            newest[record["split"], record["step"]] = record
    return sorted(newest.values(), key=lambda record: record["step"])


def best_evaluation(run_dir: RunDir) -> dict[str, Any] | None:
    """The newest record in ``evaluations.jsonl`` of the best weights on the test split, with the run's own settings."""
    own = {"split": "test", "checkpoint": "best", "settings": []}
    found = [raw for raw in jsonl.read(run_dir.evaluations) if all(raw.get(key) == own[key] for key in own)]
    return typed(found[-1]) if found else None


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
    highest = -1
    outliers: dict[int, dict[str, Any]] = {}
    for place, item in enumerate(raw):
        record = typed(item)
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


def best_of(val: Iterable[dict[str, Any]], best_step: object) -> dict[str, Any] | None:
    """The validation of the best model: that of ``best_step`` (summary.json), without one the most accurate.

    One whose loss is null (it was NaN or infinite) is never the best, as in training.
    """
    finite = [record for record in val if reading.is_number(record.get("loss", 0.0))]
    chosen = [record for record in finite if record["step"] == best_step]
    scored = [record for record in finite if reading.is_number(record.get("acc1"))]
    return chosen[0] if chosen else max(scored, key=lambda record: float(record["acc1"]), default=None)


def typed(raw: Mapping[str, Any]) -> dict[str, Any] | None:
    """A record as others may rely on it; None without a split and a step.

    ``step`` is a count, everything measured a finite number or null (a loss that has diverged), accuracies are 0 to
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
        elif key.removeprefix("ema_") in ("acc1", "acc5"):
            fits = value is None or (reading.is_number(value) and 0 <= value <= 100)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            fits, value = True, value if reading.is_number(value) else None
        else:
            fits, value = value is None or (isinstance(value, str) and key not in NUMBERS), reading.plain(value)
        if fits:
            record[key] = value
    return record


NUMBERS = ("loss", "ema_loss", "lr", "images_per_sec", "samples", "grad_norm", "max_memory_mb")
