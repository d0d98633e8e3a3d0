"""A user's own data and model: in the first attempt of a run rank 1 stands still in an update; in the second each rank
takes long for something for which the others wait in theirs. The floor of the limit by pace is 4 s."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainkit.common.image_input import DataInfo
from trainkit.data.base import Samples, Splits
from trainkit.data.datasets import digits
from trainkit.distributed import watchdog
from trainkit.models.fashion_cnn import build as build_fashion_cnn

ATTEMPT, RANK = os.environ.get("TRAINKIT_ATTEMPT"), os.environ.get("SUBMITIT_LOCAL_GLOBALID")
LONG = 12.0
watchdog.FLOOR_SECONDS = 4.0
_fsync = os.fsync


class Data:
    """``samples``, of which reading one takes long on rank 1."""

    def __init__(self, samples: Samples) -> None:
        self._samples, self._read = samples, 0

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int, /) -> tuple[Any, int]:
        self._read += 1
        if (ATTEMPT, RANK) == ("1", "1") and self._read == 600:
            time.sleep(LONG)
        return self._samples[index]


def data(root: Path) -> Splits:
    """The digits, read by loader processes."""
    splits = digits.build(root)
    return replace(splits, train=Data(splits.train), in_memory=False)


class Model(nn.Module):
    """The network ``inner``, which stands still on rank 1 in attempt 0; rank 0 validates slowly in attempt 1."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.passes = inner, 0

    def forward(self, images: Tensor) -> Tensor:
        self.passes += 1
        if (ATTEMPT, RANK) == ("0", "1") and self.passes == 12:
            time.sleep(600)
        if (ATTEMPT, RANK) == ("1", "0") and not self.training and self.passes > 12:
            self.passes = -1000
            time.sleep(LONG)
        logits: Tensor = self.inner(images)
        return logits


def _slowly(file: Any) -> None:
    """Flush a file, the first time as a slow disk does."""
    os.fsync = _fsync
    time.sleep(LONG)
    _fsync(file)


def model(info: DataInfo) -> nn.Module:
    """On rank 0 in attempt 1 the first save is slow."""
    if (ATTEMPT, RANK) == ("1", "0"):
        os.fsync = _slowly  # type: ignore[assignment]
    return Model(build_fashion_cnn(info, width=8))
