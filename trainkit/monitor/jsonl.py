"""The record: ``metrics.jsonl`` of the run folder, one line a record, on disk at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainkit import fileio, terminal
from trainkit.config.schema import Config
from trainkit.errors import DiskError
from trainkit.monitor.loggers import Logger, Start
from trainkit.run.folder import RunDir

FIRST = True


class _Jsonl:
    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir

    def log(self, record: Mapping[str, Any]) -> None:
        try:
            fileio.append_jsonl(self._run_dir.metrics, record)
        except OSError as error:
            raise DiskError(
                f"Cannot write {self._run_dir.metrics}.",
                why=f"{error.strerror}. A run that leaves no record is not worth going on with.",
                fix=f"Free some space, then go on with `{terminal.command('resume', self._run_dir.path)}`.",
            ) from error

    def close(self) -> None: ...


def build(run_dir: RunDir, config: Config, start: Start) -> Logger:
    """Append to ``run_dir.metrics``. The only logger whose failure ends the run."""
    return _Jsonl(run_dir)
