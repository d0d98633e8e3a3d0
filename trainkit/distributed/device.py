"""This rank's share of the machine: its device, its CPUs, its memory.

With `trainkit.common.accelerators` the only module that names a kind of accelerator.
"""

from __future__ import annotations

import ctypes
import gc
import os
import random
import resource
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
import torch.distributed as c10d
from torch import Tensor
from torch.distributed import Store  # type: ignore[attr-defined]

from trainkit.cluster.ranks import RankEnv, device_index
from trainkit.cluster.survey import cpu_formats
from trainkit.common import accelerators, fileio
from trainkit.common.accelerators import APPLE, COMPILES, DEVICE, EXCHANGES, MASKS, NVIDIA, PINS, Kind
from trainkit.common.errors import RefusedError, require
from trainkit.common.process import cgroups, granted_cpus, is_set, set_variables, visible_cpus

_UNLIMITED = 1 << 60
# Files of a group with the limit, what is used, and (a line of memory.stat) what is cached.
_CGROUPS = {
    False: ("memory.max", "memory.current", "inactive_file"),
    True: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),  # version 1
}


def kind_of(device: torch.device) -> Kind:
    """Return the kind of the device: what it has and lacks."""
    return accelerators.kind_of(device.type, is_rocm=torch.version.hip is not None)


def accelerator() -> torch.device | None:
    """Return the device beside the CPU that torch computes on here, without a number; None if there is none."""
    return torch.accelerator.current_accelerator(check_available=True)


def gpu_is_here() -> bool:
    """Return whether torch sees an accelerator.

    Raises:
        RefusedError: this process was granted GPUs, and torch sees none: on the CPU it would train for weeks.
    """
    if os.environ.get(DEVICE) == "cpu":
        return False
    if torch.version.hip is not None:
        set_variables(dict.fromkeys(accelerators.masked_twice(os.environ)))
    if accelerator() is not None:
        return True
    granted = _granted_gpus(os.environ)
    if granted:
        raise _unseen_gpus(granted)
    return False


def device_of_rank(local_rank: int) -> torch.device:
    """The accelerator of that rank of a node, among those that this process sees.

    Raises UserError when there are not as many.
    """
    found = accelerator()
    assert found is not None
    return torch.device(found.type, device_index(local_rank, torch.accelerator.device_count()))


def devices_here() -> list[dict[str, Any]]:
    """The accelerators that this process sees, as torch knows them; it opens none."""
    found = accelerator()
    if found is None:
        return []
    devices = []
    for index in range(torch.accelerator.device_count()):
        name = device_name(torch.device(found.type, index))
        devices.append({"index": index, "name": name, "driver": gpu_driver() or "unknown"})
    return devices


@cache
def _has_float64(device: torch.device) -> bool:
    try:
        torch.zeros(1, dtype=torch.float64, device=device)
    except TypeError:
        return False
    return True


def as_float64(numbers: Tensor) -> Tensor:
    """The same numbers in float64: on their device, or on the host where it has no such numbers, as Apple's GPUs."""
    if not _has_float64(numbers.device):
        numbers = numbers.cpu()
    return numbers.double()


def make_current(device: torch.device) -> None:
    """Have this thread use the accelerator ``device`` from now on. Before its backend starts, or every rank opens a
    context on the first one."""
    torch.accelerator.set_device_index(device)


def copies_later(device: torch.device) -> bool:
    """Return whether the device copies to and from pinned memory while it computes."""
    return device.type != "cpu" and kind_of(device).has(PINS)


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all that it was given."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def backends(device: torch.device) -> str:
    """The backends of a process group whose ranks compute on such devices; gloo carries what is in host memory."""
    if device.type == "cpu" or not kind_of(device).has(EXCHANGES):
        return "gloo"
    return f"cpu:gloo,{device.type}:{c10d.get_default_backend_for_device(device)}"


def require_exchanges(device: torch.device, world_size: int) -> None:
    """Raises RefusedError where several ranks are to train and nothing carries tensors between such devices."""
    kind = kind_of(device)
    if world_size > 1 and not kind.has(EXCHANGES):
        why = "torch has no backend that carries tensors between them."
        fix = "Start one rank with strategy.name=single, or train on the CPUs (--gpus-per-node 0)."
        raise RefusedError(f"{world_size} ranks cannot train together on GPUs by {kind.maker}.", why=why, fix=fix)


def require_compiler(device: torch.device, how: str) -> None:
    """Raises UserError where torch.compile, which train.compile=``how`` asks for, makes nothing for such a device.

    Whether a plugin of torch's has brought a compiler, only a trial shows.
    """
    kind = kind_of(device)
    why = ""
    if kind not in (*accelerators.MAKERS, accelerators.CPU):
        try:
            torch.compile(lambda numbers: numbers + 1)(torch.ones(2, device=device))
        except Exception as error:  # of whatever kind: the plugin's own, or the compiler's
            told = f"{type(error).__name__}: {error}".splitlines()[0]
            why = f"torch.compile fails there at a sum: {told}. "
    require(kind.has(COMPILES) and not why, "train.compile", how, f"off on GPUs by {kind.maker}", why=why)


def open_group(device: torch.device, store: Store, rank: int, size: int, timeout: timedelta) -> Any:
    """A process group that carries tensors of the device, and that c10d does not know: one that breaks takes no other
    with it. It has c10d's own verbs, such as ``allreduce``."""
    name = c10d.get_default_backend_for_device(device)
    kinds = {"gloo": "ProcessGroupGloo", "nccl": "ProcessGroupNCCL", "xccl": "ProcessGroupXCCL"}
    if name in kinds:
        return getattr(c10d, kinds[name])(store, rank, size, timeout)
    return c10d.Backend._plugins[name.upper()].creator_fn(store, rank, size, timeout)  # of a plugin


def _granted_gpus(env: Mapping[str, str]) -> str:
    """Return the GPUs that the scheduler, or a supervisor of ours, has given this process; empty for none."""
    none = {"SLURM_STEP_GPUS": "", "SLURM_JOB_GPUS": "", "SLURM_GPUS_ON_NODE": "0"}
    if "TRAINKIT_ATTEMPT" in env:
        none |= dict.fromkeys(MASKS, "-1")
    for name, empty in none.items():
        if env.get(name, "") not in ("", empty):
            return f"{name}={env[name]}"
    return ""


def gpu_driver(root: Path = Path("/")) -> str:
    """Name the GPU driver of the node whose /sys lies under ``root``: NVIDIA's version, ``amdgpu``, or ``xe`` or
    ``i915``, Intel's; empty for none.

    The kernel says so to containers as well.
    """
    with suppress(OSError, UnicodeDecodeError):
        return fileio.read_text(root / "sys/module/nvidia/version").strip()
    for name in ("amdgpu", "xe", "i915"):
        if (root / "sys/module" / name).exists():
            return name
    return ""


def _unseen_gpus(granted: str) -> RefusedError:
    """Make the error for GPUs that were granted and that torch does not see, with its likely causes."""
    host = socket.gethostname()
    built = "for CPUs alone"
    for name, number in (("CUDA", torch.version.cuda), ("ROCm", torch.version.hip), ("XPU", torch.version.xpu)):
        if number:
            built = f"for {name} {number}"
    masks = [f"{name}={os.environ[name]!r}" for name in MASKS if name in os.environ] or [f"{MASKS[0]} is not set"]
    why = f"{granted}; driver {gpu_driver() or 'not loaded'}; torch {torch.__version__} is built {built}; "
    fix = "Install a torch that is built for this driver; start a container with its GPUs (--nv, --gpus all); do not "
    fix += f"set {MASKS[0]} yourself; or do without this node (--exclude {host}). --gpus-per-node 0 trains on the CPU."
    what = f"GPUs are granted, and torch sees none on {host}."
    return RefusedError(what, why=f"{why}{', '.join(masks)}.", fix=fix)


def cpus_of_rank(env: RankEnv) -> int | None:
    """CPUs for one rank where the ranks of a machine share them; None where this process may use all that it sees.

    srun binds its tasks, so what a task sees is its own; torchrun, mpirun and the local executor do not.
    """
    if env.launcher in ("slurm", "single"):
        return None
    return max(1, visible_cpus() // env.local_world_size)


def intra_op_threads(env: RankEnv) -> int:
    """Threads of a rank that trains on the CPU: processes x threads <= cores.

    One with a GPU has one thread. What it computes on the CPU is small, and the GPU waits for it: on 16 cores each of
    seven operations on 5,000 numbers took 8 ms, until all threads had met.
    """
    if is_set("SLURM_CPUS_PER_TASK"):
        return granted_cpus()
    return max(1, visible_cpus() // max(1, env.local_world_size))


def seed_random(seed: int, device: torch.device) -> None:
    """Seed torch's generators that this rank draws from.

    Not `torch.manual_seed`: where CUDA is not in use it formats a stack trace each time, 1 ms per call.
    """
    torch.default_generator.manual_seed(seed)
    if device.type != "cpu":
        module = torch.get_device_module(device)
        getattr(module, "manual_seed_all", module.manual_seed)(seed)  # dp draws on other devices, too


def seed_all(seed: int, device: torch.device | None = None) -> None:
    """Seed every generator that code of the user's own may draw from: Python's, NumPy's and torch's.

    Args:
        device: whose generators of torch's are seeded, too; None: those of the CPU alone.
    """
    random.seed(seed)
    np.random.seed(seed)
    seed_random(seed, device or torch.device("cpu"))


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    """Draws in this block, on the CPU, leave these generators as they were."""
    of_python = random.getstate()
    of_numpy = np.random.get_state()
    of_torch = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.default_generator.set_state(of_torch)


def random_kept(device: torch.device) -> AbstractContextManager[None]:
    """Draws in this block leave torch's generators as they were."""
    if device.type == "cpu":
        return torch.random.fork_rng([])
    return torch.random.fork_rng([device], device_type=device.type)


def is_free_to_ask(device: torch.device) -> bool:
    """Return whether a computed value is there at once: a GPU would have to finish all that it has been given."""
    return device.type == "cpu"


def device_name(device: torch.device) -> str:
    """The accelerator's own name, or ``cpu``."""
    if device.type == "cpu":
        return "cpu"
    if kind_of(device) is APPLE:
        return torch.backends.mps.get_name()
    module = torch.get_device_module(device)
    # ROCm does not know the names of all of AMD's GPUs.
    name = hasattr(module, "get_device_name") and module.get_device_name(device)
    return str(name or getattr(module.get_device_properties(device), "gcnArchName", device.type))


def software(device: torch.device) -> dict[str, str]:
    """Versions of what the training runs on, where it runs: a login node may have others, or no GPU."""
    found: dict[str, str | None] = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        found |= {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
        if c10d.is_nccl_available():
            found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
        found["cuDNN"] = str(torch.backends.cudnn.version() or "")
    if device.type != "cpu":
        found |= {"XPU": torch.version.xpu, "driver": gpu_driver()}
    return {name: version for name, version in found.items() if version}


def formats_of(device: torch.device) -> tuple[str, ...]:
    """Number formats that the device multiplies itself, the fastest that trains well first.

    Ampere has TF32 and bf16, which was emulated before; Volta and Turing have fp16. A CPU may have bf16.
    """
    kind = kind_of(device)
    if kind is NVIDIA:
        generation = torch.cuda.get_device_capability(device)
        if generation >= (8, 0):
            return ("bf16", "tf32", "fp16", "fp32")
        return ("fp16", "fp32") if generation >= (7, 0) else ("fp32",)
    if device.type == "cpu":
        return cpu_formats()
    if kind.formats:
        return kind.formats
    has = torch.accelerator.get_device_capability(device)["supported_dtypes"]
    half = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return (*[name for name, dtype in half.items() if dtype in has], "fp32")


def allow_tf32(allowed: bool) -> None:
    """Choose whether this process multiplies and convolves float32 in TF32, on GPUs that have it."""
    torch.set_float32_matmul_precision("high" if allowed else "highest")
    torch.backends.cudnn.allow_tf32 = allowed


def share_of_cpus(device: torch.device) -> dict[str, int]:
    """Threads that a rank computes with on the CPU, and the CPUs that it may use; nothing on a GPU."""
    if device.type != "cpu":
        return {}
    return {"threads": torch.get_num_threads(), "cpus": visible_cpus()}


# Memory


def peak_memory_mb(device: torch.device) -> float:
    """Most memory held at once, in MiB: by the GPU's allocator, or by this process on CPU."""
    if device.type != "cpu":
        return round(torch.accelerator.max_memory_allocated(device) / 2**20, 1)
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20, 1)


def reserved_memory_mb(device: torch.device) -> float | None:
    """Most memory that the GPU's allocator has taken, in use or kept, in MiB; None on CPU."""
    if device.type == "cpu":
        return None
    return round(torch.accelerator.max_memory_reserved(device) / 2**20, 1)


def free_memory(device: torch.device) -> int:
    """Bytes that the accelerator has free."""
    return int(torch.accelerator.get_memory_info(device)[0])


def _give_freed_memory_back() -> None:
    """Give freed memory back to the kernel, so that what a larger trial left does not count as the next one's."""
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def forget_peak(device: torch.device) -> None:
    """Begin anew to look for the most memory that is held at once, and give back what nothing holds.

    Raises:
        RefusedError: this system does not tell a process's peak.
    """
    gc.collect()
    if device.type != "cpu":  # its allocator counts what it is asked for, however late the GPU then writes there
        torch.accelerator.empty_cache()
        torch.accelerator.reset_peak_memory_stats(device)
        return
    _give_freed_memory_back()
    what = "This system does not tell how much memory a process takes at most."
    key = "train.micro_batch_size"
    with fileio.disk_errors_as(what, fix=f"Give {key} as a number.", key=key, kind=RefusedError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # see proc(5)


class MemoryGauge:
    """Peaks of this rank's memory: what the GPU's allocator has taken; on CPU, what the process has in RAM.

    Args:
        ranks_here: ranks of this machine, which share what is free.
        limit_mb: MiB that this rank may hold, if less than there are.

    Raises:
        RefusedError: this system does not tell a process's peak.
    """

    def __init__(self, device: torch.device, ranks_here: int, limit_mb: float | None = None) -> None:
        self._device = device
        self._ranks = max(1, ranks_here)
        self._limit = _UNLIMITED if limit_mb is None else int(limit_mb * 2**20)
        self._is_gpu = device.type != "cpu"
        self.start()

    def start(self) -> None:
        """Forget the peak so far."""
        forget_peak(self._device)

    def peak(self) -> int:
        """Most bytes held since `start`."""
        if self._is_gpu:
            return torch.accelerator.max_memory_reserved(self._device)
        return _status("VmHWM")

    def held(self) -> int:
        """Bytes held now."""
        if self._is_gpu:
            return torch.accelerator.memory_reserved(self._device)
        _give_freed_memory_back()
        return _status("VmRSS")

    def room(self) -> int:
        """Bytes that this rank may hold: what it holds, and its share of what is free."""
        if self._is_gpu:
            free = free_memory(self._device)
        else:
            free = min(psutil.virtual_memory().available, cgroup_free()) // self._ranks
        return min(self.held() + max(free, 0), self._limit)


def _status(name: str) -> int:
    _, _, value = fileio.read_text(Path("/proc/self/status")).partition(f"\n{name}:")
    return int(value.split()[0]) * 1024


def cgroup_free(root: Path = Path("/")) -> int:
    """Bytes that are left of what SLURM's --mem, or a container, allows this process and those beside it, by the groups
    that it is in.

    Files that the kernel keeps in memory do not count: it gives them up when it must.
    """
    free = _UNLIMITED
    for folder, is_first in cgroups("memory", root):
        limit, used, cached = _CGROUPS[is_first]
        with suppress(OSError, ValueError):  # no such group, or no limit: max
            room = int(fileio.read_text(folder / limit)) - int(fileio.read_text(folder / used))
            stat = dict(line.split() for line in fileio.read_text(folder / "memory.stat").splitlines())
            free = min(free, room + int(stat.get(cached, 0)))
    return free
