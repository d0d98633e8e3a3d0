"""TensorBoard: ``tensorboard --logdir RUN/tensorboard``.

Tags are ``<metric>/<split>``: TensorBoard shows train and val of a metric side by side, its Custom Scalars tab draws
them in one plot, with the learning rate. HParams compares runs (``tensorboard --logdir runs``); Images and Text have
which class was taken for which in the test.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from trainkit import fileio
from trainkit.config.schema import Config
from trainkit.monitor import tensorboard_pages as pages
from trainkit.monitor.base import Logger, Start
from trainkit.monitor.described import hyperparameters, shown_name, taken_for
from trainkit.run.folder import RunDir

_MOST_CLASSES = 400
_NOT_CURVES = ("time", "step", "split", "epoch", "samples")
_FLUSH_SECONDS = 10


class _TensorBoard:
    def __init__(self, run_dir: RunDir, config: Config, start: Start) -> None:
        with _light():
            from tensorboard.compat.proto import event_pb2
            from tensorboard.summary.writer.event_file_writer import EventFileWriter

            self._event = event_pb2.Event
            # In a folder of its own name, or TensorBoard would list the run as ".".
            folder = run_dir.tensorboard / shown_name(run_dir)
            fileio.make_folder(folder, run_dir.path)
            self._file = EventFileWriter(str(folder), flush_secs=_FLUSH_SECONDS)
        self._run_dir, self._is_over = run_dir, False
        now = time.time()
        if start.resumed_step:
            # Points after the checkpoint that this attempt resumes from are drawn again: without purging, the curve
            # would go back and forth. The resumed step itself was complete.
            begins = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            self._file.add_event(self._event(wall_time=now, step=start.resumed_step + 1, session_log=begins))
        averaged = config.train.ema_decay is not None
        told = hyperparameters(config, start)
        for summary in (pages.layout(averaged=averaged), pages.hparams(told, shown_name(run_dir))):
            self._file.add_event(self._event(wall_time=now, summary=summary))
        self._file.flush()

    def log(self, record: Mapping[str, Any]) -> None:
        event = self._event(wall_time=record.get("time", time.time()), step=record["step"])
        for key, value in record.items():
            if key not in _NOT_CURVES and isinstance(value, int | float) and not isinstance(value, bool):
                # Where the time goes is a page of its own: seconds/data, seconds/forward ...
                tag = key.replace("_", "/", 1) if key.startswith("seconds_") else f"{key}/{record['split']}"
                event.summary.value.add(tag=tag, simple_value=value)
        self._file.add_event(event)
        self._is_over = self._is_over or record["split"] == "test"
        if record["split"] == "test" and (taken := taken_for(self._run_dir, _MOST_CLASSES)) is not None:
            self._file.add_event(
                self._event(wall_time=time.time(), step=record["step"], summary=pages.confusion(taken))
            )

    def close(self) -> None:
        failed = sys.exc_info()[0] is not None  # closed while an exception passes
        if failed or self._is_over:  # else it will go on
            self._file.add_event(self._event(wall_time=time.time(), summary=pages.ended(failed=failed)))
        self._file.close()


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
