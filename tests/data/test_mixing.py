from __future__ import annotations

from typing import Any

import pytest
import torch
from scipy.special import betainc  # type: ignore[import-untyped]

from trainkit.data import order
from trainkit.data.augment import Mixing, beta, boxes

COUNT = 4000
KEYS = order.keys(0, 0, torch.arange(COUNT))
LABELS = torch.arange(COUNT) % 10
RANDOM = torch.Generator().manual_seed(0)
IMAGES = torch.rand((COUNT, 1, 6, 8), generator=RANDOM)


def mixing(mixup: float = 0.0, cutmix: float = 0.0, prob: float = 1.0, switch: float = 0.5) -> Mixing:
    return Mixing(mixup, cutmix, prob, switch)


def partner(column: torch.Tensor) -> torch.Tensor:
    return column[torch.arange(len(column)) ^ 1]


@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 0.8, 1.0, 2.0, 32.0])
def test_the_shares_are_of_the_beta_distribution(alpha: float) -> None:
    """The largest distance between the two distribution functions (Kolmogorov and Smirnov), at 0.1 %."""
    drawn = beta(alpha, order.uniform(KEYS, 0), order.uniform(KEYS, 1)).sort().values
    expected = torch.from_numpy(betainc(alpha, alpha, drawn.numpy()))
    distance = (expected - torch.arange(COUNT) / COUNT).abs().max()
    assert distance < 1.95 / COUNT**0.5


def test_mixup_blends_neighbours_pixel_by_pixel_and_label_by_label() -> None:
    mixed = mixing(mixup=0.8)(IMAGES.clone(), LABELS, KEYS)
    share = torch.where(mixed.labels == LABELS, mixed.share, 1 - mixed.share).view(-1, 1, 1, 1)
    assert torch.allclose(mixed.images, IMAGES * share + partner(IMAGES) * (1 - share), atol=1e-6)
    assert 0.5 <= mixed.share.min() < mixed.share.max() <= 1.0
    two = torch.stack([mixed.labels, mixed.others]).sort(0).values
    assert torch.equal(two, torch.stack([LABELS, partner(LABELS)]).sort(0).values)


def test_cutmix_pastes_a_rectangle_of_the_neighbour_and_counts_its_pixels() -> None:
    mixed = mixing(cutmix=1.0)(IMAGES.clone(), LABELS, KEYS)
    pasted = (mixed.images == partner(IMAGES)).squeeze(1)
    assert torch.equal(mixed.images.squeeze(1), torch.where(pasted, partner(IMAGES).squeeze(1), IMAGES.squeeze(1)))
    own = 1 - pasted.float().mean(dim=(1, 2))
    assert torch.allclose(torch.where(own >= 0.5, own, 1 - own), mixed.share, atol=1e-6)
    assert torch.equal(mixed.labels, torch.where(own >= 0.5, LABELS, partner(LABELS)))
    rows, columns = pasted.any(2), pasted.any(1)
    assert torch.equal(pasted, rows[:, :, None] & columns[:, None, :])
    for line in (rows, columns):  # in one piece
        assert (line.int().diff(dim=1).abs().sum(1) <= 2).all()


def test_the_rectangles_are_timms() -> None:
    from timm.data import mixup

    sides = mixing(cutmix=1.0).draw(KEYS, 20, 30)
    again = torch.rand(COUNT, generator=RANDOM).double()
    theirs_of: Any = mixup.cutmix_bbox_and_lam
    theirs = torch.tensor([[*box, share] for box, share in (theirs_of((1, 20, 30), one) for one in again.tolist())])
    ours = sides[::2, :5]
    for column in range(5):
        assert ours[:, column].mean() == pytest.approx(theirs[:, column].mean().item(), rel=0.06)
        assert ours[:, column].std() == pytest.approx(theirs[:, column].std().item(), rel=0.06)


@pytest.mark.parametrize(("prob", "switch"), [(0.0, 0.5), (0.3, 0.0), (1.0, 0.25)])
def test_so_many_pairs_are_mixed_and_so_many_of_them_by_cutmix(prob: float, switch: float) -> None:
    drawn = mixing(1.0, 1.0, prob, switch).draw(KEYS, 32, 32)
    assert torch.equal(drawn[::2], drawn[1::2])
    cut = drawn[:, 5] == 1.0
    assert cut.float().mean() == pytest.approx(switch, abs=0.05)
    assert (drawn[~cut][:, 4] < 1.0).float().mean() == pytest.approx(prob, abs=0.05)


def test_what_becomes_of_an_image_does_not_depend_on_the_size_of_the_batch() -> None:
    both = mixing(0.8, 1.0)
    whole = both(IMAGES.clone(), LABELS, KEYS)
    part = both(IMAGES[10:16].clone(), LABELS[10:16], KEYS[10:16])
    assert all(torch.equal(one, all_[10:16]) for one, all_ in zip(part, whole, strict=True))


def test_a_batch_in_channels_last_stays_so() -> None:
    images = torch.rand(4, 3, 5, 5).to(memory_format=torch.channels_last)
    mixed = mixing(0.8, 1.0)(images, LABELS[:4], KEYS[:4]).images
    assert mixed.is_contiguous(memory_format=torch.channels_last)


def test_a_box_has_its_first_row_and_not_its_last() -> None:
    assert boxes(torch.tensor([[1, 3, 0, 2]]), 4, 3)[0].int().tolist() == [[0, 0, 0], [1, 1, 0], [1, 1, 0], [0, 0, 0]]
