"""TensorBoard: ``tensorboard --logdir RUN/tensorboard``.

Tags are ``<metric>/<split>``: TensorBoard shows train and val of a metric side by side, and its Custom Scalars tab
draws them in one plot, with the learning rate. HParams compares runs (``tensorboard --logdir runs``); Images and Text
show the confusion matrix of the test, and Text what the user said of the run before the attempt began.
"""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, cast

from trainkit import fileio, terminal, workarounds
from trainkit.config.loading import flatten
from trainkit.config.schema import Config
from trainkit.monitor import NOT_CURVES, Logger, Start, confusion_of_test, listed_name, training_settings
from trainkit.run.folder import RunDir
from trainkit.run.labels import shown_labels

_MOST_CLASSES = 400
"""Most classes whose confusion matrix is drawn,"""
_LEGIBLE_CLASSES = 30
"""and most whose matrix is also a table."""
_FLUSH_SECONDS = 10


class _TensorBoard:
    def __init__(self, run_dir: RunDir, config: Config, start: Start) -> None:
        workarounds.tensorboard_without_tensorflow()
        from torch.utils.tensorboard import SummaryWriter, summary

        self._run_dir, self._is_over = run_dir, False
        # In a folder of its own name, or TensorBoard would list the run as ".".
        folder = run_dir.tensorboard / listed_name(run_dir)
        fileio.make_folder(folder, run_dir.path)
        # Points after the checkpoint that this attempt resumes from are drawn again: without purging, the curve would
        # go back and forth. The resumed step itself was complete.
        purged = start.resumed_step + 1 if start.resumed_step else None
        self._writer = SummaryWriter(str(folder), purge_step=purged, flush_secs=_FLUSH_SECONDS)
        self._file = cast(Any, self._writer).file_writer  # torch declares it as None
        tags = ["{}/train", "{}/val"] + (["ema_{}/val"] if config.train.ema_decay is not None else [])
        plots = {name: ["Multiline", [tag.format(name) for tag in tags]] for name in (*start.metrics.metrics, "lr")}
        self._writer.add_custom_scalars({"train and val": plots})
        judged = dict.fromkeys((start.metrics.headline, "loss"))
        columns = {f"{metric}/{split}": None for split in ("val", "test") for metric in judged}
        experiment, begin, self._succeeded = summary.hparams(_hyperparameters(config, start), columns)
        self._file.add_summary(experiment)
        self._file.add_summary(begin)
        labels = shown_labels(run_dir)
        for kind, words in (("tags", [", ".join(labels.tags)]), ("notes", [note.text for note in labels.notes])):
            if any(words):
                self._writer.add_text(kind, "\n\n".join(map(terminal.literal, words)), start.resumed_step)
        self._writer.flush()

    def log(self, record: Mapping[str, Any]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        split, step = record["split"], record["step"]
        # One event for all values: a fifth of the time of as many calls of `SummaryWriter.add_scalar`.
        values = [
            Summary.Value(tag=_tag(key, split), simple_value=value)
            for key, value in record.items()
            if key not in NOT_CURVES and isinstance(value, int | float) and not isinstance(value, bool)
        ]
        self._file.add_summary(Summary(value=values), step, record.get("time"))
        if split == "test":
            self._is_over = True
            if (confusion := confusion_of_test(self._run_dir, _MOST_CLASSES)) is not None:
                self._show_confusion(*confusion, step)

    def _show_confusion(self, classes: Sequence[str], counts: Sequence[Sequence[int]], step: int) -> None:
        import numpy as np

        shares = np.array(counts) / np.maximum(np.sum(counts, axis=1, keepdims=True), 1)
        side = max(1, 400 // len(classes))  # pixels of a class
        pixels = np.kron(255 - np.rint(255 * shares), np.ones((side, side))).astype(np.uint8)
        self._writer.add_image("confusion/test", pixels, step, dataformats="HW")
        if len(classes) <= _LEGIBLE_CLASSES:
            rows = [[name, *(str(count or "") for count in row)] for name, row in zip(classes, counts, strict=True)]
            table = terminal.markdown_table(["is \\ taken for", *classes], rows)
            self._writer.add_text("confusion/test/table", table, step)

    def close(self) -> None:
        if sys.exc_info()[0] is not None:  # closed while an exception passes
            self._file.add_summary(_failed())
        elif self._is_over:  # otherwise a later attempt goes on
            self._file.add_summary(self._succeeded)
        self._writer.close()


def _tag(key: str, split: str) -> str:
    """Where the time goes is a group of its own: seconds/data, seconds/forward ..."""
    return key.replace("_", "/", 1) if key.startswith("seconds_") else f"{key}/{split}"


def _hyperparameters(config: Config, start: Start) -> dict[str, float | str]:
    """The training settings that are one value each, by dotted keys."""
    flat = dict(flatten(training_settings(config, start)))
    words = {key: str(value).lower() if isinstance(value, bool) else value for key, value in flat.items()}
    return {key: value for key, value in words.items() if isinstance(value, int | float | str)}


def _failed() -> Any:
    """The state of a failed run in the HParams tab; torch's `hparams` knows success only."""
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams import api_pb2, metadata, plugin_data_pb2

    end = plugin_data_pb2.SessionEndInfo(status=api_pb2.STATUS_FAILURE, end_time_secs=time.time())
    about = metadata.create_summary_metadata(plugin_data_pb2.HParamsPluginData(session_end_info=end))
    return Summary(value=[Summary.Value(tag=metadata.SESSION_END_INFO_TAG, metadata=about)])


def build(run_dir: RunDir, config: Config, start: Start) -> Logger:
    """Write event files into ``run_dir.tensorboard``; every attempt adds one."""
    return _TensorBoard(run_dir, config, start)
