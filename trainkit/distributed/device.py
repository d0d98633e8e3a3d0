"""What this rank's share of the machine is: its device, its CPUs, its memory."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Mapping
from pathlib import Path

import torch

from trainkit.errors import RefusedError
from trainkit.ranks.env import RankEnv

DEVICE = "TRAINKIT_DEVICE"
"""``cpu``: train on the CPU also where GPUs are granted. For clusters whose GPUs are only names (slurm/devcluster)."""


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
        raise _unseen(granted, os.environ, _driver())
    return False


def _granted_gpus(env: Mapping[str, str]) -> str:
    """Which GPUs the scheduler, or a supervisor of ours, has given this process; empty for none."""
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE"):
        if env.get(name, "") not in ("", "0" if name == "SLURM_GPUS_ON_NODE" else ""):
            return f"{name}={env[name]}"
    mask = env.get("CUDA_VISIBLE_DEVICES", "")
    return f"CUDA_VISIBLE_DEVICES={mask}" if "TRAINKIT_ATTEMPT" in env and mask not in ("", "-1") else ""


def _driver() -> str:
    """The version of this node's NVIDIA driver; empty if none is loaded."""
    try:
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _unseen(granted: str, env: Mapping[str, str], driver: str) -> RefusedError:
    host, mask = socket.gethostname(), env.get("CUDA_VISIBLE_DEVICES")
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    if not torch.version.cuda:
        fix = "Install a torch that is built with CUDA."
    elif not driver:
        fix = f"Do without this node (--exclude {host}); in a container, start it with its GPUs (--nv, --gpus all)."
    elif mask in ("", "-1", "NoDevFiles"):
        fix = "Do not set CUDA_VISIBLE_DEVICES yourself."
    else:
        fix = f"Install a torch built for a CUDA that driver {driver} has, or do without this node (--exclude {host})."
    return RefusedError(
        f"GPUs are granted, and CUDA sees none on {host}.",
        why=f"{granted}; driver {driver or 'not loaded'}; torch {torch.__version__} is built {built}; "
        + ("CUDA_VISIBLE_DEVICES is not set." if mask is None else f"CUDA_VISIBLE_DEVICES={mask!r}."),
        fix=f"{fix} --gpus-per-node 0 trains on the CPU.",
    )


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
