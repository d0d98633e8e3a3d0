"""The task that a configuration names: its metrics, and whether it fits the data and the settings.

It is read from its source, for importing it costs seconds of CPU time.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainkit.common.errors import UserError, did_you_mean
from trainkit.config import plugins

if TYPE_CHECKING:  # the schema takes a tenth of a second, and what only reads records does without it
    from trainkit.config.schema import Config


_PACKAGE = "trainkit.training.tasks"
_OF_TRAIN = {"label_smoothing": 0.0, "class_weights": None, "loss": "cross_entropy", "bce_threshold": None}
"""Settings of ``train`` that a task may take, by ``TAKES`` in its file; and what they are where it takes none."""
_NAME = re.compile(r"(?!ema_|seconds_)[A-Za-z]\w{0,40}")
# Further keys of a metrics record.
_TAKEN = frozenset(
    ("time", "step", "epoch", "split", "loss", "samples", "lr", "images_per_sec", "mfu", "grad_norm", "round", "peers")
)


@dataclass(frozen=True)
class Metric:
    """A number that a task measures on a split."""

    unit: str = ""
    """``%``: it lies between 0 and 100."""
    higher_is_better: bool = True
    label: str = ""
    """For headings and axes."""

    @property
    def spec(self) -> str:
        """Format of its values."""
        return ".2f" if self.unit == "%" else ".4f"

    def fits(self, value: float) -> bool:
        """True if it can have that value."""
        return self.unit != "%" or 0.0 <= value <= 100.0

    def text(self, value: float | None) -> str:
        """A value with its unit; ``nan`` for what a record holds as null."""
        number = "nan" if value is None else format(value, self.spec)
        return f"{number} {self.unit}".rstrip()


LOSS = Metric("", False, "Loss")
"""Every task has one."""


@dataclass(frozen=True)
class TaskMetrics:
    """The metrics of a task, ``loss`` first. Records have them by these names; ``ema_NAME`` is that of averaged
    weights."""

    headline: str
    """The one to judge by."""
    metrics: Mapping[str, Metric]

    def find(self, key: str) -> Metric | None:
        """The metric of a record's key; None for one that is no metric."""
        return self.metrics.get(key.removeprefix("ema_"))

    def words(self, key: str, value: float | None) -> str:
        """Name and value of a record's metric: ``ema acc1 71.20 %``."""
        return f"{key.replace('ema_', 'ema ')} {(self.find(key) or LOSS).text(value)}"


def metrics_of(task: str) -> TaskMetrics:
    """The metrics that the file of a task states: ``METRICS`` and ``HEADLINE``, as literals.

    Raises UserError where they are missing or not what they should be.
    """
    constants = plugins.stated(_PACKAGE, task)
    stated = constants.get("METRICS")
    headline = constants.get("HEADLINE")
    metrics = {"loss": LOSS}
    wrong = ""
    if not isinstance(stated, dict):
        stated = {}
        wrong = "METRICS is not a mapping."
    for name, about in stated.items():
        is_name = isinstance(name, str) and _NAME.fullmatch(name) is not None and name not in _TAKEN
        match about:
            case (str(unit), "higher" | "lower" as better, str(label)) if is_name:
                metrics[name] = Metric(unit, better == "higher", label)
            case _:
                wrong = wrong or f"METRICS[{name!r}] is {about!r}."
    if not isinstance(headline, str) or headline not in metrics:
        wrong = wrong or f"HEADLINE is {headline!r}, which is none of them."
    if wrong:
        what = f"The file of task '{task}' does not state its metrics."
        fix = "State them as literals, with names that records do not use yet: "
        fix += 'METRICS = {"mae": ("years", "lower", "Mean absolute error")} and HEADLINE = "mae".'
        raise UserError(what, why=wrong, fix=fix, key="task.name")
    return TaskMetrics(str(headline), metrics)


def judged_by(config: Config) -> str:
    """Return the metric that the best model is judged by: ``checkpoint.best``, or the headline of the task."""
    return config.checkpoint.best or f"val/{metrics_of(config.task.name).headline}"


def taken_of_train(config: Config) -> dict[str, Any]:
    """Return the settings of ``train`` that the task's ``build`` takes."""
    taken = plugins.stated(_PACKAGE, config.task.name).get("TAKES", ())
    return {name: getattr(config.train, name) for name in _OF_TRAIN if name in taken}


def labels_asked_by(task: str) -> str | None:
    """Return ``LABELS`` of a task's file, ``one`` or ``several``; None where it takes any."""
    labels: str | None = plugins.stated(_PACKAGE, task).get("LABELS")
    return labels


def check_task(config: Config) -> None:
    """Refuse options that the task does not have, settings that it does not take, and metrics that it does not measure.

    Without importing it.
    """
    name = config.task.name
    metrics = metrics_of(name)
    plugins.check_options(_PACKAGE, name, config.task.options, where="task")
    stated = plugins.stated(_PACKAGE, name)
    for setting, default in _OF_TRAIN.items():
        if getattr(config.train, setting) != default and setting not in stated.get("TAKES", ()):
            what = f"train.{setting} does not go with task.name={name}."
            why = "The task does not support it: its file does not list it in TAKES."
            raise UserError(what, why=why, fix=f"Omit train.{setting}.", key=f"train.{setting}")
    wanted = stated.get("LABELS")
    given = plugins.stated("trainkit.data.datasets", config.data.name).get("LABELS", "one")
    if wanted not in (None, given):
        what = f"task.name={name} does not go with data.name={config.data.name}."
        why = f"The data has {given} label(s) per image, the task needs {wanted}."
        fitting = {"several": "multilabel"}.get(given, "classification")
        fix = f"Use task.name={fitting}, or other data; "
        fix += 'a data set of your own with several labels states LABELS = "several" in its file.'
        raise UserError(what, why=why, fix=fix, key="task.name")
    measured = [f"val/{metric}" for metric in metrics.metrics]
    measured += [f"val/ema_{metric}" for metric in metrics.metrics]
    if config.checkpoint.best is not None and config.checkpoint.best not in measured:
        what = f"checkpoint.best={config.checkpoint.best} is not valid."
        fix = did_you_mean(config.checkpoint.best, measured, otherwise=f"Use val/{metrics.headline}.")
        raise UserError(what, why=f"Task '{name}' measures: {', '.join(measured)}.", fix=fix, key="checkpoint.best")
