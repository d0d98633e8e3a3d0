"""Mixup (Zhang et al., arXiv 1710.09412) and CutMix (Yun et al., arXiv 1905.04899) of whole batches, as in timm.

Neighbours in the order of the data are mixed with each other: the first with the second, the third with the fourth.
The order is random, so they are random pairs; and a micro batch of even size has both or none of a pair, whatever its
size and whichever rank it falls to. What is drawn for a pair, as in timm's `mixup_mode=pair`, is keyed by its first
sample. So ranks, accumulation and restarts change nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from trainkit.data import draws

if TYPE_CHECKING:
    from torch import Tensor


class Mixed(NamedTuple):
    """A batch after mixing. Each label has another one beside it, which counts for less or as much."""

    images: Tensor
    labels: Tensor
    """int64 [N]: what there is more of in each image."""
    others: Tensor
    """int64 [N]: what there is less of."""
    share: Tensor
    """float32 [N], 0.5 to 1: how much of each image is that of ``labels``."""


@dataclass(frozen=True)
class Mixing:
    """What share of the pairs is mixed, and how."""

    mixup_alpha: float
    """Of the Beta distribution that an image's share is drawn from; 0: no mixup."""
    cutmix_alpha: float
    """The same of a rectangle's share; 0: no CutMix."""
    prob: float
    """Of a pair to be mixed."""
    switch_prob: float
    """Of CutMix instead of mixup, where there are both."""

    def __call__(self, images: Tensor, labels: Tensor, keys: Tensor) -> Mixed:
        """Mix float [N, C, H, W] and int64 [N] of one device, N even; ``keys``, int64 [N], are on the host."""
        import torch

        height, width = images.shape[-2:]
        drawn = self.draw(keys, height, width).to(images.device, non_blocking=True)
        share, inside = drawn[:, 4], drawn[:, 5, None, None]
        partners = _swapped(images)
        others = _swapped(labels)
        of_partner = torch.where(boxes(drawn[:, :4], height, width), inside, 0.0)[:, None]
        own = share >= 0.5
        return Mixed(
            torch.lerp(images, partners, of_partner),
            torch.where(own, labels, others),
            torch.where(own, others, labels),
            torch.where(own, share, 1 - share),
        )

    def draw(self, keys: Tensor, height: int, width: int) -> Tensor:
        """float32 [N, 6]: a rectangle (top, bottom, left, right), the share of an image that stays its own, and how
        much of the partner there is inside the rectangle: all of it in CutMix, some, everywhere, in mixup."""
        import torch

        assert len(keys) % 2 == 0, "pairs are not torn apart"
        pairs = keys[::2]
        u, v = draws.uniform(pairs, draws.MIXING), draws.uniform(pairs, draws.MIXING + 1)
        if self.mixup_alpha and self.cutmix_alpha:
            cut = draws.uniform(pairs, draws.MIXING + 2) < self.switch_prob
        else:
            cut = torch.full(pairs.shape, self.cutmix_alpha > 0)
        share = torch.where(cut, beta(self.cutmix_alpha, u, v), beta(self.mixup_alpha, u, v))
        share = torch.where(draws.uniform(pairs, draws.MIXING + 3) < self.prob, share, 1.0)
        sides: list[Tensor] = []
        for number, size in ((4, height), (5, width)):
            middle = draws.below(pairs, draws.MIXING + number, size)
            length = ((1 - share).sqrt() * size).long()
            for side in (middle - length // 2, middle + (length + 1) // 2):
                sides.append(torch.where(cut, side.clamp(0, size), size if len(sides) % 2 else 0))
        area = (sides[1] - sides[0]) * (sides[3] - sides[2])
        share = torch.where(cut, 1 - area / (height * width), share)  # of the rectangle, a part may be outside
        inside = torch.where(cut, 1.0, 1 - share)
        return torch.stack([*sides, share, inside], dim=1).float().repeat_interleave(2, dim=0)


def _swapped(column: Tensor) -> Tensor:
    """Each of a pair in the other's place."""
    return column.view(len(column) // 2, 2, *column.shape[1:]).flip(1).flatten(0, 1)


def beta(alpha: float, u: Tensor, v: Tensor) -> Tensor:
    """Numbers of Beta(alpha, alpha), from two uniform ones each; alpha 0: ones.

    Devroye, "Random variate generation in one line of code" (Winter Simulation Conference 1996): exact for every alpha,
    and without rejection, so that each number needs exactly two draws.
    """
    import torch

    if alpha == 0:
        return torch.ones_like(u)
    cosine = torch.cos(2 * torch.pi * v)
    return 0.5 + 0.5 * cosine.sign() / (1 + 1 / ((u ** (-1 / alpha) - 1) * cosine**2)).sqrt()


def boxes(sides: Tensor, height: int, width: int) -> Tensor:
    """bool [N, height, width]: what is inside of each rectangle (top, bottom, left, right), [N, 4]."""
    import torch

    rows, columns = (torch.arange(size, device=sides.device) for size in (height, width))
    top, bottom, left, right = sides.unsqueeze(-1).unbind(1)
    return ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None, :]
