"""From a batch to what the model trains on."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from scipy.special import betainc  # type: ignore[import-untyped]
from timm.data import mixup
from timm.loss import BinaryCrossEntropy, cross_entropy  # type: ignore[attr-defined]
from torch.nn import functional

from tests.training.parts import parts_of
from trainkit.common.errors import UserError
from trainkit.config.loading import load
from trainkit.config.schema import AugmentConfig
from trainkit.data import draws
from trainkit.data.base import Batch
from trainkit.data.batch_augment import Augment, Mixing, RandomErasing, Target, beta
from trainkit.training.batch_size import check_batch_sizes
from trainkit.training.tasks.base import training_losses
from trainkit.training.tasks.classification import Classification

KEYS_AUGMENT = draws.keys(0, 0, torch.arange(64))
IMAGES_AUGMENT = torch.randint(0, 256, (64, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
LABELS_AUGMENT = torch.arange(64) % 7
LOGITS = torch.randn(64, 7, generator=torch.Generator().manual_seed(1))


def prepared(
    settings: dict[str, float], keys: torch.Tensor = KEYS_AUGMENT, part: slice = slice(64)
) -> tuple[torch.Tensor, Target]:
    parts = parts_of()
    augment = Augment(AugmentConfig.model_validate(settings), parts.splits.info, parts.normalized)
    return augment(Batch(IMAGES_AUGMENT[part].clone(), LABELS_AUGMENT[part], keys[part]))


PLAIN = parts_of().normalized(IMAGES_AUGMENT)


@pytest.mark.parametrize(
    "settings",
    [{"rand_augment_ops": 2}, {"random_erasing_prob": 0.5, "random_erasing_mode": "pixel"}, {"mixup_alpha": 0.8},
     {"cutmix_alpha": 1.0}, {"policy": "trivial_wide"}, {"policy": "auto_imagenet"}, {"policy": "three"}],
    ids=str,
)  # fmt: skip
def test_images_change_as_their_keys_say_whatever_batch_they_are_in(settings: dict[str, Any]) -> None:
    images, _ = prepared(settings)
    assert torch.equal(images[10:16], prepared(settings, part=slice(10, 16))[0])
    assert not torch.equal(images, PLAIN)
    assert torch.equal(images, prepared(settings)[0])
    assert not torch.equal(images, prepared(settings, KEYS_AUGMENT + 1)[0])


def shares(target: Target) -> tuple[torch.Tensor, torch.Tensor]:
    """Other labels of mixed images, and the share of the first."""
    assert target.others is not None
    assert target.share is not None
    return target.others, target.share


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_mixed_images_is_timms_of_the_mixed_labels(smoothing: float) -> None:
    soft = cast(Any, cross_entropy).SoftTargetCrossEntropy()
    one_hot: Any = mixup.mixup_target
    _, target = prepared({"mixup_alpha": 0.8, "cutmix_alpha": 1.0})
    (others, share), ones = shares(target), torch.ones(64, 1)
    one, other = (one_hot(labels, 7, ones, smoothing) for labels in (target.labels, others))
    share = share[:, None]
    expected = soft(LOGITS, one * share + other * (1 - share))
    task = Classification(parts_of().splits.info, smoothing, None)
    assert training_losses(task, LOGITS, target).plain.item() == pytest.approx(expected.item(), rel=1e-5)
    plain = training_losses(task, LOGITS, Target(LABELS_AUGMENT)).plain
    assert plain.item() == pytest.approx(soft(LOGITS, one_hot(LABELS_AUGMENT, 7, ones, smoothing)).item(), rel=1e-5)


@pytest.mark.parametrize(
    ("smoothing", "threshold", "weights"),
    [(0.0, None, None), (0.1, None, None), (0.0, 0.0, None), (0.0, 0.2, None), (0.0, 0.7, None),
     (0.0, 0.2, range(1, 8))],
)  # fmt: skip
def test_binary_cross_entropy_is_timms_of_whole_and_mixed_images(
    smoothing: float, threshold: Any, weights: Any
) -> None:
    theirs = BinaryCrossEntropy(smoothing, threshold, reduction="none")
    task = Classification(parts_of().splits.info, smoothing, weights, bce=True, threshold=threshold)
    plain = training_losses(task, LOGITS, Target(LABELS_AUGMENT)).plain
    assert plain.item() == pytest.approx(theirs(LOGITS, LABELS_AUGMENT).mean().item(), rel=1e-5)
    hard = BinaryCrossEntropy(0.0, reduction="none")(LOGITS, LABELS_AUGMENT).mean(1)
    assert task.loss(LOGITS, LABELS_AUGMENT, "none").tolist() == pytest.approx(hard.tolist(), rel=1e-5)
    _, target = prepared({"mixup_alpha": 0.8, "cutmix_alpha": 1.0, "mixup_prob": 0.7})
    others, share = shares(target)
    one_hot: Any = mixup.mixup_target
    ones = torch.ones(64, 1)
    one, other = (one_hot(labels, 7, ones, smoothing) for labels in (target.labels, others))
    expected = theirs(LOGITS, one * share[:, None] + other * (1 - share[:, None])).mean(1)
    found = training_losses(task, LOGITS, target)
    assert found.plain.item() == pytest.approx(expected.mean().item(), rel=1e-5)
    if weights:
        each = (1 + target.labels) * share + (1 + others) * (1 - share)
        assert found.weighted.item() == pytest.approx((each * expected).mean().item(), rel=1e-5)
        assert found.weight is not None
        assert found.weight.item() == pytest.approx(each.mean().item(), rel=1e-5)


def test_a_threshold_is_for_binary_cross_entropy_without_smoothing() -> None:
    assert load("single", ["train.loss=bce", "train.bce_threshold=0"]).config.train.bce_threshold == 0
    for settings in (["train.label_smoothing=0.1", "train.loss=bce"], []):
        with pytest.raises(UserError, match=r"train\.bce_threshold=0\.2 and train\.l"):
            load("single", ["train.bce_threshold=0.2", *settings])


def test_mixed_images_of_weighted_classes_count_by_both_labels() -> None:
    _, target = prepared({"mixup_alpha": 0.8})
    others, share = shares(target)
    weights = torch.arange(1, 8).float()
    losses = training_losses(Classification(parts_of().splits.info, 0.0, weights.tolist()), LOGITS, target)
    soft = torch.zeros(64, 7).scatter_(1, target.labels[:, None], share[:, None])
    soft = soft.scatter_add(1, others[:, None], 1 - share[:, None])
    expected = functional.cross_entropy(LOGITS, soft, weight=weights)  # torch divides by the number of samples
    assert losses.weighted.item() == pytest.approx(expected.item(), rel=1e-5)
    assert losses.plain.item() == pytest.approx(functional.cross_entropy(LOGITS, soft).item(), rel=1e-5)
    assert losses.weight is not None
    assert losses.weight.item() == pytest.approx((soft @ weights).mean().item(), rel=1e-5)


@pytest.mark.parametrize("setting", ["augment.rand_augment_ops=1", "augment.policy=three"])
def test_policies_for_images_that_are_neither_gray_nor_rgb_are_refused(setting: str) -> None:
    parts = parts_of("data.in_chans=2", setting)
    with pytest.raises(UserError, match=rf"{setting} is not possible(.|\n)*2 channels"):
        Augment(parts.config.augment, parts.splits.info, parts.normalized)


def test_a_rank_whose_share_has_no_pairs_is_refused_where_pairs_are_mixed() -> None:
    sizes = ("train.global_batch_size=6", "train.micro_batch_size=null")
    plain, mixing = parts_of(*sizes), parts_of(*sizes, "augment.mixup_alpha=0.2")
    check_batch_sizes(plain.config, 2, plain.splits)
    with pytest.raises(UserError, match=r"3 images, an odd number(.|\n)*global_batch_size=8"):
        check_batch_sizes(mixing.config, 2, mixing.splits)


COUNT_MIXING = 4000
KEYS_MIXING = draws.keys(0, 0, torch.arange(COUNT_MIXING))
LABELS_MIXING = torch.arange(COUNT_MIXING) % 10
RANDOM = torch.Generator().manual_seed(0)
IMAGES_MIXING = torch.rand((COUNT_MIXING, 1, 6, 8), generator=RANDOM)


def mixing(mixup: float = 0.0, cutmix: float = 0.0, prob: float = 1.0, switch: float = 0.5) -> Mixing:
    mixed = {"mixup_alpha": mixup, "cutmix_alpha": cutmix, "mixup_prob": prob, "mixup_switch_prob": switch}
    return Mixing(AugmentConfig.model_validate(mixed))


def partner(column: torch.Tensor) -> torch.Tensor:
    return column[torch.arange(len(column)) ^ 1]


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 0.8, 1.0, 2.0, 32.0])
def test_the_shares_are_of_the_beta_distribution(alpha: float) -> None:
    """The largest distance between the two distribution functions (Kolmogorov and Smirnov), at 0.1 %."""
    drawn = beta(alpha, draws.uniform(KEYS_MIXING, 0), draws.uniform(KEYS_MIXING, 1)).sort().values
    expected = torch.from_numpy(betainc(alpha, alpha, drawn.numpy()))
    distance = (expected - torch.arange(COUNT_MIXING) / COUNT_MIXING).abs().max()
    assert distance < 1.95 / COUNT_MIXING**0.5


def test_mixup_blends_neighbours_pixel_by_pixel_and_label_by_label() -> None:
    images, mixed = mixing(mixup=0.8)(IMAGES_MIXING.clone(), LABELS_MIXING, KEYS_MIXING)
    others, most = shares(mixed)
    share = torch.where(mixed.labels == LABELS_MIXING, most, 1 - most).view(-1, 1, 1, 1)
    assert torch.allclose(images, IMAGES_MIXING * share + partner(IMAGES_MIXING) * (1 - share), atol=1e-6)
    assert 0.5 <= most.min() < most.max() <= 1.0
    two = torch.stack([mixed.labels, others]).sort(0).values
    assert torch.equal(two, torch.stack([LABELS_MIXING, partner(LABELS_MIXING)]).sort(0).values)


def test_cutmix_pastes_a_rectangle_of_the_neighbour_and_counts_its_pixels() -> None:
    images, mixed = mixing(cutmix=1.0)(IMAGES_MIXING.clone(), LABELS_MIXING, KEYS_MIXING)
    pasted = (images == partner(IMAGES_MIXING)).squeeze(1)
    assert torch.equal(images, torch.where(pasted[:, None], partner(IMAGES_MIXING), IMAGES_MIXING))
    own = 1 - pasted.float().mean(dim=(1, 2))
    assert torch.allclose(torch.where(own >= 0.5, own, 1 - own), shares(mixed)[1], atol=1e-6)
    assert torch.equal(mixed.labels, torch.where(own >= 0.5, LABELS_MIXING, partner(LABELS_MIXING)))
    rows, columns = pasted.any(2), pasted.any(1)
    assert torch.equal(pasted, rows[:, :, None] & columns[:, None, :])
    for line in (rows, columns):  # in one piece
        assert (line.int().diff(dim=1).abs().sum(1) <= 2).all()


def test_the_rectangles_are_timms_mixing() -> None:
    sides = mixing(cutmix=1.0).draw(KEYS_MIXING, 20, 30)
    again = torch.rand(COUNT_MIXING, generator=RANDOM).double()
    theirs_of: Any = mixup.cutmix_bbox_and_lam
    theirs = torch.tensor([[*box, share] for box, share in (theirs_of((1, 20, 30), one) for one in again.tolist())])
    ours = sides[::2, :5]
    for column in range(5):
        assert ours[:, column].mean() == pytest.approx(theirs[:, column].mean().item(), rel=0.06)
        assert ours[:, column].std() == pytest.approx(theirs[:, column].std().item(), rel=0.06)


@pytest.mark.parametrize(("prob", "switch"), [(0.0, 0.5), (0.3, 0.0), (1.0, 0.25)])
def test_so_many_pairs_are_mixed_and_so_many_of_them_by_cutmix(prob: float, switch: float) -> None:
    drawn = mixing(1.0, 1.0, prob, switch).draw(KEYS_MIXING, 32, 32)
    assert torch.equal(drawn[::2], drawn[1::2])
    cut = drawn[:, 5] == 1.0
    assert cut.float().mean() == pytest.approx(switch, abs=0.05)
    assert (drawn[~cut][:, 4] < 1.0).float().mean() == pytest.approx(prob, abs=0.05)


COUNT_ERASING = 2000
KEYS_ERASING = draws.keys(0, 0, torch.arange(COUNT_ERASING))
IMAGES_ERASING = torch.full((COUNT_ERASING, 3, 20, 16), 5.0)


def rectangles(erased: torch.Tensor) -> torch.Tensor:
    return erased.any(2)[:, :, None] & erased.any(1)[:, None, :]


def erasing(prob: float, mode: str) -> RandomErasing:
    return RandomErasing(AugmentConfig.model_validate({"random_erasing_prob": prob, "random_erasing_mode": mode}))


@pytest.mark.parametrize("mode", ["const", "rand", "pixel"])
def test_one_rectangle_of_so_many_images_is_filled(mode: Any) -> None:
    made = erasing(0.25, mode)(IMAGES_ERASING.clone(), KEYS_ERASING)
    erased = (made != 5.0).all(1)
    assert torch.equal(erased, rectangles(erased))
    assert erased.any(2).any(1).float().mean() == pytest.approx(0.25, abs=0.03)
    inside = made.permute(1, 0, 2, 3)[:, erased]
    if mode == "const":
        assert (inside == 0).all()
    else:
        assert abs(inside.mean()) < 0.1
        assert inside.std() == pytest.approx(1, abs=0.06)


def test_a_random_colour_is_one_of_each_channel_noise_one_of_each_pixel() -> None:
    sides = erasing(1.0, "rand").draw(KEYS_ERASING[:20], 20, 16).tolist()
    erased = (erasing(1.0, mode)(IMAGES_ERASING[:20].clone(), KEYS_ERASING[:20]) for mode in ("rand", "pixel"))
    for (top, bottom, left, right), colour, noise in zip(sides, *erased, strict=True):
        colour, noise = (image[:, top:bottom, left:right].flatten(1) for image in (colour, noise))
        assert (colour == colour[:, :1]).all()
        assert len(set(colour[:, 0].tolist())) == 3
        assert len(set(noise.flatten().tolist())) == noise.numel()


# Progressive resizing.


def of_ffcv(epoch: int, low: int, high: int, start: int, end: int) -> int:
    """Size that ffcv-imagenet trains at in an epoch: between the ramp's ends the nearest multiple of 32."""
    return [low, high][epoch >= end] if epoch <= start or epoch >= end else round(float(
        np.interp([epoch], [start, end], [low, high])[0]) / 32) * 32  # fmt: skip


@pytest.mark.parametrize(("low", "high", "start", "end"), [(160, 192, 11, 13), (128, 224, 0, 13), (96, 288, 65, 76)])
def test_images_grow_as_in_the_recipes_of_ffcv(low: int, high: int, start: int, end: int) -> None:
    config = AugmentConfig(min_size=low, ramp_epochs=(start, end))
    sizes = [config.size_at(epoch, high) for epoch in range(100)]
    assert sizes == [of_ffcv(epoch, low, high, start, end) for epoch in range(100)]
    assert config.sizes(high) == sorted(set(sizes))


def test_the_last_size_is_that_of_the_data_whatever_they_grow_by() -> None:
    config = AugmentConfig(min_size=10, ramp_epochs=(1, 5), size_increment=7)
    assert [config.size_at(epoch, 28) for epoch in range(7)] == [10, 10, 14, 21, 21, 28, 28]
    config = AugmentConfig(min_size=24, ramp_epochs=(1, 3), size_increment=16)
    assert [config.size_at(epoch, 40) for epoch in range(4)] == [24, 24, 32, 40]
    assert AugmentConfig().size_at(0, 28) == 28


def test_images_are_resized_before_all_else_is_drawn_for_them() -> None:
    augment = Augment(AugmentConfig(rand_augment_ops=2), parts_of().splits.info, lambda images: images.float())
    small = functional.interpolate(IMAGES_AUGMENT, (4, 4), mode="bilinear", antialias=True)
    made = [augment(Batch(images, LABELS_AUGMENT, KEYS_AUGMENT), size=4)[0] for images in (small, IMAGES_AUGMENT)]
    assert torch.equal(*made)
