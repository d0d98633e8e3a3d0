"""Tasks: what a model is trained for. One file a task, or ``package.module:build`` of the user's own.

A task's file has ``build(splits, *, <options>) -> Task`` (`trainkit.tasks.base`), and states its metrics as literals:
checks of a configuration and readers of a run do not import torch.

    METRICS = {"mae": ("years", "lower", "Mean absolute error")}  # name: unit, which direction is better, label
    HEADLINE = "mae"  # the one to judge by

A file that states ``LABELS = "one"`` or ``"several"`` refuses data sets whose file states another; they are "one".
One that states ``TAKES = ("label_smoothing", "class_weights")`` gets these settings of ``train`` by their names; of any
other task they are refused.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit import plugins
from trainkit.config.task import check_task, taken_of_train
from trainkit.errors import UserError

if TYPE_CHECKING:
    from trainkit.config.schema import Config
    from trainkit.data.base import Splits
    from trainkit.tasks.base import Task


def build_task(config: Config, splits: Splits) -> Task:
    """The task of a configuration.

    Raises UserError for what `check_task` refuses, and for data that the task cannot be trained on.
    """
    from trainkit.tasks.base import Task

    name = config.task.name
    check_task(config)
    build = plugins.load(__name__, name)
    task = build(splits, **taken_of_train(config), **plugins.fill(build, config.task.options, where="task"))
    if not isinstance(task, Task):
        raise UserError(
            f"{name} returned no Task.",
            why=f"It returned {type(task).__name__}.",
            fix="Return a subclass of trainkit.tasks.base.Task with loss, sums and metrics.",
            key="task.name",
        )
    if unwritten := [method for method in ("loss", "sums", "metrics") if not task.has(method)]:
        raise UserError(
            f"{name} returned a Task without {' and '.join(unwritten)}.",
            why=f"Each run needs loss, sums and metrics of {type(task).__name__}.",
            fix="Write what is missing: trainkit.tasks.base.Task says what each is given and returns.",
            key="task.name",
        )
    return task
