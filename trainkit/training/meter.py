"""Sums that stay on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainkit.distributed.process_group import Distributed

_TOP = 5
_MOST_PENDING = 32
_MOST_PENDING_SCORES = 1 << 20


class Meter:
    """Loss and hits over samples; exact counts, the loss in float64.

    Nothing is copied from the device until `read`, because every such copy waits for the GPU. And every update of the
    training adds to it, so that work is put off until there is some for all: a kernel costs 3 us on a CPU and 10 on its
    way to a GPU, however small it is.
    """

    def __init__(self, dist: Distributed) -> None:
        self._dist = dist
        self._loss = torch.zeros((), dtype=torch.float64, device=dist.device)
        self._hits = torch.zeros(_TOP, dtype=torch.int64, device=dist.device)
        """Samples whose label is the highest score, the second highest, ..."""
        self._samples: int | Tensor = 0
        self._pending: list[tuple[Tensor, Tensor, Tensor]] = []
        self._scores = 0
        """Of what is pending."""
        self.told: list[float] = []
        """What each rank has told the others with the last `read`; empty where there is one rank."""

    def add(self, loss: Tensor, logits: Tensor, labels: Tensor) -> None:
        """Add a batch: the mean of its losses, logits [N, classes], labels [N]. They must stay as they are."""
        if self._pending and len(labels) != len(self._pending[0][2]):
            self._add_pending()
        self._pending.append((loss.detach(), logits.detach(), labels))
        self._scores += logits.numel()
        if len(self._pending) >= _MOST_PENDING or self._scores > _MOST_PENDING_SCORES:
            self._add_pending()

    def _add_pending(self) -> None:
        if not self._pending:
            return
        losses, logits, labels = zip(*self._pending, strict=True)
        total = torch.stack(losses).sum(dtype=torch.float64)
        self._loss.add_(total, alpha=len(labels[0]))  # all pending batches are of one size
        every = torch.cat(labels)
        self._samples += len(every)
        self._add_hits(_hits(torch.cat(logits), every))
        self._pending, self._scores = [], 0

    def add_masked(self, losses: Tensor, logits: Tensor, labels: Tensor, mask: Tensor) -> None:
        """Add a batch with padding, on which ``mask`` [N] is False: losses [N], logits [N, classes], labels [N]."""
        self._loss += torch.where(mask, losses.detach().double(), 0.0).sum()
        self._samples = self._samples + mask.sum()
        self._add_hits(_hits(logits.detach(), labels) & mask[:, None])

    def _add_hits(self, hits: Tensor) -> None:
        self._hits[: hits.shape[1]] += hits.sum(0)

    def sums(self, *, tell: float = 0.0) -> tuple[float, int, int, int]:
        """What has been added on all ranks since the last `read`: the loss, samples, top-1 and top-5 hits.

        Every rank must call it.

        Args:
            tell: a number for the other ranks, for which there is room on the way: see `told`.
        """
        self._add_pending()
        if self._dist.world_size == 1:  # nothing to put together for the way
            hits = self._hits.tolist()
            return self._loss.item(), int(self._samples), hits[0], sum(hits)
        # All in one message: a float64 is exact for counts up to 2^53.
        samples = torch.as_tensor(self._samples, device=self._hits.device).view(1).double()
        # Each rank has a place of its own, in which all others add nothing.
        told = [tell if rank == self._dist.rank else 0.0 for rank in range(self._dist.world_size)]
        message = [self._loss.view(1), samples, self._hits.double(), self._loss.new_tensor(told)]
        total, count, *rest = self._dist.all_reduce_sum(torch.cat(message)).tolist()
        hits, self.told = [int(number) for number in rest[:_TOP]], rest[_TOP:]
        return total, int(count), hits[0], sum(hits)

    def go_on(self, sums: Sequence[float]) -> None:
        """Begin with what `sums` gave before a restart: an average goes over its whole window, whoever added to it."""
        if self._dist.is_main and len(sums) == 4:
            loss, samples, top1, top5 = sums
            self._loss += loss
            self._samples += int(samples)
            self._hits[0] += int(top1)
            self._hits[1] += int(top5) - int(top1)

    def read(self, *, tell: float = 0.0) -> dict[str, float]:
        """``loss``, ``acc1``, ``acc5`` in percent and ``samples`` over all ranks, and start again from zero.

        Every rank must call it. ``tell``: as `sums`.
        """
        loss, samples, top1, top5 = self.sums(tell=tell)
        self._loss.zero_()
        self._hits.zero_()
        self._samples = 0
        if not samples:
            return {"samples": 0}
        return {
            "loss": loss / samples,
            "acc1": 100.0 * top1 / samples,
            "acc5": 100.0 * top5 / samples,
            "samples": samples,
        }


def top_classes(logits: Tensor) -> Tensor:
    """The classes with the highest scores, the best first: int64 [N, 5], or as many as there are classes.

    -1 where the scores do not tell a class: everywhere in a row with a NaN or +inf, for its probabilities are NaN, and
    in the place of a score of -inf. (`topk` takes NaN for the highest score, which would be class 0 of a row of NaN.)
    """
    scores, classes = logits.topk(min(_TOP, logits.shape[1]), dim=1)
    return classes.where(scores.isfinite() & scores[:, :1].isfinite(), -1)


def _hits(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether the label is the highest score, the second highest, ...: bool [N, 5], or as many as there are classes."""
    return top_classes(logits) == labels[:, None]
