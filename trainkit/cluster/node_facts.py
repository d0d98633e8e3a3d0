"""What one node says of itself: GPUs, driver, ECC, memory, disks, strangers' processes, versions. Without torch.

Plain JSON values, so that nodes can send them to each other; what a node cannot tell is absent.
"""

from __future__ import annotations

import getpass
import os
import platform
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

MB = 1024 * 1024
_LOOK_SECONDS = 0.3
_BUSY_PERCENT = 50.0


def node_facts(env: Mapping[str, str], folders: Sequence[Path]) -> dict[str, Any]:
    """All of it; takes about half a second.

    Args:
        folders: where the job will write; each is tried.
    """
    memory = psutil.virtual_memory()
    shm = Path("/dev/shm")
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_free_mb": memory.available // MB,
        "memory_total_mb": memory.total // MB,
        "disks": [disk_facts(folder) for folder in dict.fromkeys([*folders, *([shm] if shm.is_dir() else [])])],
        "gpus": gpu_facts(),
        "busy": busy_processes(env),
    }


def versions() -> dict[str, str]:
    """Python, torch and trainkit, as their packages say."""
    found = {"python": platform.python_version()}
    for name, package in (("torch", "torch"), ("trainkit", "trainkit-vision")):
        with suppress(PackageNotFoundError):
            found[name] = version(package)
    return found


def disk_facts(folder: Path) -> dict[str, Any]:
    """Free space and inodes below ``folder``, and why nothing can be written there, if so: a MiB is tried."""
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    facts: dict[str, Any] = {"path": str(folder)}
    try:
        space = os.statvfs(there)
        facts |= {"free_mb": space.f_bavail * space.f_frsize // MB}
        if space.f_files:  # file systems without a fixed number of inodes say 0
            facts["free_inodes"] = space.f_favail
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(bytes(MB))
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        facts["error"] = error.strerror or str(error)
    return facts


def gpu_facts() -> list[dict[str, Any]]:
    """Every GPU of this node, as its driver sees it; none where there is no driver.

    To be asked before this job's ranks open a context, so that every process on a GPU is somebody else's.
    """
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver: either way there is nothing to ask
        return []
    readings: dict[str, Callable[[Any], Any]] = {
        "name": lambda gpu: str(pynvml.nvmlDeviceGetName(gpu)),
        "driver": lambda _: str(pynvml.nvmlSystemGetDriverVersion()),
        "memory_used_mb": lambda gpu: int(pynvml.nvmlDeviceGetMemoryInfo(gpu).used) // MB,
        "memory_total_mb": lambda gpu: int(pynvml.nvmlDeviceGetMemoryInfo(gpu).total) // MB,
        "temperature_c": lambda gpu: int(pynvml.nvmlDeviceGetTemperature(gpu, pynvml.NVML_TEMPERATURE_GPU)),
        # Since the driver was loaded. Corrected ones are harmless.
        "ecc_errors": lambda gpu: int(
            pynvml.nvmlDeviceGetTotalEccErrors(gpu, pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)
        ),
        "remap_failed": lambda gpu: bool(pynvml.nvmlDeviceGetRemappedRows(gpu)[3]),
        "remap_pending": lambda gpu: bool(pynvml.nvmlDeviceGetRemappedRows(gpu)[2]),
        "pcie_width": lambda gpu: int(pynvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)),
        "pcie_width_max": lambda gpu: int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)),
        "processes": lambda gpu: [int(process.pid) for process in pynvml.nvmlDeviceGetComputeRunningProcesses(gpu)],
    }
    found = []
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            facts: dict[str, Any] = {"index": index}
            for key, reading in readings.items():
                with suppress(pynvml.NVMLError):  # vGPUs and MIG slices do not tell everything
                    facts[key] = reading(pynvml.nvmlDeviceGetHandleByIndex(index))
            found.append(facts)
    except pynvml.NVMLError as error:
        found.append({"index": len(found), "error": str(error)})  # fell off the bus
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()
    return found


def busy_processes(env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Processes of others, or of another job of this user, that use half a core or more, busiest first."""
    mine = env.get("SLURM_JOB_ID")
    me = psutil.Process()
    own = {me.pid, *(process.pid for process in me.parents())}
    before: dict[int, tuple[psutil.Process, float]] = {}
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            before[process.pid] = (process, sum(process.cpu_times()[:2]))
    time.sleep(_LOOK_SECONDS)
    found: list[dict[str, Any]] = []
    for pid, (process, earlier) in before.items():
        with suppress(psutil.Error):
            percent = (sum(process.cpu_times()[:2]) - earlier) / _LOOK_SECONDS * 100
            if percent < _BUSY_PERCENT or pid in own or (mine and _job_of(process) == mine):
                continue
            if not mine and process.username() == getpass.getuser():
                continue  # on a machine of one's own, what runs there is one's own business
            found.append(
                {"pid": pid, "name": process.name(), "user": process.username(), "cpu_percent": round(percent)}
            )
    return sorted(found, key=lambda item: -int(item["cpu_percent"]))[:5]


def _job_of(process: psutil.Process) -> str | None:
    with suppress(psutil.Error):  # another user's is not ours to read
        return process.environ().get("SLURM_JOB_ID")
    return None
