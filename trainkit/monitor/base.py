"""Loggers: the interface, how rank 0 opens those of the configuration, and the sender for those with a server.

A logger is a file in this folder with ``build(run_dir, config, start) -> Logger``; its name goes into
``monitor.loggers``. Records are those of ``metrics.jsonl`` (`trainkit.run.metrics`), with plain Python numbers. A
file may state three things: ``FIRST = True``: it gets each record before the others; ``PEERS = "judge"`` or
``"none"``: in a swarm only the peer that judges for all opens it, or nobody does; ``EXTRA = "mlflow"``: it needs the
package of that name, which is an extra of ours. One that may have no network while it trains may define
``sync(run_dir, config, start) -> str``, which sends later what ``metrics.jsonl`` has; see `sync`.

A logger that raises (a full disk, a crash of its client) is reported once on stderr and not used again. `jsonl` is the
exception: it keeps the record itself and raises `RunFailedError`, because weeks of training without a record cannot be
reported, and the same full disk would lose the next checkpoint too. `resume` goes on from the last checkpoint.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from queue import SimpleQueue
from threading import RLock, Thread
from typing import TYPE_CHECKING, Any, Protocol

from trainkit.common import terminal
from trainkit.common.errors import TrainkitError, UserError
from trainkit.config import plugins
from trainkit.config.task_metrics import TaskMetrics, metrics_of
from trainkit.monitor.log_tail import Lines
from trainkit.run.folder import RunDir
from trainkit.run.metrics import confusion_of, read_metrics

if TYPE_CHECKING:
    from trainkit.config.schema import Config


_SECTIONS = {"seed", "model", "data", "task", "train", "optim", "schedule", "strategy"}
"""Settings that loggers show. `launch` is not among them: its setup lines and mail address are private."""
NOT_CURVES = ("time", "step", "split", "epoch", "samples")
"""Keys of a record that are no measurement: loggers draw none of them."""


_RESERVED = re.compile(r"[:;,#?/'\\%]")
_LONGEST_NAME = 119
"""With the digest behind it 128: what services take in the id of a run."""


class Logger(Protocol):
    """Receiver of metrics."""

    def log(self, record: Mapping[str, Any]) -> None:
        """Take one metrics record."""

    def close(self) -> None:
        """Write what is still held back. Called once, also when training failed."""


@dataclass(frozen=True)
class Start:
    """Facts of an attempt of a run that are known when it starts."""

    total_steps: int
    """Optimizer updates of the whole run."""
    params: int = 0
    """Trainable parameters of the model."""
    world_size: int = 1
    resumed_step: int = 0
    """Updates that earlier attempts have done; 0 for the first."""
    precision: str = ""
    """``train.precision``, with auto resolved."""
    micro_batch_size: int = 0
    """``train.micro_batch_size``, with auto resolved; 0: not known."""
    metrics: TaskMetrics = field(default_factory=lambda: metrics_of("classification"))
    """Metrics of the task."""


class Loggers:
    """Hands every record to all that are open; on every rank but the first there are none."""

    def __init__(self, may_write: Callable[[], None]) -> None:
        self._loggers: dict[str, Logger] = {}
        self._may_write = may_write

    def open(self, name: str, run_dir: RunDir, config: Config, start: Start) -> None:
        with self._outlived(name):
            plugins.require_extra(__package__, name)
            self._loggers[name] = plugins.load(__package__, name)(run_dir, config, start)

    def log(self, record: Mapping[str, Any]) -> None:
        self._may_write()
        record = {"time": round(time.time(), 3), **record}
        for name, logger in list(self._loggers.items()):
            with self._outlived(name):
                logger.log(record)

    def begin(self, total_steps: int) -> None:
        """Tell those that show progress of how many updates there will be, as nobody knew at the start."""
        for logger in self._loggers.values():
            if isinstance(logger, Lines):
                logger.begin(total_steps)

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
            terminal.warn(f"Logger '{name}' is off from now on: {reason}")


@contextmanager
def open_loggers(
    config: Config, run_dir: RunDir, *, is_main: bool = True, may_write: Callable[[], None] = lambda: None, **known: Any
) -> Iterator[Loggers]:
    """One logger that hands every record to all of ``monitor.loggers``, and adds ``time`` where it is missing.

    Only the main rank opens them; other ranks get one without any, so that nobody asks for the rank afterwards.

    Args:
        may_write: asked before every record; raises RunFailedError when another process writes this run by now.
        known: what is known of the attempt, see `Start`.

    Raises:
        RunFailedError: ``metrics.jsonl`` cannot be written.
    """
    loggers = Loggers(may_write)
    start = Start(**{"metrics": metrics_of(config.task.name), **known})
    wanted = config.monitor.loggers if is_main else []
    # The record first: what the others show must also be on disk.
    for name in sorted(wanted, key=lambda name: not plugins.stated(__package__, name).get("FIRST")):
        loggers.open(name, run_dir, config, start)
    try:
        yield loggers
    finally:
        loggers.close()


def sync(run_dir: RunDir, config: Config, known: Mapping[str, Any]) -> list[str]:
    """Have each logger of the run that can do so send all that is recorded; return what each has sent, in words.

    Args:
        known: the event of the newest start.

    Raises:
        UserError: no logger of the run can, or has nothing to send.
        RunFailedError: a server did not take it.
    """
    fields: dict[str, Any] = {"total_steps": 0}
    for name in Start.__dataclass_fields__:
        if known.get(name) is not None:
            fields[name] = known[name]
    start = Start(**fields | {"metrics": metrics_of(config.task.name)})
    sent = list[str]()
    for name in config.monitor.loggers:
        if name in plugins.available(__package__) and run_dir.metrics.is_file():
            send = getattr(import_module(f"{__package__}.{name}"), "sync", None)
            if send is not None:
                sent.append(f"{name}: {send(run_dir, config, start)}")
    if not sent:
        why = "None of its loggers can send metrics.jsonl, or it has no metrics.jsonl (the logger jsonl)."
        fix = "Add wandb or mlflow to monitor.loggers, or jsonl."
        raise UserError(f"{run_dir.name} has nothing that can be sent.", why=why, fix=fix, key="monitor.loggers")
    return sent


# What a run is shown with besides its curves


def training_settings(config: Config, start: Start) -> dict[str, Any]:
    """The settings by section, as ``auto`` has resolved them here, and what only the start knows, such as the ranks."""
    settings: dict[str, Any] = config.model_dump(mode="json", include=_SECTIONS)
    if start.precision:
        settings["train"]["precision"] = start.precision
    if start.micro_batch_size:
        settings["train"]["micro_batch_size"] = start.micro_batch_size
    return settings | {"world_size": start.world_size, "params": start.params, "total_steps": start.total_steps}


def run_id(run_dir: RunDir) -> str:
    """Stable ID: constant across attempts, unique per run folder."""
    digest = hashlib.sha256(str(run_dir.path).encode()).hexdigest()
    return f"{_RESERVED.sub('_', listed_name(run_dir))[:_LONGEST_NAME]}-{digest[:8]}"


def listed_name(run_dir: RunDir) -> str:
    """The name of a run in lists; a run of a sweep, whose folder is called 0, has the sweep's name before it."""
    if (run_dir.path.parent / "sweep.json").is_file():
        return f"{RunDir(run_dir.path.parent).name}-{run_dir.name}"
    return run_dir.name


def confusion_of_test(run_dir: RunDir, most_classes: int) -> tuple[list[str], list[list[int]]] | None:
    """The classes, and samples of the test by [class, predicted class], of ``confusion.json``.

    None without that file, or for data of more classes.
    """
    _, classes, counts = confusion_of(run_dir)
    if not counts or len(classes) > most_classes:
        return None
    rows = list[list[int]]()
    for label in range(len(classes)):
        rows.append([counts[label, predicted] for predicted in range(len(classes))])
    return classes, rows


PATIENCE_SECONDS = 10.0
"""At the end of an attempt, for what is not sent yet: it stays in ``metrics.jsonl``."""
_MOST_AT_ONCE = 200


def without_login(text: str) -> str:
    """A text without the user and the password of the addresses in it."""
    return re.sub(r"//[^/\s]*@", "//", text)


class Client(Protocol):
    """Receiver of a sender's records. All of it is called in the sender's thread."""

    def begin(self) -> set[tuple[str, int]]:
        """Open the run; the splits and steps that are there already."""

    def send(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Add these points."""

    def end(self, *, failed: bool) -> None:
        """Close the run once all is sent."""


_beginning = RLock()
"""Held while a client imports its library: a process that is forked meanwhile would inherit half of it, and its locks.
Reentrant, for a library that forks a process of its own."""
os.register_at_fork(
    before=_beginning.acquire, after_in_parent=_beginning.release, after_in_child=_beginning.release
)  # fmt: skip


class Sender:
    """A logger whose client works in a thread of its own, which starts with the first record, so that the first update
    need not wait for a library or a server.

    Args:
        until: the update up to which what ``metrics.jsonl`` has is sent as well, for a client that takes each point
            once; None: it takes the records of this attempt as they come.
        patience: seconds for what is not yet sent at the end of an attempt.
    """

    def __init__(
        self, client: Client, run_dir: RunDir, *, until: float | None, patience: float = PATIENCE_SECONDS
    ) -> None:
        self._client = client
        self._run_dir = run_dir
        self._until = until
        self._patience = patience
        self._waiting: SimpleQueue[Mapping[str, Any] | bool] = SimpleQueue()
        self._error: Exception | None = None
        self._thread = Thread(target=self._work, name=type(client).__name__, daemon=True)

    def log(self, record: Mapping[str, Any]) -> None:
        if self._error is not None:
            raise self._error
        self._waiting.put(record)
        self._start()

    def close(self) -> None:
        self._waiting.put(sys.exc_info()[0] is not None)  # closed while an exception passes: the run has failed
        self._start()
        self._thread.join(self._patience)
        if self._thread.is_alive():
            what = f"not everything was sent within {self._patience:.0f} s after the end; metrics.jsonl has it"
            raise TimeoutError(what)
        if self._error is not None:
            raise self._error

    def _start(self) -> None:
        if self._thread.ident is None:
            self._thread.start()

    def _work(self) -> None:
        try:
            with _beginning:
                there = self._client.begin()
            earlier: list[Mapping[str, Any]] = []
            if self._until is not None:
                earlier = [record for record in read_metrics(self._run_dir) if record["step"] <= self._until]
            failed = self._send(earlier, there)
            while failed is None:
                taken = [self._waiting.get()]
                while not self._waiting.empty():
                    taken.append(self._waiting.get())
                failed = self._send(taken, there)
            self._client.end(failed=failed)
        except TrainkitError as error:  # meant for the user
            self._error = error
        except Exception as error:  # of a client, which has several kinds, and names its server with user and password
            self._error = RuntimeError(without_login(str(error)) or type(error).__name__)

    def _send(self, taken: Sequence[Mapping[str, Any] | bool], there: set[tuple[str, int]]) -> bool | None:
        """Send what is not there; at the end return True if the training has failed, else False."""
        failed = None
        records: list[Mapping[str, Any]] = []
        for item in taken:
            if isinstance(item, bool):
                failed = item
            else:
                records.append(item)
        if self._until is not None:
            new = {(record["split"], record["step"]): record for record in records}
            records = [record for where, record in new.items() if where not in there]
            there |= new.keys()
        for first in range(0, len(records), _MOST_AT_ONCE):
            self._client.send(records[first : first + _MOST_AT_ONCE])
        return failed


def curves(record: Mapping[str, Any]) -> dict[str, float]:
    """Measurements of a record by names such as ``loss/train``; what is not finite, null in a record, is NaN."""
    found = {}
    for key, value in record.items():
        if value is None:
            value = math.nan
        if key not in NOT_CURVES and isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{key}/{record['split']}"] = value
    return found
