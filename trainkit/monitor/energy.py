"""Energy that a run has used on a host, in kWh: of its GPUs, and of the machine's processors where they tell.

GPUs count it themselves (NVML, Volta and later); of others it is their power times the time between two samples.
Processors count it as well (RAPL), whole packages: with what else runs there. Linux tells it to root alone by default.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit import fileio
from trainkit.monitor.gpus import Gpus
from trainkit.run.folder import RunDir

_JOULES_PER_KWH = 3.6e6
_TAIL_BYTES = 32768
RAPL = Path("/sys/class/powercap")
KEYS = ("gpu_kwh", "cpu_kwh")


class Energy:
    """Adds up from one call to the next, and goes on where earlier attempts on this host have ended."""

    def __init__(self, gpus: Gpus | None, before: Mapping[str, Any], *, rapl: Path = RAPL) -> None:
        self._gpus, self._rapl = gpus, rapl
        self._total = {key: float(before[key]) for key in KEYS if fileio.is_number(before.get(key))}
        self._gpu_joules = gpus.joules() if gpus is not None else {}
        self._cpu_joules = self._packages()
        self._powers: dict[int, float] = {}
        self._since = time.monotonic()

    def used(self, samples: list[dict[str, Any]]) -> dict[str, float]:
        """``gpu_kwh`` and ``cpu_kwh`` of the run on this host until now; what nobody tells is left out.

        Args:
            samples: of the GPUs, just taken.
        """
        now = time.monotonic()
        seconds, self._since = now - self._since, now
        counted = self._gpus.joules() if self._gpus is not None else {}
        for index, joules in counted.items():
            if index in self._gpu_joules:
                self._add("gpu_kwh", max(0.0, joules - self._gpu_joules[index]))
        self._gpu_joules = counted
        for sample in samples:
            if sample["index"] not in counted and "power_w" in sample:
                before = self._powers.get(sample["index"], sample["power_w"])
                self._add("gpu_kwh", (before + sample["power_w"]) / 2 * seconds)
                self._powers[sample["index"]] = sample["power_w"]
        packages = self._packages()
        for name, (joules, whole) in packages.items():
            if name in self._cpu_joules:
                self._add("cpu_kwh", (joules - self._cpu_joules[name][0]) % whole)  # the counter begins anew
        self._cpu_joules = packages
        return {key: round(value, 7) for key, value in self._total.items()}

    def _add(self, key: str, joules: float) -> None:
        self._total[key] = self._total.get(key, 0.0) + joules / _JOULES_PER_KWH

    def _packages(self) -> dict[str, tuple[float, float]]:
        """By name of each package: joules, and at how many the counter begins anew."""
        found = {}
        for folder in sorted(self._rapl.glob("intel-rapl:[0-9]*")):  # AMD's processors have it under this name too
            try:
                if fileio.read_text(folder / "name").startswith("package"):
                    whole = int(fileio.read_text(folder / "max_energy_range_uj")) / 1e6
                    found[folder.name] = (int(fileio.read_text(folder / "energy_uj")) / 1e6, whole)
            except (OSError, ValueError):
                continue
        return found


def last_sample(file: Path) -> dict[str, Any]:
    """The newest line of a host's samples; empty if there is none."""
    try:
        text = fileio.read_end(file, _TAIL_BYTES)
    except OSError:
        return {}
    parsed = (fileio.parse_object(line) for line in reversed(text.splitlines()))
    return next((found for found in parsed if found is not None), {})


def energy_of(run: RunDir) -> dict[str, float] | None:
    """``gpu_kwh`` and ``cpu_kwh`` of a run over all hosts whose samples are in its folder; None: nobody has told."""
    samples = [last_sample(file) for file in sorted(run.path.glob("system-*.jsonl"))]
    found = {key: [sample[key] for sample in samples if fileio.is_number(sample.get(key))] for key in KEYS}
    return {key: round(sum(values), 6) for key, values in found.items() if values} or None
