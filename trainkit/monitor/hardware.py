"""Hardware samples of one host: ``system-<host>.jsonl``, one line every few seconds.

Keys of a sample::

    time                  seconds since 1970
    cpu_percent           of the whole machine, 0 to 100
    process_cpu_percent   of this process and its children (data loader workers); 100 is one core
    process_memory_mb     resident memory of the same
    memory_used_mb, memory_total_mb    of the machine
    load                  processes that run or are ready to, mean of the last minute (Unix's load average)
    cpu_taken             percent of the CPU time that the run wanted here since the last sample and other programs got,
                          its own ranks and workers not counted; absent where the kernel does not say
                          (/proc/PID/schedstat)
    gpus                  one entry per GPU of this job: index, util_percent, memory_used_mb, memory_total_mb, power_w,
                          temperature_c; absent without GPUs, and a GPU lacks what its driver does not report
    gpu_kwh               energy of the run's GPUs on this host so far; absent if they do not measure it, as they do
                          since Volta (NVML) and MI100 (amdsmi). Older files may have cpu_kwh, of the processors

``nvidia-smi-<host>.txt`` beside that file shows what `nvidia-smi` said when the GPUs of the run held most memory.
"""

import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from trainkit.cluster.ranks import RankEnv
from trainkit.common import fileio, jsonl, terminal
from trainkit.common.accelerators import AMD, NVIDIA, ROCR
from trainkit.common.process import NoAnswer, ask, device_masks
from trainkit.run.folder import RunDir
from trainkit.run.metrics import KWH, last_sample

MB = 1024 * 1024
SAMPLED = "TRAINKIT_SAMPLED"
"""Variable that a rank sets for its script: this host is sampled already."""
_JOULES_PER_KWH = 3.6e6
_NOTEWORTHY = 1.01
"""Growth of the GPUs' memory from which ``nvidia-smi-<host>.txt`` is written again."""
_SMI_SECONDS = 4.0
"""Patience with `nvidia-smi`."""
_END_SECONDS = 5.0
"""Patience with the thread at the end: a hanging driver must not keep the job."""
Look = Callable[[list[dict[str, Any]]], None]
"""Function that is called with the readings of the GPUs, as samples have them."""


@contextmanager
def sample_host(
    run_dir: RunDir, every_seconds: float, device: str, rank: RankEnv, look: Look | None = None
) -> Iterator[None]:  # fmt: skip
    """`sample_hardware` of this host, by its first rank."""
    if rank.local_rank != 0 or (rank.node_rank != 0 and rank.launcher == "submitit-local"):
        yield
        return
    with sample_hardware(run_dir, socket.gethostname(), every_seconds, device, ranks=rank.world_size, look=look):
        yield


@contextmanager
def sample_hardware(
    run_dir: RunDir, host: str, every_seconds: float, device: str, ranks: int = 1, look: Look | None = None
) -> Iterator[None]:  # fmt: skip
    """Sample in a thread while the block runs; the last sample is taken at its end, so that a short run has one too.

    A sampler that fails says so once on stderr and stops: training does not depend on it.

    Args:
        device: torch's name of it; ``cpu``: no GPUs.
        ranks: number of ranks of the run.
        look: is given the readings of the GPUs of each sample.
    """
    over = threading.Event()
    gpus = NO_GPUS if device == "cpu" else open_gpus(device_masks())
    file = run_dir.hardware(host)
    shown = run_dir.path / f"nvidia-smi-{host}.txt"
    energy = Energy(gpus, last_sample(file))
    processes: dict[int, psutil.Process] = {}
    _process_tree(processes)  # psutil measures between two calls: this is the first

    def sample_all_along() -> None:
        waits = CpuWaits(ranks)
        most = -1.0
        ended = False
        psutil.cpu_percent()  # the first call here too; psutil remembers it for each thread
        while not ended:
            ended = over.wait(every_seconds)
            cpu, resident = _process_tree(processes)
            machine = psutil.virtual_memory()
            sample: dict[str, Any] = {
                "time": round(time.time(), 3),
                "cpu_percent": psutil.cpu_percent(),
                "process_cpu_percent": round(cpu, 1),
                "process_memory_mb": round(resident / MB, 1),
                "memory_used_mb": round((machine.total - machine.available) / MB, 1),
                "memory_total_mb": round(machine.total / MB, 1),
                "load": round(os.getloadavg()[0], 2),
                **waits.since(),
            }
            used = gpus.samples()
            if used:
                sample["gpus"] = used
                memory = sum(item.get("memory_used_mb", 0.0) for item in used)
                if memory > most * _NOTEWORTHY:
                    most = memory
                    with suppress(NoAnswer):
                        fileio.write(shown, ask(["nvidia-smi"], seconds=_SMI_SECONDS).require(), shown.parent)
            jsonl.append_jsonl(file, sample | energy.used())
            if look is not None:
                look(used)

    def guarded() -> None:
        try:
            sample_all_along()
        except Exception as error:
            terminal.warn(f"No more hardware samples in {file.name}: {error}")

    thread = threading.Thread(target=guarded, name="hardware", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(timeout=_END_SECONDS)


class _Seconds(NamedTuple):
    busy: dict[int, float]
    """Each CPU's, whatever it ran."""
    ran: float
    """CPU time of all processes of the run on this machine."""
    waited: float
    """Their threads' time of waiting for a CPU."""


class CpuWaits:
    """Measures how long a run has waited for CPUs since the last call, and how much of that because of other programs.

    Args:
        ranks: number of ranks of the run on all machines. Those of this machine are children of this one's parent.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._root = psutil.Process(os.getppid() if ranks > 1 else os.getpid())
        self._threads: dict[str, float] = {}
        self._used: set[int] = set()
        self._cpus = self._counted()

    def since(self) -> dict[str, float]:
        """``cpu_taken``; nothing where the kernel does not report it."""
        earlier = self._cpus
        self._cpus = self._counted()
        if earlier is None or self._cpus is None:
            return {}
        known = self._used & earlier.busy.keys() & self._cpus.busy.keys()
        busy = sum(self._cpus.busy[cpu] - earlier.busy[cpu] for cpu in known)
        own = max(self._cpus.ran - earlier.ran, 0.0)
        waits = max(self._cpus.waited - earlier.waited, 0.0)
        # Of the others' CPU time the run would have used the share waits / (own + waits). Its waits alone do not
        # say how long it was held up: a rank that sleeps until another one is done does not wait for a CPU.
        lost = max(busy - own, 0.0) * waits / max(own + waits, 1e-9)
        return {"cpu_taken": round(100 * lost / max(own + lost, 1e-9), 1)}

    def _counted(self) -> _Seconds | None:
        """Totals so far; None where the kernel does not report them."""
        try:
            # Not psutil's list: it has no CPU numbers, and leaves out CPUs that are offline.
            busy: dict[int, float] = {}
            for line in fileio.read_start(Path("/proc/stat"), 1 << 20).splitlines():
                cpu = re.match(r"cpu(\d+) ", line)
                if cpu:
                    row = list(map(int, line.split()[1:]))
                    # user, nice, system, and after idle and iowait: irq, softirq, steal
                    busy[int(cpu[1])] = sum(row[0:3] + row[5:8]) / os.sysconf("SC_CLK_TCK")
            me = psutil.Process()
            run = self._root.children(recursive=True)
            ran = 0.0
            if self._root == me:
                run.append(me)
            else:
                ran = sum(self._root.cpu_times()[2:4])  # by children that have ended
        except (psutil.Error, OSError, ValueError, IndexError):  # no Linux, or a container that hides this
            return None
        for process in run:
            with suppress(psutil.Error, OSError):  # it may end at any moment; its time is then added to its parent's
                ran += sum(process.cpu_times()[:4])
                self._used |= os.sched_getaffinity(process.pid)
            for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                with suppress(OSError, ValueError, IndexError):  # the last number of a thread that has ended stays
                    self._threads[path.parent.name] = int(fileio.read_start(path, 200).split()[1]) / 1e9
        if not self._used & busy.keys() or not self._threads:
            return None
        return _Seconds(busy, ran, sum(self._threads.values()))


def _process_tree(known: dict[int, psutil.Process]) -> tuple[float, int]:
    """CPU percent since the last call, and resident bytes, of this process and its children.

    ``known`` keeps the process objects between calls, because psutil counts CPU time from the last call on the object.
    """
    me = psutil.Process()
    tree = {process.pid: known.get(process.pid, process) for process in [me, *me.children(recursive=True)]}
    known.clear()
    known.update(tree)
    cpu = 0.0
    memory = 0
    for process in tree.values():
        with suppress(psutil.Error):  # it may end at any moment
            cpu += process.cpu_percent()
            memory += process.memory_info().rss
    return cpu, memory


@dataclass
class Gpus:
    """The GPUs that a process sees, by their index on the machine, and what their driver tells of each.

    Values that it does not report are left out: vGPUs and slices lack some.
    """

    handles: Mapping[int, Any]
    readings: Mapping[str, Callable[[Any], Any]]
    """util_percent, memory_used_mb, memory_total_mb, power_w, temperature_c."""
    joules_of: Callable[[Any], float]
    """Energy since the driver was loaded."""
    errors: tuple[type[Exception], ...]
    """Errors that are raised for a value that is not reported."""

    def samples(self) -> list[dict[str, Any]]:
        """Index and readings of each GPU."""
        return [{"index": index, **self._told(handle, self.readings)} for index, handle in self.handles.items()]

    def joules(self) -> dict[int, float]:
        """Energy by index, of the GPUs that measure it."""
        found = {}
        for index, handle in self.handles.items():
            readings = self._told(handle, {"joules": self.joules_of})
            if readings:
                found[index] = float(readings["joules"])
        return found

    def _told(self, handle: Any, readings: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
        found = {}
        for key, read in readings.items():
            with suppress(*self.errors):
                value = read(handle)
                if jsonl.is_number(value):
                    found[key] = value
        return found


NO_GPUS = Gpus({}, {}, float, ())


def open_gpus(masks: Mapping[str, str]) -> Gpus:
    """The GPUs that a process with these masks sees (`trainkit.common.accelerators`); none where there is no driver."""
    for look in (_nvidia, _amd):
        gpus = look(masks)
        if gpus is not None and gpus.handles:
            return gpus
    return NO_GPUS


def _nvidia(masks: Mapping[str, str]) -> Gpus | None:
    """GPUs by NVML."""
    import pynvml as nvml

    with suppress(nvml.NVMLError):
        nvml.nvmlInit()
        handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
        uuids = [nvml.nvmlDeviceGetUUID(handle) for handle in handles]
        return Gpus(
            {index: handles[index] for index in visible_indices(NVIDIA.mask_in(masks), uuids)},
            {
                "util_percent": lambda handle: nvml.nvmlDeviceGetUtilizationRates(handle).gpu,
                "memory_used_mb": lambda handle: round(nvml.nvmlDeviceGetMemoryInfo(handle).used / MB, 1),
                "memory_total_mb": lambda handle: round(nvml.nvmlDeviceGetMemoryInfo(handle).total / MB, 1),
                "power_w": lambda handle: round(nvml.nvmlDeviceGetPowerUsage(handle) / 1000, 1),
                "temperature_c": lambda handle: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU),
            },
            lambda handle: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1000,
            (nvml.NVMLError,),
        )
    return None


def _amd(masks: Mapping[str, str]) -> Gpus | None:
    """GPUs by amdsmi, which comes with ROCm, and fails in many ways where that is not whole."""
    try:
        import amdsmi as smi

        smi.amdsmi_init()
        handles = smi.amdsmi_get_processor_handles()
        uuids = [f"GPU-{smi.amdsmi_get_gpu_device_uuid(handle)}" for handle in handles]
    except Exception:
        return None
    # HIP counts anew what the lower layer has left.
    left = visible_indices(masks.get(ROCR), uuids)
    of_hip = next(filter(None, map(masks.get, AMD.masks)), None)
    seen = [left[index] for index in visible_indices(of_hip, [uuids[index] for index in left])]
    vram = smi.AmdSmiMemoryType.VRAM
    junction = smi.AmdSmiTemperatureType.JUNCTION

    def power(handle: Any) -> Any:
        told = smi.amdsmi_get_power_info(handle)  # MI300 says what it takes now, older ones say it of a while
        now = told.get("current_socket_power")
        return now if jsonl.is_number(now) else told.get("average_socket_power")

    def joules(handle: Any) -> float:
        told = smi.amdsmi_get_energy_count(handle)
        return float(told.get("energy_accumulator", told.get("power")) * told["counter_resolution"] / 1e6)

    return Gpus(
        {index: handles[index] for index in seen},
        {
            "util_percent": lambda handle: smi.amdsmi_get_gpu_activity(handle)["gfx_activity"],
            "memory_used_mb": lambda handle: round(smi.amdsmi_get_gpu_memory_usage(handle, vram) / MB, 1),
            "memory_total_mb": lambda handle: round(smi.amdsmi_get_gpu_memory_total(handle, vram) / MB, 1),
            "power_w": power,
            "temperature_c": lambda handle: smi.amdsmi_get_temp_metric(
                handle, junction, smi.AmdSmiTemperatureMetric.CURRENT
            ),
        },
        joules,
        (smi.AmdSmiException, TypeError, KeyError),  # "N/A", and names that other versions have
    )


def visible_indices(mask: str | None, uuids: list[str]) -> list[int]:
    """Indices, of the driver, of the GPUs that a mask leaves; all without a mask.

    Like CUDA and ROCm, it stops at the first entry that names no GPU.

    Args:
        uuids: of every GPU in the driver's order; a mask may name a GPU by a unique prefix of its UUID.
    """
    if mask is None:
        return list(range(len(uuids)))
    indices: list[int] = []
    for part in mask.split(","):
        entry = part.strip()
        matches = [uuid for uuid in uuids if entry and uuid.startswith(entry)]
        if entry.isdigit() and int(entry) < len(uuids):
            indices.append(int(entry))
        elif len(matches) == 1 and not entry.isdigit():
            indices.append(uuids.index(matches[0]))
        else:
            break
    return indices


class Energy:
    """Energy of the run on this host, added to that in ``before``, the last sample of earlier attempts."""

    def __init__(self, gpus: Gpus, before: Mapping[str, Any]) -> None:
        self._gpus = gpus
        self._total = {key: float(before[key]) for key in KWH if jsonl.is_number(before.get(key))}
        self._joules = gpus.joules()

    def used(self) -> dict[str, float]:
        """``gpu_kwh`` so far, where the GPUs measure it; and ``cpu_kwh`` of earlier attempts."""
        before = self._joules
        self._joules = self._gpus.joules()
        gpu = [max(0.0, now - before[index]) for index, now in self._joules.items() if index in before]
        if gpu:
            self._total["gpu_kwh"] = self._total.get("gpu_kwh", 0.0) + sum(gpu) / _JOULES_PER_KWH
        return {key: round(value, 7) for key, value in self._total.items()}
