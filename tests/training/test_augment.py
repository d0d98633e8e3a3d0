"""From a batch to what the model trains on."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from timm.data import mixup
from timm.loss import cross_entropy
from torch.nn import functional

from tests.training.parts import parts_of
from trainkit.config.schema import AugmentConfig
from trainkit.data import order
from trainkit.data.augment import Augment, Target
from trainkit.data.base import Batch
from trainkit.errors import UserError
from trainkit.training.batch_size import check_batch_sizes

KEYS = order.keys(0, 0, torch.arange(64))
IMAGES = torch.randint(0, 256, (64, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS = torch.arange(64) % 7
LOGITS = torch.randn(64, 7, generator=torch.Generator().manual_seed(1))


def prepared(settings: dict[str, float], keys: torch.Tensor = KEYS) -> tuple[torch.Tensor, Target]:
    parts = parts_of()
    augment = Augment(AugmentConfig.model_validate(settings), parts.splits.info, parts.normalized)
    return augment(Batch(IMAGES.clone(), LABELS, keys))


PLAIN = parts_of().normalized(IMAGES)


def test_with_nothing_on_images_are_only_normalised() -> None:
    images, target = prepared({})
    assert torch.equal(images, PLAIN)
    assert target == Target(LABELS)


@pytest.mark.parametrize(
    "settings",
    [{"rand_augment_ops": 2}, {"random_erasing_prob": 0.5}, {"mixup_alpha": 0.8}, {"cutmix_alpha": 1.0}],
    ids=str,
)
def test_each_setting_changes_images_as_their_keys_say_and_the_batch_itself_stays(settings: dict[str, float]) -> None:
    images, _ = prepared(settings)
    assert not torch.equal(images, PLAIN)
    assert torch.equal(images, prepared(settings)[0])
    assert not torch.equal(images, prepared(settings, KEYS + 1)[0])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_mixed_images_is_timms_of_the_mixed_labels(smoothing: float) -> None:
    soft = cast(Any, cross_entropy).SoftTargetCrossEntropy()
    one_hot: Any = mixup.mixup_target
    _, target = prepared({"mixup_alpha": 0.8, "cutmix_alpha": 1.0})
    assert target.others is not None
    assert target.share is not None
    ones = torch.ones(64, 1)
    one, other = (one_hot(labels, 7, ones, smoothing) for labels in (target.labels, target.others))
    share = target.share[:, None]
    expected = soft(LOGITS, one * share + other * (1 - share))
    assert target.losses(LOGITS, smoothing).plain.item() == pytest.approx(expected.item(), rel=1e-5)
    plain = Target(LABELS).losses(LOGITS, smoothing).plain
    assert plain.item() == pytest.approx(soft(LOGITS, one_hot(LABELS, 7, ones, smoothing)).item(), rel=1e-5)


def test_mixed_images_of_weighted_classes_count_by_both_labels() -> None:
    _, target = prepared({"mixup_alpha": 0.8})
    assert target.others is not None
    assert target.share is not None
    weights = torch.arange(1, 8).float()
    losses = target.losses(LOGITS, 0.0, weights)
    soft = torch.zeros(64, 7).scatter_(1, target.labels[:, None], target.share[:, None])
    soft = soft.scatter_add(1, target.others[:, None], 1 - target.share[:, None])
    expected = functional.cross_entropy(LOGITS, soft, weight=weights)  # torch divides by the number of samples
    assert losses.weighted.item() == pytest.approx(expected.item(), rel=1e-5)
    assert losses.plain.item() == pytest.approx(functional.cross_entropy(LOGITS, soft).item(), rel=1e-5)
    assert losses.weight is not None
    assert losses.weight.item() == pytest.approx((soft @ weights).mean().item(), rel=1e-5)


def test_rand_augment_of_images_that_are_neither_gray_nor_rgb_is_refused() -> None:
    parts = parts_of("data.in_chans=2", "augment.rand_augment_ops=1")
    with pytest.raises(UserError, match="2 channels"):
        Augment(parts.config.augment, parts.splits.info, parts.normalized)


def test_a_rank_whose_share_has_no_pairs_is_refused_where_pairs_are_mixed() -> None:
    sizes = ("train.global_batch_size=6", "train.micro_batch_size=null")
    plain, mixing = parts_of(*sizes), parts_of(*sizes, "augment.mixup_alpha=0.2")
    check_batch_sizes(plain.config, 2, plain.splits)
    with pytest.raises(UserError, match=r"3 images, an odd number(.|\n)*global_batch_size=8"):
        check_batch_sizes(mixing.config, 2, mixing.splits)
