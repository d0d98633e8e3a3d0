"""Tasks: what a model is trained for. One file a task, or ``package.module:build`` of the user's own.

A task's file has ``build(splits, *, <options>) -> Task`` (`Task`), and states its metrics as literals:
checks of a configuration and readers of a run do not import torch.

    METRICS = {"mae": ("years", "lower", "Mean absolute error")}  # name: unit, which direction is better, label
    HEADLINE = "mae"  # the one to judge by

A file that states ``LABELS = "one"`` or ``"several"`` refuses data sets whose file states another; they are "one".
One that states ``TAKES = ("label_smoothing", "class_weights")`` gets these settings of ``train`` by their names, and so
``loss`` and ``bce_threshold``; of any other task they are refused.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from torch.nn import functional

from trainkit.common.errors import UserError
from trainkit.common.terminal import one_line
from trainkit.config import plugin_options, plugins
from trainkit.config.task_metrics import check_task, metrics_of, taken_of_train

if TYPE_CHECKING:
    from trainkit.config.schema import Config
    from trainkit.data.base import Splits
    from trainkit.data.batch_augment import Target


def build_task(config: Config, splits: Splits) -> Task:
    """The task of a configuration.

    Raises UserError for what `check_task` refuses, and for data that the task cannot be trained on.
    """

    name = config.task.name
    check_task(config)
    build = plugins.load("trainkit.training.tasks", name)
    try:
        task = build(splits, **taken_of_train(config), **plugin_options.fill(build, config.task.options, where="task"))
        if isinstance(task, Task):
            task.stated = tuple(name for name in metrics_of(name).metrics if name != "loss")
            return task
        why = f"It returned {type(task).__name__}."
    except TypeError as error:
        if "abstract" not in str(error):
            raise
        why = f"{error}."
    fix = "Return a subclass of trainkit.tasks.base.Task: it documents the arguments and results of each method. "
    fix += "Then submit again."
    raise UserError(f"{name} returned no Task.", why=why, fix=fix, key="task.name")


_KEY = "classes"
"""Key of a checkpoint's state for the names of the model's outputs: the data may have other classes by now."""
_LONGEST = 1 << 20
"""Characters of JSON: of more the checkpoint's record would be too long to be read."""
_SHOWN = 40


class Task(ABC):
    """A task: the loss and the metrics. `loss`, `sums` and `metrics` must be written; the others may.

    ``output`` is the model's for a batch, float32 [N, num_classes]; ``target`` is what the data set gives as label,
    collated: int64 [N] of whole numbers, float32 [N] of others, [N, ...] of tensors.
    """

    stated: Sequence[str] = ()
    """Names of the metrics that the task's file states, once it is built for a run."""

    @abstractmethod
    def loss(self, output: Tensor, target: Tensor, reduction: str) -> Tensor:
        """The loss. ``reduction`` as in torch: ``mean`` over the batch, or ``none``: one for each sample, [N]."""

    @abstractmethod
    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        """Numbers of each sample that add up, bool or float [N, K]: hits, errors, counts."""

    @abstractmethod
    def metrics(self, sums: Sequence[float], samples: int) -> dict[str, float]:
        """The metrics, from the K sums and the number of samples; but for those of `pooled`."""

    def training_loss(self, output: Tensor, target: Tensor, reduction: str) -> Tensor:
        """The loss to train on, where it is another one than `loss`, which is measured in evaluation."""
        return self.loss(output, target, reduction)

    def mixed_loss(self, output: Tensor, target: Target) -> Tensor | None:
        """The losses of mixed images to train on, [N], where they are not those of both labels, each by its share."""
        return None

    def distillation_loss(self, output: Tensor, told: Tensor, temperature: float) -> Tensor:
        """Return the mean distance of ``output`` from what another model, the teacher, says of the same batch."""
        raise NotImplementedError

    def weights(self, target: Tensor) -> Tensor | None:
        """Return the weight of each sample in training, [N]; the loss is the weighted mean over the global batch."""
        return None

    def pooled(self, output: Tensor, target: Tensor) -> dict[str, float]:
        """Metrics that need all samples of an evaluation at once, such as those of a ranking; on the CPU."""
        return {}

    def probabilities(self, output: Tensor) -> Tensor:
        """Return class probabilities, [N, num_classes]. Without it outputs are no classes: `predict` writes them."""
        raise NotImplementedError

    def wrong(self, output: Tensor, target: Tensor) -> Tensor:
        """Return how surely each sample is wrong, [N]: the highest are kept as pictures; 0 or less: it is right."""
        raise NotImplementedError

    def words(self, output: Tensor, target: Tensor) -> tuple[str, str]:
        """Name what a sample that is `wrong` is, and what the model takes it for."""
        raise NotImplementedError

    def taken_for(self, output: Tensor) -> Tensor:
        """The class that each sample is taken for, int64 [N], for a confusion matrix; -1: none."""
        raise NotImplementedError

    def has(self, method: str) -> bool:
        """Return whether a method that may be written is."""
        return getattr(type(self), method) is not getattr(Task, method)


class Losses(NamedTuple):
    """Means over a batch."""

    plain: Tensor
    """Mean loss of all samples alike."""
    weighted: Tensor
    """Mean of the losses times the weights of the samples; the same where there are no weights."""
    weight: Tensor | None
    """Mean of those weights."""


def training_losses(task: Task, output: Tensor, target: Target) -> Losses:
    """The training loss; a mixed image's against both labels, each by its share.

    Where the loss is linear in the target, as cross entropy is, that is the loss against the mixture of the two.
    """
    weight = task.weights(target.labels)
    if target.others is None and weight is None:  # the usual case in one kernel
        loss = task.training_loss(output, target.labels, "mean")
        return Losses(loss, loss, None)
    if target.others is None or target.share is None:
        return _part(task, output, target.labels, target.share, weight)
    losses = task.mixed_loss(output, target)
    if losses is not None:
        other = task.weights(target.others)
        if weight is None or other is None:
            return Losses(losses.mean(), losses.mean(), None)
        weight = weight * target.share + other * (1 - target.share)
        return Losses(losses.mean(), (weight * losses).mean(), weight.mean())
    first = _part(task, output, target.labels, target.share, weight)
    second = _part(task, output, target.others, 1 - target.share, task.weights(target.others))
    both = None
    if first.weight is not None and second.weight is not None:
        both = first.weight + second.weight
    return Losses(first.plain + second.plain, first.weighted + second.weighted, both)


def binary_cross_entropy(output: Tensor, target: Tensor, reduction: str) -> Tensor:
    """Binary cross-entropy of scores against targets of 0 to 1, both [N, classes]; ``reduction`` as in `Task`."""
    losses = functional.binary_cross_entropy_with_logits(output, target, reduction="none").mean(dim=1)
    if reduction == "mean":
        return losses.mean()
    return losses


def _part(task: Task, output: Tensor, labels: Tensor, share: Tensor | None, weight: Tensor | None) -> Losses:
    losses = task.training_loss(output, labels, "none")
    if share is not None:
        losses = losses * share
    plain = losses.mean()
    if weight is None:
        return Losses(plain, plain, None)
    weighted = (weight * losses).mean()
    if share is not None:
        weight = weight * share
    return Losses(plain, weighted, weight.mean())


def told_classes(splits: Splits) -> dict[str, list[str]]:
    """For the state of a checkpoint: the names of the model's outputs in order.

    Nothing where there are too many, and of a peer that has no data, nor names.
    """
    names = [str(name) for name in splits.info.class_names]
    is_known = len(splits.train) > 0 and len(json.dumps(names)) <= _LONGEST
    return {_KEY: names} if is_known else {}


def classes_in(state: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the classes that a checkpoint was trained on; None where it does not say so."""
    names = state.get(_KEY)
    if isinstance(names, list) and all(isinstance(name, str) for name in names):
        return tuple(names)
    return None


def difference(trained: Sequence[str] | None, now: Sequence[str]) -> str:
    """Say how the data's classes differ from a checkpoint's; empty if they do not, or if the checkpoint names none."""
    if trained is None:
        return ""
    if len(trained) != len(now):
        return f"it was trained on {len(trained)} classes, and the data has {len(now)}"
    for label, (was, is_now) in enumerate(zip(trained, map(str, now), strict=True)):
        if was != is_now:
            names = f"'{one_line(was, _SHOWN)}' in training, and in the data is '{one_line(is_now, _SHOWN)}'"
            return f"class {label} was {names}"
    return ""


def require_same_classes(state: Mapping[str, Any], splits: Splits, root: str) -> None:
    """Raises UserError where the labels of the data mean other classes than in training."""
    found = difference(classes_in(state), splits.info.class_names)
    if found:
        what = f"The data in {root} has other classes than the checkpoint."
        why = f"{found[0].upper()}{found[1:]}: its labels would mean other classes."
        fix = "Name the original data: data.root=FOLDER if it has moved; or train again on this data."
        raise UserError(what, why=why, fix=fix, key="data.root")
