"""What a data set is to the rest of the kit: three splits of raw samples, and how a raw image becomes a tensor."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from trainkit.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

Transform = Callable[[Any], "Tensor"]
"""Raw image -> uint8 tensor [in_chans, image_size, image_size]. Random numbers come from torch's default generator."""


class Samples(Protocol):
    """Raw samples by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> tuple[Any, int]:
        """Raw image (uint8 tensor [C, H, W] or PIL image) and label."""
        ...


@dataclass(frozen=True)
class DataInfo:
    """What a model must know about the data."""

    name: str
    num_classes: int
    in_chans: int
    image_size: int
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    """Mean of each channel, of pixel values scaled to 0..1."""
    std: tuple[float, ...]


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


def normalize(images: Tensor, info: DataInfo) -> Tensor:
    """uint8 [N, C, H, W] -> float32 of zero mean and unit variance, on the images' own device.

    Batches travel as bytes, a quarter of the size of floats, and are normalised where they are used.
    """
    import torch

    # One multiplication and one addition per pixel: (x / 255 - mean) / std = x * scale + shift.
    scale = [1.0 / (255.0 * std) for std in info.std]
    shift = [-mean / std for mean, std in zip(info.mean, info.std, strict=True)]
    view = (1, -1, 1, 1)
    scale_t = torch.tensor(scale, dtype=torch.float32).to(images.device, non_blocking=True).view(view)
    shift_t = torch.tensor(shift, dtype=torch.float32).to(images.device, non_blocking=True).view(view)
    return images.to(torch.float32).mul_(scale_t).add_(shift_t)


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
        fix=fix or f"python -m jobs.prepare {name} --root {root}",
        key="data.name",
    )
