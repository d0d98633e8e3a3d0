"""What this machine and its site are: SLURM or not, partitions and their nodes, GPUs and CPUs here.

`discover` asks; the rest are pure readers of what `scontrol` prints as text. Its JSON differs between SLURM's versions.
"""

from __future__ import annotations

import contextlib
import grp
import os
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

from trainkit import programs, terminal
from trainkit.config.slurm_options import time_minutes
from trainkit.errors import UserError
from trainkit.ranks.hostlist import expand

# A node that is powered down is none of these: SLURM boots it for the job, as clouds do.
_DOWN = frozenset(
    (
        *("DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "ERROR", "FUTURE", "INVAL", "INVALID_REG"),
        *("MAINT", "NOT_RESPONDING", "UNKNOWN"),
    )
)
_NO_CLUSTER = "Could not establish a configuration source"


@dataclass(frozen=True)
class Node:
    """One compute node."""

    name: str
    cpus: int
    gpus: int
    up: bool = True
    mem_mb: int | None = None
    """Memory that jobs may have; None where the site does not say."""
    gpu_types: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    """What `--constraint` can ask for."""


@dataclass(frozen=True)
class Partition:
    """One partition; None where it sets no limit, and no names where it lets everybody in."""

    name: str
    nodes: tuple[Node, ...] = ()
    default: bool = False
    max_time_min: float | None = None
    max_nodes: int | None = None
    up: bool = True
    max_mem_mb: int | None = None
    """Memory per node that one job may have."""
    min_nodes: int | None = None
    has_memory_default: bool = False
    """The site gives a job memory by its CPUs or GPUs, if the job does not say."""
    accounts: tuple[str, ...] = ()
    denied_accounts: tuple[str, ...] = ()
    qos: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    """Unix groups whose members it lets in."""
    preempt_mode: str = ""


@dataclass(frozen=True)
class Site:
    """Where a command is given. ``gpus`` and ``cpus`` are those of this machine that this process may use."""

    slurm: bool
    gpus: int
    cpus: int
    partitions: tuple[Partition, ...] = ()
    unknown: str = ""
    """Why the partitions are not known, if SLURM is there but did not tell."""
    user_groups: tuple[str, ...] = ()
    """Unix groups of this user; empty where they do not matter, as for root."""

    def partition(self, name: str | None) -> Partition | None:
        """The partition of that name, or the default one; None if unknown."""
        for partition in self.partitions:
            if partition.name == name or (name is None and partition.default):
                return partition
        return None


def discover(env: Mapping[str, str]) -> Site:
    """Ask this machine, and SLURM if it is here."""
    gpus, cpus = local_gpus(env.get("CUDA_VISIBLE_DEVICES")), local_cpus()
    if shutil.which("sbatch", path=env.get("PATH")) is None:
        return Site(slurm=False, gpus=gpus, cpus=cpus)
    try:
        nodes = read_nodes(_ask("scontrol", "show", "node", "-o"))
        partitions = read_partitions(_ask("scontrol", "show", "partition", "-o"), nodes)
    except (programs.NoAnswer, ValueError, KeyError, UserError) as error:  # cut off, or of a version to come
        words = error.words if isinstance(error, programs.NoAnswer) else f"scontrol: {terminal.one_line(error)}"
        # SLURM's packages alone make no cluster: such a machine runs jobs itself.
        here = _NO_CLUSTER not in words
        return Site(
            slurm=here, gpus=gpus, cpus=cpus, unknown=words if here else "sbatch is here, but configured for no cluster"
        )
    groups = () if os.geteuid() == 0 or not any(partition.groups for partition in partitions) else _own_groups()
    return Site(slurm=True, gpus=gpus, cpus=cpus, partitions=partitions, user_groups=groups)


def largest_array() -> int:
    """Tasks that one job array may have here, its indices from 0 on; SLURM's own default where it does not say.

    MaxArraySize is one more than the highest index.
    """
    try:
        told = re.search(r"^MaxArraySize\s*=\s*(\d{1,9})", _ask("scontrol", "show", "config"), flags=re.MULTILINE)
    except programs.NoAnswer:
        told = None
    return max(int(told[1]), 1) if told else 1001


def read_partitions(text: str, nodes: Mapping[str, Node]) -> tuple[Partition, ...]:
    """Partitions from ``scontrol show partition -o``."""
    return tuple(_partition(_fields(line), nodes) for line in text.splitlines() if line.startswith("PartitionName="))


def read_nodes(text: str) -> dict[str, Node]:
    """Nodes by name from ``scontrol show node -o``."""
    found = (_node(_fields(line)) for line in text.splitlines() if line.startswith("NodeName="))
    return {node.name: node for node in found}


def count_gpus(gres: str) -> int:
    """GPUs in a list of generic resources: ``gpu:a100:4(S:0-1),nvme:1`` has 4, ``gpu`` has 1."""
    total = 0
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, *rest = item.strip().removeprefix("gres/").replace("=", ":").split(":")
        if kind == "gpu":
            count = rest[-1] if rest and rest[-1].isdigit() else "1"
            total += int(count)
    return total


def gpu_types(gres: str) -> tuple[str, ...]:
    """Types of the GPUs in a list of generic resources: ``gpu:a100:4(S:0-1),nvme:1`` has a100."""
    items = [item.split(":") for item in re.sub(r"\([^)]*\)", "", gres).split(",")]
    return tuple(
        dict.fromkeys(item[1] for item in items if item[0] == "gpu" and len(item) > 1 and not item[1].isdigit())
    )


def visible_gpus(mask: str | None, present: int) -> int:
    """How many of the ``present`` GPUs a process with that CUDA_VISIBLE_DEVICES sees.

    As CUDA reads it: the list ends at the first entry that names no device.
    """
    if mask is None:
        return present
    seen: list[str] = []
    for entry in (part.strip() for part in mask.split(",")):
        if entry in seen or (not entry.startswith(("GPU-", "MIG-")) and not (entry.isdigit() and int(entry) < present)):
            break
        seen.append(entry)
    return len(seen) if present else 0


def local_gpus(mask: str | None) -> int:
    """GPUs of this machine that are visible under ``mask``; asked from the driver, without torch."""
    try:
        import pynvml
    except ImportError:
        return 0
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return 0
    try:
        return visible_gpus(mask, int(pynvml.nvmlDeviceGetCount()))
    except pynvml.NVMLError:
        return 0
    finally:
        pynvml.nvmlShutdown()


def local_cpus() -> int:
    """CPUs that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _own_groups() -> tuple[str, ...]:
    found = []
    for number in {os.getegid(), *os.getgroups()}:
        with contextlib.suppress(KeyError):  # a number without a name
            found.append(grp.getgrgid(number).gr_name)
    return tuple(found)


def _ask(*command: str) -> str:
    return programs.ask(command).shown().require()


def _fields(line: str) -> dict[str, str]:
    # Values may hold spaces (OS=, Reason=), so a field runs up to the next word with an equals sign.
    return {name: value.strip() for name, value in re.findall(r"(\w+)=(.*?)(?=\s\w+=|$)", line)}


def _partition(fields: Mapping[str, str], nodes: Mapping[str, Node]) -> Partition:
    names = fields.get("Nodes", "(null)")
    members = [] if names in ("(null)", "") else expand(names)
    return Partition(
        name=fields["PartitionName"],
        nodes=tuple(nodes[name] for name in members if name in nodes),
        default=fields.get("Default") == "YES",
        max_time_min=_minutes(fields.get("MaxTime", "")),
        max_nodes=int(fields["MaxNodes"]) if fields.get("MaxNodes", "").isdigit() else None,
        up=fields.get("State", "UP") == "UP",
        max_mem_mb=_number(fields.get("MaxMemPerNode", "")) or None,
        min_nodes=_number(fields.get("MinNodes", "")) or None,
        has_memory_default=any((_number(fields.get(f"DefMemPer{unit}", "")) or 0) > 0 for unit in ("CPU", "Node"))
        or "DefMemPerGPU" in fields.get("JobDefaults", ""),
        accounts=names_in(fields.get("AllowAccounts", "")),
        denied_accounts=names_in(fields.get("DenyAccounts", "")),
        qos=names_in(fields.get("AllowQos", fields.get("AllowQOS", ""))),
        groups=names_in(fields.get("AllowGroups", "")),
        preempt_mode=fields.get("PreemptMode", ""),
    )


def names_in(text: str) -> tuple[str, ...]:
    """Names in a list of SLURM's; none for ALL, which is how it says that it does not mind."""
    return () if text in ("", "ALL", "(null)", "N/A") else tuple(name for name in text.split(",") if name)


def _number(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _minutes(text: str) -> float | None:
    try:
        return time_minutes(text)
    except ValueError:  # UNLIMITED, NONE
        return None


def _node(fields: Mapping[str, str]) -> Node:
    # CPUEfctv, where there is one, leaves out the cores that the site keeps for itself.
    cpus = fields.get("CPUEfctv") or fields.get("CPUTot") or "1"
    # CfgTRES is complete only where the site accounts for GPUs; Gres always names them.
    gpus = count_gpus(fields.get("Gres", ""))
    state = fields.get("State", "").upper()
    # "IDLE+DRAIN", "DOWN*"; "IDLE~" is one that is powered down.
    words = {word.rstrip("*~#!%$@^-") for word in state.split("+")}
    memory = _number(fields.get("RealMemory", "")) or 0
    memory -= _number(fields.get("MemSpecLimit", "")) or 0
    return Node(
        fields["NodeName"],
        int(cpus),
        gpus,
        up=not words & _DOWN,
        mem_mb=memory if memory > 1 else None,  # 1 MB is SLURM's word for a memory that nobody has configured
        gpu_types=gpu_types(fields.get("Gres", "")),
        features=names_in(fields.get("AvailableFeatures", "")),
    )
