"""From the host's memory to the GPU, while it computes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from trainkit.data.batch import Batch, EvalBatch

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def on_gpu(batches: Iterator[Any], device: torch.device) -> Iterator[Any]:
    """Batches, each copied a step before it is asked for, on a stream of its own: beside what the GPU computes.

    What lies there already stays, and what is no batch (an error) passes as it is.
    """
    import torch

    stream = torch.cuda.Stream(device)

    def moved(item: Tensor) -> Tensor:
        if device.type == "cuda" and not item.is_cuda and not item.is_pinned():
            item = item.pin_memory()  # of a data set that is in memory
        return item.to(device, non_blocking=True)

    def copied() -> Any:
        batch = next(batches, None)
        with torch.cuda.stream(stream):
            if isinstance(batch, Batch):
                return Batch(moved(batch.images), moved(batch.labels), batch.keys)
            if isinstance(batch, EvalBatch):
                return EvalBatch(*map(moved, batch))
        return batch

    ahead = copied()
    while ahead is not None:
        batch = ahead
        user = torch.cuda.current_stream(device)
        user.wait_stream(stream)
        if isinstance(batch, Batch | EvalBatch):
            for item in batch:
                if item.is_cuda:
                    item.record_stream(user)  # or its memory would be given to the next copy while it is still read
        ahead = copied()
        yield batch
