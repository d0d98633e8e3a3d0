"""Partitions and nodes of a site, and pure readers of the text in which `scontrol` prints them.

Its JSON differs between SLURM's versions.
"""

import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Literal

from trainkit.common.accelerators import SHARES
from trainkit.common.hosts import expand
from trainkit.config.slurm_options import time_minutes

# A node that is powered down is none of these: SLURM boots it for the job, as clouds do.
_DOWN = {
    "DOWN", "DRAIN", "DRAINED", "DRAINING", "FAIL", "FAILING", "ERROR", "FUTURE", "INVAL", "INVALID_REG", "MAINT",
    "NOT_RESPONDING", "UNKNOWN",
}  # fmt: skip
Dialect = Literal["gpus-per-node", "gres", "constraint"]
ON_GPUS = "bf16 on GPUs from Ampere on and by AMD and Intel, fp16 on Volta and Turing, else fp32"
ON_CPUS = "bf16 on CPUs with AVX512-BF16 or AMX, else fp32"


@dataclass(frozen=True)
class ComputeNode:
    """One compute node."""

    name: str
    cpus: int
    gpus: int
    up: bool = True
    mem_mb: int | None = None
    """Memory that jobs may have; None where the site does not say."""
    gpu_types: tuple[str, ...] = ()
    features: tuple[str, ...] = ()
    """Features that `--constraint` can ask for."""
    shares: Mapping[str, int] = field(default_factory=dict)
    """Generic resources that are shares of GPUs -> how many one GPU has."""


@dataclass(frozen=True)
class Partition:
    """One partition; None where it sets no limit, and no names where it lets everybody in."""

    name: str
    nodes: tuple[ComputeNode, ...] = ()
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
    qos: tuple[str, ...] = ()
    preempt_mode: str = ""


@dataclass(frozen=True)
class Site:
    """Scheduler and machine of a command. ``gpus`` and ``cpus`` are those that this process may use here."""

    scheduler: str
    """Name of the scheduler that is here; empty if there is none."""
    gpus: int
    cpus: int
    partitions: tuple[Partition, ...] = ()
    unknown: str = ""
    """Reason why the partitions are not known, if SLURM is there but did not tell."""
    expected: str = ""
    """The variable that says that a scheduler is meant to be here, if there is none."""

    def partition(self, name: str | None) -> Partition | None:
        """Return the partition of that name, or the default one; None if unknown."""
        for item in self.partitions:
            if item.name == name or (name is None and item.default):
                return item
        return None


def read_partitions(text: str, nodes: Mapping[str, ComputeNode]) -> tuple[Partition, ...]:
    """Read partitions from ``scontrol show partition -o``."""
    lines = [line for line in text.splitlines() if line.startswith("PartitionName=")]
    return tuple(_partition(_fields(line), nodes) for line in lines)


def read_nodes(text: str) -> dict[str, ComputeNode]:
    """Read nodes by name from ``scontrol show node -o``."""
    found = {}
    for line in text.splitlines():
        if line.startswith("NodeName="):
            node = _node(_fields(line))
            found[node.name] = node
    return found


def count_gpus(gres: str, kind: str = "gpu") -> int:
    """Count GPUs in a list of generic resources: ``gpu:a100:4(S:0-1),nvme:1`` has 4, ``gpu`` has 1; or another kind."""
    total = 0
    for rest in _listed(gres, kind):
        count = rest[-1] if rest else ""
        total += int(count) if count.isdigit() else 1
    return total


def gpus_asked(gres: str) -> int:
    """Count GPUs that a job sees which asks for these: with ``shard:2`` it is one, of which others have shards, too."""
    return count_gpus(gres) or int(any(count_gpus(gres, kind) for kind in SHARES))


def gpu_types(gres: str) -> tuple[str, ...]:
    """List types of the GPUs in a list of generic resources: ``gpu:a100:4(S:0-1),nvme:1`` has a100."""
    return tuple(dict.fromkeys(rest[0] for rest in _listed(gres, "gpu") if rest and not rest[0].isdigit()))


def _listed(gres: str, wanted: str) -> list[list[str]]:
    """Split what follows a kind in each item of such a list: its type, its count, both or neither."""
    found = []
    for item in re.sub(r"\([^)]*\)", "", gres).split(","):
        kind, *rest = item.strip().removeprefix("gres/").replace("=", ":").split(":")
        if kind == wanted:
            found.append(rest)
    return found


def _fields(line: str) -> dict[str, str]:
    # Values may hold spaces (OS=, Reason=), so a field runs up to the next word with an equals sign.
    return {name: value.strip() for name, value in re.findall(r"(\w+)=(.*?)(?=\s\w+=|$)", line)}


def _partition(fields: Mapping[str, str], nodes: Mapping[str, ComputeNode]) -> Partition:
    names = fields.get("Nodes", "")
    members = expand(names) if names not in ("(null)", "") else []
    by_cpu = leading_number(fields.get("DefMemPerCPU", ""))
    by_node = leading_number(fields.get("DefMemPerNode", ""))
    return Partition(
        fields["PartitionName"],
        tuple(nodes[name] for name in members if name in nodes),
        default=fields.get("Default") == "YES",
        max_time_min=limit_minutes(fields.get("MaxTime", "")),
        max_nodes=leading_number(fields.get("MaxNodes", "")),
        up=fields.get("State", "UP") == "UP",
        max_mem_mb=leading_number(fields.get("MaxMemPerNode", "")) or None,
        min_nodes=leading_number(fields.get("MinNodes", "")) or None,
        has_memory_default=bool(by_cpu or by_node or "DefMemPerGPU" in fields.get("JobDefaults", "")),
        accounts=names_in(fields.get("AllowAccounts", "")),
        qos=names_in(fields.get("AllowQos", fields.get("AllowQOS", ""))),
        preempt_mode=fields.get("PreemptMode", ""),
    )


def names_in(text: str) -> tuple[str, ...]:
    """Split a list of SLURM's into names; none for ALL, which is how it says that it does not mind."""
    if text in ("ALL", "(null)", "N/A"):
        return ()
    return tuple(filter(None, text.split(",")))


def leading_number(text: str) -> int | None:
    """Read the number that a text begins with: ``5 sec`` is 5, UNLIMITED is none."""
    match = re.match(r"\d{1,18}", text)
    return int(match[0]) if match else None


def limit_minutes(text: str) -> float | None:
    """Convert a time limit of SLURM's into minutes; None for UNLIMITED, NONE, infinite and n/a."""
    with suppress(ValueError):
        return time_minutes(text)
    return None


def _node(fields: Mapping[str, str]) -> ComputeNode:
    # CPUEfctv, where there is one, leaves out the cores that the site keeps for itself.
    cpus = fields.get("CPUEfctv") or fields.get("CPUTot") or "1"
    # CfgTRES is complete only where the site accounts for GPUs; Gres always names them.
    gpus = count_gpus(fields.get("Gres", ""))
    # "IDLE+DRAIN", "DOWN*"; "IDLE~" is one that is powered down.
    words = {word.rstrip("*~#!%$@^-") for word in fields.get("State", "").upper().split("+")}
    memory = (leading_number(fields.get("RealMemory", "")) or 0) - (leading_number(fields.get("MemSpecLimit", "")) or 0)
    mem_mb = memory if memory > 1 else None  # 1 MB is SLURM's word for a memory that nobody has configured
    types = gpu_types(fields.get("Gres", ""))
    features = names_in(fields.get("AvailableFeatures", ""))
    shares = {kind: count_gpus(fields.get("Gres", ""), kind) // gpus for kind in SHARES if gpus}
    return ComputeNode(fields["NodeName"], int(cpus), gpus, not words & _DOWN, mem_mb, types, features, shares)
