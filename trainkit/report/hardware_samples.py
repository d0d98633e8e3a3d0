"""Hardware samples of a run, by host: use of CPUs and GPUs, memory, power."""

import statistics
from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

from trainkit.common import jsonl
from trainkit.report.values import list_of

_TAKEN = 10.0
"""Percent of the CPU time that a run wanted and others had (`trainkit.monitor.hardware`), beyond which its speed is
not compared.

Measured on two cores: runs of 1, 2 and 4 ranks come to 0 or 1 alone, to 27 to 43 beside one busy program, and to 79 to
81 beside eight.
"""


def cpus_taken(taken: float | None) -> str:
    """Why speeds on the CPU are not compared: others had too much of it. Empty where they did not."""
    if taken is None or taken <= _TAKEN:
        return ""
    return f"the CPUs were taken: others had {taken:.0f} % of the time that it wanted"


class Usage(NamedTuple):
    """Mean and highest value of one hardware reading over a run."""

    mean: float
    highest: float


class HostSamples:
    """Hardware samples of one host: of the machine, and of each of its GPUs by NVML's index."""

    def __init__(self, host: str, samples: list[dict[str, Any]]) -> None:
        self.host = host
        self.samples = samples
        self._curves = defaultdict[tuple[int | None, str], list[tuple[float, float]]](list)
        for sample in samples:
            self._take(sample["time"], None, sample)
            for gpu in list_of(sample.get("gpus")):
                if isinstance(gpu, dict) and jsonl.is_whole(gpu.get("index")):
                    self._take(sample["time"], gpu["index"], gpu)

    def _take(self, time: float, gpu: int | None, readings: Mapping[str, Any]) -> None:
        for key, value in readings.items():
            if jsonl.is_number(value):
                self._curves[gpu, key].append((time, value))

    def gpus(self) -> list[int]:
        """The sampled GPUs."""
        return sorted({index for index, _ in self._curves if index is not None})

    def gpu_use(self) -> list[Usage]:
        """Utilisation of each GPU that tells it, in percent."""
        found = []
        for gpu in self.gpus():
            usage = self.usage("util_percent", gpu)
            if usage is not None:
                found.append(usage)
        return found

    def curve(self, key: str, gpu: int | None = None) -> list[tuple[float, float]]:
        """(time, value) of a reading: ``cpu_percent``, ``memory_used_mb``; of a GPU ``power_w`` ..."""
        return self._curves.get((gpu, key), [])

    def usage(self, key: str, gpu: int | None = None) -> Usage | None:
        """Mean and highest value of a reading, or None."""
        values = [float(value) for _, value in self.curve(key, gpu)]
        if not values:
            return None
        return Usage(statistics.fmean(values), max(values))
