"""Hardware samples of a run's hosts, as its folder has them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainkit import fileio

_TAKEN = 10.0
"""Percent of the CPU time that a run wanted, from which on others had too much of it: `trainkit.monitor.hardware`.

Measured on two cores: runs of 1, 2 and 4 ranks come to 0 or 1 alone, to 27 to 43 beside one busy program, and to 79 to
81 beside eight.
"""


def cpus_taken(taken: float | None, load: float | None = None) -> str:
    """Why speeds on the CPU are not compared, or empty: who waits for one is slowed down, one run more than another."""
    if taken is None or taken <= _TAKEN:
        return ""
    told = f" (load {load:.1f})" if load is not None else ""
    return f"the CPUs were taken: others had {taken:.0f} % of the time that it wanted{told}"


@dataclass(frozen=True)
class Usage:
    """Mean and highest value of one hardware reading over a run."""

    mean: float
    highest: float


@dataclass(frozen=True)
class HostSamples:
    """Hardware samples of one host."""

    host: str
    samples: list[dict[str, Any]]

    def machine(self, key: str) -> Usage | None:
        """Usage of a reading of the machine: ``cpu_percent``, ``memory_used_mb`` ..."""
        return _usage(sample.get(key) for sample in self.samples)

    def gpu_indices(self) -> list[int]:
        """GPUs that were sampled, by NVML's index."""
        return sorted({gpu["index"] for sample in self.samples for gpu in _gpus(sample)})

    def gpu(self, index: int, key: str) -> Usage | None:
        """Usage of a reading of one GPU: ``util_percent``, ``memory_used_mb``, ``power_w`` ..."""
        return _usage(gpu.get(key) for sample in self.samples for gpu in _gpus(sample) if gpu["index"] == index)

    def series(self, key: str, gpu: int | None = None) -> list[tuple[float, float]]:
        """(time, value) of a reading of the machine, or of one GPU."""
        points = []
        for sample in self.samples:
            holders = [sample] if gpu is None else [found for found in _gpus(sample) if found["index"] == gpu]
            points += [(sample["time"], holder[key]) for holder in holders if fileio.is_number(holder.get(key))]
        return points


def _gpus(sample: Mapping[str, Any]) -> list[dict[str, Any]]:
    gpus = sample.get("gpus")
    readable = [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []
    return [gpu for gpu in readable if fileio.is_whole(gpu.get("index"))]


def _usage(values: Iterable[Any]) -> Usage | None:
    numbers = [float(value) for value in values if fileio.is_number(value)]
    return Usage(statistics.fmean(numbers), max(numbers)) if numbers else None
