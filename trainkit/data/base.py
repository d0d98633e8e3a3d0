"""The types that data, models and training share: samples, splits, batches; and the options that data sets have."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    """How images are prepared for pretrained weights."""

    source: str
    """Full name of the weights."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    """Of resizing: ``bilinear``, ``bicubic`` ..."""
    crop: float
    """Share of the resized image's shorter side that the centre crop keeps."""


@dataclass(frozen=True)
class DataInfo:
    """What a model must know about the data."""

    name: str
    num_classes: int
    """Number of outputs of the model."""
    in_chans: int
    image_size: int
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    """Of each channel, with pixel values scaled to 0..1."""
    std: tuple[float, ...]

    def as_input(
        self, source: str, *, mean: Sequence[float], std: Sequence[float], interpolation: str, crop: float
    ) -> ModelInput:
        """What weights expect of this data's images. For gray images the weights' RGB statistics are averaged."""

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
    """A sample costs so little that loader processes would only slow training down."""
    transforms_for: Callable[[ModelInput], tuple[Transform, Transform]] | None = None
    """Train and eval transform for pretrained weights; None where images keep this data set's own transforms."""
    expected: ModelInput | None = None
    """The weights that `prepared_for` was called with."""

    def prepared_for(self, expected: ModelInput | None) -> Splits:
        """The same images, prepared as pretrained weights expect them."""
        if expected is None:
            return self
        transforms = self.train_transform, self.eval_transform
        train, evaluate = transforms if self.transforms_for is None else self.transforms_for(expected)
        info = replace(self.info, mean=expected.mean, std=expected.std)
        return replace(self, info=info, train_transform=train, eval_transform=evaluate, expected=expected)


def normalize(images: Tensor, info: DataInfo, *, channels_last: bool = False) -> Tensor:
    """Turn uint8 [N, C, H, W] into float32 of zero mean and unit variance, on the images' own device.

    Batches travel as bytes, a quarter of the size of floats, and are normalised where they are used.
    """
    import torch

    scale, shift = _constants(tuple(info.mean), tuple(info.std), images.device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    return images.to(torch.float32, memory_format=layout).mul_(scale).add_(shift)


@lru_cache(maxsize=8)  # making them costs as much as using them
def _constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and shift of (x / 255 - mean) / std = x * scale + shift."""
    import torch

    scale = [1.0 / (255.0 * item) for item in std]
    shift = [-offset / item for offset, item in zip(mean, std, strict=True)]
    with torch.inference_mode(False):  # the cache serves training as well
        both = torch.tensor([scale, shift], dtype=torch.float32).to(device, non_blocking=True).view(2, 1, -1, 1, 1)
        return both[0], both[1]


_POSSIBLE: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "image_size": (lambda pixels: pixels >= 8, "8 or more"),
    "in_chans": (lambda channels: channels in (1, 3), "3 for colours, or 1 for gray images"),
    "val_fraction": (lambda part: 0.0 < part < 1.0, "between 0 and 1"),
    "test_fraction": (lambda part: 0.0 < part < 1.0, "between 0 and 1"),
}
"""Options that several data sets have: which values are possible, and the words for them."""


def require_options(options: Mapping[str, Any]) -> None:
    """Refuse impossible values of options that several data sets have. Each data set checks its own with `require`."""
    for name, (is_possible, must_be) in _POSSIBLE.items():
        if name in options:
            require(is_possible(options[name]), name, options[name], must_be)
    if {"val_fraction", "test_fraction"} <= options.keys():
        val = options["val_fraction"]
        require(val + options["test_fraction"] < 1.0, "val_fraction", val, "less than 1 with data.test_fraction")


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


class Batch(NamedTuple):
    """A micro batch of training."""

    images: Tensor
    """uint8 [N, C, H, W], on the device that trains."""
    labels: Tensor
    """int64 [N], or as the data's labels are, on the device that trains."""
    keys: Tensor
    """int64 [N], on the host: each sample's random numbers are drawn by its key (`order.keys`)."""


class EvalBatch(NamedTuple):
    """A batch of evaluation, on the device."""

    images: Tensor
    """uint8 [N, C, H, W]."""
    labels: Tensor
    """int64 [N], or as the data's labels are."""
    mask: Tensor
    """bool [N]: False for samples that only fill the batch."""


def stratified_split(
    labels: Sequence[int], fractions: Sequence[float], *, keys: Sequence[str] | None = None
) -> list[list[int]]:
    """Split samples by class into ``len(fractions) + 1`` parts: what is left over, then one part for each fraction.

    The split is the same for every seed, machine and version of every library: within a class the samples are ordered
    by a hash of their key (by default their index). Each part is sorted, and gets at least one sample of each class, as
    long as the class keeps one itself.
    """
    by_class: dict[int, list[int]] = defaultdict(list)
    for index, label in enumerate(labels):
        by_class[label].append(index)
    parts: list[list[int]] = [[] for _ in range(len(fractions) + 1)]
    for members in by_class.values():
        members.sort(key=lambda index: _hash(keys[index] if keys else str(index)))
        first = 0
        for part, count in enumerate(_sizes(len(members), fractions), start=1):
            parts[part % len(parts)] += members[first : first + count]
            first += count
    return [sorted(part) for part in parts]


def size_left(counts: Iterable[int], fractions: Sequence[float]) -> int:
    """Samples that `stratified_split` leaves in its first part, of classes with ``counts`` samples."""
    return sum(_sizes(count, fractions)[-1] for count in counts)


def _sizes(count: int, fractions: Sequence[float]) -> list[int]:
    """Samples of a class of ``count`` for each fraction, and then those left over."""
    sizes: list[int] = []
    for fraction in fractions:
        left = count - sum(sizes)
        sizes.append(min(max(round(fraction * count), 1), left - 1) if fraction > 0 else 0)
    return [*sizes, count - sum(sizes)]


def _hash(key: str) -> bytes:
    return hashlib.blake2b(key.encode(), digest_size=8).digest()
