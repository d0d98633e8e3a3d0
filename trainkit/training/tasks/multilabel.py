"""Multi-label classification: each image shows any number of classes. Binary cross entropy, mAP and F1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from trainkit.training.tasks.base import Task, binary_cross_entropy

if TYPE_CHECKING:
    from trainkit.common.image_input import DataInfo
    from trainkit.data.base import Splits


METRICS = {
    "mAP": ("%", "higher", "Mean average precision"),
    "f1": ("%", "higher", "F1, mean over the classes"),
    "f1_micro": ("%", "higher", "F1, over all labels"),
}
HEADLINE = "mAP"
LABELS = "several"
TAKES = ("label_smoothing",)


class MultiLabel(Task):
    """Targets are uint8 [N, classes]: 1 for each class that an image shows."""

    def __init__(self, info: DataInfo, label_smoothing: float, threshold: float) -> None:
        self._info = info
        self._label_smoothing = label_smoothing
        self._threshold = threshold

    def loss(self, output: Tensor, target: Tensor, reduction: str) -> Tensor:
        """The mean over the classes."""
        return binary_cross_entropy(output, target.float(), reduction)

    def training_loss(self, output: Tensor, target: Tensor, reduction: str) -> Tensor:
        """The same against smoothed labels: half of the smoothing goes to the other answer."""
        smoothing = self._label_smoothing
        return binary_cross_entropy(output, target.float() * (1.0 - smoothing) + smoothing / 2, reduction)

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        """For each class whether it is found and there, found, and there: bool [N, 3 * classes]."""
        found = self._found(output)
        there = target > 0
        return torch.cat([found & there, found, there], dim=1)

    def metrics(self, sums: Sequence[float], samples: int) -> dict[str, float]:
        """``f1`` and ``f1_micro`` in percent; 0 for a class that is neither found nor there, as scikit-learn has it."""
        right, found, there = torch.tensor(sums, dtype=torch.float64).view(3, -1)
        each = torch.where(found + there > 0, 2 * right / (found + there), 0.0)
        whole = found.sum() + there.sum()
        micro = 2 * right.sum() / whole.clamp(min=1)
        return {"f1": 100.0 * each.mean().item(), "f1_micro": 100.0 * micro.item()}

    def pooled(self, output: Tensor, target: Tensor) -> dict[str, float]:
        """``mAP`` in percent: the mean over the classes that some sample shows."""
        shown = (target > 0).any(0).nonzero().flatten().tolist()
        found = [average_precision(output[:, label], target[:, label] > 0) for label in shown]
        return {"mAP": 100.0 * sum(found) / len(found) if found else 0.0}

    def probabilities(self, output: Tensor) -> Tensor:
        """Predictions for each class alone."""
        return output.sigmoid()

    def wrong(self, output: Tensor, target: Tensor) -> Tensor:
        """Return how far the worst of the classes that are told wrong is off."""
        there = target > 0
        off = (output.sigmoid() - there.float()).abs()
        return torch.where(self._found(output) != there, off, 0.0).amax(dim=1)

    def words(self, output: Tensor, target: Tensor) -> tuple[str, str]:
        """The classes of the label, and those that were found."""
        return self._names(target > 0), self._names(self._found(output))

    def _found(self, output: Tensor) -> Tensor:
        return (output.sigmoid() > self._threshold) & output.isfinite()

    def _names(self, labels: Tensor) -> str:
        return ", ".join(self._info.class_names[at] for at in labels.nonzero().flatten().tolist()) or "nothing"


def build(splits: Splits, label_smoothing: float = 0.0, *, threshold: float = 0.5) -> Task:
    """Several classes an image.

    ``threshold``: a class counts as present if its probability is higher.
    """
    return MultiLabel(splits.info, label_smoothing, threshold)


def average_precision(scores: Tensor, there: Tensor) -> float:
    """The precision at each score, weighted by what it adds to the recall; samples of equal scores come together.

    A score that is not finite is the lowest.
    """
    scores = scores.double().masked_fill(~scores.isfinite(), -torch.inf)
    scores, order = scores.sort(descending=True)
    hits = there[order].double().cumsum(0)
    last = torch.cat([scores[1:] != scores[:-1], torch.ones(1, dtype=torch.bool)])
    hits = hits[last]
    seen = torch.arange(1, len(scores) + 1, dtype=torch.float64)[last]
    return float((hits.diff(prepend=hits.new_zeros(1)) * hits / seen).sum() / hits[-1])
