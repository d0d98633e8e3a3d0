"""Images as a model takes them: their size, channels and classes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ModelInput:
    """Preparation of images for pretrained weights."""

    source: str
    """Full name of the weights."""
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str
    """Mode of resizing: ``bilinear``, ``bicubic`` ..."""
    crop: float
    """Share of the resized image's shorter side that the centre crop keeps."""


@dataclass(frozen=True)
class DataInfo:
    """Facts about the data that a model is built by."""

    name: str
    num_classes: int
    """Number of outputs of the model."""
    in_chans: int
    image_size: int
    class_names: tuple[str, ...]
    mean: tuple[float, ...]
    """Mean of each channel, with pixel values scaled to 0..1."""
    std: tuple[float, ...]
    exif: bool = False
    """Photos are turned upright, as the orientation in their EXIF data says."""

    def as_input(
        self, source: str, *, mean: Sequence[float], std: Sequence[float], interpolation: str, crop: float
    ) -> ModelInput:
        """Return the input that weights expect of this data's images; gray ones get the mean of RGB statistics."""
        mean, std = (of_channels(values, self.in_chans) for values in (mean, std))
        return ModelInput(source, mean, std, interpolation, crop)


def of_channels(values: Sequence[float], in_chans: int) -> tuple[float, ...]:
    """A statistic of each channel, averaged where it is of others: of RGB for gray images."""
    if len(values) == in_chans:
        return tuple(values)
    return (sum(values) / len(values),) * in_chans
