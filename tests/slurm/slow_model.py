"""A user's own model: the kit's small network, slow in a run's first attempt only: time to interrupt it."""

from __future__ import annotations

import os
import time

from torch import Tensor, nn

from trainkit.data.base import DataInfo
from trainkit.models.fashion_cnn import build as build_fashion_cnn


class SlowAtFirst(nn.Module):
    """The network ``inner``, whose forward takes ``seconds`` longer in attempt 0 of a run."""

    def __init__(self, inner: nn.Module, seconds: float) -> None:
        super().__init__()
        self.inner = inner
        self.seconds = seconds if os.environ.get("TRAINKIT_ATTEMPT") == "0" else 0.0

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            time.sleep(self.seconds)
        logits: Tensor = self.inner(images)
        return logits


def build(info: DataInfo, *, seconds: float = 0.0) -> nn.Module:
    """The model; what it computes does not depend on ``seconds``."""
    return SlowAtFirst(build_fashion_cnn(info, width=8), seconds)
