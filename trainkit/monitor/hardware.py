"""Hardware samples of one host: ``system-<host>.jsonl``, one line every few seconds.

Keys of a sample::

    time                  seconds since 1970
    cpu_percent           of the whole machine, 0 to 100
    process_cpu_percent   of this process and its children (data loader workers); 100 is one core
    process_memory_mb     resident memory of the same
    memory_used_mb, memory_total_mb    of the machine
    load                  processes that run or are ready to, mean of the last minute (Unix's load average)
    cpu_pressure          percent of the time since the last sample in which some process was ready and had no CPU;
                          absent where the kernel does not tell (Linux's /proc/pressure)
    cpu_taken             percent of the CPU time that the run wanted here since then which other programs had instead,
                          not its own ranks and workers; absent where the kernel does not tell (/proc/PID/schedstat)
    gpus                  one entry per GPU of this job: index, util_percent, memory_used_mb, memory_total_mb, power_w,
                          temperature_c; absent without GPUs, and a GPU lacks what its driver does not tell
    gpu_kwh, cpu_kwh      energy of the run on this host until now (`trainkit.monitor.energy`); absent if nobody tells

``nvidia-smi-<host>.txt`` beside them shows the GPUs when they held most memory.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from trainkit import fileio
from trainkit.monitor.energy import Energy, last_sample
from trainkit.monitor.gpus import MB, Gpus
from trainkit.ranks.env import RankEnv
from trainkit.run.folder import RunDir

_PRESSURE = Path("/proc/pressure/cpu")
_STAT = Path("/proc/stat")
_NOTEWORTHY = 1.01
"""So much more memory than ever, and the GPUs are shown anew."""


@contextmanager
def sample_host(run_dir: RunDir, every_seconds: float, device: str, rank: RankEnv) -> Iterator[None]:
    """`sample_hardware` of this host, by its first rank."""
    if rank.local_rank != 0 or (rank.node_rank != 0 and rank.launcher == "submitit-local"):
        yield
        return
    with sample_hardware(run_dir, socket.gethostname(), every_seconds, device, ranks=rank.world_size):
        yield


@contextmanager
def sample_hardware(
    run_dir: RunDir,
    host: str,
    every_seconds: float,
    device: str,
    env: Mapping[str, str] | None = None,
    ranks: int = 1,
) -> Iterator[None]:
    """Sample in a thread while the block runs; the last sample is taken at its end, so that a short run has one too.

    A sampler that fails says so once on stderr and stops: training does not depend on it.

    Args:
        device: ``cuda`` samples GPUs as well; anything else does not.
        env: where CUDA_VISIBLE_DEVICES is looked up (default: this process's environment).
        ranks: of the run.
    """
    mask = (os.environ if env is None else env).get("CUDA_VISIBLE_DEVICES")
    stop = threading.Event()
    gpus = Gpus(mask) if device.startswith("cuda") else None
    file, shown = run_dir.hardware(host), run_dir.path / f"nvidia-smi-{host}.txt"
    energy = Energy(gpus, last_sample(file))
    processes: dict[int, psutil.Process] = {}
    _process_tree(processes)  # psutil measures from one call to the next: this sets the beginning
    sampling = partial(_sample_until, file, shown, every_seconds, gpus, energy, processes, stop, ranks)
    thread = threading.Thread(target=sampling, name="hardware", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(timeout=5.0)  # a hanging driver must not keep the job


def _sample_until(
    path: Path,
    shown: Path,
    every_seconds: float,
    gpus: Gpus | None,
    energy: Energy,
    processes: dict[int, psutil.Process],
    stop: threading.Event,
    ranks: int,
) -> None:
    waits = CpuWaits(ranks)
    try:
        most = 0.0
        psutil.cpu_percent()  # the beginning of this, which psutil keeps for each thread
        ended = False
        while not ended:
            ended = stop.wait(every_seconds)
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
            used = gpus.samples() if gpus is not None else []
            if gpus is not None and used:
                sample["gpus"] = used
                memory = sum(item.get("memory_used_mb", 0.0) for item in used)
                if memory > most * _NOTEWORTHY or not most:
                    most = memory
                    fileio.write(shown, gpus.described(), shown.parent)
            sample |= energy.used(used)
            fileio.append_jsonl(path, sample)
    except Exception as error:
        print(f"No more hardware samples in {path.name}: {error}", file=sys.stderr, flush=True)


class _Seconds(NamedTuple):
    busy: dict[int, float]
    """Of each CPU, with whatever it ran."""
    ran: float
    """Of all processes of the run on this machine."""
    waited: float
    """Of their threads, for a CPU."""


class CpuWaits:
    """What a run waited for CPUs since it was asked last, and what of that was because others had them.

    Args:
        ranks: of the run, those of other machines too. All of this machine are children of what started this one.
    """

    def __init__(self, ranks: int = 1) -> None:
        self._root = psutil.Process(os.getppid() if ranks > 1 else os.getpid())
        self._threads: dict[str, float] = {}
        self._used: set[int] = set()
        self._pressure = time.monotonic(), _waited()
        self._cpus = self._counted()

    def since(self) -> dict[str, float]:
        """``cpu_pressure`` and ``cpu_taken``; without what the kernel does not tell."""
        found: dict[str, float] = {}
        (then, before), self._pressure = self._pressure, (time.monotonic(), _waited())
        now, waited = self._pressure
        if before is not None and waited is not None and now > then:
            found["cpu_pressure"] = round(min(100 * (waited - before) / (now - then), 100.0), 1)
        earlier, self._cpus = self._cpus, self._counted()
        if earlier is not None and self._cpus is not None:
            known = self._used & earlier.busy.keys() & self._cpus.busy.keys()
            busy = sum(self._cpus.busy[cpu] - earlier.busy[cpu] for cpu in known)
            own, waits = max(self._cpus.ran - earlier.ran, 0.0), max(self._cpus.waited - earlier.waited, 0.0)
            # Of what others had, the run wanted as large a part as it waited of its time. The waits themselves do not
            # tell how long it was held up: a rank that sleeps until another one had its turn does not wait for a CPU.
            lost = max(busy - own, 0.0) * waits / max(own + waits, 1e-9)
            found["cpu_taken"] = round(100 * lost / max(own + lost, 1e-9), 1)
        return found

    def _counted(self) -> _Seconds | None:
        """Until now; None where the kernel does not tell."""
        busy = {}
        try:
            # Not psutil's list, which has no numbers: CPUs that are switched off are not in it.
            for name, *ticks in (line.split() for line in fileio.read_start(_STAT, 1 << 20).splitlines()):
                if name.startswith("cpu") and name != "cpu":
                    # user, nice, system, idle, iowait, irq, softirq, steal
                    spent = [int(word) for word in ticks[:3] + ticks[5:8]]
                    busy[int(name[3:])] = sum(spent) / os.sysconf("SC_CLK_TCK")
            me = psutil.Process()
            run = [*self._root.children(recursive=True), *([me] if self._root == me else [])]
            ran = sum(self._root.cpu_times()[2:4]) if self._root != me else 0.0  # of those that have ended
        except (psutil.Error, OSError, ValueError):  # no Linux, or a container that hides this
            return None
        for process in run:
            with suppress(psutil.Error, OSError):  # it may end at any moment; its parent has its time then
                ran += sum(process.cpu_times()[:4])
                self._used |= os.sched_getaffinity(process.pid)
            for path in Path(f"/proc/{process.pid}/task").glob("*/schedstat"):
                with suppress(OSError, ValueError, IndexError):  # of threads that have ended their last words stay
                    self._threads[path.parent.name] = int(fileio.read_start(path, 200).split()[1]) / 1e9
        return _Seconds(busy, ran, sum(self._threads.values())) if self._used & busy.keys() and self._threads else None


def _waited() -> float | None:
    """Seconds since the machine was booted."""
    try:
        return int(fileio.read_start(_PRESSURE, 200).splitlines()[0].rpartition("total=")[2]) / 1e6
    except (OSError, ValueError, IndexError):
        return None


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
