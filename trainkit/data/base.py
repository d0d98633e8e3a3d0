"""The types that data, models and training share: samples, splits, batches; and the errors of data sets."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterable, Mapping, Sized
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from trainkit.common import terminal
from trainkit.common.errors import UserError, require
from trainkit.common.image_input import DataInfo, ModelInput
from trainkit.data.decoding import Part

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


@runtime_checkable
class PartSamples(Samples, Protocol):
    """Raw samples of which a part costs less than the whole."""

    def read_part(self, index: int, part: Part | None = None) -> tuple[Any, Any]:
        """The wanted part of the raw image, and the label."""


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
        train = self.train_transform
        evaluate = self.eval_transform
        if self.transforms_for is not None:
            train, evaluate = self.transforms_for(expected)
        info = replace(self.info, mean=expected.mean, std=expected.std)
        return replace(self, info=info, train_transform=train, eval_transform=evaluate, expected=expected)


def pair_of(sample: Any) -> tuple[Any, Any]:
    """Return the image and the label of a sample. Raises UserError where it is no pair."""
    if isinstance(sample, tuple | list) and len(sample) == 2:
        return sample[0], sample[1]
    what = f"{type(sample).__name__} of length {len(sample)}" if isinstance(sample, Sized) else type(sample).__name__
    raise refused_data("A sample of the data set is no pair.", f"It is {what}.", "Return (image, label) for each.")


def require_tensors(image: Any, labels: Any) -> None:
    """Raises UserError where a transform gives no image as a tensor, or the labels of a batch are no numbers."""
    from torch import Tensor

    if not isinstance(image, Tensor) or image.dim() != 3:
        found = f"a tensor of {image.dim()} dimensions" if isinstance(image, Tensor) else type(image).__name__
        fix = "Let train_transform and eval_transform return uint8 tensors [channels, height, width]: "
        fix += "torchvision.transforms.v2.functional.pil_to_tensor makes one of a picture."
        raise refused_data("An image is no tensor of three dimensions.", f"The transform returned {found}.", fix)
    if labels is not None and not isinstance(labels, Tensor):
        fix = "Use the number of the class as label, or a tensor that the task understands."
        raise refused_data("Labels are no numbers.", f"Those of a batch are {type(labels).__name__}.", fix)


def refused_data(what: str, why: str, fix: str) -> UserError:
    """Return the error for a data set whose code gives something else than training asks for."""
    return UserError(what, why=why, fix=f"{fix} Then submit again.", key="data.name")


@dataclass(frozen=True)
class OneOfSeveral:
    """Samples whose class is one of several labels that they could have: uint8 [num_classes]."""

    samples: Samples
    num_classes: int

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int, /) -> tuple[Any, Tensor]:
        import torch

        image, label = self.samples[index]
        return image, (torch.arange(self.num_classes) == label).to(torch.uint8)


def normalize(images: Tensor, info: DataInfo, *, channels_last: bool = False) -> Tensor:
    """Turn uint8 [N, C, H, W] into float32 of zero mean and unit variance, on the images' own device.

    Batches travel as bytes, a quarter of the size of floats, and are normalised where they are used.
    """
    import torch

    scale, shift = _constants(tuple(info.mean), tuple(info.std), images.device)
    layout = torch.channels_last if channels_last else torch.contiguous_format
    if images.device.type != "cpu" or images.numel() <= _IN_CACHE:
        return images.to(torch.float32, memory_format=layout).mul_(scale).add_(shift)
    made = _room(images.shape, layout)
    count = max(1, _IN_CACHE // images[0].numel())
    for some, place in zip(images.split(count), made.split(count), strict=True):
        place.copy_(some).mul_(scale).add_(shift)
    return made


_IN_CACHE = 1 << 18
"""Numbers that a core keeps in its cache. A batch of photos takes two thirds of the time where so many at once are
converted, scaled and shifted."""


_KEPT = 32 << 20
"""Bytes of the largest block that glibc keeps for the next one of its size. A larger one is new memory each time."""


def _room(shape: torch.Size, layout: torch.memory_format) -> Tensor:
    """Return float32 [N, C, H, W] without content, on the CPU.

    For 64 photos of 224 pixels, 39 MB, the system clears 9,400 pages, which takes twice as long as to normalise them;
    it clears as much in large pages in a quarter of the time.
    """
    import torch

    count, channels, height, width = shape
    size = 4 * shape.numel()
    if size <= _KEPT or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(shape, dtype=torch.float32, memory_format=layout)
    room = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory has pages of one size
    with suppress(OSError):  # a kernel without them
        room.madvise(mmap.MADV_HUGEPAGE)
    numbers = torch.frombuffer(room, dtype=torch.float32)
    if layout == torch.channels_last:
        return numbers.view(count, height, width, channels).permute(0, 3, 1, 2)
    return numbers.view(shape)


@lru_cache(maxsize=8)  # making them costs as much as using them
def _constants(mean: tuple[float, ...], std: tuple[float, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Scale and shift of (x / 255 - mean) / std = x * scale + shift."""
    import torch

    scale = [1.0 / (255.0 * item) for item in std]
    shift = [-offset / item for offset, item in zip(mean, std, strict=True)]
    with torch.inference_mode(False):  # the cache serves training as well
        both = torch.tensor([scale, shift], dtype=torch.float32).to(device, non_blocking=True).view(2, 1, -1, 1, 1)
        return both[0], both[1]


def require_options(options: Mapping[str, Any]) -> None:
    """Refuse impossible values of options that several data sets have. Each data set checks its own."""
    if options.get("image_size") is not None:
        require(options["image_size"] >= 4, "data.image_size", options["image_size"], "4 or more")
    for name in ("val_fraction", "test_fraction"):
        fraction = options.get(name, 0.5)
        require(0.0 < fraction < 1.0, f"data.{name}", fraction, "between 0 and 1")
    val = options.get("val_fraction", 0.0)
    fits = val + options.get("test_fraction", 0.0) < 1.0
    require(fits, "data.val_fraction", val, "less than 1 together with data.test_fraction")


Given = Mapping[str, object]


def missing(
    name: str, root: Path, absent: Path, *, fix: str = "", what: str = "", key: str = "name", given: Given | None = None
) -> UserError:
    """The error for a data set that is not there, with the command that fetches it.

    Args:
        what, key: of one that stands for many: what is not there, and the option that names it.
        given: options that the command takes; those that are None are left out.
    """
    words = [f"data.{option}={value}" for option, value in (given or {}).items() if value is not None]
    command = terminal.command("prepare", name, *words, "--root", root)
    what = what or f"The data set '{name}' is not in {root}."
    why = f"{absent} does not exist. To rehearse without it: data.fake=true."
    return UserError(what, why=why, fix=f"{fix}: {command}" if fix else command, key=f"data.{key}")


def damaged(name: str, what: str, why: str) -> UserError:
    """The error for a file of a data set that is not what it should be."""
    return UserError(what, why=why, fix=f"Delete its folder, and fetch it again: {terminal.command('prepare', name)}")


def require_files(name: str, root: Path, files: Iterable[Path]) -> None:
    """Refuse a data set one of whose files is not there."""
    for file in files:
        if not file.is_file():
            raise missing(name, root, file)


class Batch(NamedTuple):
    """A micro batch of training."""

    images: Tensor
    """uint8 [N, C, H, W], on the device that trains."""
    labels: Tensor
    """int64 [N], or as the data's labels are, on the device that trains."""
    keys: Tensor
    """int64 [N], on the host: each sample's random numbers are drawn by its key (`keys`)."""


class EvalBatch(NamedTuple):
    """A batch of evaluation, on the device."""

    images: Tensor
    """uint8 [N, C, H, W]."""
    labels: Tensor
    """int64 [N], or as the data's labels are."""
    mask: Tensor
    """bool [N]: False for samples that only fill the batch."""


Keys = tuple[int, list[int]]
"""Keys of a batch's samples: in training an epoch and indices; in evaluation how many of the last indices only fill the
batch, and indices."""
