"""Augmentation policies: which operations each image of a batch draws, and the operations, of whole batches.

What torchvision has of them, RandAugment, TrivialAugmentWide and AutoAugment, gives each image what torchvision's own
would give it by the same draws, to the last bit. All images that drew the same operation go through it together, each
with its own strength: 17 calls at most for a batch of any size, instead of one for each image.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import conv2d, pad

from trainkit.config.schema import AugmentConfig
from trainkit.data import draws

Operation = Callable[[Tensor, Tensor], Tensor]
"""Images uint8 [N, 1 or 3, H, W], and how strongly each, float64 [N] on the host; below 0: in the other direction."""


class OperationLayer(NamedTuple):
    """One operation for each image."""

    chosen: Tensor
    """int64 [N]: numbers of `operations`."""
    strength: Tensor
    """float64 [N]."""


class Policy(ABC):
    """Layers of operations, one after the other."""

    @abstractmethod
    def draw(self, keys: Tensor, height: int, width: int) -> list[OperationLayer]:
        """Draw for images of ``keys``, int64 [N]: a function of the key alone, and of the size of images."""

    def __call__(self, images: Tensor, keys: Tensor) -> Tensor:
        """uint8 [N, 1 or 3, H, W]; ``keys``, int64 [N], are on the host. Gives what they became."""
        made_by = list(operations().values())
        places = torch.arange(len(keys))
        for chosen, strength in self.draw(keys, *images.shape[-2:]):
            chosen, order = chosen[places].sort(stable=True)
            places = places[order]
            images = images.index_select(0, order.to(images.device, non_blocking=True))
            sizes = chosen.bincount().tolist()
            done: list[Tensor] = []
            groups = zip(made_by, images.split(sizes), strength[places].split(sizes), strict=False)
            for operation, some, how_much in groups:
                if len(some):
                    done.append(operation(some, how_much))
            images = torch.cat(done)
        return images.index_select(0, places.argsort().to(images.device, non_blocking=True))


@dataclass(frozen=True)
class RandAugment(Policy):
    """``num_ops`` operations, all of ``magnitude``, 0 to 30 (Cubuk et al., arXiv 1909.13719)."""

    num_ops: int
    magnitude: int

    def draw(self, keys: Tensor, height: int, width: int) -> list[OperationLayer]:
        """Each image's own operations, and which way."""
        strengths = _strengths(31, height, width)[:, self.magnitude]
        layers: list[OperationLayer] = []
        for first in range(draws.POLICY, draws.POLICY + 2 * self.num_ops, 2):
            chosen = draws.below(keys, first, len(strengths))
            layers.append(OperationLayer(chosen, strengths[chosen] * _ways(keys, first + 1, chosen)))
        return layers


class TrivialAugmentWide(Policy):
    """One operation of any strength, for small images and large ones (Mueller and Hutter, arXiv 2103.10158)."""

    def draw(self, keys: Tensor, height: int, width: int) -> list[OperationLayer]:
        """Operation, strength, and which way."""
        strengths = _strengths(31, height, width, wide=True)
        first = draws.POLICY
        chosen = draws.below(keys, first, len(strengths))
        level = draws.below(keys, first + 1, strengths.shape[1])
        return [OperationLayer(chosen, strengths[chosen, level] * _ways(keys, first + 2, chosen))]


class AutoAugment(Policy):
    """One of 25 pairs of operations, each of them with its probability (Cubuk et al., arXiv 1805.09501)."""

    def __init__(self, learned_on: str) -> None:
        """``learned_on``: imagenet, cifar10 or svhn."""
        from torchvision.transforms import AutoAugment as Theirs
        from torchvision.transforms import AutoAugmentPolicy

        names = list(operations())
        pairs = Theirs(AutoAugmentPolicy(learned_on)).policies
        table = [[(names.index(name), probability, level or 0) for name, probability, level in pair] for pair in pairs]
        self._pairs = torch.tensor(table, dtype=torch.float64)

    def draw(self, keys: Tensor, height: int, width: int) -> list[OperationLayer]:
        """The pair; and of each of the two, whether it happens, and which way."""
        strengths = torch.cat([_strengths(10, height, width), torch.zeros(1, 10)])  # Invert has none
        first = draws.POLICY
        layers: list[OperationLayer] = []
        for place, one in enumerate(self._pairs[draws.below(keys, first, len(self._pairs))].unbind(1)):
            chosen = one[:, 0].long()
            level = one[:, 2].long()
            strength = strengths[chosen, level] * _ways(keys, first + 2 + 2 * place, chosen)
            happens = draws.uniform(keys, first + 1 + 2 * place) < one[:, 1]
            layers.append(OperationLayer(torch.where(happens, chosen, 0), strength))
        return layers


class ThreeAugment(Policy):
    """One of three, gray, solarized or blurred, and then jitter of brightness, contrast and colour in any order: that
    of DeiT III (Touvron et al., arXiv 2204.07118)."""

    JITTER = 0.3
    """Each changes by up to this share."""
    BLUR = (0.1, 2.0)
    """Sigma of the blur, in pixels."""

    def draw(self, keys: Tensor, height: int, width: int) -> list[OperationLayer]:
        """Draw which of the three, and how blurred; the order of the jitter, and how strong each is."""
        names = list(operations())
        first = draws.POLICY
        three = torch.tensor([names.index(name) for name in ("Grayscale", "Solarize", "GaussianBlur")])
        jitter = torch.tensor([names.index(name) for name in ("Brightness", "Contrast", "Color")])
        which = draws.below(keys, first, 3)
        sigma = draws.uniform(keys, first + 1)
        sigma = self.BLUR[0] + (self.BLUR[1] - self.BLUR[0]) * sigma
        layers = [OperationLayer(three[which], torch.where(which == 1, 128 / 255, sigma))]
        orders = torch.tensor([[0, 1, 2], [0, 2, 1], [1, 0, 2], [1, 2, 0], [2, 0, 1], [2, 1, 0]])
        for place, order in enumerate(orders[draws.below(keys, first + 2, len(orders))].unbind(1)):
            strength = (2 * draws.uniform(keys, first + 3 + place) - 1) * self.JITTER
            layers.append(OperationLayer(jitter[order], strength))
        return layers


def policy_of(config: AugmentConfig) -> Policy | None:
    """The policy of a configuration; None: images stay as they are."""
    if config.rand_augment_ops:
        return RandAugment(config.rand_augment_ops, config.rand_augment_magnitude)
    if config.policy.startswith("auto_"):
        return AutoAugment(config.policy.removeprefix("auto_"))
    return {"none": lambda: None, "trivial_wide": TrivialAugmentWide, "three": ThreeAugment}[config.policy]()


_TWO_WAYS = range(1, 10)
"""Numbers of the operations that go in two directions."""


def _ways(keys: Tensor, draw: int, chosen: Tensor) -> Tensor:
    """1 or -1, as drawn, for each image."""
    two = torch.tensor([number in _TWO_WAYS for number in range(len(operations()))])
    return 1 - 2 * (draws.below(keys, draw, 2) * two[chosen])


@cache
def _strengths(levels: int, height: int, width: int, *, wide: bool = False) -> Tensor:
    """Strengths of RandAugment's and AutoAugment's operations (``wide``: of TrivialAugmentWide's), in the order of
    `operations`, float64 [14, levels]: torchvision's, to the last bit."""
    shear, degrees, blend, bits = (0.99, 135.0, 0.99, 6) if wide else (0.3, 30.0, 0.9, 4)
    rows, columns = (32.0, 32.0) if wide else (150 / 331 * height, 150 / 331 * width)
    most = [0.0, shear, shear, columns, rows, degrees, blend, blend, blend, blend]
    rising = [torch.linspace(0.0, end, levels) for end in most]
    kept = (8 - torch.arange(levels) / ((levels - 1) / bits)).round()
    none = torch.zeros(levels)
    return torch.stack([*rising, kept, torch.linspace(1.0, 0.0, levels), none, none]).double()


@cache
def operations() -> dict[str, Operation]:
    """Operations by torchvision's names: its RandAugment's in its order; AutoAugment's Invert; and 3-Augment's."""
    from torchvision.transforms import InterpolationMode
    from torchvision.transforms.v2 import functional as F

    def each(strength: Tensor, images: Tensor) -> Tensor:
        return strength.float().to(images.device, non_blocking=True).view(-1, 1, 1, 1)

    def moved(move: Callable[[Tensor, float], Tensor]) -> Operation:
        """``move`` as a choice of pixels, made once on the host: torchvision copies a matrix to the GPU for each call,
        and waits for it."""

        @cache
        def places(height: int, width: int, strength: float, device: torch.device) -> Tensor:
            numbers = torch.arange(1.0, height * width + 1).view(1, 1, height, width)  # 0 is what comes in from outside
            return move(numbers, strength).int().flatten().to(device, non_blocking=True)

        def move_all(images: Tensor, strength: Tensor) -> Tensor:
            chosen = [places(*images.shape[-2:], one, images.device) for one in strength.tolist()]
            all_channels = torch.stack(chosen).long()[:, None].expand(-1, images.shape[1], -1)
            return pad(images.flatten(2), (1, 0)).gather(2, all_channels).view(images.shape)

        return move_all

    nearest = InterpolationMode.NEAREST
    affine = partial(F.affine, angle=0.0, scale=1.0, interpolation=nearest)
    shear = partial(affine, translate=[0, 0], center=[0, 0])
    shift = partial(affine, shear=[0.0, 0.0], center=None)

    def degrees(strength: float) -> float:
        return math.degrees(math.atan(strength))

    def blended(images: Tensor, others: Tensor, strength: Tensor) -> Tensor:
        made = images.mul(each(1 + strength, images)).addcmul_(others, each(-strength, images))
        return made.clamp_(0, 255).to(torch.uint8)

    def brightness(images: Tensor, strength: Tensor) -> Tensor:
        return images.mul(each(1 + strength, images)).clamp_(0, 255).to(torch.uint8)

    def color(images: Tensor, strength: Tensor) -> Tensor:
        if images.shape[1] == 1:
            return images
        return blended(images, F.rgb_to_grayscale(images).float(), strength)

    def contrast(images: Tensor, strength: Tensor) -> Tensor:
        return blended(images, F.rgb_to_grayscale(images).float().mean((1, 2, 3), keepdim=True), strength)

    @cache
    def softening(device: torch.device) -> Tensor:
        kernel = torch.full((3, 3), 1 / 13)
        kernel[1, 1] = 5 / 13
        return kernel.to(device, non_blocking=True)

    def sharpness(images: Tensor, strength: Tensor) -> Tensor:
        if min(images.shape[-2:]) <= 2:
            return images
        made = images.float()
        channels = images.shape[1]
        soft = conv2d(made, softening(images.device).expand(channels, 1, 3, 3), groups=channels).round_()
        inner = made[..., 1:-1, 1:-1]
        inner.addcmul_(soft.sub_(inner), each(-strength, images))
        return made.clamp_(0, 255).to(torch.uint8)

    def posterize(images: Tensor, strength: Tensor) -> Tensor:
        return images & each(256 - 2 ** (8 - strength), images).to(torch.uint8)

    def solarize(images: Tensor, strength: Tensor) -> Tensor:
        return torch.where(images >= each(255 * strength, images), ~images, images)

    def blur(images: Tensor, sigma: Tensor) -> Tensor:
        """Blur by sums of shifted images: a convolution would be tuned anew for each number of images."""
        reach = math.ceil(3 * ThreeAugment.BLUR[1])
        shares = (-((torch.arange(-reach, reach + 1) / sigma[:, None]) ** 2) / 2).softmax(1)
        weights = [each(share, images) for share in shares.unbind(1)]
        made = pad(images.float(), (reach,) * 4, mode="replicate")
        for axis in (2, 3):
            shifted = [made.narrow(axis, first, images.shape[axis]) for first in range(len(weights))]
            made = shifted[0] * weights[0]
            for one, weight in zip(shifted[1:], weights[1:], strict=True):
                made.addcmul_(one, weight)
        return made.round_().to(torch.uint8)

    return {
        "Identity": lambda images, strength: images,
        "ShearX": moved(lambda images, strength: shear(images, shear=[degrees(strength), 0.0])),
        "ShearY": moved(lambda images, strength: shear(images, shear=[0.0, degrees(strength)])),
        "TranslateX": moved(lambda images, strength: shift(images, translate=[int(strength), 0])),
        "TranslateY": moved(lambda images, strength: shift(images, translate=[0, int(strength)])),
        "Rotate": moved(lambda images, strength: F.rotate(images, strength, interpolation=nearest)),
        "Brightness": brightness,
        "Color": color,
        "Contrast": contrast,
        "Sharpness": sharpness,
        "Posterize": posterize,
        "Solarize": solarize,
        "AutoContrast": lambda images, strength: F.autocontrast(images),
        "Equalize": lambda images, strength: F.equalize(images),
        "Invert": lambda images, strength: F.invert(images),
        "Grayscale": lambda images, strength: F.rgb_to_grayscale(images, num_output_channels=images.shape[1]),
        "GaussianBlur": blur,
    }
