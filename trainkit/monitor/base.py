"""Loggers: what one is, and how rank 0 opens those of the configuration.

A logger is a file in this folder with ``build(run_dir, config, start) -> Logger``; its name goes into
``monitor.loggers``. Records are those of ``metrics.jsonl`` (`trainkit.run.metrics`), with plain Python numbers. A
logger whose file states ``FIRST = True`` has each of them before the others; one that states ``PEERS = "judge"``, or
``"none"``, is opened by that peer of a swarm only which judges for all, or by none. One that states ``PREPARES = True``
has a function ``prepare()`` as well, called before torch is imported; what it gives is in `Start.prepared`.

Training outlives its loggers: one that raises (a full disk, a crash of its client) is reported once on stderr and not
used again. The exception is `jsonl`, which keeps the record itself: it raises `RunFailedError`, because weeks of
training that left no record cannot be reported, and the same full disk would lose the next checkpoint too. What was
trained so far is in the last checkpoint, from which `resume` goes on.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from trainkit import plugins
from trainkit.config.schema import Config
from trainkit.errors import TrainkitError
from trainkit.run.folder import RunDir


class Logger(Protocol):
    """Where metrics go."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take one metrics record."""

    def close(self) -> None:
        """Write what is still held back. Called once, also when training failed."""


@dataclass(frozen=True)
class Start:
    """What is known when an attempt of a run starts."""

    total_steps: int
    """Optimizer updates of the whole run."""
    params: int = 0
    """Trainable parameters of the model."""
    world_size: int = 1
    resumed_step: int = 0
    """Updates that earlier attempts have done; 0 for the first."""
    precision: str = ""
    """What ``train.precision=auto`` has come to."""
    micro_batch_size: int = 0
    """And ``train.micro_batch_size``; 0: not known."""
    prepared: object = None
    """What the logger's own ``prepare`` has given; None if it was not called."""


class NullLogger:
    """Takes everything, keeps nothing: the logger of every rank but the first."""

    def log(self, record: Mapping[str, Any]) -> None: ...

    def close(self) -> None: ...


class _FanOut:
    def __init__(self, may_write: Callable[[], None]) -> None:
        self._loggers: dict[str, Logger] = {}
        self._may_write = may_write

    def open(self, name: str, run_dir: RunDir, config: Config, start: Start) -> None:
        with self._outlived(name):
            self._loggers[name] = plugins.load(__package__, name)(run_dir, config, start)

    def log(self, record: Mapping[str, Any]) -> None:
        self._may_write()
        record = {"time": round(time.time(), 3), **record}
        for name, logger in list(self._loggers.items()):
            with self._outlived(name):
                logger.log(record)

    def close(self) -> None:
        for name, logger in list(self._loggers.items()):
            with self._outlived(name):
                logger.close()

    @contextmanager
    def _outlived(self, name: str) -> Iterator[None]:
        try:
            yield
        except TrainkitError:  # meant for the user: the record itself cannot be kept
            raise
        except Exception as error:
            self._loggers.pop(name, None)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            print(f"Logger '{name}' is off from here on: {reason}", file=sys.stderr, flush=True)


def prepare_loggers(config: Config) -> dict[str, object]:
    """What takes those of the configuration long to start, while this process does other things; for `open_loggers`."""
    prepared = {}
    for name in config.monitor.loggers:
        if plugins.stated(__package__, name).get("PREPARES"):
            with suppress(Exception):  # it is tried again, and then said
                module = sys.modules[plugins.load(__package__, name).__module__]
                prepared[name] = module.prepare()
    return prepared


@contextmanager
def open_loggers(
    config: Config,
    run_dir: RunDir,
    *,
    total_steps: int,
    params: int = 0,
    world_size: int = 1,
    resumed_step: int = 0,
    precision: str = "",
    micro_batch_size: int = 0,
    is_main: bool = True,
    may_write: Callable[[], None] = lambda: None,
    prepared: Mapping[str, object] | None = None,
) -> Iterator[Logger]:
    """One logger that hands every record to all of ``monitor.loggers``, and adds ``time`` where it is missing.

    Only the main rank opens them; elsewhere this gives a `NullLogger`, so that nobody asks for the rank afterwards.

    Args:
        may_write: raises RunFailedError when another process writes this run by now; asked before every record.
        prepared: what `prepare_loggers` has given, if it was called.

    Raises:
        RunFailedError: ``metrics.jsonl`` cannot be written.
    """
    if not is_main:
        yield NullLogger()
        return
    start = Start(total_steps, params, world_size, resumed_step, precision, micro_batch_size)
    fan_out = _FanOut(may_write)
    # The record first: what the others show must also be on disk.
    for name in sorted(config.monitor.loggers, key=lambda name: not plugins.stated(__package__, name).get("FIRST")):
        fan_out.open(name, run_dir, config, replace(start, prepared=(prepared or {}).get(name)))
    try:
        yield fan_out
    finally:
        fan_out.close()
