"""``metrics.jsonl``: ``{"time", "step", "epoch", "split", "loss", "acc1", "acc5", "lr", "images_per_sec", ...}``.

Accuracy is in percent, ``step`` counts optimizer updates, ``epoch`` is a float.
"""

from __future__ import annotations

from typing import Any

from trainkit.records import jsonl
from trainkit.records.rundir import RunDir


def read_metrics(run_dir: RunDir, split: str | None = None) -> list[dict[str, Any]]:
    """Records in order of step, of one split or of all; after a restart the newer record of a step counts."""
    newest: dict[tuple[str, int], dict[str, Any]] = {}
    for record in jsonl.read(run_dir.metrics):
        kind, step = record.get("split"), record.get("step")
        if isinstance(kind, str) and isinstance(step, int) and split in (None, kind):
            newest[kind, step] = record
    return sorted(newest.values(), key=lambda record: record["step"])
