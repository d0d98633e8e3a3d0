"""Check of nodes, without torch: facts that each node measures of itself, and which nodes are to blame.

`node_facts` measures one node. The facts are plain JSON values, so that nodes can send them to each other; what a node
cannot tell is absent. `trainkit.distributed.health` collects them into the report of rank 0, and `findings` judges that
report: a pure function, as is `table`.
"""

import os
import platform
import socket
import statistics
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from trainkit.common import terminal
from trainkit.common.process import visible_cpus

HEADER = ("node", "GPUs", "memory", "disk", "clock", "versions", "inside GB/s", "verdict")
FOLDER = "TRAINKIT_CHECK_FOLDER"
"""The environment variable that says where the job would write."""
CLOCK_SECONDS = 1.0
"""Farther from the others' a clock is wrong: file times and certificates depend on it."""
FREE_MB = 512
FREE_SHM_MB = 64
FREE_INODES = 1000
FREE_MEMORY_MB = 1024
SLOW = 0.2
"""A link with less of the best one's bandwidth is slow."""
SLOWEST_GB_S = 0.01
"""100 Mbit/s: less is slow whatever the others have."""
_STRANGERS_MB = 1024
_HOT_C = 90
MB = 1024 * 1024


# The report, judged


@dataclass(frozen=True)
class NodeFinding:
    """One thing that is wrong with a node. ``bad``: nothing should run there; otherwise a remark."""

    node: str
    check: str
    what: str
    bad: bool = True


def bad_nodes(found: Sequence[NodeFinding]) -> list[str]:
    """List the nodes that nothing should run on, in SLURM's order of them."""
    nodes: dict[str, None] = {}
    for item in found:
        if item.bad:
            nodes.update(dict.fromkeys(item.node.split(",")))
    return list(nodes)


def findings(report: Mapping[str, Any], here: float | None = None) -> list[NodeFinding]:
    """List everything that is wrong, nodes in their order.

    Args:
        here: this machine's clock minus that of the report's first node, in seconds, to judge between two nodes.
    """
    found = [NodeFinding(node, "answer", "did not answer") for node in dict.fromkeys(report["missing"].values())]
    versions = {}
    gpus = {}
    for facts in report["ranks"].values():
        if "host" in facts:  # of the first rank of a node
            node = facts["node"]
            found += [NodeFinding(node, *item) for item in _of_one(facts)]
            versions[node] = _words(facts["versions"])
            gpus[node] = _gpus(facts)
    found += [*_odd_ones("versions", versions), *_odd_ones("GPUs", gpus)]
    found += [*_clocks(report, here), *_products(report), *_links(report)]
    order = list(_names(report).values())
    return sorted(found, key=lambda item: ([*order, item.node].index(item.node), not item.bad))


def _of_one(facts: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Judge what needs no comparison with other nodes; yields check, words and True if the node is bad."""
    for disk in facts["disks"]:
        least_mb = FREE_SHM_MB if disk["path"] == "/dev/shm" else FREE_MB
        if "error" in disk:
            yield "disk", f"{disk['path']}: {disk['error']}", True
        elif disk["free_mb"] < least_mb:
            yield "disk", f"{disk['path']}: {disk['free_mb']} MB free", True
        elif disk.get("free_inodes", FREE_INODES) < FREE_INODES:
            yield "disk", f"{disk['path']}: {disk['free_inodes']} inodes free", True
    if facts["memory_free_mb"] < FREE_MEMORY_MB:
        yield "memory", f"{facts['memory_free_mb']} MB of {facts['memory_total_mb']} free", True
    for gpu in facts["gpus"]:
        for check, words, bad in _of_gpu(gpu):
            yield check, f"GPU {gpu['index']}: {words}", bad


def _of_gpu(gpu: Mapping[str, Any]) -> Iterator[tuple[str, str, bool]]:
    pids = ", ".join(f"pid {pid}" for pid in gpu.get("processes", ()))
    used = gpu.get("memory_used_mb", 0)
    lanes = gpu.get("pcie_width", 0)
    most = gpu.get("pcie_width_max", 0)
    if "error" in gpu:
        yield "GPUs", str(gpu["error"]), True
    if gpu.get("ecc_errors"):
        yield "ECC", f"{gpu['ecc_errors']} uncorrected memory errors", True
    if gpu.get("remap_failed") or gpu.get("remap_pending"):
        yield "ECC", "bad memory rows need a reset, or could not be replaced", True
    if pids:
        yield "processes", f"already used by {pids}", True
    elif used > _STRANGERS_MB:
        yield "memory", f"{used} MB are in use already", True
    if gpu.get("temperature_c", 0) >= _HOT_C:
        yield "GPUs", f"{gpu['temperature_c']} degrees C", False
    if lanes < most:
        yield "GPUs", f"PCIe has {lanes} of {most} lanes", False


def _odd_ones(check: str, values: Mapping[str, str]) -> list[NodeFinding]:
    """Name the nodes that differ from most others; where there is no majority, the first one counts as usual."""
    if not values:
        return []
    kinds = list(values.values())
    usual, _ = Counter(kinds).most_common(1)[0]  # among equal counts the first seen
    like_most = list(values)[kinds.index(usual)]
    found = []
    for node, value in values.items():
        if value != usual:
            found.append(NodeFinding(node, check, f"{value}, and {like_most} has {usual}"))
    return found


def _clocks(report: Mapping[str, Any], here: float | None) -> list[NodeFinding]:
    clocks = report.get("clocks", {})
    if not clocks:
        return []
    offsets = list(clocks.values())
    if here is not None:
        offsets.append(here)
    right = statistics.median_low(offsets)
    found = []
    for rank, offset in clocks.items():
        if abs(offset - right) > CLOCK_SECONDS:
            found.append(NodeFinding(_names(report)[rank], "clock", f"{offset - right:+.1f} s from the others'"))
    return found


def _products(report: Mapping[str, Any]) -> list[NodeFinding]:
    answers = report.get("found", {})
    checksums = [item["checksum"] for item in answers.values()]
    usual = max(checksums, key=checksums.count, default=None)
    is_any_wrong = any(item["wrong"] for item in answers.values())
    found = []
    for rank, name in _names(report).items():
        item = answers.get(rank)
        if item is None:
            found.append(NodeFinding(name, "answer", "answered at first, then disappeared"))
            continue
        where = f"rank {rank} ({item['device']})"
        if item["wrong"] or item["unsteady"]:
            found.append(NodeFinding(name, "matmul", f"{where}: matrix products are wrong"))
        elif item["checksum"] != usual and not is_any_wrong:
            found.append(NodeFinding(name, "matmul", f"{where}: its checksum differs from that of the other ranks"))
        if "error" in item.get("inside", {}):
            found.append(NodeFinding(name, "all-reduce", f"inside the node: {item['inside']['error']}"))
    return found


def slow(pairs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Select the measured pairs of nodes whose link is slow or broken."""
    best = max((pair.get("gb_s", 0.0) for pair in pairs), default=0.0)
    least = max(SLOWEST_GB_S, SLOW * best)
    return [pair for pair in pairs if pair.get("gb_s", 0.0) < least]


def _links(report: Mapping[str, Any]) -> list[NodeFinding]:
    """Blame the nodes that slow pairs have in common: those first that have no good link at all."""
    names = _names(report)
    pairs = report.get("pairs", [])
    left = list(slow(pairs))
    good = _ranks_in(pair for pair in pairs if pair not in left)
    found = []
    while left:
        counts = _ranks_in(left)
        blamed = [rank for rank in counts if rank not in good] or list(counts)
        most = max(counts[rank] for rank in blamed)
        worst = [rank for rank in blamed if counts[rank] == most]
        own = [pair for pair in left if not set(worst).isdisjoint(pair["ranks"])]
        if len(worst) > 1 and len(own) == 1:  # two nodes alone
            node = ",".join(names[str(rank)] for rank in own[0]["ranks"])
            words = f"{_speed(own[0], names)}; a check of three nodes would tell which link is slow"
        else:
            node = names[str(worst[0])]
            own = [pair for pair in left if worst[0] in pair["ranks"]]
            words = "; ".join(_speed(pair, names) for pair in own[:3])
        found.append(NodeFinding(node, "network", words))
        left = [pair for pair in left if pair not in own]
    return found


def _ranks_in(pairs: Iterable[Mapping[str, Any]]) -> Counter[int]:
    """Count in how many pairs each rank is."""
    return Counter(chain.from_iterable(pair["ranks"] for pair in pairs))


def _speed(pair: Mapping[str, Any], names: Mapping[str, str]) -> str:
    first, second = pair["ranks"]
    speed = pair.get("error") or f"{pair['gb_s']:.3f} GB/s"
    return f"{names[str(first)]} - {names[str(second)]}: {speed}"


def table(report: Mapping[str, Any], found: Sequence[NodeFinding]) -> list[str]:
    """Lines of the check for people: every node, then the speed of their links, then what is wrong."""
    bad = bad_nodes(found)
    rows = []
    for rank, facts in report["ranks"].items():
        if "host" not in facts:
            continue
        inside = "-"
        if "gb_s" in report.get("found", {}).get(rank, {}).get("inside", {}):
            inside = f"{report['found'][rank]['inside']['gb_s']:.2f}"
        clock = "-"
        if rank in report.get("clocks", {}):
            clock = f"{report['clocks'][rank] * 1000:+.0f} ms"
        memory = f"{facts['memory_free_mb'] // 1024} of {facts['memory_total_mb'] // 1024} GB"
        free_mb = min((disk.get("free_mb", 0) for disk in facts["disks"]), default=0)
        verdict = "BAD" if facts["node"] in bad else "ok"
        row = [facts["node"], _gpus(facts), memory, f"{free_mb / 1024:.1f} GB", clock]
        rows.append([*row, _words(facts["versions"]), inside, verdict])
    lines = terminal.table(HEADER, rows, dispensable=("versions", "inside GB/s", "memory"))
    lines += [_speed(pair, _names(report)) for pair in report.get("pairs", [])]
    for item in found:
        mark = "BAD " if item.bad else "note"
        lines.append(f"{mark} {item.node}: {item.check}: {item.what}")
    if bad:
        lines.append(f"Bad: {', '.join(bad)}. Exclude it with --exclude {','.join(bad)}.")
    else:
        lines.append("All good.")
    return lines


def _names(report: Mapping[str, Any]) -> dict[str, str]:
    return {rank: facts["node"] for rank, facts in report["ranks"].items()}


def _words(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in versions.items())


def _gpus(facts: Mapping[str, Any]) -> str:
    kinds = Counter(f"{gpu.get('name', '?')} (driver {gpu.get('driver', '?')})" for gpu in facts["gpus"])
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items()) or "none"


# The facts of one node


def node_facts(folders: Sequence[Path]) -> dict[str, Any]:
    """Measure this node.

    Args:
        folders: where the job will write; each is tried.
    """
    memory = psutil.virtual_memory()
    shm = Path("/dev/shm")
    if shm.is_dir():
        folders = [*folders, shm]
    return {
        "host": socket.gethostname(),
        "versions": versions(),
        "cpus": visible_cpus(),
        "memory_free_mb": memory.available // MB,
        "memory_total_mb": memory.total // MB,
        "disks": [disk_facts(folder) for folder in dict.fromkeys(folders)],
        "gpus": gpu_facts(),
    }


def versions() -> dict[str, str]:
    """Versions of Python, torch and trainkit, as their packages say."""
    found = {"python": platform.python_version()}
    for name, package in (("torch", "torch"), ("trainkit", "trainkit-vision")):
        with suppress(PackageNotFoundError):
            found[name] = version(package)
    return found


def disk_facts(folder: Path) -> dict[str, Any]:
    """Measure free space and inodes below ``folder``; an ``error`` if a trial MiB cannot be written there."""
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
    """List every GPU of this node, as its driver's library sees it; none where there is no library for its maker.

    Ask before this job's ranks open a context: then every process on a GPU is somebody else's.
    """
    return _nvidia_facts() or _amd_facts()


def _nvidia_facts() -> list[dict[str, Any]]:
    """Ask NVML."""
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
    """Ask amdsmi, which comes with ROCm."""
    try:
        import amdsmi as smi

        smi.amdsmi_init()
        handles = smi.amdsmi_get_processor_handles()
    except Exception:  # not installed, no driver, or not whole
        return []
    vram = smi.AmdSmiMemoryType.VRAM
    junction = smi.AmdSmiTemperatureType.JUNCTION
    now = smi.AmdSmiTemperatureMetric
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
    """Read each GPU: vGPUs and slices do not tell everything. The last one may have an ``error``."""
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
