"""How much memory this rank holds at most, and how much it may hold: on the GPU, or of the job on its node."""

from __future__ import annotations

import ctypes
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch

from trainkit import fileio
from trainkit.distributed.process_group import Distributed
from trainkit.errors import RefusedError

_UNLIMITED = 1 << 60
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # <malloc.h>
_LARGEST_IN_HEAP = 32 << 20  # the most that glibc takes
_ALLOCATOR_VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


def keep_freed_memory() -> None:
    """Have glibc keep the memory that a training frees and needs again in its next update, unless the user says
    otherwise in the environment.

    glibc gives free memory at the end of its heap back to the kernel, and takes it again as new pages: a thousand page
    faults an update of a small network, by chance of what lies at the end. On the CPU a whole command takes 6.7 s then
    instead of 5.2.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None and not any(name in os.environ for name in _ALLOCATOR_VARIABLES):
        mallopt(_TRIM_THRESHOLD, -1)
        mallopt(_MMAP_THRESHOLD, _LARGEST_IN_HEAP)  # setting one of the two lowers the other


def give_freed_memory_back() -> None:
    """Once, to the kernel, so that the process holds only what is in use."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(0)


class MemoryGauge:
    """Peaks of this rank's memory: what the GPU's allocator has taken; on CPU, what the process has in RAM.

    Args:
        limit_mb: MiB that this rank may hold, if less than there are.

    Raises:
        RefusedError: this system does not tell a process's peak.
    """

    def __init__(self, dist: Distributed, limit_mb: float | None) -> None:
        self._device, self._ranks, self._limit = dist.device, max(1, dist.env.local_world_size), limit_mb
        self.start()

    def start(self) -> None:
        """Forget the peak so far."""
        gc.collect()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self._device)
            return
        give_freed_memory_back()
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # see proc(5)
        except OSError as problem:
            raise RefusedError(
                "This system does not tell how much memory a process takes at most.",
                why=f"/proc/self/clear_refs: {problem.strerror}.",
                fix="Give train.micro_batch_size as a number.",
                key="train.micro_batch_size",
            ) from None

    def peak(self) -> int:
        """Most bytes held since `start`."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_reserved(self._device)
        return _status("VmHWM")

    def held(self) -> int:
        """Bytes held now."""
        if self._device.type == "cuda":
            return torch.cuda.memory_reserved(self._device)
        give_freed_memory_back()
        return _status("VmRSS")

    def room(self) -> int:
        """Bytes that this rank may hold: what it holds, and its share of what is free."""
        if self._device.type == "cuda":
            free = torch.cuda.mem_get_info(self._device)[0]
        else:
            free = min(psutil.virtual_memory().available, cgroup_free()) // self._ranks
        limit = _UNLIMITED if self._limit is None else int(self._limit * 2**20)
        return min(self.held() + max(free, 0), limit)


def _status(name: str) -> int:
    text = fileio.read_text(Path("/proc/self/status"))
    return next(int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(f"{name}:"))


def cgroup_free(root: Path = Path("/")) -> int:
    """Bytes that are left of what SLURM's --mem, or a container, allows this process and those beside it.

    Files that the kernel keeps in memory do not count: it gives them up when it must.
    """
    return min((limit - used for limit, used in _limits(root)), default=_UNLIMITED)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Limit and use of every group that this process is in."""
    try:
        lines = fileio.read_text(root / "proc/self/cgroup").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":  # version 2
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *group.parents):  # a container may not see its own path: then what it sees is at the top
            if folder.is_relative_to(top) and (found := _limit(folder, *names)) is not None:
                yield found


def _limit(folder: Path, limit: str, used: str, cached: str) -> tuple[int, int] | None:
    try:
        allowed = fileio.read_text(folder / limit).strip()
        if not allowed.isdigit():  # max
            return None
        stat = dict(line.split(maxsplit=1) for line in fileio.read_text(folder / "memory.stat").splitlines())
        return int(allowed), int(fileio.read_text(folder / used)) - int(stat.get(cached, 0))
    except (OSError, ValueError):
        return None
