"""``metrics.jsonl``: ``{"time", "step", "epoch", "split", "loss", "acc1", "acc5", "lr", "images_per_sec", ...}``.

Accuracy is in percent, ``step`` counts optimizer updates, ``epoch`` is a float.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit.records import jsonl, reading
from trainkit.records.rundir import RunDir

SPLITS = ("train", "val", "test")


def read_metrics(run_dir: RunDir, split: str | None = None) -> list[dict[str, Any]]:
    """Records in order of step, of one split or of all; after a restart the newer record of a step counts.

    Raises UserError where the file is there and cannot be read.
    """
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    for raw in jsonl.read(run_dir.metrics):
        record = typed(raw)
        if record is not None and split in (None, record["split"]):
            newest[record["split"], record["step"]] = record
    return sorted(newest.values(), key=lambda record: record["step"])


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
