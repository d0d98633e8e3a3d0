"""RandAugment (Cubuk et al., arXiv 1909.13719) of whole batches: each image gets what torchvision's would give it.

Each image of a batch draws its own operations. All that drew the same one, in the same direction, go through
torchvision's own function together: 22 calls at most for a batch of any size, instead of one for each image.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from trainkit.data import draws

if TYPE_CHECKING:
    from torch import Tensor

BINS = 31
"""Magnitudes go from 0 to this, less one."""

Operation = Callable[["Tensor", int], "Tensor"]
"""Images uint8 [N, C, H, W], and in which direction, 1 or -1."""


class RandAugment:
    """``num_ops`` operations for each image, all of ``magnitude``, 0 to 30."""

    def __init__(self, num_ops: int, magnitude: int) -> None:
        self.num_ops = num_ops
        self._operations = operations(magnitude)

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """uint8 [N, 1 or 3, H, W]; ``keys``, int64 [N], are on the host. Gives what they became."""
        import torch

        places = torch.arange(len(keys))
        for drawn in self.draw(keys):
            drawn, order = drawn[places].sort(stable=True)
            places = places[order]
            images = images.index_select(0, order.to(images.device, non_blocking=True))
            groups = torch.split(images, drawn.bincount().tolist())
            images = torch.cat([self._made(number, group) for number, group in enumerate(groups) if len(group)])
        return images.index_select(0, places.argsort().to(images.device, non_blocking=True))

    def draw(self, keys: Tensor) -> list[Tensor]:
        """What each image gets, one operation after the other: numbers of `operations`, twice, and one more for those
        that go the other way. int64 [N] each."""
        import torch

        signed = torch.tensor([signed for _, _, signed in self._operations])
        drawn = []
        for number in range(self.num_ops):
            chosen = draws.below(keys, draws.RAND_AUGMENT + 2 * number, len(self._operations))
            other_way = draws.below(keys, draws.RAND_AUGMENT + 2 * number + 1, 2) * signed[chosen]
            drawn.append(2 * chosen + other_way)
        return drawn

    def _made(self, number: int, images: Tensor) -> Tensor:
        _, operation, _ = self._operations[number // 2]
        return operation(images, -1 if number % 2 else 1)


def operations(magnitude: int) -> list[tuple[str, Operation, bool]]:
    """Those of torchvision's RandAugment: name, what it does, and whether it goes in two directions."""
    import torch
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional

    nearest = InterpolationMode.NEAREST

    def at(most: float) -> float:
        return float(torch.linspace(0.0, most, BINS)[magnitude])  # to torchvision's last bit

    def affine(
        images: Tensor, shift: tuple[int, int], shear: tuple[float, float], center: list[float] | None
    ) -> Tensor:
        made: Tensor = functional.affine(
            images, angle=0.0, translate=list(shift), scale=1.0, shear=list(shear), interpolation=nearest, center=center
        )
        return made

    def shear(images: Tensor, way: int, *, along_x: bool) -> Tensor:
        angle = math.degrees(math.atan(at(0.3) * way))
        return affine(images, (0, 0), (angle, 0.0) if along_x else (0.0, angle), [0, 0])

    def translate(images: Tensor, way: int, *, along_x: bool) -> Tensor:
        pixels = int(at(150 / 331 * images.shape[-1 if along_x else -2])) * way
        return affine(images, (pixels, 0) if along_x else (0, pixels), (0.0, 0.0), None)

    angle, blend = at(30.0), at(0.9)
    bits, threshold = round(8 - magnitude / ((BINS - 1) / 4)), 255 * float(torch.linspace(1.0, 0.0, BINS)[magnitude])
    return [
        ("Identity", lambda images, way: images, False),
        ("ShearX", lambda images, way: shear(images, way, along_x=True), True),
        ("ShearY", lambda images, way: shear(images, way, along_x=False), True),
        ("TranslateX", lambda images, way: translate(images, way, along_x=True), True),
        ("TranslateY", lambda images, way: translate(images, way, along_x=False), True),
        ("Rotate", lambda images, way: functional.rotate(images, angle * way, interpolation=nearest), True),
        ("Brightness", lambda images, way: functional.adjust_brightness(images, 1 + blend * way), True),
        ("Color", lambda images, way: functional.adjust_saturation(images, 1 + blend * way), True),
        ("Contrast", lambda images, way: functional.adjust_contrast(images, 1 + blend * way), True),
        ("Sharpness", lambda images, way: functional.adjust_sharpness(images, 1 + blend * way), True),
        ("Posterize", lambda images, way: functional.posterize(images, bits), False),
        ("Solarize", lambda images, way: functional.solarize(images, threshold), False),
        ("AutoContrast", lambda images, way: functional.autocontrast(images), False),
        ("Equalize", lambda images, way: functional.equalize(images), False),
    ]
