"""Images of one size as tensors: cut out, mirrored and resized in whole batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from trainkit.common.image_input import DataInfo
from trainkit.data import draws
from trainkit.data.base import Samples, Splits
from trainkit.data.image_files import ImageFiles
from trainkit.data.packs import Pack
from trainkit.distributed.device import free_memory


class TensorSamples:
    """Images uint8 [N, C, H, W] and labels on one device: int64 [N], float32 [N], or uint8 [N, classes]."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        assert len(images) == len(labels)
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int, /) -> tuple[Tensor, Any]:
        label = self.labels[index]
        return self.images[index], label if label.dim() else label.item()


@dataclass(frozen=True)
class TensorTransform:
    """Raw images of one size -> [in_chans, image_size, image_size]: padded by ``shift`` pixels, with black or, by
    ``reflect``, their mirror image, cropped at a random place, mirrored at random if ``flip``, and then resized.

    The pixels are those of torchvision's RandomCrop(size, shift, padding_mode=...) and RandomHorizontalFlip. A batch at
    a time it takes some 3 us for an image of CIFAR-10, image by image 40.
    """

    image_size: int
    shift: int = 0
    flip: bool = False
    reflect: bool = False

    def __call__(self, image: Tensor) -> Tensor:
        """One image [C, H, W]; random numbers come from torch's default generator."""
        return self.batch(image[None], self.draw(torch.randint(1 << 62, (1,))))[0]

    def draw(self, keys: Tensor) -> Tensor:
        """Row and column in the padded image, and 1 to mirror it: int64 [..., 3] for keys [...]."""
        places = 2 * self.shift + 1
        row = draws.below(keys, draws.SHIFT, places)
        column = draws.below(keys, draws.SHIFT + 1, places)
        mirror = torch.zeros_like(keys)
        if self.flip:
            mirror = draws.below(keys, draws.SHIFT + 2, 2)
        return torch.stack([row, column, mirror], dim=-1)

    def batch(self, images: Tensor, drawn: Tensor | None = None) -> Tensor:
        """Images [N, C, H, W] with what `draw` drew for them, int64 [N, 3] on the same device; None: as they are."""
        if drawn is not None and (self.shift or self.flip):
            images = self._cropped(images, drawn)
        return resized(images, self.image_size)

    def _cropped(self, images: Tensor, drawn: Tensor) -> Tensor:
        shift = self.shift
        count, channels, height, width = images.shape
        tall = height + 2 * shift
        wide = width + 2 * shift
        padded = images.new_zeros((1 + self.flip, count, channels, tall, wide))
        if self.reflect:
            rows = _reflected(height, shift, images.device)
            columns = _reflected(width, shift, images.device)
            padded[0] = images[:, :, rows][..., columns]
        else:
            padded[0, ..., shift : shift + height, shift : shift + width] = images
        if self.flip:
            padded[1] = padded[0].flip(-1)
        top, left, mirror = drawn.unbind(1)
        # The mirror image of a window is a window of the mirror image, counted from its other side.
        left = torch.where(mirror.bool(), 2 * shift - left, left)
        # Each row of each window is a run of bytes: one gather of runs, where indexing would go byte by byte.
        image = torch.arange(count * channels, device=images.device).view(count, channels, 1) * tall
        row = (top + mirror * (count * channels * tall)).view(-1, 1, 1) + torch.arange(height, device=images.device)
        first = (image + row) * wide + left.view(-1, 1, 1)
        runs = padded.as_strided((padded.numel() - width + 1, width), (1, 1))
        return runs.index_select(0, first.view(-1)).view(count, channels, height, width)


def _reflected(size: int, shift: int, device: torch.device) -> Tensor:
    """Pixels, of ``size``, that are seen from -shift to size + shift - 1, with mirrors at the first and the last."""
    return size - 1 - (size - 1 - torch.arange(-shift, size + shift, device=device).abs()).abs()


def resized(images: Tensor, image_size: int) -> Tensor:
    """uint8 [N, C, H, W] -> [N, C, image_size, image_size], bilinear."""
    size = (image_size, image_size)
    if images.shape[-2:] == size:
        return images
    if images.device.type == "cpu":  # its kernel for bytes is the fast one, and rounds as an image viewer does
        return F.interpolate(images, size=size, mode="bilinear", align_corners=False, antialias=True)
    exact = F.interpolate(images.float(), size=size, mode="bilinear", align_corners=False, antialias=True)
    return exact.round_().clamp_(0, 255).to(torch.uint8)  # within one level of the above


def tensor_splits(
    info: DataInfo, parts: Iterable[Samples], *, augment: bool, shift: int, flip: bool = True, in_memory: bool = True,
    reflect: bool = False,
) -> Splits:  # fmt: skip
    """A data set of small images of one size: shifted and mirrored at their own size for training, then resized.

    Args:
        parts: train, val and test.
    """
    plain = TensorTransform(info.image_size)
    augmented = TensorTransform(info.image_size, shift, flip, reflect) if augment else plain
    train, val, test = parts
    return Splits(info, train, val, test, augmented, plain, in_memory)


def mapped(splits: Splits) -> Splits:
    """Use the mapped pixels of a pack as tensors, if all images are pixels of one size: nothing is read or decoded.

    They are augmented in whole batches then, and may move to the GPU. Only for a data set that augments images of one
    size: photos are cut out each in another size.
    """
    parts: list[TensorSamples] = []
    for samples in (splits.train, splits.val, splits.test):
        if isinstance(samples, ImageFiles) and isinstance(samples.files, Pack) and samples.in_chans == 3:
            images = samples.files.stacked
            first = samples.positions[0]
            end = first + len(samples)
            if images is not None and samples.positions.tolist() == [*range(first, end)]:
                parts.append(TensorSamples(images[first:end], torch.tensor(samples.labels.tolist())))
    if len(parts) < 3 or not isinstance(splits.train_transform, TensorTransform):
        return splits
    train, val, test = parts
    return replace(splits, train=train, val=val, test=test, in_memory=True)


SHARE_OF_FREE = 0.1
"""Share of a GPU's free memory that the data may take: the model and its activations need the rest."""


def to_device(splits: Splits, where: Literal["auto", "cpu"], device: torch.device, *, workers: int) -> Splits:
    """Move ``splits`` to the GPU that trains, if they are in memory and take little of what it has free (`auto`).

    Bytes are cut out alike wherever they lie. Only resizing rounds otherwise on a GPU, by one level of 255 at most.
    """
    if where == "cpu" or device.type == "cpu" or workers:  # a loader process has no GPU
        return splits
    parts = [part for part in (splits.train, splits.val, splits.test) if isinstance(part, TensorSamples)]
    if len(parts) < 3:
        return splits
    if sum(part.images.nbytes + part.labels.nbytes for part in parts) > free_memory(device) * SHARE_OF_FREE:
        return splits
    train, val, test = (TensorSamples(part.images.to(device), part.labels.to(device)) for part in parts)
    return replace(splits, train=train, val=val, test=test)
