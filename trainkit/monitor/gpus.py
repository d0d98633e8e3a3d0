"""NVIDIA's GPUs as their driver sees them, by NVML: those of this job."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

MB = 1024 * 1024


class Gpus:
    """The GPUs that a CUDA_VISIBLE_DEVICES mask leaves; none where NVML is missing.

    What a driver does not tell (vGPUs and MIG slices do not tell everything) is left out.
    """

    def __init__(self, mask: str | None) -> None:
        import pynvml

        self._nvml: Any = pynvml
        self._handles: dict[int, Any] = {}
        with suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
            uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
            self._handles = {index: handles[index] for index in visible_indices(mask, uuids)}

    def samples(self) -> list[dict[str, Any]]:
        """For each GPU: index, util_percent, memory_used_mb, memory_total_mb, power_w, temperature_c."""
        nvml = self._nvml
        readings: dict[str, Callable[[Any], Any]] = {
            "util_percent": lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
            "memory_used_mb": lambda handle: round(nvml.nvmlDeviceGetMemoryInfo(handle).used / MB, 1),
            "memory_total_mb": lambda handle: round(nvml.nvmlDeviceGetMemoryInfo(handle).total / MB, 1),
            "power_w": lambda handle: round(nvml.nvmlDeviceGetPowerUsage(handle) / 1000, 1),
            "temperature_c": lambda handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
        }
        return [{"index": index, **self._told(handle, readings)} for index, handle in self._handles.items()]

    def joules(self) -> dict[int, float]:
        """By index, since the driver was loaded: of those that count it, which Volta and what came after do."""
        reading = {"joules": lambda handle: self._nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000}
        told = {index: self._told(handle, reading) for index, handle in self._handles.items()}
        return {index: found["joules"] for index, found in told.items() if found}

    def described(self) -> str:
        """What `nvidia-smi` would show: driver, names, use, and the processes on each GPU. Empty without GPUs."""
        if not self._handles:
            return ""
        nvml = self._nvml
        driver = self._told(None, {"driver": lambda _: nvml.nvmlSystemGetDriverVersion()}).get("driver", "?")
        lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')}  driver {driver}"]
        about: dict[str, Callable[[Any], Any]] = {
            "name": lambda handle: nvml.nvmlDeviceGetName(handle),
            "limit": lambda handle: nvml.nvmlDeviceGetPowerManagementLimit(handle) // 1000,
            "processes": lambda handle: nvml.nvmlDeviceGetComputeRunningProcesses(handle),
        }
        for sample, handle in zip(self.samples(), self._handles.values(), strict=True):
            told = self._told(handle, about)
            values = [
                f"GPU {sample['index']}  {told.get('name', '?')}",
                f"{sample.get('util_percent', '?')} % used",
                f"{sample.get('memory_used_mb', '?')} of {sample.get('memory_total_mb', '?')} MB",
                f"{sample.get('power_w', '?')} of {told.get('limit', '?')} W",
                f"{sample.get('temperature_c', '?')} C",
            ]
            lines.append("  ".join(values))
            for process in told.get("processes", ()):
                used = getattr(process, "usedGpuMemory", None)  # unknown inside of containers
                lines.append(f"    process {process.pid}  {'?' if used is None else round(used / MB)} MB")
        return "\n".join(lines) + "\n"

    def _told(self, handle: Any, readings: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
        told = {}
        for key, reading in readings.items():
            with suppress(self._nvml.NVMLError):
                told[key] = reading(handle)
        return told


def visible_indices(mask: str | None, uuids: list[str]) -> list[int]:
    """NVML's indices of the GPUs that a CUDA_VISIBLE_DEVICES mask leaves; all without a mask.

    CUDA stops reading at the first entry it does not know, and so does this.

    Args:
        uuids: UUID of every GPU in NVML's order; a mask may name GPUs by a unique beginning of it.
    """
    if mask is None:
        return list(range(len(uuids)))
    found: list[int] = []
    for entry in (part.strip() for part in mask.split(",")):
        if entry.isdigit():
            matches = [int(entry)] if int(entry) < len(uuids) else []
        else:
            matches = [index for index, uuid in enumerate(uuids) if entry and uuid.startswith(entry)]
        if len(matches) != 1:
            break
        found += matches
    return found
