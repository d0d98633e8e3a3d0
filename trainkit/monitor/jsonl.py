"""The record: ``metrics.jsonl`` of the run folder, one line a record, on disk at once; ``task.json`` beside it."""

from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from trainkit.common import fileio, jsonl, terminal
from trainkit.common.errors import DiskError
from trainkit.config.schema import Config
from trainkit.config.task_metrics import TaskMetrics
from trainkit.monitor.base import Logger, Start
from trainkit.run.folder import RunDir
from trainkit.run.metrics import describe

FIRST = True


class _Jsonl:
    def __init__(self, run_dir: RunDir, metrics: TaskMetrics) -> None:
        self._run_dir = run_dir
        with self._written(run_dir.task):
            describe(run_dir, metrics)

    def log(self, record: Mapping[str, Any]) -> None:
        with self._written(self._run_dir.metrics):
            jsonl.append_jsonl(self._run_dir.metrics, record)

    def _written(self, file: Path) -> AbstractContextManager[None]:
        more = "A run without records should not continue."
        fix = f"Free some space, then continue with `{terminal.command('resume', self._run_dir.path)}`."
        return fileio.disk_errors_as(f"Cannot write {file}.", fix=fix, more=more, kind=DiskError)

    def close(self) -> None: ...


def build(run_dir: RunDir, config: Config, start: Start) -> Logger:
    """Append to ``run_dir.metrics``. The only logger whose failure ends the run."""
    return _Jsonl(run_dir, start.metrics)
