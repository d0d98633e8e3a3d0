"""The types that data, models and training share: samples, splits, batches; the options that data sets have; and the
order of the data, with the random numbers of each sample.

The order is a pure function of (seed, epoch, position). It depends neither on the number of ranks nor on loader
processes nor on where a run was resumed: global step ``s`` sees the same samples however many GPUs share them.

Random numbers are a function of (seed, epoch, index), for whole batches at once, and without any state. SplitMix64
(Steele, Lea and Flood, OOPSLA 2014; constants of Vigna's splitmix64.c) needs one 64-bit number to start from, and gives
the n-th number of its stream without those before it. Each sample has such a stream in each epoch. So neither ranks nor
loader processes nor micro batches nor a restart change what is drawn for it.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from trainkit import terminal
from trainkit.errors import UserError, require

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
    exif: bool = False
    """Photos are turned upright, as the orientation in their EXIF data says."""

    def as_input(
        self, source: str, *, mean: Sequence[float], std: Sequence[float], interpolation: str, crop: float
    ) -> ModelInput:
        """What weights expect of this data's images. For gray images the weights' RGB statistics are averaged."""
        mean, std = (of_channels(values, self.in_chans) for values in (mean, std))
        return ModelInput(source, mean, std, interpolation, crop)


def of_channels(values: Sequence[float], in_chans: int) -> tuple[float, ...]:
    """A statistic of each channel, averaged where it is of others: of RGB for gray images."""
    return tuple(values) if len(values) == in_chans else (sum(values) / len(values),) * in_chans


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


class OneOfSeveral:
    """Samples whose class is one of several labels that they could have: uint8 [num_classes]."""

    def __init__(self, samples: Samples, num_classes: int) -> None:
        self.samples, self.num_classes = samples, num_classes

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


def require_options(options: Mapping[str, Any]) -> None:
    """Refuse impossible values of options that several data sets have. Each data set checks its own."""
    if options.get("image_size") is not None:
        require(options["image_size"] >= 4, "data.image_size", options["image_size"], "4 or more")
    fractions = {name: options[name] for name in ("val_fraction", "test_fraction") if name in options}
    for name, fraction in fractions.items():
        require(0.0 < fraction < 1.0, f"data.{name}", fraction, "between 0 and 1")
    if len(fractions) == 2:
        both = "less than 1 with data.test_fraction"
        require(sum(fractions.values()) < 1.0, "data.val_fraction", fractions["val_fraction"], both)


def missing(
    name: str, root: Path, absent: Path, *, fix: str = "", what: str = "", key: str = "name",
    given: Mapping[str, object] | None = None,
) -> UserError:  # fmt: skip
    """The error for a data set that is not there, with the command that fetches it.

    Args:
        what, key: of one that stands for many: what is not there, and the option that names it.
        given: options that the command takes; those that are None are left out.
    """
    words = [f"data.{option}={value}" for option, value in (given or {}).items() if value is not None]
    return UserError(
        what or f"The data set '{name}' is not in {root}.",
        why=f"{absent} does not exist. To rehearse without it: data.fake=true.",
        fix=f"{fix}{': ' if fix else ''}{terminal.command('prepare', name, *words, '--root', root)}",
        key=f"data.{key}",
    )


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
"""What is read for a batch: in training an epoch and indices; in evaluation how many of the last indices only fill the
batch, and indices."""


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
        members.sort(key=lambda index: _digest(keys[index] if keys else str(index), 8))
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


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


# The order of the data.


def derive_seed(*parts: int) -> int:
    """A 32-bit seed from integers of any size.

    Hashed, because torch's CPU generator looks at the low 32 bits of a seed only: a seed composed by shifting, such as
    ``seed << 32 | epoch``, would lose its upper part.
    """
    return int.from_bytes(_digest(repr(parts), 4), "little")


def epoch_order(num_samples: int, seed: int, epoch: int) -> Tensor:
    """The permutation of ``range(num_samples)`` that epoch ``epoch`` walks through: int32, or int64 if need be."""
    import torch

    generator = torch.Generator().manual_seed(derive_seed(seed, epoch))
    # The same numbers in half of the memory are drawn in less than half of the time.
    dtype = torch.int32 if num_samples < 1 << 31 else torch.int64
    return torch.randperm(num_samples, generator=generator, dtype=dtype)


def order_of(samples: Sized, seed: int, epoch: int) -> Tensor:
    """The order in which epoch ``epoch`` walks through ``samples``: that of their own method ``order``, if they have
    one."""
    own: Callable[[int, int], Tensor] | None = getattr(samples, "order", None)
    return epoch_order(len(samples), seed, epoch) if own is None else own(seed, epoch)


def steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Optimizer steps in one epoch. The remainder is dropped; the next permutation brings it back."""
    if num_samples < global_batch_size:
        what = f"train.global_batch_size={global_batch_size} is larger than the training data."
        why = f"The training split has {num_samples} images, so that not even one step fits into an epoch."
        fix = f"Use train.global_batch_size={1 << max(num_samples.bit_length() - 1, 0)}, or more data."
        raise UserError(what, why=why, fix=fix, key="train.global_batch_size")
    return num_samples // global_batch_size


def share_of(order: Tensor, micro_batch_size: int, *, rank: int, world_size: int) -> Tensor:
    """The micro batches of ``rank`` in some whole global batches ``order``: int64 [count, micro_batch_size].

    Each micro step takes ``world_size * micro_batch_size`` samples, of which rank ``r`` takes the r-th part: together
    the ranks see exactly ``order``.
    """
    return order.view(-1, world_size, micro_batch_size)[:, rank].long()


def repeated(order: Tensor, repeats: int, global_batch_size: int) -> Tensor:
    """An epoch of whole global batches in which each image comes ``repeats`` times (Hoffer et al., arXiv 1901.09335; as
    in DeiT an epoch is as long as without): int64, of which copy ``c`` of image ``i`` is ``i + c * len(order)``.

    Copies of an image are far from one another, so that on several ranks most are on others, and each copy has another
    neighbour to be mixed with. Where batches are no multiple of ``repeats``, some images come once less.
    """
    import torch

    if repeats == 1:
        return order
    steps, images = len(order) // global_batch_size, -(-global_batch_size // repeats)
    once = order[: steps * images].long().view(steps, images)
    copies = [once.roll(-copy, dims=1) + copy * len(order) for copy in range(repeats)]
    return torch.cat(copies, dim=1)[:, :global_batch_size].flatten()


def global_batch(samples: Sized, seed: int, position: int, global_batch_size: int, repeats: int = 1) -> list[int]:
    """Indices of the samples in the ``position``-th global batch of a run, from 0."""
    epoch, step = divmod(position, steps_per_epoch(len(samples), global_batch_size))
    order = repeated(order_of(samples, seed, epoch), repeats, global_batch_size) % len(samples)
    return order[step * global_batch_size : (step + 1) * global_batch_size].tolist()


# Random numbers of samples. int64 tensors overflow as unsigned numbers do; only shifting to the right needs a mask.


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


SHIFT = 0
POLICY = 16
MIXING = 64
ERASING = 96
"""Where in a sample's stream the draws of each augmentation begin: none takes another's."""

_GAMMA = _signed(0x9E3779B97F4A7C15)
_STEPS = ((30, _signed(0xBF58476D1CE4E5B9)), (27, _signed(0x94D049BB133111EB)))


def keys(seed: int, epoch: int, indices: Tensor) -> Tensor:
    """Where each sample's stream starts: int64, like ``indices``."""
    return _mixed(indices * _GAMMA + int.from_bytes(_digest(repr((seed, epoch)), 8), "little", signed=True))


def stream(keys: Tensor, draw: int | Tensor) -> Tensor:
    """The ``draw``-th number of each stream, from 0, with all of its 64 bits: where a further stream may start."""
    offset = _signed((draw + 1) * _GAMMA % (1 << 64)) if isinstance(draw, int) else (draw + 1) * _GAMMA
    return _mixed(keys + offset)


def bits(keys: Tensor, draw: int | Tensor) -> Tensor:
    """The upper half of it: int64 of 0 to 2**32 - 1."""
    return (stream(keys, draw) >> 32) & 0xFFFFFFFF


def below(keys: Tensor, draw: int | Tensor, end: int) -> Tensor:
    """The ``draw``-th number as one of 0 to ``end - 1``, int64. All are equally likely, for ``end``
    is far below 2**31."""
    return (bits(keys, draw) * end) >> 32


def uniform(keys: Tensor, draw: int | Tensor) -> Tensor:
    """The ``draw``-th number as one between 0 and 1, float64, neither of them ever."""
    return (bits(keys, draw).double() + 0.5) / (1 << 32)


def normal(keys: Tensor, draw: int | Tensor) -> Tensor:
    """The ``draw``-th number as one of mean 0 and variance 1, float32, normally distributed up to 5 sigma."""
    middle = ((bits(keys, draw) >> 9).float() + 0.5) / (1 << 22) - 1  # 23 bits and a half: no float32 is between
    return middle.erfinv_() * 2**0.5


def _mixed(numbers: Tensor) -> Tensor:
    for shift, factor in _STEPS:
        numbers = (numbers ^ _shifted(numbers, shift)) * factor
    return numbers ^ _shifted(numbers, 31)


def _shifted(numbers: Tensor, shift: int) -> Tensor:
    return (numbers >> shift) & ((1 << (64 - shift)) - 1)
