"""Resources of a launch, one decision at a time: what was asked for, what the site has, and who decided.

GPUs have a file of their own (`trainkit.launch.gpus`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from trainkit.config.checks import strategy_traits
from trainkit.config.loading import Loaded, Source
from trainkit.config.slurm_options import slurm_time, time_minutes
from trainkit.errors import RefusedError, UserError, did_you_mean
from trainkit.site.profile import Node, Partition, Site

DERIVED = Source("derived")
FIXED = Source("trainkit")


@dataclass(frozen=True)
class Decision:
    """A decided value, where it came from, and why."""

    name: str
    value: Any
    source: Source
    reason: str = ""


def decide_executor(loaded: Loaded, site: Site) -> Decision:
    """SLURM where it is, unless another was asked for."""
    asked, source = loaded.config.launch.executor, loaded.source("launch.executor")
    if asked != "auto":
        return Decision("executor", asked, source)
    if site.slurm:
        return Decision("executor", "slurm", Source("discovered", "sbatch"), "SLURM is here")
    return Decision(
        "executor", "local", Source("discovered", "no sbatch"), site.unknown or "there is no SLURM on this machine"
    )


def chosen_partition(loaded: Loaded, site: Site) -> Partition | None:
    """The partition that the job will run in; None if the site does not tell.

    Raises RefusedError for one that does not exist or takes no jobs.
    """
    asked = loaded.config.launch.partition
    found = site.partition(asked)
    if found is None and asked is not None and "," not in asked and site.partitions:
        names = [partition.name for partition in site.partitions]
        raise RefusedError(
            f"Unknown partition '{asked}' ({loaded.source('launch.partition')}).",
            why=f"This site has: {', '.join(names)}.",
            fix=did_you_mean(asked, names, otherwise=f"Use --partition {names[0]}."),
            key="launch.partition",
        )
    if found is not None and found.groups and site.user_groups and not set(found.groups) & set(site.user_groups):
        raise RefusedError(
            f"Partition '{found.name}' is not for you ({loaded.source('launch.partition')}).",
            why=f"It lets in the Unix groups {', '.join(found.groups)}.",
            fix="Use another --partition, or ask for membership.",
            key="launch.partition",
        )
    if found is not None and not found.up:
        raise RefusedError(
            f"Partition '{found.name}' takes no jobs now.",
            why="Its state is not UP.",
            fix="Use another --partition.",
            key="launch.partition",
        )
    return found


def require_ranks(loaded: Loaded) -> None:
    """Raise UserError where several ranks are asked for and the strategy is one process."""
    strategy, launch = loaded.config.strategy.name, loaded.config.launch
    if strategy_traits(strategy).ranks != "one":
        return
    for name, count in (("nodes", launch.nodes), ("ntasks_per_node", launch.ntasks_per_node or 1)):
        if count > 1:
            written = [f"{key} ({loaded.source(key)})" for key in ("strategy.name", f"launch.{name}")]
            raise UserError(
                f"strategy.name={strategy} cannot run with launch.{name}={count}.",
                why=f"{strategy} is one process on one node. Written: {', '.join(written)}.",
                fix=f"Use a strategy for many ranks, such as strategy.name=ddp, or launch.{name}=1.",
                key=f"launch.{name}",
            )


def decide_nodes(loaded: Loaded, site: Site, executor: str, partition: Partition | None) -> Decision:
    """As many nodes as asked for; RefusedError if the partition does not give them."""
    nodes, source = loaded.config.launch.nodes, loaded.source("launch.nodes")
    if executor == "debug":
        reason = "debug runs rank 0 of 1 in this process" + (f", not {nodes} nodes" if nodes > 1 else "")
        return Decision("nodes", 1, FIXED, reason)
    if executor == "local":
        reason = f"{nodes} nodes are simulated on this machine" if nodes > 1 else ""
        return Decision("nodes", nodes, source, reason)
    if partition is not None:
        if nodes < (partition.min_nodes or 1):
            raise RefusedError(
                f"{nodes} nodes are fewer than partition '{partition.name}' gives ({source}).",
                why=f"Its jobs have at least {partition.min_nodes}.",
                fix=f"Use --nodes {partition.min_nodes}"
                + (" or another --partition." if len(site.partitions) > 1 else "."),
                key="launch.nodes",
            )
        total = len(partition.nodes)
        limit = min(partition.max_nodes or total, total) if total else partition.max_nodes
        if limit is not None and nodes > limit:
            why = f"It has {total} nodes" + (
                f" and allows {partition.max_nodes} per job." if partition.max_nodes else "."
            )
            raise RefusedError(
                f"{nodes} nodes are more than partition '{partition.name}' gives ({source}).",
                why=why,
                fix=f"Use --nodes {limit}" + (" or another --partition." if len(site.partitions) > 1 else "."),
                key="launch.nodes",
            )
    return Decision("nodes", nodes, source)


def decide_tasks(loaded: Loaded, executor: str, gpus: int) -> Decision:
    """Ranks per node: one per GPU, or one on the CPU, unless asked otherwise."""
    asked, source = loaded.config.launch.ntasks_per_node, loaded.source("launch.ntasks_per_node")
    strategy = loaded.config.strategy.name
    if executor == "debug":
        return Decision("ntasks_per_node", 1, FIXED, "one process")
    if strategy_traits(strategy).ranks == "one":
        return Decision("ntasks_per_node", 1, Source("default"), f"{strategy} is one process")
    if asked is None:
        why = "one rank per GPU" if gpus else "one rank per node on the CPU"
        return Decision("ntasks_per_node", gpus or 1, Source("default"), why)
    if gpus and asked > gpus:
        raise RefusedError(
            f"{asked} ranks per node cannot share {gpus} GPU{'s' * (gpus > 1)} ({source}).",
            why="Every rank needs a GPU of its own.",
            fix=f"Use --ntasks-per-node {gpus}, or --gpus-per-node 0 to train on the CPU.",
            key="launch.ntasks_per_node",
        )
    idle = gpus - asked
    return Decision("ntasks_per_node", asked, source, f"{idle} of {gpus} GPUs stay idle" if idle > 0 else "")


def decide_cpus(
    loaded: Loaded, executor: str, partition: Partition | None, nodes: int, gpus: int, tasks: int
) -> Decision:
    """CPUs per rank: on SLURM the share that belongs to its GPUs."""
    asked, source = loaded.config.launch.cpus_per_task, loaded.source("launch.cpus_per_task")
    if executor == "slurm" and partition is not None and asked is not None:
        _require_cpus(asked, source, partition, nodes, tasks)
    if asked is not None or executor != "slurm":
        return Decision("cpus_per_task", asked, source, "" if asked else "what this machine has is shared")
    owners = _with_gpus(loaded, partition, gpus)
    if not owners:
        return Decision(
            "cpus_per_task", None, Source("default"), "left to the site" + ("" if gpus else ": no GPUs to go by")
        )
    # A node's CPUs in proportion to the GPUs taken: the rest is for whoever takes the other GPUs.
    share = min(node.cpus * gpus // (node.gpus * tasks) for node in owners)
    where = Source("discovered", f"partition {partition.name}" if partition else "")
    return Decision(
        "cpus_per_task", max(share, 1), where, f"{min(node.cpus for node in owners)} CPUs a node, by its GPUs"
    )


def _require_cpus(asked: int, source: Source, partition: Partition, nodes: int, tasks: int) -> None:
    """Raise RefusedError where so many nodes do not have the CPUs that their ranks ask for."""
    most = _of_so_many(nodes, [node.cpus for node in partition.nodes])
    if most is not None and asked * tasks > most:
        raise RefusedError(
            f"{tasks} x {asked} CPUs per node are asked for on {nodes} node{'s' * (nodes > 1)} ({source}).",
            why=f"So many nodes of partition '{partition.name}' have {most} CPUs each at most.",
            fix=f"Use --cpus-per-task {max(most // tasks, 1)}"
            + (f" and --ntasks-per-node {most}" if tasks > most else "")
            + ", or another --partition.",
            key="launch.cpus_per_task",
        )


def decide_memory(loaded: Loaded, executor: str, partition: Partition | None, nodes: int, gpus: int) -> Decision | None:
    """Memory per node: what was asked for, if so many nodes have it; on GPUs the share that belongs to them.

    None where it is left to the site, which gives jobs memory by its own rule.
    """
    launch, source = loaded.config.launch, loaded.source("launch.mem")
    if executor != "slurm":
        return None
    if launch.mem is not None:
        if partition is not None:
            _require_memory(launch.mem, source, partition, nodes)
        return Decision("mem", launch.mem, source)
    if (
        partition is None
        or partition.has_memory_default
        or {"mem-per-cpu", "mem-per-gpu", "mem"} & launch.sbatch.keys()
    ):
        return None
    shares = [
        node.mem_mb * gpus // node.gpus for node in _with_gpus(loaded, partition, gpus) if node.mem_mb is not None
    ]
    if not shares:
        return None
    share = min(*shares, partition.max_mem_mb or shares[0])
    return Decision("mem", f"{share}M", Source("discovered", f"partition {partition.name}"), "by its GPUs")


def _require_memory(asked: str, source: Source, partition: Partition, nodes: int) -> None:
    """Raise RefusedError where so many nodes do not have that memory, or one job may not have it."""
    known = [node.mem_mb for node in partition.nodes if node.mem_mb is not None]
    most = _of_so_many(nodes, known) if len(known) == len(partition.nodes) else None
    limits = [limit for limit in (most, partition.max_mem_mb) if limit is not None]
    if limits and memory_mb(asked) > min(limits):
        allows = f"A job may have {partition.max_mem_mb} MB of it there" if min(limits) != most else ""
        raise RefusedError(
            f"{asked} of memory per node is asked for on {nodes} node{'s' * (nodes > 1)} ({source}).",
            why=f"{allows or f'So many nodes of partition {partition.name!r} have {most} MB each at most'}.",
            fix=f"Use --mem {min(limits)}M, or another --partition.",
            key="launch.mem",
        )


def memory_mb(text: str) -> float:
    """Megabytes of a size as sbatch writes it: ``32G``, ``500M``, ``500`` (MB); 0 stands for all of a node's."""
    match = re.fullmatch(r"(\d+)([KMGT]?)B?", text)
    assert match is not None, "the configuration has checked it"
    return int(match[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1024**2}[match[2]]


def _of_so_many(nodes: int, counts: list[int]) -> int | None:
    """What ``nodes`` nodes all have at least, of the best; None where nothing is known."""
    return sorted(counts, reverse=True)[min(nodes, len(counts)) - 1] if counts else None


def _with_gpus(loaded: Loaded, partition: Partition | None, gpus: int) -> list[Node]:
    """The partition's nodes that have so many GPUs, of the type that was asked for."""
    if partition is None or not gpus:
        return []
    kind = loaded.config.launch.gpu_type
    return [node for node in partition.nodes if node.gpus >= gpus and (kind is None or kind in node.gpu_types)]


def decide_time(loaded: Loaded, executor: str, partition: Partition | None) -> Decision:
    """The time limit, within the partition's."""
    time, source = loaded.config.launch.time, loaded.source("launch.time")
    limit = partition.max_time_min if partition else None
    if executor == "slurm" and partition and limit is not None and time_minutes(time) > limit:
        longest = slurm_time(limit)
        if source.kind == "default":
            return Decision("time", longest, Source("discovered", f"partition {partition.name}"), "its MaxTime")
        raise RefusedError(
            f"--time {time} is over the limit of partition '{partition.name}' ({source}).",
            why=f"Its MaxTime is {longest}; SLURM would leave the job pending for ever.",
            fix=f"Use --time {longest}; the job is requeued at the limit and goes on where it was.",
            key="launch.time",
        )
    return Decision("time", time, source)
