"""A user's own models for runs that something happens to: the kit's small network, which does something before it."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from trainkit.common.image_input import DataInfo
from trainkit.models.fashion_cnn import build as build_fashion_cnn

FIRST_TROUBLE = 5
"""The forward pass that has the trouble."""
FLUSH_SECONDS = 0.03
PACE = Path(os.environ.get("TRAINKIT_RUN_DIR", ""), "pace")
ATTEMPT = int(os.environ.get("TRAINKIT_ATTEMPT", "0"))


class Interrupted(nn.Module):
    """The network ``inner``; in training ``before`` is called before it. What it computes is the same."""

    def __init__(self, info: DataInfo, before: Callable[[], None]) -> None:
        super().__init__()
        self.inner, self.before = build_fashion_cnn(info, width=8), before

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.before()
        logits: Tensor = self.inner(images)
        return logits


def slow(info: DataInfo, *, seconds: float = 0.0) -> nn.Module:
    """Takes ``seconds`` longer in attempt 0 of a run: time to interrupt it."""
    return Interrupted(info, lambda: time.sleep(seconds if ATTEMPT == 0 else 0.0))


def paced(info: DataInfo) -> nn.Module:
    """Waits as long as the file ``pace`` of the run folder says, so that a training outlasts whatever happens to it.

    Its disk takes its time, so that something can happen in the middle of a save.
    """
    flush = os.fsync

    def flush_slowly(descriptor: int) -> None:
        if PACE.exists():
            time.sleep(FLUSH_SECONDS)
        flush(descriptor)

    os.fsync = flush_slowly  # type: ignore[assignment]
    return Interrupted(info, lambda: time.sleep(float(PACE.read_text())) if PACE.exists() else None)


def troubled(info: DataInfo, *, troubles: str = "") -> nn.Module:
    """Hangs or is killed on the last rank, once it trains; ``troubles``: ``hang,kill`` in attempts 0 and 1."""
    rank = int(os.environ.get("RANK") or os.environ["SLURM_PROCID"])
    is_last = rank + 1 == int(os.environ.get("WORLD_SIZE") or os.environ["SLURM_NTASKS"])
    trouble = dict(enumerate(troubles.split(","))).get(ATTEMPT, "") if is_last else ""
    passes = iter(range(1, 1 << 30))

    def fall_into_it() -> None:
        if torch.is_grad_enabled() and next(passes) == FIRST_TROUBLE:
            if trouble == "hang":
                time.sleep(600)
            elif trouble == "kill":
                os.kill(os.getpid(), signal.SIGKILL)

    return Interrupted(info, fall_into_it)
