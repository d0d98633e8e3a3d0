"""Which class is taken for which: exact counts, on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainkit.data.base import DataInfo
from trainkit.distributed.process_group import Distributed
from trainkit.training.meter import top_classes

NO_CLASS = "no class: NaN"
"""Of images whose scores are not finite; it comes after the classes of the data."""
# 32 MB on the device. Of more classes nobody looks at a matrix, and ImageNet-21k's would have 3.8 GB.
MOST_CLASSES = 2000


@dataclass(frozen=True)
class ClassCounts:
    """How often each class was taken for which, over all ranks."""

    pairs: Mapping[tuple[int, int], int]
    """(class, class that it was taken for) -> samples; those of none are left out. Images whose scores are not finite
    are taken for the number after that of the last class."""

    def per_class(self, classes: int) -> list[tuple[int, int]]:
        """Samples of each class, and how many of them were told right."""
        rows = [[0, 0] for _ in range(classes)]
        for (label, told), count in self.pairs.items():
            rows[label][0] += count
            rows[label][1] += count if label == told else 0
        return [(samples, right) for samples, right in rows]

    def to_json(self) -> list[list[int]]:
        """``[class, class that it was taken for, samples]``, in this order."""
        return [[label, told, count] for (label, told), count in sorted(self.pairs.items())]


class Confusion:
    """Counts of one pass over a split."""

    def __init__(self, classes: int, dist: Distributed) -> None:
        self._classes, self._dist = classes, dist
        self._counts = torch.zeros(classes * (classes + 1), dtype=torch.int64, device=dist.device)

    @classmethod
    def of(cls, info: DataInfo, dist: Distributed) -> Confusion | None:
        """None for data of more than `MOST_CLASSES`."""
        return cls(info.num_classes, dist) if info.num_classes <= MOST_CLASSES else None

    @torch.no_grad()
    def add(self, logits: Tensor, labels: Tensor, mask: Tensor) -> None:
        """Add a batch: logits [N, classes], labels int64 [N]; ``mask`` [N] is False on padding."""
        told = top_classes(logits)[:, 0]  # the `Meter`'s top-1, of equal scores too
        told = told.where(told >= 0, self._classes)
        # Not `bincount`, which waits for the GPU to learn how long its result is.
        self._counts.index_add_(0, labels * (self._classes + 1) + told, mask.long())

    def read(self) -> ClassCounts:
        """The counts of all ranks. Every rank must call it."""
        counts = self._dist.all_reduce_sum(self._counts.clone()).cpu()
        places = counts.nonzero().flatten().tolist()
        found = zip(places, counts[places].tolist(), strict=True)
        return ClassCounts({divmod(place, self._classes + 1): count for place, count in found})


def names_of(info: DataInfo, counts: Mapping[str, ClassCounts]) -> list[str]:
    """Of the classes in the counts: those of the data, and `NO_CLASS` where an image has none."""
    names = list(info.class_names)
    no_class = any(told == len(names) for each in counts.values() for _, told in each.pairs)
    return [*names, NO_CLASS] if no_class else names


def told(info: DataInfo, counts: Mapping[str, ClassCounts], **where: Any) -> dict[str, Any]:
    """``confusion.json``: the names of the classes, and for each kind of weights `ClassCounts.to_json`."""
    return {**where, "classes": names_of(info, counts), **{kind: each.to_json() for kind, each in counts.items()}}
