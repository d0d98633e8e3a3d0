"""Classes that count for more than others: the weighted mean of the loss over the global batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from trainkit.data.base import Samples, Splits
from trainkit.distributed.process_group import Distributed, local_part
from trainkit.errors import UserError

_KEY = "train.class_weights"


def class_weights(asked: Literal["balanced"] | Sequence[float] | None, splits: Splits) -> list[float] | None:
    """A weight for each class. ``balanced``: samples / (classes * samples of the class), as scikit-learn has it.

    Raises UserError for another number of weights than of classes, and where the classes cannot be balanced.
    """
    classes = splits.info.num_classes
    if asked is None:
        return None
    if asked != "balanced":
        if len(asked) != classes:
            raise UserError(
                f"{_KEY} has {len(asked)} weights, and {splits.info.name} has {classes} classes.",
                why="Each class has one, in the order of the labels.",
                fix=f"Give {classes} numbers, or {_KEY}=balanced.",
                key=_KEY,
            )
        return list(asked)
    counts = Counter(_labels(splits.train, splits))
    absent = [splits.info.class_names[label] for label in range(classes) if not counts[label]]
    if absent:
        raise UserError(
            f"{_KEY}=balanced needs samples of each class; {splits.info.name} has none of {', '.join(absent[:3])}.",
            why="The weight of a class is one divided by its share of the training data.",
            fix=f"Give {classes} numbers as {_KEY}, or add images.",
            key=_KEY,
        )
    return [len(splits.train) / (classes * counts[label]) for label in range(classes)]


def divide_by_mean(mean: Tensor, parameters: Iterable[nn.Parameter], dist: Distributed) -> None:
    """Make the gradients of a mean of weighted losses those of their weighted mean.

    The mean weight is known only when all of a global batch has been seen, by all ranks together. Dividing the
    gradients by it then, instead of each part by its own, gives the same on any number of ranks and micro batches.

    Args:
        mean: of the weights of this rank's samples, on the device; changed.
    """
    if dist.world_size > 1:
        torch.distributed.all_reduce(mean)  # equally many samples a rank
        mean /= dist.world_size
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    torch._foreach_div_([local_part(gradient) for gradient in gradients], mean)


def _labels(samples: Samples, splits: Splits) -> Iterable[int]:
    known = getattr(samples, "labels", None)
    if known is not None:
        labels: Iterable[int] = known.tolist() if isinstance(known, Tensor) else known
        return labels
    if splits.in_memory:
        return (samples[index][1] for index in range(len(samples)))
    raise UserError(
        f"{_KEY}=balanced needs the labels of {splits.info.name}, which does not tell them.",
        why="Each image would have to be read for its label.",
        fix=f"Give {splits.info.num_classes} numbers as {_KEY}, or add `labels` to the data set's samples.",
        key=_KEY,
    )
