"""What this rank's share of the machine is: its device, its CPUs, its memory."""

from __future__ import annotations

import os
import resource
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from trainkit import fileio
from trainkit.errors import RefusedError
from trainkit.ranks.env import RankEnv

DEVICE = "TRAINKIT_DEVICE"
"""``cpu``: train on the CPU also where GPUs are granted. For clusters whose GPUs are only names (slurm/devcluster)."""


_MASK = "CUDA_VISIBLE_DEVICES"


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
        raise unseen_gpus(granted, os.environ, drivers(), torch.version.cuda, torch.version.hip)
    return False


def _granted_gpus(env: Mapping[str, str]) -> str:
    """Which GPUs the scheduler, or a supervisor of ours, has given this process; empty for none."""
    for name in ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "SLURM_GPUS_ON_NODE"):
        if env.get(name, "") not in ("", "0" if name == "SLURM_GPUS_ON_NODE" else ""):
            return f"{name}={env[name]}"
    mask = env.get("CUDA_VISIBLE_DEVICES", "")
    return f"CUDA_VISIBLE_DEVICES={mask}" if "TRAINKIT_ATTEMPT" in env and mask not in ("", "-1") else ""


@dataclass(frozen=True)
class Drivers:
    """What the kernel of a node says of its GPUs; it says so to containers as well."""

    nvidia: str
    """The driver's version; empty if none is loaded."""
    gpus: int
    """How many the NVIDIA driver has, whatever mask a process sees them through."""
    amd: bool
    """The driver of AMD's GPUs is loaded."""


def drivers(root: Path = Path("/")) -> Drivers:
    """Of the node whose /sys and /proc lie under ``root``."""
    try:
        version = fileio.read_text(root / "sys/module/nvidia/version").strip()
    except (OSError, UnicodeDecodeError):
        version = ""
    return Drivers(
        version, len(list((root / "proc/driver/nvidia/gpus").glob("*"))), (root / "sys/module/amdgpu").exists()
    )


def unseen_gpus(granted: str, env: Mapping[str, str], node: Drivers, cuda: str | None, hip: str | None) -> RefusedError:
    """Why CUDA may see none of the GPUs that were granted.

    Args:
        cuda: the version of CUDA that torch is built for.
        hip: the version of ROCm's HIP that it is built for.
    """
    host = socket.gethostname()
    name = next((key for key in ("HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES") if hip and key in env), _MASK)
    mask = env.get(name)
    built = f"for CUDA {cuda}" if cuda else f"for ROCm {hip}" if hip else "without CUDA"
    beyond = [int(item) for item in (mask or "").split(",") if item.isdigit() and int(item) >= node.gpus > 0]
    loaded = "amdgpu" if node.amd and (hip or not node.nvidia) else node.nvidia
    if not cuda and not (hip and node.amd):
        fix = f"Install a torch that is built {'for ROCm' if node.amd and not node.nvidia else 'with CUDA'}."
    elif cuda and node.amd and not node.nvidia:
        fix = "This node's GPUs are AMD's: install a torch that is built for ROCm, or ask for other nodes."
    elif not loaded:
        fix = f"Do without this node (--exclude {host}); in a container, start it with its GPUs (--nv, --gpus all)."
    elif mask in ("", "-1", "NoDevFiles"):
        fix = f"Do not set {name} yourself."
    elif beyond:
        fix = f"Do not set {name} yourself: it names GPU {beyond[0]}, and the node has {node.gpus}."
    elif mask is not None and mask.startswith(("GPU-", "MIG-")):
        fix = f"Do not set {name} yourself: `nvidia-smi -L` lists what this node has."
    else:
        fix = f"Install a torch built for what driver {loaded} has, or do without this node (--exclude {host})."
    return RefusedError(
        f"GPUs are granted, and CUDA sees none on {host}.",
        why=f"{granted}; driver {loaded or 'not loaded'}; torch {torch.__version__} is built {built}; "
        + (f"{name} is not set." if mask is None else f"{name}={mask!r}."),
        fix=f"{fix} --gpus-per-node 0 trains on the CPU.",
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
    cores = visible_cpus()
    granted = os.environ.get("SLURM_CPUS_PER_TASK", "")
    return max(1, min(cores, int(granted)) if granted.isdigit() else cores // max(1, env.local_world_size))


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


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """Whatever the body draws from torch's generators, afterwards they go on where they were."""
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield


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
        found |= {"cuDNN": str(cudnn or ""), "driver": drivers().nvidia}
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


def visible_cpus() -> int:
    """CPUs that this process may use."""
    # Not on macOS: it has no affinity.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
