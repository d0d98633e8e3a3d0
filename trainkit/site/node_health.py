"""A check of nodes, without torch: what each node says of itself, and which of them are to blame.

`node_facts` measures one node. The facts are plain JSON values, so that nodes can send them to each other; what a node
cannot tell is absent. `trainkit.distributed.health` collects them into the report of rank 0, and `findings` judges that
report: a pure function, as is `table`.
"""

import os
import platform
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from trainkit import terminal

HEADER = ("node", "GPUs", "memory", "disk", "clock", "versions", "inside GB/s", "verdict")
FOLDER = "TRAINKIT_CHECK_FOLDER"
"""The environment variable that says where the job would write."""
CLOCK_SECONDS = 1.0
"""Farther from the others' a clock is wrong: file times and certificates depend on it."""
FREE_MB, FREE_SHM_MB, FREE_INODES = 512, 64, 1000
FREE_MEMORY_MB = 1024
SLOW = 0.2
"""A link with less of the best one's bandwidth is slow."""
SLOWEST_GB_S = 0.01
"""100 Mbit/s: less is slow whatever the others have."""
_STRANGERS_MB = 1024
_HOT_C = 90
MB = 1024 * 1024
_LOOK_SECONDS = 0.3
_BUSY_PERCENT = 50.0


# The report, judged


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong with a node. ``bad``: nothing should run there; otherwise a remark."""

    node: str
    check: str
    what: str
    bad: bool = True


def culprits(found: Sequence[Finding]) -> list[str]:
    """Nodes that nothing should run on, in SLURM's order of them."""
    return list(dict.fromkeys(node for item in found if item.bad for node in item.node.split(",")))


def findings(report: Mapping[str, Any], here: float | None = None) -> list[Finding]:
    """Everything that is wrong, nodes in their order.

    Args:
        here: this machine's clock minus that of the report's first node, in seconds, to judge between two nodes.
    """
    nodes = {facts["node"]: facts for facts in report["ranks"].values() if "host" in facts}
    found = [Finding(node, "answer", "did not answer") for node in dict.fromkeys(report["missing"].values())]
    found += [Finding(node, *item) for node, facts in nodes.items() for item in _of_one(facts)]
    found += _odd_ones("versions", {node: _words(facts["versions"]) for node, facts in nodes.items()})
    found += _odd_ones("GPUs", {node: _gpus(facts) for node, facts in nodes.items()})
    found += [*_clocks(report, here), *_products(report), *_links(report)]
    order = list(dict.fromkeys([*_names(report).values(), *nodes]))
    return sorted(found, key=lambda item: (order.index(item.node) if item.node in order else len(order), not item.bad))


def _of_one(facts: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """What a node says of itself and no comparison is needed for: check, words, whether it is bad."""
    for disk in facts["disks"]:
        words = disk.get("error", "")
        if not words and disk["free_mb"] < (FREE_SHM_MB if disk["path"] == "/dev/shm" else FREE_MB):
            words = f"{disk['free_mb']} MB free"
        elif not words and disk.get("free_inodes", FREE_INODES) < FREE_INODES:
            words = f"{disk['free_inodes']} inodes free"
        if words:
            yield "disk", f"{disk['path']}: {words}", True
    if facts["memory_free_mb"] < FREE_MEMORY_MB:
        yield "memory", f"{facts['memory_free_mb']} MB of {facts['memory_total_mb']} free", True
    for process in facts["busy"]:
        who = f"{process['user']}'s {process['name']} (pid {process['pid']})"
        yield "processes", f"{who} uses {process['cpu_percent']} % of a core", False
    for gpu in facts["gpus"]:
        yield from ((check, f"GPU {gpu['index']}: {words}", bad) for check, words, bad in _of_gpu(gpu))


def _of_gpu(gpu: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    pids, used = ", ".join(f"pid {pid}" for pid in gpu.get("processes", ())), gpu.get("memory_used_mb", 0)
    lanes, most = gpu.get("pcie_width", 0), gpu.get("pcie_width_max", 0)
    rows = (
        ("error" in gpu, "GPUs", str(gpu.get("error")), True),
        (gpu.get("ecc_errors"), "ECC", f"{gpu.get('ecc_errors')} uncorrected memory errors", True),
        (gpu.get("remap_failed") or gpu.get("remap_pending"), "ECC",
         "bad memory rows wait for a reset, or could not be replaced", True),
        (pids, "processes", f"used by {pids} already", True),
        (not pids and used > _STRANGERS_MB, "memory", f"{used} MB are in use already", True),
        (gpu.get("temperature_c", 0) >= _HOT_C, "GPUs", f"{gpu.get('temperature_c')} degrees C", False),
        (lanes < most, "GPUs", f"PCIe has {lanes} of {most} lanes", False),
    )  # fmt: skip
    return ((check, words, bad) for is_so, check, words, bad in rows if is_so)


def _odd_ones(check: str, values: Mapping[str, str]) -> list[Finding]:
    """Nodes that have not what most have; where there is no majority, what the first one has counts."""
    usual = max(values.values(), key=[*values.values()].count, default="")  # of equal counts the first seen
    other = next((node for node, value in values.items() if value == usual), "")
    odd = {node: value for node, value in values.items() if value != usual}
    return [Finding(node, check, f"{value}, and {other} has {usual}") for node, value in odd.items()]


def _clocks(report: Mapping[str, Any], here: float | None) -> list[Finding]:
    clocks, names = report.get("clocks", {}), _names(report)
    right = statistics.median_low([*clocks.values(), *([] if here is None else [here])]) if clocks else 0.0
    off = {rank: offset - right for rank, offset in clocks.items() if abs(offset - right) > CLOCK_SECONDS}
    return [Finding(names[rank], "clock", f"{offset:+.1f} s from the others'") for rank, offset in off.items()]


def _products(report: Mapping[str, Any]) -> list[Finding]:
    names, answers = _names(report), report.get("found", {})
    gone = [rank for rank in report["ranks"] if rank not in answers]
    found = [Finding(names[rank], "answer", "answered first and was gone then") for rank in gone]
    usual = Counter(item["checksum"] for item in answers.values()).most_common(1)
    for rank, item in answers.items():
        where = f"rank {rank} ({item['device']})"
        if item["wrong"] or item["unsteady"]:
            found.append(Finding(names[rank], "matmul", f"{where}: known products came out wrong"))
        elif item["checksum"] != usual[0][0] and not any(each["wrong"] for each in answers.values()):
            found.append(Finding(names[rank], "matmul", f"{where}: another checksum than the other ranks"))
        if "error" in item.get("inside", {}):
            found.append(Finding(names[rank], "all-reduce", f"inside the node: {item['inside']['error']}"))
    return found


def slow(pairs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Of the pairs of nodes that have been measured those whose link is slow or broken."""
    least = max(SLOWEST_GB_S, SLOW * max((pair.get("gb_s", 0.0) for pair in pairs), default=0.0))
    return [pair for pair in pairs if pair.get("gb_s", 0.0) < least]


def _links(report: Mapping[str, Any]) -> list[Finding]:
    """The nodes that slow pairs have in common: those first that have no good link at all."""
    names, pairs = _names(report), report.get("pairs", [])
    left, found = list(slow(pairs)), []
    good = {str(rank) for pair in pairs if pair not in left for rank in pair["ranks"]}
    while left:
        counts = Counter(str(rank) for pair in left for rank in pair["ranks"])
        blamed = {rank: count for rank, count in counts.items() if rank not in good} or counts
        worst = [rank for rank, count in blamed.items() if count == max(blamed.values())]
        own = [pair for pair in left if not {*map(str, pair["ranks"])}.isdisjoint(worst)]
        if len(worst) > 1 and len(own) == 1:  # two nodes alone
            nodes = [names[str(rank)] for rank in own[0]["ranks"]]
            words = f"{_speed(own[0], names)}; a check of three nodes would tell whose link it is"
        else:
            nodes = [names[worst[0]]]
            own = [pair for pair in left if worst[0] in map(str, pair["ranks"])]
            words = "; ".join(_speed(pair, names) for pair in own[:3])
        found.append(Finding(",".join(nodes), "network", words))
        left = [pair for pair in left if pair not in own]
    return found


def _speed(pair: Mapping[str, Any], names: Mapping[str, str]) -> str:
    words = " - ".join(names[str(rank)] for rank in pair["ranks"])
    speed = pair.get("error") or f"{pair['gb_s']:.3f} GB/s"
    return f"{words}: {speed}"


def table(report: Mapping[str, Any], found: Sequence[Finding]) -> list[str]:
    """The check for people: a line for every node, then what is wrong, then how fast they talk to each other."""
    names, answers = _names(report), report.get("found", {})
    rows = []
    for rank, facts in report["ranks"].items():
        if "host" not in facts:
            continue
        inside = answers.get(rank, {}).get("inside", {}).get("gb_s")
        offset = report.get("clocks", {}).get(rank)
        own = [item for item in found if facts["node"] in item.node.split(",")]
        rows.append((
            facts["node"], _gpus(facts), f"{facts['memory_free_mb'] // 1024} of {facts['memory_total_mb'] // 1024} GB",
            f"{min((disk.get('free_mb', 0) for disk in facts['disks']), default=0) / 1024:.1f} GB",
            "-" if offset is None else f"{offset * 1000:+.0f} ms", _words(facts["versions"]),
            "-" if inside is None else f"{inside:.2f}",
            "BAD" if any(item.bad for item in own) else "ok",
        ))  # fmt: skip
    lines = terminal.table(HEADER, rows, dispensable=("versions", "inside GB/s", "memory"))
    lines += [f"{_speed(pair, names)}" for pair in report.get("pairs", [])]
    lines += [f"{'BAD ' if item.bad else 'note'} {item.node}: {item.check}: {item.what}" for item in found]
    bad = culprits(found)
    lines.append(f"Bad: {', '.join(bad)}. Keep away from it with --exclude {','.join(bad)}." if bad else "All good.")
    return lines


def _names(report: Mapping[str, Any]) -> dict[str, str]:
    return {rank: facts["node"] for rank, facts in report["ranks"].items()}


def _words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items())


def _gpus(facts: Mapping[str, Any]) -> str:
    kinds = Counter(f"{gpu.get('name', '?')} (driver {gpu.get('driver', '?')})" for gpu in facts["gpus"])
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none"


# What one node says of itself


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
    """Every GPU of this node, as its driver's library sees it; none where there is none for its maker.

    To be asked before this job's ranks open a context, so that every process on a GPU is somebody else's.
    """
    return _nvidia_facts() or _amd_facts()


def _nvidia_facts() -> list[dict[str, Any]]:
    """By NVML."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # not installed, or no driver: either way there is nothing to ask
        return []
    nvml: Any = pynvml
    readings: dict[str, Callable[[Any], Any]] = {
        "name": lambda gpu: str(nvml.nvmlDeviceGetName(gpu)),
        "driver": lambda _: str(nvml.nvmlSystemGetDriverVersion()),
        "memory_used_mb": lambda gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).used) // MB,
        "memory_total_mb": lambda gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).total) // MB,
        "temperature_c": lambda gpu: int(nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU)),
        # Since the driver was loaded. Corrected ones are harmless.
        "ecc_errors": lambda gpu: int(
            nvml.nvmlDeviceGetTotalEccErrors(gpu, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC)
        ),
        "remap_failed": lambda gpu: bool(nvml.nvmlDeviceGetRemappedRows(gpu)[3]),
        "remap_pending": lambda gpu: bool(nvml.nvmlDeviceGetRemappedRows(gpu)[2]),
        "pcie_width": lambda gpu: int(nvml.nvmlDeviceGetCurrPcieLinkWidth(gpu)),
        "pcie_width_max": lambda gpu: int(nvml.nvmlDeviceGetMaxPcieLinkWidth(gpu)),
        "processes": lambda gpu: [int(process.pid) for process in nvml.nvmlDeviceGetComputeRunningProcesses(gpu)],
    }

    def handles() -> Iterator[Any]:
        for index in range(nvml.nvmlDeviceGetCount()):
            yield nvml.nvmlDeviceGetHandleByIndex(index)

    try:
        return _facts_of(handles(), readings, (nvml.NVMLError,))
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def _amd_facts() -> list[dict[str, Any]]:
    """By amdsmi, which comes with ROCm."""
    try:
        import amdsmi as smi

        smi.amdsmi_init()
        handles = smi.amdsmi_get_processor_handles()
    except Exception:  # not installed, no driver, or not whole
        return []
    vram, junction, now = smi.AmdSmiMemoryType.VRAM, smi.AmdSmiTemperatureType.JUNCTION, smi.AmdSmiTemperatureMetric
    readings: dict[str, Callable[[Any], Any]] = {
        "name": lambda gpu: str(smi.amdsmi_get_gpu_asic_info(gpu)["market_name"]),
        "driver": lambda gpu: str(smi.amdsmi_get_gpu_driver_info(gpu)["driver_version"]),
        "memory_used_mb": lambda gpu: int(smi.amdsmi_get_gpu_memory_usage(gpu, vram)) // MB,
        "memory_total_mb": lambda gpu: int(smi.amdsmi_get_gpu_memory_total(gpu, vram)) // MB,
        "temperature_c": lambda gpu: int(smi.amdsmi_get_temp_metric(gpu, junction, now.CURRENT)),
        "ecc_errors": lambda gpu: int(smi.amdsmi_get_gpu_total_ecc_count(gpu)["uncorrectable_count"]),
        # It lists processes that hold nothing of this GPU, too.
        "processes": lambda gpu: [
            int(process["pid"])
            for process in smi.amdsmi_get_gpu_process_list(gpu)
            if process["memory_usage"]["vram_mem"]
        ],
    }
    try:
        # Values are "N/A", and other versions have other names.
        return _facts_of(handles, readings, (smi.AmdSmiException, TypeError, KeyError, ValueError))
    finally:
        with suppress(smi.AmdSmiException):
            smi.amdsmi_shut_down()


def _facts_of(
    handles: Iterable[Any], readings: Mapping[str, Callable[[Any], Any]], errors: tuple[type[Exception], ...]
) -> list[dict[str, Any]]:
    """What each GPU tells of itself: vGPUs and slices do not tell everything. The last one may have an ``error``."""
    found: list[dict[str, Any]] = []
    try:
        for handle in handles:
            found.append({"index": len(found)})
            for key, reading in readings.items():
                with suppress(*errors):
                    found[-1][key] = reading(handle)
    except errors as error:
        found.append({"index": len(found), "error": str(error)})  # fell off the bus
    return found


def busy_processes(env: Mapping[str, str]) -> list[dict[str, Any]]:
    """Processes of others, or of another job of this user, that use half a core or more, busiest first."""
    processes = list(psutil.process_iter())
    for process in processes:
        with suppress(psutil.Error):
            process.cpu_percent()
    time.sleep(_LOOK_SECONDS)
    found: list[dict[str, Any]] = []
    for process in processes:
        with suppress(psutil.Error):
            percent = round(process.cpu_percent())  # since the first call
            if percent >= _BUSY_PERCENT and _job_of(process) != env.get("SLURM_JOB_ID", ""):
                said = {"pid": process.pid, "name": process.name(), "user": process.username(), "cpu_percent": percent}
                found.append(said)
    return sorted(found, key=lambda item: -int(item["cpu_percent"]))[:5]


def _job_of(process: psutil.Process) -> str | None:
    """The job that a process belongs to; empty for this user's outside of jobs, None for other users'.

    Goes by the number of the user: in a container it may have no name, or another one than in the variable USER.
    """
    if process.uids().real != os.getuid():
        return None  # another user's environment is not ours to read
    try:
        return process.environ().get("SLURM_JOB_ID", "")
    except psutil.AccessDenied:  # a browser hides its own even from its user
        return ""
