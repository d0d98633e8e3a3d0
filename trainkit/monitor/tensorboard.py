"""TensorBoard: ``tensorboard --logdir RUN/tensorboard``.

Tags are ``<metric>/<split>``: TensorBoard shows train and val of a metric side by side, and its Custom Scalars tab
draws them in one plot, with the learning rate. HParams compares runs (``tensorboard --logdir runs``); Images and Text
show the confusion matrix of the test, and Text what the user said of the run before the attempt began.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from trainkit.common import fileio, markdown
from trainkit.config.layers import flatten
from trainkit.config.schema import Config
from trainkit.monitor.base import NOT_CURVES, Logger, Sender, Start, confusion_of_test, listed_name, training_settings
from trainkit.run.folder import RunDir
from trainkit.run.labels import shown_labels

_MOST_CLASSES = 400
"""Most classes whose confusion matrix is drawn."""
_LEGIBLE_CLASSES = 30
"""Most classes whose confusion matrix is also a table."""
_FLUSH_SECONDS = 10


class _TensorBoard:
    def __init__(self, run_dir: RunDir, config: Config, start: Start) -> None:
        self._run_dir = run_dir
        self._config = config
        self._start = start
        self._is_over = False
        self._newest_step = start.resumed_step

    def begin(self) -> set[tuple[str, int]]:
        from torch.utils.tensorboard import SummaryWriter, summary

        run_dir = self._run_dir
        config = self._config
        start = self._start
        # In a folder of its own name, or TensorBoard would list the run as ".".
        folder = run_dir.tensorboard / listed_name(run_dir)
        fileio.make_folder(folder, run_dir.path)
        # Points after the checkpoint that this attempt resumes from are drawn again: without purging, the curve would
        # go back and forth. The resumed step itself was complete. The first attempt says so too, though nothing is
        # there: TensorBoard without its data server takes the first such mark of a run for the run's beginning.
        purged = start.resumed_step + 1 if start.resumed_step else 0
        self._writer = SummaryWriter(str(folder), purge_step=purged, flush_secs=_FLUSH_SECONDS)
        self._file = cast(Any, self._writer).file_writer  # torch declares it as None
        plots = {}
        for name in (*start.metrics.metrics, "lr"):
            tags = [f"{name}/train", f"{name}/val"]
            if config.train.ema_decay is not None:
                tags.append(f"ema_{name}/val")
            plots[name] = ["Multiline", tags]
        self._writer.add_custom_scalars({"train and val": plots})
        judged = dict.fromkeys((start.metrics.headline, "loss"))
        columns = dict.fromkeys([f"{metric}/{split}" for split in ("val", "test") for metric in judged])
        experiment, begin, self._succeeded = summary.hparams(_hyperparameters(config, start), columns)
        self._file.add_summary(experiment)
        self._file.add_summary(begin)
        labels = shown_labels(run_dir)
        for kind, words in (("tags", [", ".join(labels.tags)]), ("notes", [note.text for note in labels.notes])):
            if any(words):
                self._writer.add_text(kind, "\n\n".join(map(markdown.literal, words)), start.resumed_step)
        self._writer.flush()
        return set()

    def send(self, records: Sequence[Mapping[str, Any]]) -> None:
        for record in records:
            self._add(record)

    def _add(self, record: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        split = record["split"]
        step = record["step"]
        if step < self._newest_step:  # rolled back to a checkpoint
            self._purge_from(step)
        self._newest_step = step
        # One event for all values: a fifth of the time of as many calls of `SummaryWriter.add_scalar`.
        values = [
            Summary.Value(tag=_tag(key, split), simple_value=value)
            for key, value in record.items()
            if key not in NOT_CURVES and isinstance(value, int | float) and not isinstance(value, bool)
        ]
        self._file.add_summary(Summary(value=values), step, record.get("time"))
        if split == "test":
            self._is_over = True
            confusion = confusion_of_test(self._run_dir, _MOST_CLASSES)
            if confusion is not None:
                self._show_confusion(*confusion, step)

    def _purge_from(self, step: int) -> None:
        """Have TensorBoard forget the points from ``step`` on that it has seen so far."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        self._file.add_event(Event(step=step, session_log=SessionLog(status=SessionLog.START)), step)

    def _show_confusion(self, classes: Sequence[str], counts: Sequence[Sequence[int]], step: int) -> None:
        import numpy as np

        shares = np.array(counts) / np.maximum(np.sum(counts, axis=1, keepdims=True), 1)
        side = max(1, 400 // len(classes))  # pixels of a class
        pixels = np.kron(255 - np.rint(255 * shares), np.ones((side, side))).astype(np.uint8)
        self._writer.add_image("confusion/test", pixels, step, dataformats="HW")
        if len(classes) <= _LEGIBLE_CLASSES:
            rows = [[name, *(str(count or "") for count in row)] for name, row in zip(classes, counts, strict=True)]
            table = markdown.markdown_table(["is \\ taken for", *classes], rows)
            self._writer.add_text("confusion/test/table", table, step)

    def end(self, *, failed: bool) -> None:
        if failed:
            self._file.add_summary(_failed())
        elif self._is_over:  # otherwise a later attempt goes on
            self._file.add_summary(self._succeeded)
        self._writer.close()


def _tag(key: str, split: str) -> str:
    """Name of a curve; those of time are a group of their own: seconds/data, seconds/forward ..."""
    return key.replace("_", "/", 1) if key.startswith("seconds_") else f"{key}/{split}"


def _hyperparameters(config: Config, start: Start) -> dict[str, float | str]:
    """Training settings that are one value each, by dotted keys."""
    found: dict[str, float | str] = {}
    for key, value in flatten(training_settings(config, start)):
        if isinstance(value, bool):
            found[key] = str(value).lower()
        elif isinstance(value, int | float | str):
            found[key] = value
    return found


def _failed() -> Any:
    """The state of a failed run in the HParams tab; torch's `hparams` knows success only."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_FAILURE, end_time_secs=time.time())
    about = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=end))
    return Summary(value=[Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=about)])


def build(run_dir: RunDir, config: Config, start: Start) -> Logger:
    """Write event files into ``run_dir.tensorboard``; every attempt adds one."""
    return Sender(_TensorBoard(run_dir, config, start), run_dir, until=None)
