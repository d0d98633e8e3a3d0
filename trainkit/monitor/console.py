"""Progress for a person: a bar on a terminal, plain lines everywhere else (log files, pipes)."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

from trainkit.config.schema import Config
from trainkit.monitor import Logger, Start, metric_words, progress_bar, record_line
from trainkit.run.folder import RunDir

PEERS = "none"  # a swarm has lines of its own, one a round


class _Plain:
    """One line a record, flushed, so that `logs -f` shows it at once."""

    def __init__(self, start: Start, clock: Callable[[], float] = time.monotonic) -> None:
        self._total, self._metrics, self._clock = start.total_steps, start.metrics, clock
        self._first: tuple[int, float] | None = None  # step and time of this attempt's first record

    def log(self, record: Mapping[str, Any]) -> None:
        eta = self._eta(record.get("step", 0)) if record.get("split") == "train" else None
        print(record_line(record, self._metrics, total_steps=self._total, eta_seconds=eta), flush=True)

    def close(self) -> None: ...

    def _eta(self, step: int) -> float | None:
        """Seconds to go, at the pace since the first record: the steps before it also paid for warming up."""
        now = self._clock()
        if self._first is None:
            self._first = (step, now)
        done, seconds = step - self._first[0], now - self._first[1]
        return seconds / done * (self._total - step) if done > 0 else None


class _Bar:
    """A bar for training, and a line above it for every evaluation.

    No redirection of stdout and no refreshing thread: `breakpoint()` must still find a usable terminal.
    """

    def __init__(self, start: Start) -> None:
        self._total, self._metrics = start.total_steps, start.metrics
        how = dict.fromkeys(("auto_refresh", "redirect_stdout", "redirect_stderr"), False)
        self._progress = progress_bar("step {task.completed}/{task.total}", **how)
        self._task = self._progress.add_task("", total=start.total_steps, completed=start.resumed_step, text="")
        self._progress.start()

    def log(self, record: Mapping[str, Any]) -> None:
        if record.get("split") == "train":
            text = "  ".join(metric_words(record, self._metrics))
            self._progress.update(self._task, completed=record.get("step", 0), text=text, refresh=True)
        else:
            line = record_line(record, self._metrics, total_steps=self._total)
            self._progress.print(line, highlight=False, markup=False)
            self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()


def build(run_dir: RunDir, config: Config, start: Start) -> Logger:
    """A progress bar if stdout is a terminal, else one line a record.

    The debug executor gets lines as well: a bar drawn over a debugger's prompt would help nobody.
    """
    if sys.stdout.isatty() and config.launch.executor != "debug":
        return _Bar(start)
    return _Plain(start)
