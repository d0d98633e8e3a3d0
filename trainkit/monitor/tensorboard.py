"""TensorBoard: ``tensorboard --logdir RUN/tensorboard``.

Tags are ``<metric>/<split>``: TensorBoard shows train and val of a metric side by side, its Custom Scalars tab draws
them in one plot.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from trainkit.config.schema import Config
from trainkit.monitor.base import Logger, Start
from trainkit.monitor.event_file import EventFile
from trainkit.records.rundir import RunDir

OVERLAID = ("loss", "acc1", "acc5")
_NOT_CURVES = ("time", "step", "split", "epoch", "samples")


class _TensorBoard:
    def __init__(self, run_dir: RunDir, config: Config, start: Start) -> None:
        # Points after the checkpoint that this attempt resumes from are drawn again: without purging, the curve would
        # go back and forth. The resumed step itself was complete.
        purge_step = start.resumed_step + 1 if start.resumed_step else None
        averaged = config.train.ema_decay is not None
        plots = {metric: [f"{metric}/train", f"{metric}/val", *[f"ema_{metric}/val"] * averaged] for metric in OVERLAID}
        self._events = EventFile(run_dir.tensorboard, purge_step=purge_step, layout=plots)

    def log(self, record: Mapping[str, Any]) -> None:
        values = {}
        for key, value in record.items():
            if key not in _NOT_CURVES and isinstance(value, int | float) and not isinstance(value, bool):
                # Where the time goes is a page of its own: seconds/data, seconds/forward ...
                tag = key.replace("_", "/", 1) if key.startswith("seconds_") else f"{key}/{record['split']}"
                values[tag] = value
        self._events.add(values, record["step"], record.get("time", time.time()))

    def close(self) -> None:
        self._events.close()


def build(run_dir: RunDir, config: Config, start: Start) -> Logger:
    """Write event files into ``run_dir.tensorboard``; every attempt adds one."""
    return _TensorBoard(run_dir, config, start)
