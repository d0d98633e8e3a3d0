"""A user's own data and model, with a trouble of its own in each attempt of a run: data, disk, then only slowness."""

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from trainkit.common.image_input import DataInfo
from trainkit.data.base import Samples, Splits
from trainkit.data.datasets import digits
from trainkit.models.fashion_cnn import build as build_fashion_cnn

ATTEMPT, RANK = os.environ.get("TRAINKIT_ATTEMPT"), os.environ.get("SUBMITIT_LOCAL_GLOBALID")


class Data:
    """``samples``, of which reading one never ends on rank 1 in attempt 0."""

    def __init__(self, samples: Samples) -> None:
        self._samples, self._read = samples, 0

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int, /) -> tuple[Any, int]:
        self._read += 1
        if (ATTEMPT, RANK) == ("0", "1") and self._read > 200:
            self._read_from_a_dead_disk()
        return self._samples[index]

    def _read_from_a_dead_disk(self) -> None:
        time.sleep(600)


def data(root: Path) -> Splits:
    """The digits, read by loader processes."""
    splits = digits.build(root)
    return replace(splits, train=Data(splits.train), in_memory=False)


class Model(nn.Module):
    """The network ``inner``; in attempt 2 its first forward takes as long as a compilation, and each of a validation
    a second."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.passes = inner, 0

    def forward(self, images: Tensor) -> Tensor:
        if ATTEMPT == "2" and len(images) > 2:  # and not the kit's own first look at it
            self.passes += self.training
            time.sleep((30.0 if self.passes == 1 else 0.0) if self.training else 1.0)
        logits: Tensor = self.inner(images)
        return logits


def model(info: DataInfo) -> nn.Module:
    """On rank 0, in attempt 1, no checkpoint ever comes to the disk."""
    if (ATTEMPT, RANK) == ("1", "0"):
        os.fsync = _wait_for_a_dead_disk  # type: ignore[assignment]
    return Model(build_fashion_cnn(info, width=8))


def _wait_for_a_dead_disk(file: Any) -> None:
    time.sleep(600)
