"""Small data sets that live in memory as one tensor, and their augmentation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainkit.data.base import Transform

if TYPE_CHECKING:
    from torch import Tensor


class TensorSamples:
    """Images uint8 [N, C, H, W] and labels int64 [N]."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        assert len(images) == len(labels)
        self.images = images
        self.labels: list[int] = labels.tolist()  # indexing a tensor for one number costs microseconds

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int, /) -> tuple[Tensor, int]:
        return self.images[index], self.labels[index]


class ShiftFlip:
    """Pad with black by ``shift`` pixels, crop at a random place, mirror at random if ``flip``.

    What transforms.v2's RandomCrop and RandomHorizontalFlip do to a tensor, at a third of their cost (10 us against 30)
    and without torchvision's import.
    """

    def __init__(self, shift: int, *, flip: bool) -> None:
        self.shift, self.flip = shift, flip

    def __call__(self, image: Tensor) -> Tensor:
        import torch

        shift = self.shift
        channels, height, width = image.shape
        padded = image.new_zeros((channels, height + 2 * shift, width + 2 * shift))
        padded[:, shift : shift + height, shift : shift + width] = image
        top, left, mirror = torch.randint(0, 1 << 30, (3,)).tolist()
        top, left = top % (2 * shift + 1), left % (2 * shift + 1)
        crop = padded[:, top : top + height, left : left + width]
        return crop.flip(-1) if self.flip and mirror & 1 else crop


class Resize:
    """Raw image tensor -> [in_chans, image_size, image_size], bilinear."""

    def __init__(self, image_size: int) -> None:
        self.image_size = image_size

    def __call__(self, image: Tensor) -> Tensor:
        size = (self.image_size, self.image_size)
        if image.shape[-2:] == size:
            return image
        import torch.nn.functional as F

        # uint8 in, uint8 out: the kernel for bytes is the fast one, and rounds as an image viewer does.
        return F.interpolate(image[None], size=size, mode="bilinear", align_corners=False, antialias=True)[0]


class Sequential:
    """Transforms one after the other."""

    def __init__(self, *transforms: Transform) -> None:
        self.transforms = transforms

    def __call__(self, image: Tensor) -> Tensor:
        for transform in self.transforms:
            image = transform(image)
        return image


def tensor_transforms(image_size: int, *, augment: bool, shift: int, flip: bool) -> tuple[Transform, Transform]:
    """Train and eval transform for images that are small tensors: shift and mirror at their own size, then resize."""
    resize = Resize(image_size)
    return (Sequential(ShiftFlip(shift, flip=flip), resize) if augment else resize), resize
