"""TensorBoard's event files that a script writes below its run: read as records, where it writes no other."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from trainkit.run.events import Attempt
from trainkit.script.log_record import write_record

_LOOK_SECONDS = 10.0
_NAMES = "events.out.tfevents.*"
_SPLITS = {
    "train": ("train", "training"), "val": ("val", "valid", "validation", "eval", "dev"), "test": ("test",)
}  # fmt: skip
Record = tuple[int, str]


class EventFiles:
    """Reads what is new in the event files of an attempt, as records of the run."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self._began = time.time()
        self._looked = time.monotonic()
        self._loaders: dict[str, Any] = {}
        self._size = self._metrics_size()
        self._is_wanted = True

    def look(self, *, now: bool = False) -> None:
        """Write records of what has come since the last look, unless that was a moment ago.

        Args:
            now: also then, for the script has ended.
        """
        if not self._is_wanted or (not now and time.monotonic() - self._looked < _LOOK_SECONDS):
            return
        self._looked = time.monotonic()
        if self._metrics_size() != self._size:  # the script calls `trainkit.log`
            self._is_wanted = False
            return
        try:
            for (step, split), (when, values) in sorted(self._new().items()):
                write_record(self._attempt, step, split, values, when)
        except Exception:  # no tensorboard here, or files that it cannot read: nothing that a training should end for
            self._is_wanted = False
        self._size = self._metrics_size()

    def _metrics_size(self) -> int:
        with suppress(OSError):
            return os.stat(self._attempt.run.metrics).st_size
        return 0

    def _new(self) -> dict[Record, tuple[float, dict[str, Any]]]:
        found: dict[Record, tuple[float, dict[str, Any]]] = {}
        for file in sorted(self._attempt.run.path.rglob(_NAMES)):
            if file.stat().st_mtime < self._began:  # of an attempt before
                continue
            for when, step, tag, value in self._scalars(str(file)):
                split, name = named(tag)
                found.setdefault((step, split), (when, {}))[1][name] = value
        return found

    def _scalars(self, file: str) -> Iterator[tuple[float, int, str, float]]:
        """Time, step, tag and value of each scalar that is new in a file."""
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.util.tensor_util import make_ndarray

        if file not in self._loaders:
            self._loaders[file] = EventFileLoader(file)
        for event in self._loaders[file].Load():
            for value in event.summary.value:
                array = make_ndarray(value.tensor) if value.HasField("tensor") else None
                if array is not None and array.size == 1 and array.dtype.kind in "fiu":
                    yield event.wall_time, event.step, value.tag, float(array.reshape(()))


def named(tag: str) -> tuple[str, str]:
    """Split and name of a metric by TensorBoard's tag: ``Loss/val`` is ``val`` and ``loss``."""
    words = [word for word in re.split(r"[^a-z0-9]+", tag.lower()) if word]
    for split, names in _SPLITS.items():
        for word in words:
            if word in names and len(words) > 1:
                words.remove(word)
                return split, "_".join(words)
    return "train", "_".join(words)
