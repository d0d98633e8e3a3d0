"""A user's own model with a trouble of its own in each attempt of a run: on the last rank, once it trains."""

from __future__ import annotations

import os
import signal
import time

import torch
from torch import Tensor, nn

from trainkit.data.base import DataInfo
from trainkit.models.fashion_cnn import build as build_fashion_cnn

FIRST = 5
"""Which forward pass has the trouble."""


class Troubled(nn.Module):
    """The network ``inner``, in trouble."""

    def __init__(self, inner: nn.Module, trouble: str) -> None:
        super().__init__()
        self.inner = inner
        self.trouble = trouble if os.environ["SLURM_PROCID"] == str(int(os.environ["SLURM_NTASKS"]) - 1) else ""
        self.passes = 0

    def forward(self, images: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.passes += 1
            if self.passes == FIRST:
                self._fall_into_it()
        logits: Tensor = self.inner(images)
        return logits

    def _fall_into_it(self) -> None:
        if self.trouble == "hang":
            time.sleep(600)
        elif self.trouble == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def build(info: DataInfo, *, troubles: str = "") -> nn.Module:
    """The model; ``troubles``: of attempt 0, 1, ..., with commas. What it computes does not depend on them."""
    attempt = int(os.environ.get("TRAINKIT_ATTEMPT", "0"))
    trouble = dict(enumerate(troubles.split(","))).get(attempt, "")
    return Troubled(build_fashion_cnn(info, width=8), trouble)
