"""What this rank's share of the machine is: its device, its CPUs, its memory."""

from __future__ import annotations

import os
import resource

import torch

from trainkit.ranks.env import RankEnv


def cpus_of_rank(env: RankEnv) -> int | None:
    """CPUs for one rank where the ranks of a machine share them; None where this process may use all that it sees.

    srun binds its tasks, so what a task sees is its own; torchrun, mpirun and the local executor do not.
    """
    if env.launcher in ("slurm", "single"):
        return None
    return max(1, _visible_cpus() // env.local_world_size)


def intra_op_threads(env: RankEnv) -> int:
    """Threads of a rank: processes x threads <= cores."""
    cores = _visible_cpus()
    granted = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return max(1, min(cores, int(granted)) if granted.isdigit() else cores // max(1, env.local_world_size))


def seed_random(seed: int, device: torch.device) -> None:
    """Seed torch's generators that this rank draws from.

    Not `torch.manual_seed`: where CUDA is not in use it formats a stack trace each time, 1 ms per call.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def device_name(device: torch.device) -> str:
    """The GPU's own name, or ``cpu``."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def peak_memory_mb(device: torch.device) -> float:
    """Most memory held at once, in MiB: by the GPU's allocator, or by this process on CPU."""
    if device.type == "cuda":
        return round(torch.cuda.max_memory_allocated(device) / 2**20, 1)
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1)


def _visible_cpus() -> int:
    # Not on macOS: it has no affinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
