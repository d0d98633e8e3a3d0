"""Resources of a launch, one decision at a time: what was asked for, what the site has, and who decided."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainkit.cluster.site import Node, Partition, Site, count_gpus
from trainkit.config.layers import Source
from trainkit.config.loading import Loaded
from trainkit.config.times import slurm_time, time_minutes
from trainkit.config.traits import strategy_traits
from trainkit.errors import RefusedError, UserError, did_you_mean

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


def decide_gpus(loaded: Loaded, site: Site, executor: str, partition: Partition | None, nodes: int) -> Decision:
    """GPUs per node: what was asked for, if it is there, else what is there."""
    launch, traits = loaded.config.launch, strategy_traits(loaded.config.strategy.name)
    one = traits.ranks == "one" and traits.gpus_per_rank == 1
    asked, source = launch.gpus_per_node, loaded.source("launch.gpus_per_node")
    if launch.gres is not None and count_gpus(launch.gres):
        asked, source = count_gpus(launch.gres), loaded.source("launch.gres")
    if executor == "slurm":
        return _slurm_gpus(asked, source, one, partition, nodes)
    simulated = f" over {nodes} simulated nodes" if nodes > 1 else ""
    if executor == "debug":
        return Decision(
            "gpus_per_node", min(site.gpus, 1 if asked == "auto" else asked), DERIVED, "one process uses one GPU"
        )
    if asked == "auto":
        share = site.gpus // nodes
        share = min(share, 1) if one else share
        where = Source("discovered", "nvidia driver")
        why = f"{site.gpus} GPUs here{simulated}" if site.gpus else "no GPU here, so it trains on the CPU"
        return Decision("gpus_per_node", share, where, why)
    if asked * nodes > site.gpus:
        here = f"{site.gpus} of its GPUs are visible" if site.gpus else "no GPU is visible"
        no_slurm = "" if site.slurm else ", and there is no SLURM here to find others"
        raise RefusedError(
            f"{asked * nodes} GPUs are asked for, and this machine does not have them ({source}).",
            why=f"The run would be local, and {here}{no_slurm}.",
            fix="Use --gpus-per-node 0 or the preset ddp_sim to train on the CPU, or submit from a login node.",
            key="launch.gpus_per_node",
        )
    return Decision("gpus_per_node", asked, source, "trains on the CPU" if asked == 0 else "")


def _slurm_gpus(asked: int | str, source: Source, one: bool, partition: Partition | None, nodes: int) -> Decision:
    # The GPU counts of the partition's nodes, largest first: entry nodes-1 is what that many nodes all have.
    counts = sorted((node.gpus for node in partition.nodes if node.up), reverse=True) if partition else []
    if asked == "auto":
        if not counts:
            return Decision(
                "gpus_per_node", 0, Source("default"), "the partition's nodes are not known; set --gpus-per-node"
            )
        most = counts[min(nodes, len(counts)) - 1]
        assert partition is not None
        count = min(most, 1) if one else most
        why = "one process uses one GPU" if count < most else "what its nodes have"
        return Decision("gpus_per_node", count, Source("discovered", f"partition {partition.name}"), why)
    assert isinstance(asked, int)
    known = sorted((node.gpus for node in partition.nodes), reverse=True) if partition else []
    if known and asked > known[min(nodes, len(known)) - 1]:
        assert partition is not None
        most = known[min(nodes, len(known)) - 1]
        has = f"{most} GPUs each at most" if most else "no GPUs"
        raise RefusedError(
            f"{asked} GPUs per node are asked for on {nodes} node{'s' * (nodes > 1)} ({source}).",
            why=f"So many nodes of partition '{partition.name}' have {has}.",
            fix=f"Use --gpus-per-node {most}"
            + (" to train on the CPU" if not most else "")
            + ", or another --partition.",
            key="launch.gpus_per_node",
        )
    return Decision("gpus_per_node", asked, source, "trains on the CPU" if asked == 0 else "")


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


def decide_cpus(loaded: Loaded, executor: str, partition: Partition | None, gpus: int, tasks: int) -> Decision:
    """CPUs per rank: on SLURM the share that belongs to its GPUs."""
    asked, source = loaded.config.launch.cpus_per_task, loaded.source("launch.cpus_per_task")
    if asked is not None or executor != "slurm":
        return Decision("cpus_per_task", asked, source, "" if asked else "what this machine has is shared")
    owners: list[Node] = [node for node in partition.nodes if node.gpus >= gpus] if partition and gpus else []
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
