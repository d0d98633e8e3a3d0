"""Read the metrics that the file of a task states, and check that a configuration fits the task; without torch."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from trainkit import plugins
from trainkit.errors import UserError, did_you_mean

if TYPE_CHECKING:
    from trainkit.config.schema import Config

_PACKAGE = "trainkit.tasks"
_OF_TRAIN = {"label_smoothing": 0.0, "class_weights": None}
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
        """How its values are formatted."""
        return ".2f" if self.unit == "%" else ".4f"

    def fits(self, value: float) -> bool:
        """Whether it can have that value."""
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
        metric = self.find(key) or LOSS
        return f"{key.replace('ema_', 'ema ')} {metric.text(value)}"


def metrics_of(task: str) -> TaskMetrics:
    """The metrics that the file of a task states: ``METRICS`` and ``HEADLINE``, as literals.

    Raises UserError where they are missing or not what they should be.
    """
    stated = plugins.stated(_PACKAGE, task)
    told, headline = stated.get("METRICS"), stated.get("HEADLINE")
    found = {"loss": LOSS}
    for name, about in told.items() if isinstance(told, dict) else ():
        is_name = isinstance(name, str) and _NAME.fullmatch(name) is not None and name not in _TAKEN
        match about:
            case (str(unit), "higher" | "lower" as better, str(label)) if is_name:
                found[name] = Metric(unit, better == "higher", label)
            case _:
                raise _not_stated(task, f"METRICS[{name!r}] is {about!r}.")
    if not isinstance(told, dict) or not isinstance(headline, str) or headline not in found:
        raise _not_stated(task, f"METRICS is {told!r}, HEADLINE is {headline!r}.")
    return TaskMetrics(headline, found)


def _not_stated(task: str, why: str) -> UserError:
    return UserError(
        f"The file of task '{task}' does not state its metrics.",
        why=why,
        fix="State them as literals, by names that no record has yet: "
        'METRICS = {"mae": ("years", "lower", "Mean absolute error")} and HEADLINE = "mae".',
        key="task.name",
    )


def judged_by(config: Config) -> str:
    """What the best model is judged by: ``checkpoint.best``, or the headline of the task."""
    return config.checkpoint.best or f"val/{metrics_of(config.task.name).headline}"


def taken_of_train(config: Config) -> dict[str, Any]:
    """What the task takes of ``train``, for its ``build``."""
    taken = plugins.stated(_PACKAGE, config.task.name).get("TAKES", ())
    return {name: getattr(config.train, name) for name in _OF_TRAIN if name in taken}


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
            raise UserError(
                f"train.{setting} does not go with task.name={name}.",
                why="That task does not take it: its file does not name it in TAKES.",
                fix=f"Leave train.{setting} out.",
                key=f"train.{setting}",
            )
    wanted = stated.get("LABELS")
    given = plugins.stated("trainkit.data.datasets", config.data.name).get("LABELS", "one")
    if wanted not in (None, given):
        raise UserError(
            f"task.name={name} does not go with data.name={config.data.name}.",
            why=f"The task takes {wanted} label{'s' * (wanted != 'one')} an image, the data has {given}.",
            fix=f"Use task.name={'multilabel' if given == 'several' else 'classification'}, or other data; "
            'a data set of your own with several labels states LABELS = "several" in its file.',
            key="task.name",
        )
    measured = [f"val/{prefix}{metric}" for prefix in ("", "ema_") for metric in metrics.metrics]
    if config.checkpoint.best is not None and config.checkpoint.best not in measured:
        raise UserError(
            f"checkpoint.best={config.checkpoint.best} is not valid.",
            why=f"Task '{name}' measures: {', '.join(measured)}.",
            fix=did_you_mean(config.checkpoint.best, measured, otherwise=f"Use val/{metrics.headline}."),
            key="checkpoint.best",
        )
