"""A user's own model whose updates take as long as a file says: so a training outlasts whatever happens to it.

And a disk that takes its time: so what happens to a training can happen to it in the middle of a save.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor, nn

from trainkit.data.base import DataInfo
from trainkit.models.fashion_cnn import build as build_fashion_cnn

FLUSH_SECONDS = 0.03
PACE = Path(os.environ.get("TRAINKIT_RUN_DIR", ""), "pace")


class Paced(nn.Module):
    """The network ``inner``, which waits for ``SECONDS`` in the file ``pace`` of the run folder, if it is there."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, images: Tensor) -> Tensor:
        if self.training and PACE.exists():
            time.sleep(float(PACE.read_text()))
        logits: Tensor = self.inner(images)
        return logits


def build(info: DataInfo) -> nn.Module:
    """The model; what it computes does not depend on its pace."""
    flush = os.fsync

    def flush_slowly(descriptor: int) -> None:
        if PACE.exists():
            time.sleep(FLUSH_SECONDS)
        flush(descriptor)

    os.fsync = flush_slowly  # type: ignore[assignment]
    return Paced(build_fashion_cnn(info, width=8))
