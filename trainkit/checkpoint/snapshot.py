"""A copy of what is saved, so that training may go on while it is written."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor

Key = TypeVar("Key", bound=Hashable)


class Snapshot:
    """Memory for one copy of a rank's own share on the CPU, used again by every save: new memory costs more than the
    copy itself. Pinned where the tensors are on a GPU, so that it is the GPU that copies."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}

    def take(self, tensors: Mapping[Key, Tensor]) -> tuple[dict[Key, Tensor], Callable[[], None]]:
        """Copies of ``tensors``, and what waits until they are complete; the copies before are no more.

        What changes the tensors afterwards on the current stream does not change the copies.
        """
        copies = {key: self._buffer(key, value) for key, value in tensors.items()}
        self._buffers = {key: copy for key, copy in copies.items()}  # noqa: C416 - another type of keys
        if copies:
            torch._foreach_copy_([*copies.values()], [*tensors.values()], non_blocking=True)
        if any(value.is_cuda for value in tensors.values()):
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record()
            return copies, copied.synchronize
        return copies, lambda: None

    def _buffer(self, key: Hashable, value: Tensor) -> Tensor:
        known = self._buffers.get(key)
        if known is not None and known.shape == value.shape and known.dtype == value.dtype:
            return known
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
