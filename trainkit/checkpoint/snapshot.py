"""A copy of what is saved, so that training may go on while it is written."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from typing import TypeVar

import torch
from torch import Tensor

from trainkit.checkpoint.priority import give_way

Key = TypeVar("Key", bound=Hashable)


class Snapshot:
    """Memory for one copy of a rank's own share on the CPU, used again by every save: new memory costs more than the
    copy itself. Pinned where the tensors are on a GPU, so that it is the GPU that copies."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, Tensor] = {}
        self._warming: list[threading.Thread] = []

    def warm(self, tensors: Mapping[Key, Tensor]) -> None:
        """Begin to get memory for the first copy of ``tensors``, in a thread that gives way to those that train."""
        if self._buffers or self._warming:
            return  # what is there may be on its way to the disk
        self._warming.append(threading.Thread(target=self._warm, args=(tensors,), name="snapshot"))
        self._warming[-1].start()

    def take(self, tensors: Mapping[Key, Tensor]) -> tuple[dict[Key, Tensor], Callable[[], None]]:
        """Copies of ``tensors``, and what waits until they are complete; the copies before are no more.

        What changes the tensors afterwards on the current stream does not change the copies.
        """
        for thread in self._warming:
            thread.join()
        self._warming.clear()
        copies = {key: self._buffer(key, value) for key, value in tensors.items()}
        self._buffers = {key: copy for key, copy in copies.items()}  # noqa: C416 - another type of keys
        if copies:
            torch._foreach_copy_([*copies.values()], [*tensors.values()], non_blocking=True)
        if any(value.is_cuda for value in tensors.values()):
            copied = torch.cuda.Event()
            copied.record()
            return copies, copied.synchronize
        return copies, lambda: None

    def _warm(self, tensors: Mapping[Key, Tensor]) -> None:
        give_way()
        with suppress(RuntimeError):  # no memory: `take` says so, if that is still so by then
            for key, value in tensors.items():
                buffer = self._buffers[key] = self._buffer(key, value)
                # The kernel gives a page when it is first written to.
                buffer.view(-1).view(torch.uint8)[:: mmap.PAGESIZE].zero_()

    def _buffer(self, key: Hashable, value: Tensor) -> Tensor:
        known = self._buffers.get(key)
        if known is not None and known.shape == value.shape and known.dtype == value.dtype:
            return known
        return torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
