"""A fixed, stratified split: the same for every seed, machine and version of every library."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence


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
