"""TensorBoard: ``tensorboard --logdir RUN/tensorboard``.

Tags are ``<metric>/<split>``: TensorBoard shows train and val of a metric side by side, its Custom Scalars tab draws
them in one plot.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from trainkit.config.schema import Config
from trainkit.monitor.base import Logger, Start
from trainkit.records.rundir import RunDir

OVERLAID = ("loss", "acc1", "acc5")
_NOT_CURVES = ("time", "step", "split", "epoch", "samples")
_FLUSH_SECONDS = 10


class _TensorBoard:
    def __init__(self, run_dir: RunDir, config: Config, start: Start) -> None:
        with _light():
            from tensorboard.compat.proto import event_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._event = event_pb2.Event
            self._file = EventFileWriter(str(run_dir.tensorboard), flush_secs=_FLUSH_SECONDS)
        now = time.time()
        if start.resumed_step:
            # Points after the checkpoint that this attempt resumes from are drawn again: without purging, the curve
            # would go back and forth. The resumed step itself was complete.
            begins = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._file.add_event(self._event(wall_time=now, step=start.resumed_step + 1, session_log=begins))
        self._file.add_event(self._event(wall_time=now, summary=_layout(averaged=config.train.ema_decay is not None)))
        self._file.flush()

    def log(self, record: Mapping[str, Any]) -> None:
        event = self._event(wall_time=record.get("time", time.time()), step=record["step"])
        for key, value in record.items():
            if key not in _NOT_CURVES and isinstance(value, int | float) and not isinstance(value, bool):
                # Where the time goes is a page of its own: seconds/data, seconds/forward ...
                tag = key.replace("_", "/", 1) if key.startswith("seconds_") else f"{key}/{record['split']}"
                event.summary.value.add(tag=tag, simple_value=value)
        self._file.add_event(event)

    def close(self) -> None:
        self._file.close()


def _layout(*, averaged: bool) -> Any:
    """What the Custom Scalars tab draws together."""
    from tensorboard.compat.proto import summary_pb2, tensor_pb2, types_pb2
    from tensorboard.plugins.custom_scalar import layout_pb2, metadata

    def chart(metric: str) -> Any:
        tags = [f"{metric}/train", f"{metric}/val", *[f"ema_{metric}/val"] * averaged]
        return layout_pb2.Chart(title=metric, multiline=layout_pb2.MultilineChartContent(tag=tags))

    layout = layout_pb2.Layout(category=[layout_pb2.Category(title="train and val", chart=map(chart, OVERLAID))])
    # As the plugin's own `summary.pb` does, which needs TensorFlow.
    text = tensor_pb2.TensorProto(dtype=types_pb2.DT_STRING, string_val=[layout.SerializeToString()])
    text.tensor_shape.SetInParent()
    value = {"tag": metadata.CONFIG_SUMMARY_TAG, "metadata": metadata.create_summary_metadata(), "tensor": text}
    return summary_pb2.Summary(value=[summary_pb2.Summary.Value(**value)])


@contextmanager
def _light() -> Iterator[None]:
    """Have TensorBoard's writer import neither TensorFlow (many seconds) nor boto3 (0.2 s), where they are installed.

    It would take them to write to other places than a folder.
    """
    sys.modules.setdefault("tensorboard.compat.notf", ModuleType("notf"))  # TensorBoard's own word for that
    boto3 = sys.modules.get("boto3")
    sys.modules["boto3"] = boto3  # type: ignore[assignment]  # None: as if it were not installed
    try:
        yield
    finally:
        if boto3 is None:
            del sys.modules["boto3"]


def build(run_dir: RunDir, config: Config, start: Start) -> Logger:
    """Write event files into ``run_dir.tensorboard``; every attempt adds one."""
    return _TensorBoard(run_dir, config, start)
