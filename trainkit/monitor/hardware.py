"""Hardware samples of one host: ``system-<host>.jsonl``, one line every few seconds.

Keys of a sample::

    time                  seconds since 1970
    cpu_percent           of the whole machine, 0 to 100
    process_cpu_percent   of this process and its children (data loader workers); 100 is one core
    process_memory_mb     resident memory of the same
    memory_used_mb, memory_total_mb    of the machine
    gpus                  one entry per GPU of this job: index, util_percent, memory_used_mb, memory_total_mb, power_w,
                          temperature_c; absent without GPUs, and a GPU lacks what its driver does not tell
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from trainkit.records import jsonl
from trainkit.records.rundir import RunDir

MB = 1024 * 1024
ReadGpus = Callable[[], list[dict[str, Any]]]


@contextmanager
def sample_hardware(
    run_dir: RunDir, host: str, every_seconds: float, device: str, env: Mapping[str, str] | None = None
) -> Iterator[None]:
    """Sample in a thread while the block runs; the last sample is taken at its end, so that a short run has one too.

    A sampler that fails says so once on stderr and stops: training does not depend on it.

    Args:
        device: ``cuda`` samples GPUs as well; anything else does not.
        env: where CUDA_VISIBLE_DEVICES is looked up (default: this process's environment).
    """
    mask = (os.environ if env is None else env).get("CUDA_VISIBLE_DEVICES")
    stop = threading.Event()
    read_gpus = _gpu_reader(mask) if device.startswith("cuda") else _no_gpus
    processes: dict[int, psutil.Process] = {}
    _process_tree(processes)  # psutil measures from one call to the next: this sets the beginning
    sampling = partial(_sample_until, run_dir.hardware(host), every_seconds, read_gpus, processes, stop)
    thread = threading.Thread(target=sampling, name="hardware", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=5.0)  # a hanging driver must not keep the job


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


def _sample_until(
    path: Path, every_seconds: float, read_gpus: ReadGpus, processes: dict[int, psutil.Process], stop: threading.Event
) -> None:
    try:
        psutil.cpu_percent()  # the beginning of this, which psutil keeps for each thread
        ended = False
        while not ended:
            ended = stop.wait(every_seconds)
            cpu, memory = _process_tree(processes)
            machine = psutil.virtual_memory()
            sample: dict[str, Any] = {
                "time": round(time.time(), 3),
                "cpu_percent": psutil.cpu_percent(),
                "process_cpu_percent": round(cpu, 1),
                "process_memory_mb": round(memory / MB, 1),
                "memory_used_mb": round((machine.total - machine.available) / MB, 1),
                "memory_total_mb": round(machine.total / MB, 1),
            }
            if gpus := read_gpus():
                sample["gpus"] = gpus
            jsonl.append(path, sample)
    except Exception as error:
        print(f"No more hardware samples in {path.name}: {error}", file=sys.stderr, flush=True)


def _process_tree(known: dict[int, psutil.Process]) -> tuple[float, int]:
    """CPU percent since the last call, and resident bytes, of this process and its children.

    ``known`` keeps the process objects between calls, because psutil counts CPU time from the last call on the object.
    """
    me = psutil.Process()
    tree = {process.pid: process for process in [me, *me.children(recursive=True)]}
    for pid in known.keys() - tree.keys():
        del known[pid]
    cpu, memory = 0.0, 0
    for pid, process in tree.items():
        process = known.setdefault(pid, process)
        with suppress(psutil.Error):  # it may end at any moment
            cpu += process.cpu_percent()
            memory += process.memory_info().rss
    return cpu, memory


def _no_gpus() -> list[dict[str, Any]]:
    return []


def _gpu_reader(mask: str | None) -> ReadGpus:
    """A function that samples the GPUs of this job; of none where NVML is missing."""
    import pynvml

    try:
        pynvml.nvmlInit()
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        uuids = [pynvml.nvmlDeviceGetUUID(handle) for handle in handles]
    except pynvml.NVMLError:
        return _no_gpus
    readings: dict[str, Callable[[Any], float]] = {
        "util_percent": lambda handle: pynvml.nvmlDeviceGetUtilizationRates(handle).gpu,
        "memory_used_mb": lambda handle: round(pynvml.nvmlDeviceGetMemoryInfo(handle).used / MB, 1),
        "memory_total_mb": lambda handle: round(pynvml.nvmlDeviceGetMemoryInfo(handle).total / MB, 1),
        "power_w": lambda handle: round(pynvml.nvmlDeviceGetPowerUsage(handle) / 1000, 1),
        "temperature_c": lambda handle: pynvml.nvmlDeviceGetTemperature(handle, pynvml.NVML_TEMPERATURE_GPU),
    }

    def read() -> list[dict[str, Any]]:
        samples = []
        for index in visible_indices(mask, uuids):
            sample: dict[str, Any] = {"index": index}
            for key, reading in readings.items():
                with suppress(pynvml.NVMLError):  # vGPUs and MIG slices do not tell everything
                    sample[key] = reading(handles[index])
            samples.append(sample)
        return samples

    return read
