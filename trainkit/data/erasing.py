"""Random erasing (Zhong et al., arXiv 1708.04896) of whole batches, with timm's defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from trainkit.data import draws
from trainkit.data.mixing import boxes

if TYPE_CHECKING:
    from torch import Tensor

AREA = (0.02, 1 / 3)
"""Smallest and largest part of an image that is erased."""
ASPECT = (0.3, 1 / 0.3)
"""Height to width of what is erased."""
_TRIES = 10
_NOISE = draws.ERASING + 1 + 4 * _TRIES


@dataclass(frozen=True)
class RandomErasing:
    """Fills a random rectangle of some images, after they have been normalised."""

    prob: float
    """Of an image to lose a rectangle."""
    mode: Literal["const", "rand", "pixel"]
    """What comes there: zeros, which is the mean colour; one random colour; or noise."""

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """Erase in ``images``, float [N, C, H, W], which are changed; ``keys``, int64 [N], are on the host."""
        import torch

        sides = self.draw(keys, *images.shape[-2:])
        # By number and not by a mask: how many there are is known here, and the device need not be asked.
        chosen = (sides[:, 1] > sides[:, 0]).nonzero().view(-1)
        if not len(chosen):
            return images
        device = images.device
        noise_keys = draws.stream(keys[chosen], _NOISE).to(device, non_blocking=True)
        sides, chosen = (item.to(device, non_blocking=True) for item in (sides[chosen], chosen))
        some = images.index_select(0, chosen)
        inside = boxes(sides, *images.shape[-2:])[:, None]
        some = torch.where(inside, self._filling(noise_keys, some), some)
        return images.index_copy_(0, chosen, some)

    def draw(self, keys: Tensor, height: int, width: int) -> Tensor:
        """Rectangles (top, bottom, left, right), int64 [N, 4]; empty for images that stay whole."""
        import torch

        tries = torch.arange(_TRIES) * 4 + draws.ERASING + 1
        one, two, three, four = (draws.uniform(keys[:, None], tries + number) for number in range(4))
        area = (AREA[0] + (AREA[1] - AREA[0]) * one) * (height * width)
        aspect = (math.log(ASPECT[0]) + (math.log(ASPECT[1]) - math.log(ASPECT[0])) * two).exp()
        tall, wide = (area * aspect).sqrt().round(), (area / aspect).sqrt().round()
        fits = (tall < height) & (wide < width)
        first = fits.byte().argmax(dim=1, keepdim=True)
        top, left = (three * (height - tall + 1)).floor(), (four * (width - wide + 1)).floor()
        sides = torch.stack([top, top + tall, left, left + wide], dim=-1).long()
        sides = sides.gather(1, first[:, :, None].expand(-1, -1, 4)).squeeze(1)
        erased = (draws.uniform(keys, draws.ERASING) < self.prob) & fits.any(dim=1)
        return torch.where(erased[:, None], sides, 0)

    def _filling(self, keys: Tensor, images: Tensor) -> Tensor:
        """For images [N, C, H, W]: [N, C, H, W], or what is spread to it."""
        import torch

        if self.mode == "const":
            return torch.zeros((), dtype=images.dtype, device=images.device)
        shape = images.shape if self.mode == "pixel" else (*images.shape[:2], 1, 1)
        numbers = torch.arange(math.prod(shape[1:]), device=images.device)
        return draws.normal(keys[:, None], numbers).view(shape).to(images.dtype)
