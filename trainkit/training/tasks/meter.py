"""Meters of a pass over samples, kept on the device until read: sums, outputs, mistakes, a confusion matrix."""

from __future__ import annotations

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from trainkit.distributed.device import as_float64
from trainkit.training.tasks.base import Task
from trainkit.training.tasks.returned import metrics_of, sums_of

if TYPE_CHECKING:
    from trainkit.common.image_input import DataInfo
    from trainkit.distributed.process_group import Distributed


_MOST_PENDING = 32
_MOST_PENDING_SCORES = 1 << 20
MOST = 24
"""Pictures of mistakes that are kept: half a megabyte of photos, a few kilobytes of digits."""
LONGEST_SIDE = 96
"""Pixels of a side of such a picture, at most."""
NO_CLASS = "no class: NaN"
"""The class of images whose scores are not finite; it comes after the classes of the data."""
MOST_CLASSES = 2000
"""Classes of the largest confusion matrix, 32 MB on the device; that of ImageNet-21k would have 3.8 GB."""


class Meter:
    """The loss and the task's sums over samples, in float64: exact for counts.

    Nothing is copied from the device until `read`, because every such copy waits for the GPU. Every update of the
    training adds to it, so several are added up together: a kernel costs 3 us on a CPU and 10 on its way to a GPU,
    however small it is.
    """

    def __init__(self, task: Task, dist: Distributed) -> None:
        self._task = task
        self._dist = dist
        self._totals = as_float64(torch.zeros(2, device=dist.device))
        """Sums of the losses, of the samples, and then the task's, as soon as there are some."""
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []
        self.exchanged: list[float] | None = None
        """Result of `exchange`, until something is added."""
        self.told: list[float] = []
        """Value that each rank has told the others with the last `read`."""

    def add(self, loss: Tensor, output: Tensor, target: Tensor) -> None:
        """Add a batch: the mean of its losses, outputs [N, ...], targets [N, ...]. They must stay as they are."""
        if self._pending and len(target) != len(self._pending[0][2]):
            self._add_pending()
        self._pending.append((loss.detach(), output.detach(), target))
        self.exchanged = None
        if len(self._pending) >= _MOST_PENDING or len(self._pending) * output.numel() > _MOST_PENDING_SCORES:
            self._add_pending()

    def _add_pending(self) -> None:
        if self._pending:
            losses, outputs, targets = zip(*self._pending, strict=True)
            self._pending = []
            every = torch.cat(targets)
            total = as_float64(torch.stack(losses)).sum() * len(targets[0])  # all are of one size
            samples = torch.full_like(total, len(every))
            self._add_up(total, samples, as_float64(sums_of(self._task, torch.cat(outputs).float(), every)))

    def add_masked(self, losses: Tensor, output: Tensor, target: Tensor, mask: Tensor) -> None:
        """Add a batch with padding, on which ``mask`` [N] is False; losses [N]."""
        sums = as_float64(sums_of(self._task, output.detach(), target))
        mask = mask.to(sums.device)
        total = torch.where(mask, as_float64(losses.detach()), 0.0).sum()
        self._add_up(total, mask.sum(dtype=torch.float64), torch.where(mask[:, None], sums, 0.0))

    def _add_up(self, loss: Tensor, samples: Tensor, sums: Tensor) -> None:
        added = torch.cat([torch.stack([loss, samples]), sums.sum(0)])
        added[: len(self._totals)] += self._totals
        self._totals = added

    def sums(self, *, tell: float = 0.0) -> list[float]:
        """Sum up what was added on all ranks since the last `read`: the loss, samples, and the task's sums.

        Every rank must call it.

        Args:
            tell: a number for the other ranks, for which there is room on the way: see `told`.
        """
        if self.exchanged is not None:
            return self.exchanged
        self._add_pending()
        # Each rank has a place of its own, in which all others add nothing.
        told = [0.0] * self._dist.world_size
        told[self._dist.rank] = tell
        message = torch.cat([self._totals, self._totals.new_tensor(told)])  # exact for counts up to 2^53
        total: list[float] = self._dist.all_reduce_sum(message).tolist()
        own = len(self._totals)
        self.told = total[own:]
        return total[:own]

    def exchange(self, *, tell: float) -> None:
        """`sums` already now: the next `sums` and `read` ask no other rank if nothing is added before."""
        self.exchanged = self.sums(tell=tell)

    def go_on(self, sums: Sequence[float]) -> None:
        """Begin with what `sums` gave before a restart: an average goes over its whole window, whoever added to it."""
        if len(sums) >= 2:
            self._totals = self._totals.new_tensor(sums if self._dist.is_main else [0.0] * len(sums))

    def read(self, *, tell: float = 0.0) -> dict[str, float]:
        """``loss``, the task's metrics and ``samples`` over all ranks, and start again from zero.

        Every rank must call it. ``tell``: as `sums`.
        """
        loss, count, *sums = self.sums(tell=tell)
        self.exchanged = None
        self._totals = self._totals.new_zeros(2)
        samples = int(count)
        if not samples:
            return {"samples": 0}
        return {"loss": loss / samples, **metrics_of(self._task, sums, samples), "samples": samples}


class Pool:
    """All outputs of one pass over a split, for `Task.pooled`."""

    def __init__(self, task: Task, dist: Distributed) -> None:
        self._task = task
        self._dist = dist
        self._kept: list[tuple[Tensor, Tensor, Tensor]] = []

    def add(self, images: Tensor, output: Tensor, target: Tensor, mask: Tensor) -> None:
        """Add a batch; ``mask`` [N] is False on padding."""
        self._kept.append((output, target, mask.byte()))

    def read(self) -> dict[str, float]:
        """The metrics of all ranks' samples, computed by rank 0. Every rank must call it."""
        output, target, mask = (self._gathered(torch.cat(column).cpu()) for column in zip(*self._kept, strict=True))
        found = self._task.pooled(output[mask > 0], target[mask > 0]) if self._dist.is_main else {}
        return self._dist.broadcast_json(found)

    def _gathered(self, rows: Tensor) -> Tensor:
        """Gather the rows of all ranks on rank 0; each has equally many."""
        if self._dist.world_size == 1:
            return rows
        rows = rows.contiguous()
        if not self._dist.is_main:
            torch.distributed.gather(rows, dst=0)
            return rows
        parts = [torch.empty_like(rows) for _ in range(self._dist.world_size)]
        torch.distributed.gather(rows, parts, dst=0)
        return torch.cat(parts)


class Mistakes:
    """The surest mistakes of one pass over a split, small, for people to look at: ``mistakes-<split>.json``."""

    def __init__(self, task: Task, dist: Distributed) -> None:
        self._task = task
        self._dist = dist
        self._kept: tuple[Tensor, ...] = ()  # how sure, output, target, image

    @torch.no_grad()
    def add(self, images: Tensor, output: Tensor, target: Tensor, mask: Tensor) -> None:
        """Look at a batch: images uint8 [N, C, H, W]; ``mask`` [N] is False on padding."""
        wrong = self._task.wrong(output, target)
        found: tuple[Tensor, ...] = (wrong.where(mask & wrong.isfinite(), -1.0), output, target, images)
        if self._kept:
            found = tuple(torch.cat(pair) for pair in zip(self._kept, found, strict=True))
        surest = found[0].topk(min(MOST, len(found[0]))).indices
        self._kept = tuple(tensor[surest] for tensor in found)

    def read(self) -> list[dict[str, Any]]:
        """The surest of all ranks, the surest first: ``label`` and ``told`` (`Task.words`), ``confidence`` and ``png``
        (base64). Every rank must call it."""
        mine: list[dict[str, Any]] = []
        for sure, output, target, image in zip(*(tensor.cpu() for tensor in self._kept), strict=True):
            if sure > 0:
                label, told = self._task.words(output, target)
                mine.append({"label": label, "told": told, "confidence": round(float(sure), 4), "png": _png(image)})
        found = [item for items in self._dist.gather_json(mine) for item in items]
        return sorted(found, key=lambda item: -item["confidence"])[:MOST]


def _png(image: Tensor) -> str:
    """uint8 [C, H, W] as a small PNG, in base64."""
    from PIL import Image

    pixels = image.permute(1, 2, 0).numpy()
    picture = Image.fromarray(pixels if pixels.shape[2] == 3 else pixels[:, :, 0])
    picture.thumbnail((LONGEST_SIDE, LONGEST_SIDE))
    out = io.BytesIO()
    picture.save(out, "PNG")
    return base64.b64encode(out.getvalue()).decode()


ConfusionCounts = Mapping[tuple[int, int], int]
"""(class, class that it was taken for) -> samples over all ranks; those of none are left out. Images whose scores are
not finite are taken for the number after that of the last class."""


class Confusion:
    """Counts of one pass over a split, on the device until somebody reads them."""

    def __init__(self, task: Task, classes: int, dist: Distributed) -> None:
        self._task = task
        self._classes = classes
        self._dist = dist
        self._counts = torch.zeros(classes * (classes + 1), dtype=torch.int64, device=dist.device)

    def add(self, images: Tensor, output: Tensor, target: Tensor, mask: Tensor) -> None:
        """Add a batch; ``mask`` [N] is False on padding."""
        told = self._task.taken_for(output)
        places = target * (self._classes + 1) + told.where(told >= 0, self._classes)
        # Not `bincount`, which waits for the GPU to learn how long its result is.
        self._counts.index_add_(0, places, mask.long())

    def read(self) -> ConfusionCounts:
        """The counts of all ranks. Every rank must call it."""
        counts = self._dist.all_reduce_sum(self._counts.clone()).tolist()
        return {divmod(place, self._classes + 1): count for place, count in enumerate(counts) if count}


class Calibration:
    """Expected calibration error over one pass: how far a model's confidence is from how often it is right.

    Of Guo et al., "On Calibration of Modern Neural Networks", arXiv 1706.04599: 15 bins of equal width. Images whose
    scores are not finite have no confidence, and are left out.
    """

    BINS = 15

    def __init__(self, task: Task, dist: Distributed) -> None:
        self._task = task
        self._dist = dist
        self._sums = as_float64(torch.zeros(self.BINS, 3, device=dist.device))
        """Sums of each bin: samples, those that are right, confidence."""

    def add(self, images: Tensor, output: Tensor, target: Tensor, mask: Tensor) -> None:
        """Add a batch; ``mask`` [N] is False on padding."""
        told = self._task.taken_for(output)
        sure = as_float64(self._task.probabilities(output).gather(1, told.clamp(min=0)[:, None])[:, 0]).nan_to_num()
        told, target, mask = (known.to(sure.device) for known in (told, target, mask))
        rows = torch.stack([torch.ones_like(sure), (told == target).double(), sure], dim=1)
        rows *= (mask & (told >= 0))[:, None]
        self._sums.index_add_(0, (sure * self.BINS).long().clamp(max=self.BINS - 1), rows)

    def read(self) -> float:
        """Percent over all ranks; NaN of no samples. Every rank must call it."""
        count, right, sure = self._dist.all_reduce_sum(self._sums.clone()).unbind(1)
        return float(100 * (right - sure).abs().sum() / count.sum())


class ClassScores(NamedTuple):
    """Scores of one class against all others."""

    name: str
    precision: float
    """Percent of the images taken for it that are of it; 0 where none is."""
    recall: float
    """Percent of its images that are taken for it."""
    f1: float
    """Their harmonic mean, in percent."""
    images: int


def class_scores(counts: ConfusionCounts, names: Sequence[str]) -> list[ClassScores]:
    """Scores of each class that has images, in order; the mean of their F1 is the macro F1."""
    of = Counter[int]()
    taken = Counter[int]()
    for (label, told), count in counts.items():
        of[label] += count
        taken[told] += count
    found = []
    for label in sorted(of):
        right = counts.get((label, label), 0)
        precision = right / max(taken[label], 1)
        recall = right / of[label]
        f1 = 2 * right / (taken[label] + of[label])
        found.append(ClassScores(names[label], 100 * precision, 100 * recall, 100 * f1, of[label]))
    return found


def confusion_json(info: DataInfo, counts: Mapping[str, ConfusionCounts], **where: Any) -> dict[str, Any]:
    """``confusion.json``: names of the classes, with `NO_CLASS` where an image has none, and for each kind of weights
    [class, taken for, samples], in order."""
    names = list(info.class_names)
    no_class = any(told == len(names) for each in counts.values() for _, told in each)
    rows = {kind: [[*pair, count] for pair, count in sorted(each.items())] for kind, each in counts.items()}
    return {**where, "classes": [*names, NO_CLASS] if no_class else names, **rows}
