"""Small data sets that live in memory, or on the device, as one tensor, and their augmentation in whole batches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainkit.data import draws
from trainkit.data.base import Transform

if TYPE_CHECKING:
    import torch
    from torch import Tensor


class TensorSamples:
    """Images uint8 [N, C, H, W] and labels int64 [N], both on one device."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        assert len(images) == len(labels)
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])

    @property
    def nbytes(self) -> int:
        """Of images and labels."""
        return self.images.nbytes + self.labels.nbytes

    def on(self, device: torch.device) -> TensorSamples:
        """The same samples there."""
        return TensorSamples(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True)
class TensorTransform:
    """Raw images of one size -> [in_chans, image_size, image_size]: padded with black by ``shift`` pixels, cropped at a
    random place, mirrored at random if ``flip``, and then resized.

    The pixels are those of torchvision's RandomCrop(size, padding=shift) and RandomHorizontalFlip. A batch at a time it
    takes some 3 us for an image of CIFAR-10, image by image 40.
    """

    image_size: int
    shift: int = 0
    flip: bool = False

    def __call__(self, image: Tensor) -> Tensor:
        """One image [C, H, W]; random numbers come from torch's default generator."""
        import torch

        return self.batch(image[None], self.draw(torch.randint(1 << 62, (1,))))[0]

    def draw(self, keys: Tensor) -> Tensor:
        """Row and column in the padded image, and 1 to mirror it: int64 [..., 3] for keys [...]."""
        import torch

        places = 2 * self.shift + 1
        mirror = draws.below(keys, draws.SHIFT + 2, 2) if self.flip else torch.zeros_like(keys)
        return torch.stack([*(draws.below(keys, draws.SHIFT + n, places) for n in (0, 1)), mirror], dim=-1)

    def batch(self, images: Tensor, drawn: Tensor | None = None) -> Tensor:
        """Images [N, C, H, W] with what `draw` drew for them, int64 [N, 3] on the same device; None: as they are."""
        if drawn is not None and (self.shift or self.flip):
            images = self._cropped(images, drawn)
        return resized(images, self.image_size)

    def _cropped(self, images: Tensor, drawn: Tensor) -> Tensor:
        import torch

        shift = self.shift
        count, channels, height, width = images.shape
        tall, wide = height + 2 * shift, width + 2 * shift
        padded = images.new_zeros((1 + self.flip, count, channels, tall, wide))
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


def resized(images: Tensor, image_size: int) -> Tensor:
    """uint8 [N, C, H, W] -> [N, C, image_size, image_size], bilinear."""
    import torch
    import torch.nn.functional as F

    size = (image_size, image_size)
    if images.shape[-2:] == size:
        return images
    if images.device.type == "cpu":  # its kernel for bytes is the fast one, and rounds as an image viewer does
        return F.interpolate(images, size=size, mode="bilinear", align_corners=False, antialias=True)
    exact = F.interpolate(images.float(), size=size, mode="bilinear", align_corners=False, antialias=True)
    return exact.round_().clamp_(0, 255).to(torch.uint8)  # within one level of the above


def tensor_transforms(image_size: int, *, augment: bool, shift: int, flip: bool) -> tuple[Transform, Transform]:
    """Train and eval transform for images that are small tensors: shift and mirror at their own size, then resize."""
    plain = TensorTransform(image_size)
    return (TensorTransform(image_size, shift, flip) if augment else plain), plain
