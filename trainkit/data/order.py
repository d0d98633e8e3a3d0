"""The order of the data, and which samples are held out.

The order is a pure function of (seed, epoch, position). It depends neither on the number of ranks nor on loader
processes nor on where a run was resumed: global step ``s`` sees the same samples however many GPUs share them.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence, Sized
from typing import TYPE_CHECKING

from trainkit.common.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


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
        for part, count in enumerate(sizes(len(members), fractions), start=1):
            parts[part % len(parts)] += members[first : first + count]
            first += count
    return [sorted(part) for part in parts]


def size_left(counts: Iterable[int], fractions: Sequence[float]) -> int:
    """Samples that `stratified_split` leaves in its first part, of classes with ``counts`` samples."""
    return sum(sizes(count, fractions)[-1] for count in counts)


def sizes(count: int, fractions: Sequence[float]) -> list[int]:
    """Samples of a class of ``count`` for each fraction, and then those left over."""
    found: list[int] = []
    for fraction in fractions:
        left = count - sum(found)
        found.append(min(max(round(fraction * count), 1), left - 1) if fraction > 0 else 0)
    return [*found, count - sum(found)]


def _digest(text: str, size: int) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=size).digest()


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
    if own is None:
        return epoch_order(len(samples), seed, epoch)
    return own(seed, epoch)


def steps_per_epoch(num_samples: int, global_batch_size: int) -> int:
    """Optimizer steps in one epoch. The remainder is dropped; the next permutation brings it back."""
    if num_samples < global_batch_size:
        what = f"train.global_batch_size={global_batch_size} is larger than the training data."
        why = f"The training split has {num_samples} images, fewer than one step needs."
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
    steps = len(order) // global_batch_size
    images = -(-global_batch_size // repeats)
    once = order[: steps * images].long().view(steps, images)
    copies = [once.roll(-copy, dims=1) + copy * len(order) for copy in range(repeats)]
    return torch.cat(copies, dim=1)[:, :global_batch_size].flatten()


def global_batch(samples: Sized, seed: int, position: int, global_batch_size: int, repeats: int = 1) -> list[int]:
    """Indices of the samples in the ``position``-th global batch of a run, from 0."""
    epoch, step = divmod(position, steps_per_epoch(len(samples), global_batch_size))
    order = repeated(order_of(samples, seed, epoch), repeats, global_batch_size) % len(samples)
    return order[step * global_batch_size : (step + 1) * global_batch_size].tolist()
