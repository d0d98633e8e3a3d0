"""Augment, normalise and mix whole batches, on the device that trains."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from trainkit.common.errors import require
from trainkit.common.image_input import DataInfo
from trainkit.config.schema import AugmentConfig
from trainkit.data import draws
from trainkit.data.augment_policies import policy_of
from trainkit.data.base import Batch
from trainkit.data.tensors import resized

# Mixup (Zhang et al., arXiv 1710.09412) and CutMix (Yun et al., arXiv 1905.04899) of whole batches, as in timm.
#
# Neighbours in the order of the data are mixed with each other: the first with the second, the third with the fourth.
# The order is random, so they are random pairs; and a micro batch of even size has both or none of a pair, whatever
# its size and whichever rank it falls to. What is drawn for a pair, as in timm's `mixup_mode=pair`, is keyed by its
# first sample. So ranks, accumulation and restarts change nothing.


class Target(NamedTuple):
    """The answer that the model should give to a batch."""

    labels: Tensor
    """int64 [N]: of an image, or of what a mixed image shows most of. Metrics go by it."""
    others: Tensor | None = None
    """int64 [N]: what else a mixed image shows."""
    share: Tensor | None = None
    """float32 [N], 0.5 to 1: how much of each image is that of ``labels``."""


@dataclass(frozen=True)
class Mixing:
    """Mixes what share of the pairs the configuration says, and how."""

    config: AugmentConfig

    def __call__(self, images: Tensor, labels: Tensor, keys: Tensor) -> tuple[Tensor, Target]:
        """Mix float [N, C, H, W] and int64 [N] of one device, N even; ``keys``, int64 [N], are on the host."""
        height, width = images.shape[-2:]
        drawn = self.draw(keys, height, width).to(images.device, non_blocking=True)
        share = drawn[:, 4]
        inside = drawn[:, 5, None, None]
        of_partner = torch.where(boxes(drawn[:, :4], height, width), inside, 0.0)[:, None]
        images = torch.lerp(images, _swapped(images), of_partner)
        others = _swapped(labels)
        own = share >= 0.5
        wide = own.view(-1, *[1] * (labels.dim() - 1))
        more = torch.where(wide, labels, others)
        less = torch.where(wide, others, labels)
        return images, Target(more, less, torch.where(own, share, 1 - share))

    def draw(self, keys: Tensor, height: int, width: int) -> Tensor:
        """float32 [N, 6]: a rectangle (top, bottom, left, right), the share of an image that stays its own, and how
        much of the partner there is inside the rectangle: all of it in CutMix, some, everywhere, in mixup."""
        assert len(keys) % 2 == 0, "pairs of images stay together"
        config = self.config
        pairs = keys[::2]
        u = draws.uniform(pairs, draws.MIXING)
        v = draws.uniform(pairs, draws.MIXING + 1)
        if config.mixup_alpha and config.cutmix_alpha:
            cut = draws.uniform(pairs, draws.MIXING + 2) < config.mixup_switch_prob
        else:
            cut = torch.full(pairs.shape, config.cutmix_alpha > 0)
        share = torch.where(cut, beta(config.cutmix_alpha, u, v), beta(config.mixup_alpha, u, v))
        share = torch.where(draws.uniform(pairs, draws.MIXING + 3) < config.mixup_prob, share, 1.0)
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
    if alpha == 0:
        return torch.ones_like(u)
    cosine = torch.cos(2 * torch.pi * v)
    return 0.5 + 0.5 * cosine.sign() / (1 + 1 / ((u ** (-1 / alpha) - 1) * cosine**2)).sqrt()


def boxes(sides: Tensor, height: int, width: int) -> Tensor:
    """bool [N, height, width]: what is inside of each rectangle (top, bottom, left, right), [N, 4]."""
    rows = torch.arange(height, device=sides.device)
    columns = torch.arange(width, device=sides.device)
    top, bottom, left, right = sides.unsqueeze(-1).unbind(1)
    return ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None, :]


# Random erasing (Zhong et al., arXiv 1708.04896) of whole batches, with timm's defaults.

AREA = (0.02, 1 / 3)
"""Smallest and largest part of an image that is erased."""
ASPECT = (0.3, 1 / 0.3)
"""Height to width of what is erased."""
_TRIES = 10
_NOISE = draws.ERASING + 1 + 4 * _TRIES


@dataclass(frozen=True)
class RandomErasing:
    """Fills a random rectangle of some images, after they have been normalised: with zeros, which is the mean colour,
    one random colour, or noise."""

    config: AugmentConfig

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """Erase in ``images``, float [N, C, H, W], which are changed; ``keys``, int64 [N], are on the host."""
        sides = self.draw(keys, *images.shape[-2:])
        # By number and not by a mask: how many there are is known here, and the device need not be asked.
        chosen = (sides[:, 1] > sides[:, 0]).nonzero().view(-1)
        if not len(chosen):
            return images
        device = images.device
        noise_keys = draws.stream(keys[chosen], _NOISE).to(device, non_blocking=True)
        sides = sides[chosen].to(device, non_blocking=True)
        chosen = chosen.to(device, non_blocking=True)
        some = images.index_select(0, chosen)
        inside = boxes(sides, *images.shape[-2:])[:, None]
        some = torch.where(inside, self._filling(noise_keys, some), some)
        return images.index_copy_(0, chosen, some)

    def draw(self, keys: Tensor, height: int, width: int) -> Tensor:
        """Rectangles (top, bottom, left, right), int64 [N, 4]; empty for images that stay whole."""
        tries = torch.arange(_TRIES) * 4 + draws.ERASING + 1
        one, two, three, four = (draws.uniform(keys[:, None], tries + number) for number in range(4))
        area = (AREA[0] + (AREA[1] - AREA[0]) * one) * (height * width)
        aspect = (math.log(ASPECT[0]) + (math.log(ASPECT[1]) - math.log(ASPECT[0])) * two).exp()
        tall = (area * aspect).sqrt().round()
        wide = (area / aspect).sqrt().round()
        fits = (tall < height) & (wide < width)
        first = fits.byte().argmax(dim=1, keepdim=True)
        top = (three * (height - tall + 1)).floor()
        left = (four * (width - wide + 1)).floor()
        sides = torch.stack([top, top + tall, left, left + wide], dim=-1).long()
        sides = sides.gather(1, first[:, :, None].expand(-1, -1, 4)).squeeze(1)
        erased = (draws.uniform(keys, draws.ERASING) < self.config.random_erasing_prob) & fits.any(dim=1)
        return torch.where(erased[:, None], sides, 0)

    def _filling(self, keys: Tensor, images: Tensor) -> Tensor:
        """For images [N, C, H, W]: [N, C, H, W], or what is spread to it."""
        mode = self.config.random_erasing_mode
        if mode == "const":
            return torch.zeros((), dtype=images.dtype, device=images.device)
        shape = images.shape if mode == "pixel" else (*images.shape[:2], 1, 1)
        numbers = torch.arange(math.prod(shape[1:]), device=images.device)
        return draws.normal(keys[:, None], numbers).view(shape).to(images.dtype)


class Augment:
    """Turns a batch into images and target for the model. With nothing switched on, images are only normalised."""

    def __init__(self, config: AugmentConfig, info: DataInfo, normalized: Callable[[Tensor], Tensor]) -> None:
        """``normalized``: uint8 [N, C, H, W] as the model takes them.

        Raises UserError for a policy that changes colours, and images that are neither gray nor RGB.
        """
        self._policy = policy_of(config)
        setting = "policy"
        none = "none"
        if config.rand_augment_ops:
            setting = "rand_augment_ops"
            none = "0"
        must_be = f"{none} for images of {info.in_chans} channels: it changes colours of gray or RGB images"
        is_fit = self._policy is None or info.in_chans in (1, 3)
        require(is_fit, f"augment.{setting}", getattr(config, setting), must_be)
        self._normalized = normalized
        self._erase = RandomErasing(config) if config.random_erasing_prob else None
        self._mix = Mixing(config) if config.mixes else None

    @torch.no_grad()  # bytes have no gradient
    def __call__(self, batch: Batch, size: int | None = None) -> tuple[Tensor, Target]:
        """Images, float32 [N, C, H, W], and what they show; ``size``: H and W, if they are to be resized."""
        images, labels, keys = batch
        if size is not None:
            images = resized(images, size)
        if self._policy is not None:
            images = self._policy(images, keys)
        images = self._normalized(images)
        if self._erase is not None:
            images = self._erase(images, keys)
        if self._mix is None:
            return images, Target(labels)
        return self._mix(images, labels, keys)
