"""Broken images: what is taken in their place, and how a rank gets to know of them.

In training the next whole image in the data's own order stands in, with its label: a function of the data alone, so
that every rank, every worker and every attempt takes the same. Evaluation leaves a broken image out of its counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from trainkit.data.images import BrokenImageError

if TYPE_CHECKING:
    from trainkit.data.base import Samples


class Broken:
    """How many images may be broken, and those that this rank has met and not told the others of: file -> why."""

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.met: dict[str, str] = {}

    def take(self) -> dict[str, str]:
        """What has been met since it was last taken."""
        met, self.met = self.met, {}
        return met


class Mended(NamedTuple):
    """A batch in which other images stand in for broken ones, as it comes from a worker."""

    batch: Any
    broken: dict[str, str]


def read_whole(samples: Samples, index: int, most: int, met: dict[str, str]) -> tuple[Any, int, bool]:
    """Image and label of sample ``index``, and whether it is that one: else it is the next whole one.

    Args:
        most: how many broken ones may be passed by.
        met: to which they are added.

    Raises:
        BrokenImageError: there are more of them in a row.
    """
    for passed_by in range(most + 1):
        try:
            image, label = samples[(index + passed_by) % len(samples)]
            return image, label, passed_by == 0
        except BrokenImageError as error:
            met[error.file] = error.why
            last = error
    raise last


def noted(batches: Iterable[Any], broken: Broken) -> Iterator[Any]:
    """The batches themselves; what is broken in them is noted."""
    for batch in batches:
        if isinstance(batch, Mended):
            broken.met.update(batch.broken)
            batch = batch.batch
        yield batch
