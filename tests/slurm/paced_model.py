"""A user's own model whose updates take as long as a file says: so a training outlasts whatever happens to it."""

from __future__ import annotations

import os
import time
from pathlib import Path

from torch import Tensor, nn

from trainkit.data.base import DataInfo
from trainkit.models.fashion_cnn import build as build_fashion_cnn


class Paced(nn.Module):
    """The network ``inner``, which waits for ``SECONDS`` in the file ``pace`` of the run folder, if it is there."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.pace = Path(os.environ["TRAINKIT_RUN_DIR"], "pace")

    def forward(self, images: Tensor) -> Tensor:
        if self.training and self.pace.exists():
            time.sleep(float(self.pace.read_text()))
        logits: Tensor = self.inner(images)
        return logits


def build(info: DataInfo) -> nn.Module:
    """The model; what it computes does not depend on its pace."""
    return Paced(build_fashion_cnn(info, width=8))
