"""A stand-in for NVIDIA's management library, for machines without its GPUs."""

from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any


def fake_nvml(*, gpus: int, driver: bool = True, busy: Sequence[int] = range(90, 100)) -> ModuleType:
    """NVML with GPUs whose numbers tell their index, and which do not tell their temperature.

    Args:
        busy: percent of time that each GPU is in use; one below 0 does not tell it.
    """

    class NVMLError(Exception):
        pass

    def fails(*arguments: Any) -> Any:
        raise NVMLError("Not Supported")

    def use(index: int) -> SimpleNamespace:
        if busy[index] < 0:
            fails()
        return SimpleNamespace(gpu=busy[index])

    nvml: Any = ModuleType("pynvml")
    nvml.NVMLError, nvml.NVML_TEMPERATURE_GPU = NVMLError, 0
    nvml.nvmlInit = (lambda: None) if driver else fails
    nvml.nvmlDeviceGetCount = lambda: gpus
    nvml.nvmlDeviceGetHandleByIndex = lambda index: index
    nvml.nvmlDeviceGetUUID = lambda handle: f"GPU-{handle}"
    nvml.nvmlDeviceGetUtilizationRates = use
    nvml.nvmlDeviceGetMemoryInfo = lambda handle: SimpleNamespace(used=handle * 1000 * 2**20, total=16000 * 2**20)
    nvml.nvmlDeviceGetPowerUsage = lambda handle: 60500 + 1000 * handle
    nvml.nvmlDeviceGetTemperature = nvml.nvmlDeviceGetTotalEnergyConsumption = fails
    return nvml  # type: ignore[no-any-return]
