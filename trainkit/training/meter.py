"""Sums that stay on the device until somebody reads them."""

from __future__ import annotations

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

    def read(self) -> dict[str, float]:
        """``loss``, ``acc1``, ``acc5`` in percent and ``samples`` over all ranks, and start again from zero.

        Every rank must call it.
        """
        loss, counts = self._dist.all_reduce_sum(self._loss.clone()), self._dist.all_reduce_sum(self._counts.clone())
        self._loss.zero_()
        self._counts.zero_()
        samples, top1, top5 = counts.tolist()
        if not samples:
            return {"samples": 0}
        return {
            "loss": loss.item() / samples,
            "acc1": 100.0 * top1 / samples,
            "acc5": 100.0 * top5 / samples,
            "samples": samples,
        }
