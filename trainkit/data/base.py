"""What a data set is to the rest of the kit: three splits of raw samples, and how a raw image becomes a tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from trainkit import terminal
from trainkit.errors import UserError

if TYPE_CHECKING:
    import torch
    from torch import Tensor


Transform = Callable[[Any], "Tensor"]
"""Raw image -> uint8 tensor [in_chans, image_size, image_size]. Random numbers come from torch's default generator."""


class Samples(Protocol):
    """Raw samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, Any]:
        """Raw image (uint8 tensor [C, H, W] or PIL image) and label: a number, or a tensor as the task takes it."""
        ...


@dataclass(frozen=True)
class ModelInput:
    """How the images were prepared that a model's weights were trained on; others it would see through a veil."""

    source: str
    """Who says so: the weights' full name."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    """``bilinear``, ``bicubic`` ...: of resizing."""
    crop: float
    """Share of the resized image's shorter side that the crop in the middle keeps."""


@dataclass(frozen=True)
class DataInfo:
    """What a model must know about the data."""

    name: str
    num_classes: int
    """Outputs of the model."""
    in_chans: int
    image_size: int
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    """Mean of each channel, of pixel values scaled to 0..1."""
    std: tuple[float, ...]

    def as_input(
        self, source: str, *, mean: Sequence[float], std: Sequence[float], interpolation: str, crop: float
    ) -> ModelInput:
        """What weights expect of this data's images; weights for RGB take gray ones as the mean of the colours."""

        def fitted(values: Sequence[float]) -> tuple[float, ...]:
            return tuple(values) if len(values) == self.in_chans else (sum(values) / len(values),) * self.in_chans

        return ModelInput(source, fitted(mean), fitted(std), interpolation, crop)


@dataclass(frozen=True)
class Splits:
    """A data set, ready to read."""

    info: DataInfo
    train: Samples
    val: Samples
    test: Samples
    train_transform: Transform
    eval_transform: Transform
    in_memory: bool = False
    """True where a sample costs so little that loader processes would only slow it down."""
    transforms_for: Callable[[ModelInput], tuple[Transform, Transform]] | None = None
    """Train and eval transform for pretrained weights, where images are resized and cropped."""
    expected: ModelInput | None = None
    """What pretrained weights made of the above."""

    def prepared_for(self, expected: ModelInput | None) -> Splits:
        """The same images as pretrained weights expect them, instead of as this data set would have them."""
        if expected is None:
            return self
        train, evaluate = self.train_transform, self.eval_transform
        if self.transforms_for is not None:
            train, evaluate = self.transforms_for(expected)
        info = replace(self.info, mean=expected.mean, std=expected.std)
        return replace(self, info=info, train_transform=train, eval_transform=evaluate, expected=expected)


def normalize(images: Tensor, info: DataInfo, *, channels_last: bool = False) -> Tensor:
    """uint8 [N, C, H, W] -> float32 of zero mean and unit variance, on the images' own device.

    Batches travel as bytes, a quarter of the size of floats, and are normalised where they are used.
    """
    import torch

    scale, shift = _constants(tuple(info.mean), tuple(info.std), images.device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return images.to(torch.float32, memory_format=layout).mul_(scale).add_(shift)


@lru_cache(maxsize=8)  # making them costs as much as using them
def _constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """One multiplication and one addition per pixel: (x / 255 - mean) / std = x * scale + shift."""
    import torch

    scale = [1.0 / (255.0 * item) for item in std]
    shift = [-offset / item for offset, item in zip(mean, std, strict=True)]
    view = (1, -1, 1, 1)
    with torch.inference_mode(False):  # made once, for every caller
        return (
            torch.tensor(scale, dtype=torch.float32).to(device, non_blocking=True).view(view),
            torch.tensor(shift, dtype=torch.float32).to(device, non_blocking=True).view(view),
        )


def require(condition: bool, option: str, value: object, must_be: str) -> None:
    """Refuse the value of a data option."""
    if not condition:
        raise UserError(
            f"data.{option}={value} is not possible.",
            why=f"data.{option} must be {must_be}.",
            fix=f"Give data.{option} such a value, or leave it out.",
            key=f"data.{option}",
        )


def missing(name: str, root: Path, absent: Path, *, fix: str = "") -> UserError:
    """The error for a data set that is not there, with the command that fetches it."""
    return UserError(
        f"The data set '{name}' is not in {root}.",
        why=f"{absent} does not exist.",
        fix=fix or terminal.command("prepare", name, "--root", root),
        key="data.name",
    )


# What travels from the data to the model.


class Batch(NamedTuple):
    """A micro batch of training."""

    images: Tensor
    """uint8 [N, C, H, W], on the device that trains."""
    labels: Tensor
    """int64 [N], or as the data's labels are, on the device that trains."""
    keys: Tensor
    """int64 [N], on the host: what each sample's random numbers are drawn by (`order.keys`)."""


class EvalBatch(NamedTuple):
    """A batch of evaluation, on the device."""

    images: Tensor
    """uint8 [N, C, H, W]."""
    labels: Tensor
    """int64 [N], or as the data's labels are."""
    mask: Tensor
    """bool [N]: False on what only fills the batch."""


# A fixed, stratified split: the same for every seed, machine and version of every library.


def stratified_split(
    labels: Sequence[int], fractions: Sequence[float], *, keys: Sequence[str] | None = None
) -> list[list[int]]:
    """Indices of ``len(fractions) + 1`` parts: what is left over, then one part for each fraction.

    Within each class the samples are ordered by a hash of their key (their index by default), not by a library's random
    numbers, which may change from one version to the next. Each part is sorted. A class gives each part at least one
    sample as long as it keeps one itself.
    """
    by_class: dict[int, list[int]] = {}
    for index, label in enumerate(labels):
        by_class.setdefault(label, []).append(index)
    parts: list[list[int]] = [[] for _ in range(len(fractions) + 1)]
    for label in sorted(by_class):
        members = sorted(by_class[label], key=lambda i: _hash(keys[i] if keys else str(i)))
        for part, count in enumerate(_held_out(len(members), fractions), start=1):
            parts[part] += members[:count]
            members = members[count:]
        parts[0] += members
    return [sorted(part) for part in parts]


def size_left(counts: Iterable[int], fractions: Sequence[float]) -> int:
    """Of classes with so many samples, how many `stratified_split` leaves in its first part."""
    return sum(count - sum(_held_out(count, fractions)) for count in counts)


def _held_out(count: int, fractions: Sequence[float]) -> list[int]:
    """How many of a class's ``count`` samples each part but the first gets."""
    left, sizes = count, []
    for fraction in fractions:
        sizes.append(min(max(round(fraction * count), 1), left - 1) if fraction > 0 else 0)
        left -= sizes[-1]
    return sizes


def _hash(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=8).digest()
