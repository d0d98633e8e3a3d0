"""Classification: each image shows one class. Cross entropy, binary if so asked, the accuracies, and which class is
taken for which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from trainkit.common.errors import UserError
from trainkit.training.tasks.base import Task, binary_cross_entropy

if TYPE_CHECKING:
    from trainkit.common.image_input import DataInfo
    from trainkit.data.base import Splits
    from trainkit.data.batch_augment import Target


METRICS = {"acc1": ("%", "higher", "Top-1 accuracy"), "acc5": ("%", "higher", "Top-5 accuracy")}
HEADLINE = "acc1"
LABELS = "one"
TAKES = ("label_smoothing", "class_weights", "loss", "bce_threshold")
_TOP = 5
_KEY = "train.class_weights"


class Classification(Task):
    """``weights``: how much a sample of each class counts; None: all alike. ``bce`` and ``threshold``: as
    ``train.loss`` and ``train.bce_threshold`` have them."""

    def __init__(
        self,
        info: DataInfo,
        label_smoothing: float,
        weights: Sequence[float] | None,
        *,
        bce: bool = False,
        threshold: float | None = None,
    ) -> None:
        self._info = info
        self._label_smoothing = label_smoothing
        self._bce = bce
        self._threshold = threshold
        self._weights = None if weights is None else torch.tensor(weights, dtype=torch.float32)

    def loss(self, output: Tensor, target: Tensor, reduction: str) -> Tensor:
        """Cross entropy, binary if so asked."""
        return self._against(output, target, reduction, smoothing=0.0)

    def training_loss(self, output: Tensor, target: Tensor, reduction: str) -> Tensor:
        """The same against smoothed labels."""
        return self._against(output, target, reduction, smoothing=self._label_smoothing)

    def _against(self, output: Tensor, target: Tensor, reduction: str, *, smoothing: float) -> Tensor:
        if not self._bce:
            return functional.cross_entropy(output, target, label_smoothing=smoothing, reduction=reduction)
        rest = smoothing / output.shape[1]  # timm's, as for cross entropy
        smoothed = torch.full_like(output, rest).scatter_(1, target[:, None], 1.0 - smoothing + rest)
        return binary_cross_entropy(output, smoothed, reduction)

    def mixed_loss(self, output: Tensor, target: Target) -> Tensor | None:
        """Binary cross entropy of each class, shown or not, where there is a threshold."""
        if self._threshold is None or target.others is None or target.share is None:
            return None
        share = target.share.where(target.labels != target.others, 1.0)[:, None]
        shown = torch.zeros_like(output).scatter_(1, target.others[:, None], 1 - share)
        shown = shown.scatter_(1, target.labels[:, None], share)
        return binary_cross_entropy(output, (shown > self._threshold).float(), "none")

    def distillation_loss(self, output: Tensor, told: Tensor, temperature: float) -> Tensor:
        """Kullback and Leibler's divergence of softened probabilities, times the temperature's square."""
        own, theirs = ((scores / temperature).log_softmax(dim=1) for scores in (output, told))
        return functional.kl_div(own, theirs, reduction="batchmean", log_target=True) * temperature**2

    def weights(self, target: Tensor) -> Tensor | None:
        """Return the weights of the samples' classes."""
        if self._weights is None:
            return None
        self._weights = self._weights.to(target.device)
        return self._weights[target]

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        """Return whether the label is the highest score, and among the five highest: bool [N, 2]."""
        hits = top_classes(output) == target[:, None]
        return torch.stack([hits[:, 0], hits.any(1)], dim=1)

    def metrics(self, sums: Sequence[float], samples: int) -> dict[str, float]:
        """``acc1`` and ``acc5`` in percent."""
        return {name: 100.0 * hits / samples for name, hits in zip(METRICS, sums, strict=True)}

    def probabilities(self, output: Tensor) -> Tensor:
        """They add up to 1."""
        return output.softmax(dim=1)

    def wrong(self, output: Tensor, target: Tensor) -> Tensor:
        """The probability of the class that an image is wrongly taken for."""
        told = self.taken_for(output)
        sure = output.softmax(dim=1).gather(1, told.clamp(min=0)[:, None])[:, 0]
        return sure.where((told >= 0) & (told != target), -1.0)

    def words(self, output: Tensor, target: Tensor) -> tuple[str, str]:
        """The names of the two classes."""
        names = self._info.class_names
        return names[int(target)], names[int(self.taken_for(output[None]))]

    def taken_for(self, output: Tensor) -> Tensor:
        """The highest score."""
        return top_classes(output)[:, 0]


def build(
    splits: Splits,
    label_smoothing: float = 0.0,
    class_weights: str | Sequence[float] | None = None,
    loss: str = "cross_entropy",
    bce_threshold: float | None = None,
) -> Task:
    """One class an image."""
    weights = weights_of(class_weights, splits)
    return Classification(splits.info, label_smoothing, weights, bce=loss == "bce", threshold=bce_threshold)


def top_classes(logits: Tensor) -> Tensor:
    """The classes with the highest scores, the best first: int64 [N, 5], or as many as there are classes.

    -1 where the scores do not tell a class: everywhere in a row with a NaN or +inf, for its probabilities are NaN, and
    in the place of a score of -inf. (`topk` takes NaN for the highest score, which would be class 0 of a row of NaN.)
    """
    scores, classes = logits.topk(min(_TOP, logits.shape[1]), dim=1)
    return classes.where(scores.isfinite() & scores[:, :1].isfinite(), -1)


def weights_of(asked: str | Sequence[float] | None, splits: Splits) -> list[float] | None:
    """A weight for each class. ``balanced``: samples / (classes * samples of the class), as scikit-learn has it.

    Raises UserError for another number of weights than of classes, and where the classes cannot be balanced.
    """
    classes = splits.info.num_classes
    name = splits.info.name
    train = splits.train
    if asked is None:
        return None

    def refused(what: str, why: str, fix: str) -> UserError:
        return UserError(f"{_KEY}{what}", why=why, fix=f"Give {classes} numbers as {_KEY}, or {fix}", key=_KEY)

    if asked != "balanced":
        if len(asked) != classes:
            what = f" has {len(asked)} weights, and {name} has {classes} classes."
            raise refused(what, "Each class needs one weight, in the order of the labels.", f"{_KEY}=balanced.")
        return [float(weight) for weight in asked]
    known = getattr(train, "labels", None)
    if known is None and not splits.in_memory:
        what = f"=balanced needs the labels of {name}, which does not tell them."
        why = "Each image would have to be read to get its label."
        raise refused(what, why, "add `labels` to the data set's samples.")
    if known is None:
        known = [train[index][1] for index in range(len(train))]
    elif isinstance(known, Tensor):
        known = known.tolist()
    counts = Counter(known)
    absent = [splits.info.class_names[label] for label in range(classes) if not counts[label]]
    if absent:
        what = f"=balanced needs samples of each class; {name} has none of {', '.join(absent[:3])}."
        raise refused(what, "The weight of a class is one divided by its share of the training data.", "add images.")
    return [len(train) / (classes * counts[label]) for label in range(classes)]
