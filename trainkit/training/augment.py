"""What becomes of a batch on its way into the model: augmented, normalised, mixed; whole, and on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from trainkit.config.schema import AugmentConfig
from trainkit.data.base import DataInfo
from trainkit.data.batch import Batch
from trainkit.data.erasing import RandomErasing
from trainkit.data.mixing import Mixing
from trainkit.data.rand_augment import RandAugment
from trainkit.errors import UserError


class Losses(NamedTuple):
    """Means over a batch."""

    plain: Tensor
    """Of all samples alike."""
    weighted: Tensor
    """Of the losses times the weight of their class; the same where there are no weights."""
    weight: Tensor | None
    """Of those weights."""


class Target(NamedTuple):
    """What the model is to say of a batch."""

    labels: Tensor
    """int64 [N]: what an image shows, or shows most of. Hits are counted by it."""
    others: Tensor | None = None
    """int64 [N]: what else a mixed image shows."""
    share: Tensor | None = None
    """float32 [N], 0.5 to 1: how much of it shows ``labels``."""

    def losses(self, logits: Tensor, label_smoothing: float, weights: Tensor | None = None) -> Losses:
        """Cross entropy of logits [N, classes]; a mixed image's against both labels, each by its share.

        That is the cross entropy against the mixture of the two, smoothed or not, because it is linear in the target.

        Args:
            weights: of the classes, [classes].
        """
        if self.others is None and weights is None:  # the usual case in one kernel
            loss = functional.cross_entropy(logits, self.labels, label_smoothing=label_smoothing)
            return Losses(loss, loss, None)
        first = _part(logits, self.labels, self.share, label_smoothing, weights)
        if self.others is None or self.share is None:
            return first
        second = _part(logits, self.others, 1 - self.share, label_smoothing, weights)
        weight = None if first.weight is None or second.weight is None else first.weight + second.weight
        return Losses(first.plain + second.plain, first.weighted + second.weighted, weight)


def _part(
    logits: Tensor, labels: Tensor, share: Tensor | None, label_smoothing: float, weights: Tensor | None
) -> Losses:
    losses = functional.cross_entropy(logits, labels, label_smoothing=label_smoothing, reduction="none")
    losses = losses if share is None else losses * share
    plain = losses.mean()
    if weights is None:
        return Losses(plain, plain, None)
    weight = weights[labels]
    return Losses(plain, (weight * losses).mean(), (weight if share is None else weight * share).mean())


class Augment:
    """Makes of a batch what a model trains on. With nothing switched on, that is its normalised images."""

    def __init__(self, config: AugmentConfig, info: DataInfo, normalized: Callable[[Tensor], Tensor]) -> None:
        """``normalized``: uint8 [N, C, H, W] as the model takes them.

        Raises UserError for RandAugment of images that are neither gray nor RGB.
        """
        if config.rand_augment_ops and info.in_chans not in (1, 3):
            raise UserError(
                f"augment.rand_augment_ops={config.rand_augment_ops} is not possible with {info.in_chans} channels.",
                why="RandAugment changes colours: it takes gray or RGB images.",
                fix="Use augment.rand_augment_ops=0.",
                key="augment.rand_augment_ops",
            )
        self._normalized = normalized
        ops, prob = config.rand_augment_ops, config.random_erasing_prob
        self._rand_augment = RandAugment(ops, config.rand_augment_magnitude) if ops else None
        self._erase = RandomErasing(prob, config.random_erasing_mode) if prob else None
        self._mix = (
            Mixing(config.mixup_alpha, config.cutmix_alpha, config.mixup_prob, config.mixup_switch_prob)
            if config.mixes
            else None
        )

        self._is_plain = self._rand_augment is None and self._erase is None and self._mix is None

    def __call__(self, batch: Batch) -> tuple[Tensor, Target]:
        """Images, float32 [N, C, H, W], and what they show."""
        if self._is_plain:  # bytes have no gradient
            return self._normalized(batch.images), Target(batch.labels)
        return self._augmented(batch)

    @torch.no_grad()
    def _augmented(self, batch: Batch) -> tuple[Tensor, Target]:
        images, labels, keys = batch
        if self._rand_augment is not None:
            images = self._rand_augment(images, keys)
        images = self._normalized(images)
        if self._erase is not None:
            images = self._erase(images, keys)
        if self._mix is None:
            return images, Target(labels)
        images, *target = self._mix(images, labels, keys)
        return images, Target(*target)
