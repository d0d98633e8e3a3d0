"""Into which micro batches a rank's share of a global batch can be divided."""

from __future__ import annotations


def micro_batch_sizes(share: int, *, even: bool = False) -> list[int]:
    """Sizes that divide ``share``, ascending; ``even``: those that mixing pairs of images takes."""
    return [size for size in range(1, share + 1) if share % size == 0 and not (even and size % 2)]


def smaller(micro: int, share: int, *, even: bool = False) -> int:
    """The largest of them that is at most half as large as ``micro``; 0 if none is."""
    return max((size for size in micro_batch_sizes(share, even=even) if size <= micro // 2), default=0)
