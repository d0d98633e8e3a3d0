"""Loggers: the interface, how rank 0 opens those of the configuration, and what they share.

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
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol

from trainkit import plugins, terminal
from trainkit.config.components import TaskMetrics, metrics_of
from trainkit.errors import TrainkitError, UserError
from trainkit.run.folder import RunDir
from trainkit.run.metrics import confusion_of

if TYPE_CHECKING:
    from trainkit.config.schema import Config

_SECTIONS = {"seed", "model", "data", "task", "train", "optim", "schedule", "strategy"}
"""Settings that loggers show. `launch` is not among them: its setup lines and mail address are private."""
NOT_CURVES = ("time", "step", "split", "epoch", "samples")
"""Keys of a record that are no measurement: loggers draw none of them."""


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
    """What ``train.precision=auto`` has resolved to."""
    micro_batch_size: int = 0
    """What ``train.micro_batch_size`` has resolved to; 0: not known."""
    metrics: TaskMetrics = field(default_factory=lambda: metrics_of("classification"))
    """What the task measures."""


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


@contextmanager
def open_loggers(
    config: Config,
    run_dir: RunDir,
    *,
    is_main: bool = True,
    may_write: Callable[[], None] = lambda: None,
    **known: Any,
) -> Iterator[Logger]:
    """One logger that hands every record to all of ``monitor.loggers``, and adds ``time`` where it is missing.

    Only the main rank opens them; other ranks get one without any, so that nobody asks for the rank afterwards.

    Args:
        may_write: asked before every record; raises RunFailedError when another process writes this run by now.
        known: what is known of the attempt, see `Start`.

    Raises:
        RunFailedError: ``metrics.jsonl`` cannot be written.
    """
    loggers = Loggers(may_write)
    start = Start(**known, metrics=metrics_of(config.task.name))
    wanted = config.monitor.loggers if is_main else []
    # The record first: what the others show must also be on disk.
    for name in sorted(wanted, key=lambda name: not plugins.stated(__package__, name).get("FIRST")):
        loggers.open(name, run_dir, config, start)
    try:
        yield loggers
    finally:
        loggers.close()


def sync(run_dir: RunDir, config: Config, known: Mapping[str, Any]) -> list[str]:
    """Have each logger of the run that can do so send all that is recorded; what each has sent.

    Args:
        known: the event of the newest start.

    Raises:
        UserError: no logger of the run can, or has nothing to send.
        RunFailedError: a server did not take it.
    """
    fields = {name: value for name in Start.__dataclass_fields__ if (value := known.get(name)) is not None}
    start = Start(**{"total_steps": 0, **fields}, metrics=metrics_of(config.task.name))
    own = [name for name in config.monitor.loggers if name in plugins.available(__package__)]
    found = {name: send for name in own if (send := getattr(import_module(f"{__package__}.{name}"), "sync", None))}
    if not found or not run_dir.metrics.is_file():
        why = "Its loggers have sent all they had." if not found else "It has no metrics.jsonl (the logger jsonl)."
        fix = "Add wandb or mlflow to monitor.loggers, or jsonl."
        raise UserError(f"Nothing of {run_dir.name} can be sent.", why=why, fix=fix, key="monitor.loggers")
    return [f"{name}: {send(run_dir, config, start)}" for name, send in found.items()]


# What a run is shown with besides its curves


def training_settings(config: Config, start: Start) -> dict[str, Any]:
    """The settings by section, as ``auto`` has resolved them here, and what only the start knows, such as the ranks."""
    settings: dict[str, Any] = config.model_dump(mode="json", include=_SECTIONS)
    resolved = {"precision": start.precision, "micro_batch_size": start.micro_batch_size}
    settings["train"] |= {key: value for key, value in resolved.items() if value}
    return settings | {"world_size": start.world_size, "params": start.params, "total_steps": start.total_steps}


def run_id(run_dir: RunDir) -> str:
    """The same for every attempt of a run, different for runs of one name in different folders."""
    digest = hashlib.sha256(str(run_dir.path).encode()).hexdigest()
    return f"{listed_name(run_dir)}-{digest[:8]}"


def listed_name(run_dir: RunDir) -> str:
    """The name of a run in lists; a run of a sweep, whose folder is called 0, has the sweep's name before it."""
    is_of_sweep = (run_dir.path.parent / "sweep.json").is_file()
    return f"{RunDir(run_dir.path.parent).name}-{run_dir.name}" if is_of_sweep else run_dir.name


def confusion_of_test(run_dir: RunDir, most_classes: int) -> tuple[list[str], list[list[int]]] | None:
    """The classes, and samples of the test by [class, predicted class], of ``confusion.json``.

    None without that file, or for data of more classes.
    """
    _, classes, counts = confusion_of(run_dir)
    labels = range(len(classes))
    if not counts or len(classes) > most_classes:
        return None
    return classes, [[counts[label, predicted] for predicted in labels] for label in labels]


# Metrics as text


def number(value: Any, spec: str, unit: str = "") -> str:
    """A number in ``spec``; ``nan`` for what the record holds as null, because JSON has no NaN."""
    return ("nan" if value is None else format(value, spec)) + unit


def metric_words(record: Mapping[str, Any], metrics: TaskMetrics) -> list[str]:
    """The measured values of a record, each with its name and unit; what is absent is left out."""
    head = metrics.headline
    others = [name for name in metrics.metrics if name not in ("loss", head)] if record.get("split") != "train" else []
    words, keys = [], ("loss", head, "lr", "images_per_sec", *others, f"ema_{head}")
    for key in filter(record.__contains__, keys):
        if key == "lr":
            words.append(f"lr {number(record[key], '.2e')}")
        elif key == "images_per_sec":
            words.append(number(record[key], ",.0f", " images/s"))
        else:
            words.append(metrics.words(key, record[key]))
    return words


def record_line(record: Mapping[str, Any], metrics: TaskMetrics, total_steps: int, eta_seconds: float | None) -> str:
    """One record as one line: split, epoch, step, metrics and, when known, the time to go."""
    width = len(str(total_steps))
    head = f"{record.get('split', '?'):5}"
    if "epoch" in record:
        head += f"  epoch {number(record['epoch'], '6.2f')}"
    # A swarm's peers make as many updates as time allows: there is no total.
    of_total = f"/{total_steps}" if total_steps else ""
    words = [f"{head}  step {record.get('step', 0):>{width}}{of_total}", *metric_words(record, metrics)]
    if eta_seconds is not None:
        words.append(f"ETA {terminal.age(eta_seconds)}")
    return "  ".join(words)


class Lines:
    """A run's progress for a person: one line a record, flushed, so that `logs -f` shows it at once."""

    def __init__(self, total_steps: int, metrics: TaskMetrics) -> None:
        self.total_steps, self.metrics = total_steps, metrics
        self._first: tuple[int, float] | None = None  # step and time of this attempt's first record

    def begin(self, total_steps: int) -> None:
        """Another attempt begins."""
        self.total_steps, self._first = total_steps, None

    def log(self, record: Mapping[str, Any]) -> None:
        eta = self._eta(record) if record.get("split") == "train" else None
        self.say(record_line(record, self.metrics, self.total_steps, eta))

    def log_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Take records that were read at once."""
        for record in records:
            self.log(record)

    def say(self, line: str) -> None:
        """Show another line."""
        print(line, flush=True)

    def close(self) -> None: ...

    def _eta(self, record: Mapping[str, Any]) -> float | None:
        """Seconds to go, at the pace since the first record: the steps before it also paid for warming up."""
        step, now = record.get("step", 0), record.get("time", 0.0)
        if self._first is None:
            self._first = (step, now)
        done, seconds = step - self._first[0], now - self._first[1]
        return seconds / done * (self.total_steps - step) if done > 0 and self.total_steps else None


class Bar(Lines):
    """On a terminal: a bar for training, and a line above it for every evaluation.

    No redirection of stdout and no refreshing thread: `breakpoint()` must still find a usable terminal.
    """

    def __init__(self, total_steps: int, metrics: TaskMetrics, *, resumed_step: int = 0) -> None:
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        super().__init__(total_steps, metrics)
        self._progress = Progress(
            "{task.fields[where]}",
            BarColumn(bar_width=24),
            TextColumn("{task.fields[text]}"),
            TimeRemainingColumn(compact=True),
            speed_estimate_period=120.0,
            auto_refresh=False,
            redirect_stdout=False,
            redirect_stderr=False,
        )
        where = "waiting for the first step"
        self._task = self._progress.add_task("", total=None, completed=resumed_step, where=where, text="")
        self.begin(total_steps)
        self._progress.start()

    def begin(self, total_steps: int) -> None:
        super().begin(total_steps)
        self._progress.update(self._task, total=total_steps or None)

    def log(self, record: Mapping[str, Any]) -> None:
        if record.get("split") != "train":
            super().log(record)
            return
        step, text = record.get("step", 0), "  ".join(metric_words(record, self.metrics))
        where = f"step {step}/{self.total_steps}" if self.total_steps else f"step {step}"
        self._progress.update(self._task, completed=step, where=where, text=text, refresh=True)

    def log_all(self, records: Sequence[Mapping[str, Any]]) -> None:
        # A thousand old records read at once must not look like a thousand steps a second.
        super().log_all([record for record in records if record.get("split") != "train"])
        super().log_all([record for record in records if record.get("split") == "train"][-1:])

    def say(self, line: str) -> None:
        self._progress.print(line, highlight=False, markup=False)
        self._progress.refresh()

    def close(self) -> None:
        self._progress.stop()


def setback_line(event: Mapping[str, Any]) -> str | None:
    """An event about an update that came to nothing, as one line; None for every other event."""
    kind, step = event.get("event"), event.get("step", "?")
    if kind == "skipped":
        before, after = (number(event.get(key), "g") for key in ("scale_before", "scale_after"))
        where = f" of {event['parameter']}" if "parameter" in event else ""
        scale = f"loss scale {before} -> {after}"
        return f"Overflow after step {step}, skipping step: a gradient{where} was not finite; {scale}"
    if kind == "nonfinite":
        norm = event.get("grad_norm")
        of_norm = f", gradients' norm {norm}" if norm is not None else ""
        return f"Step {step} came to nothing: a gradient was not finite; loss {event.get('loss', '?')}{of_norm}"
    if kind == "rolled_back":
        return f"Rolled back from step {event.get('from_step', '?')} to step {step}; goes on with other data."
    return None
