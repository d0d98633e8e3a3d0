"""The network of `recipes/cifar10_fast`, for photos of 32x32: airbench's (Jordan, arXiv 2404.00498, and the later
versions in his repository of that name). It learns with the optimizer of that name, and little with others."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.common.errors import require

if TYPE_CHECKING:
    from torch import Tensor, nn

    from trainkit.common.image_input import DataInfo

# How alike pixels are that lie side by side, and the colours of one pixel, in normalised CIFAR-10.
_BESIDE = 0.93
_COLOURS = 0.91


def build(info: DataInfo, *, width: int = 64) -> nn.Module:
    """A layer that whitens, and six convolutions of 3x3 in three blocks. ``width``: channels of the first block.

    Where it is not trained, its scores are the mean of six looks at an image: as it is and moved by a pixel, each
    mirrored too. Raises UserError for images of less than 9x9.
    """
    import torch
    from torch import nn
    from torch.nn import functional as F

    require(info.image_size >= 9, "data.image_size", info.image_size, "9 or more with this network: it halves thrice")

    class Airbench(nn.Sequential):
        def forward(self, images: Tensor) -> Tensor:
            if self.training:
                return self._scores(images)
            size = images.shape[-1]
            wide = F.pad(images, (1, 1, 1, 1), mode="reflect")
            looks = ((images, 0.5), (wide[..., :size, :size], 0.25), (wide[..., 2:, 2:], 0.25))
            sums = [share * (self._scores(each) + self._scores(each.flip(-1))) for each, share in looks]
            return torch.stack(sums).sum(0) / 2

        def _scores(self, images: Tensor) -> Tensor:
            scores: Tensor = super().forward(images)  # type: ignore[no-untyped-call]
            return scores.float() / 256

    def convolution(inputs: int, outputs: int) -> nn.Conv2d:
        layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        nn.init.dirac_(layer.weight.data[:inputs])  # what comes in goes on; further channels are random
        return layer

    def norm(channels: int) -> nn.BatchNorm2d:
        layer = nn.BatchNorm2d(channels, momentum=0.4)
        layer.weight.requires_grad_(False)
        return layer

    layers: list[nn.Module] = [whitening(info.in_chans), nn.GELU()]
    inputs = 8 * info.in_chans
    for outputs in (width, 4 * width, 4 * width):
        layers += [convolution(inputs, outputs), nn.MaxPool2d(2), norm(outputs), nn.GELU()]
        layers += [convolution(outputs, outputs), norm(outputs), nn.GELU()]
        inputs = outputs
    head = nn.Linear(inputs, info.num_classes, bias=False)
    head.weight.data.div_(head.weight.data.std())
    return Airbench(*layers, nn.AdaptiveMaxPool2d(1), nn.Flatten(), head)


def check(*, width: int) -> None:
    """Refuse values that make no network."""
    require(width >= 1, "model.width", width, "1 or more")


def whitening(in_chans: int) -> nn.Conv2d:
    """Patches of 2 x 2 pixels by their principal directions, each of the same variance and with both signs.

    Only its bias is trained. The directions are those of images in which likeness falls by a factor from pixel to
    pixel, so that no images need be read to make them.
    """
    import torch
    from torch import nn

    layer = nn.Conv2d(in_chans, 8 * in_chans, 2)
    beside, colours = (
        torch.tensor([[each ** abs(i - j) for j in range(size)] for i in range(size)])
        for each, size in ((_BESIDE, 2), (_COLOURS, in_chans))
    )
    variance, direction = torch.linalg.eigh(torch.kron(colours, torch.kron(beside, beside)))
    filters = (direction / (variance + 5e-4).sqrt()).T.reshape(-1, in_chans, 2, 2)
    layer.weight.data = torch.cat([filters, -filters])
    layer.weight.requires_grad_(False)
    nn.init.zeros_(layer.bias)  # type: ignore[arg-type]  # there is one
    return layer
