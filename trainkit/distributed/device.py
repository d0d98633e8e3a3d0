"""What this rank's share of the machine is: its device, its CPUs, its memory."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from trainkit import fileio
from trainkit.errors import RefusedError
from trainkit.process import granted_cpus, is_set, visible_cpus
from trainkit.ranks import RankEnv

if TYPE_CHECKING:
    from trainkit.distributed.process_group import Distributed

DEVICE = "TRAINKIT_DEVICE"
"""``cpu``: train on the CPU also where GPUs are granted. For clusters whose GPUs are only names (slurm/devcluster)."""
_MASK = "CUDA_VISIBLE_DEVICES"
_MASKS = (_MASK, "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
_UNLIMITED = 1 << 60


def gpu_is_here() -> bool:
    """Whether CUDA sees a GPU.

    Raises:
        RefusedError: this process was granted GPUs, and CUDA sees none: on the CPU it would train for weeks.
    """
    if os.environ.get(DEVICE) == "cpu":
        return False
    if torch.cuda.is_available():
        return True
    if granted := _granted_gpus(os.environ):
        raise _unseen_gpus(granted)
    return False


def _granted_gpus(env: Mapping[str, str]) -> str:
    """Which GPUs the scheduler, or a supervisor of ours, has given this process; empty for none."""
    none = {"SLURM_STEP_GPUS": "", "SLURM_JOB_GPUS": "", "SLURM_GPUS_ON_NODE": "0"}
    none |= {_MASK: "-1"} if "TRAINKIT_ATTEMPT" in env else {}
    return next((f"{name}={env[name]}" for name in none if env.get(name, "") not in ("", none[name])), "")


def gpu_driver(root: Path = Path("/")) -> str:
    """What drives the GPUs of the node whose /sys lies under ``root``: NVIDIA's version, or ``amdgpu``; empty for none.

    The kernel says so to containers as well.
    """
    with suppress(OSError, UnicodeDecodeError):
        return fileio.read_text(root / "sys/module/nvidia/version").strip()
    return "amdgpu" if (root / "sys/module/amdgpu").exists() else ""


def _unseen_gpus(granted: str) -> RefusedError:
    """CUDA sees none of the GPUs that were granted: what that may come from."""
    host, cuda, hip = socket.gethostname(), torch.version.cuda, torch.version.hip
    built = f"for CUDA {cuda}" if cuda else f"for ROCm {hip}" if hip else "without CUDA"
    masks = [f"{name}={os.environ[name]!r}" for name in _MASKS if name in os.environ] or [f"{_MASK} is not set"]
    return RefusedError(
        f"GPUs are granted, and CUDA sees none on {host}.",
        why=f"{granted}; driver {gpu_driver() or 'not loaded'}; torch {torch.__version__} is built {built}; "
        f"{', '.join(masks)}.",
        fix="Install a torch that is built for this driver; start a container with its GPUs (--nv, --gpus all); do not "
        f"set {_MASK} yourself; or do without this node (--exclude {host}). --gpus-per-node 0 trains on the CPU.",
    )


def cpus_of_rank(env: RankEnv) -> int | None:
    """CPUs for one rank where the ranks of a machine share them; None where this process may use all that it sees.

    srun binds its tasks, so what a task sees is its own; torchrun, mpirun and the local executor do not.
    """
    if env.launcher in ("slurm", "single"):
        return None
    return max(1, visible_cpus() // env.local_world_size)


def intra_op_threads(env: RankEnv) -> int:
    """Threads of a rank: processes x threads <= cores."""
    return granted_cpus() if is_set("SLURM_CPUS_PER_TASK") else max(1, visible_cpus() // max(1, env.local_world_size))


def seed_random(seed: int, device: torch.device) -> None:
    """Seed torch's generators that this rank draws from.

    Not `torch.manual_seed`: where CUDA is not in use it formats a stack trace each time, 1 ms per call.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def is_free_to_ask(device: torch.device) -> bool:
    """Whether a value that it has computed is there at once: a GPU would have to finish all that it has been given."""
    return device.type == "cpu"


def device_name(device: torch.device) -> str:
    """The GPU's own name, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def software(device: torch.device) -> dict[str, str]:
    """Versions of what the training runs on, where it runs: a login node may have others, or no GPU."""
    found: dict[str, str | None] = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        nccl = torch.cuda.nccl.version() if torch.distributed.is_nccl_available() else ()
        found |= {"CUDA": torch.version.cuda, "ROCm": torch.version.hip, "NCCL": ".".join(map(str, nccl))}
        cudnn = torch.backends.cudnn.version()
        found |= {"cuDNN": str(cudnn or ""), "driver": gpu_driver()}
    return {name: version for name, version in found.items() if version}


def peak_memory_mb(device: torch.device) -> float:
    """Most memory held at once, in MiB: by the GPU's allocator, or by this process on CPU."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def reserved_memory_mb(device: torch.device) -> float | None:
    """Most memory that the GPU's allocator has taken, in use or kept, in MiB; None on CPU."""
    return round(torch.cuda.max_memory_reserved(device) / 2**20, 1) if device.type == "cuda" else None


def share_of_cpus(device: torch.device) -> dict[str, int]:
    """Threads that a rank computes with on the CPU, and the CPUs that it may use; nothing on a GPU."""
    return {"threads": torch.get_num_threads(), "cpus": visible_cpus()} if device.type == "cpu" else {}


def _give_freed_memory_back() -> None:
    """Give freed memory back to the kernel, so that what a larger trial left does not count as the next one's."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


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
        _give_freed_memory_back()
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
        _give_freed_memory_back()
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
    """Bytes that are left of what SLURM's --mem, or a container, allows this process and those beside it, by the groups
    that it is in.

    Files that the kernel keeps in memory do not count: it gives them up when it must.
    """
    free = _UNLIMITED
    with suppress(OSError):
        for line in fileio.read_text(root / "proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            top, limit, used, cached = "", "memory.max", "memory.current", "inactive_file"
            if controllers:  # version 1 of cgroups, which has a tree for each
                top, limit, used = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
                cached = "total_inactive_file"
            if top not in controllers.split(","):
                continue
            group = root / "sys/fs/cgroup" / top / path.lstrip("/")
            for folder in (group, *group.parents):  # a container may not see its own path, but what is at the top
                with suppress(OSError, ValueError):  # no such group, or no limit: max
                    room = int(fileio.read_text(folder / limit)) - int(fileio.read_text(folder / used))
                    stat = dict(line.split() for line in fileio.read_text(folder / "memory.stat").splitlines())
                    free = min(free, room + int(stat.get(cached, 0)))
    return free
