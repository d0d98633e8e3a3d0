"""CIFAR-10 to 94 % after airbench (Jordan, arXiv 2404.00498, and his repository of that name): a network, an optimizer,
a schedule and crops of one's own, for `recipes/cifar10_fast`. README.md of this folder's parent has the command.
"""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainkit.data.base import DataInfo, Splits
from trainkit.data.datasets import cifar10
from trainkit.data.loader import TensorTransform

# How alike pixels are that lie side by side, and the colours of one pixel, in normalised CIFAR-10.
_BESIDE, _COLOURS = 0.93, 0.91
# Newton-Schulz: three steps of a x + b x^3 + c x^5 bring all singular values near to 1.
_A, _B, _C, _STEPS = 3.4445, -4.7750, 2.0315, 3
# Rates of biases and of the head, by their dimensions, where that of filters is 0.24; and how much of them decays.
_LR, _RATES, _DECAY = 0.24, {1: 106.0, 2: 1340.0}, 0.004


class Whitening(nn.Conv2d):
    """Patches of 2 x 2 pixels by their principal directions, each of the same variance and with both signs.

    Only its bias is trained. The directions are those of images in which likeness falls by a factor from pixel to
    pixel, so that no images need be read to make them.
    """

    def __init__(self, in_chans: int) -> None:
        directions = 4 * in_chans
        super().__init__(in_chans, 2 * directions, 2)
        beside, colours = (
            torch.tensor([[each ** abs(i - j) for j in range(size)] for i in range(size)])
            for each, size in ((_BESIDE, 2), (_COLOURS, in_chans))
        )
        variance, direction = torch.linalg.eigh(torch.kron(colours, torch.kron(beside, beside)))
        filters = (direction / (variance + 5e-4).sqrt()).T.reshape(directions, in_chans, 2, 2)
        assert self.bias is not None
        with torch.no_grad():
            self.weight.copy_(torch.cat([filters, -filters]))
            self.bias.zero_()
        self.weight.requires_grad_(False)


class Net(nn.Module):
    """The mean of six looks at an image, where it is not trained: as it is and one pixel aside, each mirrored too."""

    def __init__(self, info: DataInfo, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [Whitening(info.in_chans), nn.GELU()]
        inputs = 8 * info.in_chans
        for outputs in (width, 4 * width, 4 * width):
            layers += [_convolution(inputs, outputs), nn.MaxPool2d(2), _norm(outputs), nn.GELU()]
            layers += [_convolution(outputs, outputs), _norm(outputs), nn.GELU()]
            inputs = outputs
        self.layers = nn.Sequential(*layers, nn.MaxPool2d(3), nn.Flatten())
        self.head = nn.Linear(inputs, info.num_classes, bias=False)
        with torch.no_grad():
            self.head.weight.div_(self.head.weight.std())

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            return self._logits(images)
        size, wide = images.shape[-1], F.pad(images, (1, 1, 1, 1), mode="reflect")
        looks = ((images, 0.5), (wide[..., :size, :size], 0.25), (wide[..., 2:, 2:], 0.25))
        sums = [share * (self._logits(each) + self._logits(each.flip(-1))) for each, share in looks]
        return torch.stack(sums).sum(0) / 2

    def _logits(self, images: Tensor) -> Tensor:
        features: Tensor = self.head(self.layers(images))
        return features / 256


def _convolution(inputs: int, outputs: int) -> nn.Conv2d:
    layer = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
    nn.init.dirac_(layer.weight.data[:inputs])  # what comes in goes on; further channels are random
    return layer


def _norm(channels: int) -> nn.BatchNorm2d:
    layer = nn.BatchNorm2d(channels, momentum=0.4)
    layer.weight.requires_grad_(False)
    return layer


def net(info: DataInfo, *, width: int = 64) -> nn.Module:
    """Six convolutions of 3x3 in three blocks, for images of 32x32; ``width``: channels of the first block."""
    return Net(info, width)


class Optimizer(torch.optim.Optimizer):
    """Muon for filters, each of which is brought to one length before its update; SGD for biases and the head."""

    def __init__(self, groups: Any, lr: float, *, momentum: float = 0.6, sgd_momentum: float = 0.85) -> None:
        super().__init__(groups, {"lr": lr, "weight_decay": 0.0})
        self._momentum, self._sgd_momentum = momentum, sgd_momentum

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._update(parameter, group["lr"])

    def _update(self, parameter: Tensor, lr: float) -> None:
        assert parameter.grad is not None
        is_filter, gradient = parameter.ndim == 4, parameter.grad
        momentum = self._momentum if is_filter else self._sgd_momentum
        if not is_filter:
            rate = _RATES[parameter.ndim]
            gradient, lr = gradient + _DECAY / rate * parameter, lr / _LR * rate
        state = self.state[parameter]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        velocity = state["momentum_buffer"].mul_(momentum).add_(gradient)
        step = gradient.add(velocity, alpha=momentum)  # Nesterov's
        if is_filter:
            parameter.mul_(len(parameter) ** 0.5 / parameter.norm())
            step = orthogonal(step.flatten(1)).view_as(step)
        parameter.add_(step, alpha=-lr)


def orthogonal(matrix: Tensor) -> Tensor:
    """A matrix of the same singular vectors, whose singular values are about 1."""
    tall = matrix.shape[0] > matrix.shape[1]
    near = (matrix.T if tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(_STEPS):
        square = near @ near.T
        near = _A * near + (_B * square + _C * square @ square) @ near
    return near.T if tall else near


def linear(step: int, total_steps: int, lr: float) -> float:
    """Down to zero, from the first update on."""
    return lr * (1 - step / total_steps)


class Crops(TensorTransform):
    """As `TensorTransform`, but beyond its edge an image goes on as its mirror image."""

    def batch(self, images: Tensor, drawn: Tensor | None = None) -> Tensor:
        """Images uint8 [N, C, H, W] of the size that is wanted, with what `draw` drew for them, int64 [N, 3]."""
        if drawn is None:
            return super().batch(images)
        size = images.shape[-1]
        places = torch.arange(-self.shift, size + self.shift, device=images.device).abs()
        places = size - 1 - (size - 1 - places).abs()
        padded = images[:, :, places][:, :, :, places]
        top, left, mirror = drawn.unbind(1)
        rows, columns = (start[:, None] + torch.arange(size, device=images.device) for start in (top, left))
        columns = torch.where(mirror[:, None].bool(), columns.flip(1), columns)
        image, channel = (torch.arange(count, device=images.device) for count in images.shape[:2])
        return padded[
            image[:, None, None, None], channel[:, None, None], rows[:, None, :, None], columns[:, None, None, :]
        ]


def crops(root: Path, *, val_fraction: float = 0.02) -> Splits:
    """CIFAR-10, moved by up to 2 pixels where the kit's own moves it by 4."""
    splits = cifar10.build(root, val_fraction=val_fraction)
    return dataclasses.replace(splits, train_transform=Crops(splits.info.image_size, 2, True))
