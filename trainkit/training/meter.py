"""Sums that stay on the device until somebody reads them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainkit.distributed.process_group import Distributed


class Meter:
    """Loss and hits over samples; exact counts in int64, the loss in float64.

    Nothing is copied from the device until `read`, because every such copy waits for the GPU.
    """

    def __init__(self, dist: Distributed) -> None:
        self._dist = dist
        self._loss = torch.zeros((), dtype=torch.float64, device=dist.device)
        self._counts = torch.zeros(3, dtype=torch.int64, device=dist.device)  # samples, top-1 hits, top-5 hits

    @torch.no_grad()
    def add(self, losses: Tensor, logits: Tensor, labels: Tensor, mask: Tensor | None = None) -> None:
        """Add a batch: losses [N], logits [N, classes], labels [N]; ``mask`` [N] is False on padding."""
        keep = torch.ones_like(labels, dtype=torch.bool) if mask is None else mask
        top = logits.topk(min(5, logits.shape[1]), dim=1).indices
        hits = (top == labels[:, None]) & keep[:, None]
        self._loss += torch.where(keep, losses.double(), 0.0).sum()
        self._counts += torch.stack([keep.sum(), hits[:, 0].sum(), hits.sum()])

    def sums(self) -> tuple[float, int, int, int]:
        """What has been added on all ranks since the last `read`: the loss, samples, top-1 and top-5 hits.

        Every rank must call it.
        """
        loss, counts = self._dist.all_reduce_sum(self._loss.clone()), self._dist.all_reduce_sum(self._counts.clone())
        samples, top1, top5 = counts.tolist()
        return loss.item(), samples, top1, top5

    def go_on(self, sums: Sequence[float]) -> None:
        """Begin with what `sums` gave before a restart: an average goes over its whole window, whoever added to it."""
        if self._dist.is_main and len(sums) == 4:
            self._loss += sums[0]
            self._counts += torch.tensor([int(count) for count in sums[1:]], device=self._counts.device)

    def read(self) -> dict[str, float]:
        """``loss``, ``acc1``, ``acc5`` in percent and ``samples`` over all ranks, and start again from zero.

        Every rank must call it.
        """
        loss, samples, top1, top5 = self.sums()
        self._loss.zero_()
        self._counts.zero_()
        if not samples:
            return {"samples": 0}
        return {
            "loss": loss / samples,
            "acc1": 100.0 * top1 / samples,
            "acc5": 100.0 * top5 / samples,
            "samples": samples,
        }
