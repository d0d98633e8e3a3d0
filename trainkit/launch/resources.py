"""Resources of a launch, one decision at a time: what was asked for, what the site has, and who decided."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from trainkit.config.checks import strategy_traits
from trainkit.config.loading import Loaded, Source
from trainkit.config.slurm_options import slurm_time, time_minutes
from trainkit.errors import RefusedError, UserError, did_you_mean
from trainkit.schedulers.base import named
from trainkit.site.profile import Node, Partition, Site, count_gpus

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
    """The site's scheduler where there is one, unless another was asked for."""
    asked, source = loaded.config.launch.executor, loaded.source("launch.executor")
    if asked != "auto":
        return Decision("executor", asked, source)
    if site.scheduler:
        reason = f"{named(site.scheduler).title} is here"
        return Decision("executor", site.scheduler, Source("discovered", "sbatch"), reason)
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
    if partition is not None and asked is not None:
        _require_cpus(asked, source, partition, nodes, tasks)
    if asked is not None or not named(executor).batch:
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
    if not named(executor).batch:
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
    if partition and limit is not None and time_minutes(time) > limit:
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


# GPUs: never in two ways at once. SLURM 22.05 takes --gres=gpu:1 with --gpus-per-node=2 without a word, gives the one,
# and then refuses the srun in it.


_OTHER_WAYS = ("gpus", "G", "gpus-per-node", "gpus-per-task", "gpus-per-socket")


def decide_gpus(loaded: Loaded, site: Site, executor: str, partition: Partition | None, nodes: int) -> Decision:
    """GPUs per node: what was asked for, if it is there, else what is there."""
    launch, traits = loaded.config.launch, strategy_traits(loaded.config.strategy.name)
    one = traits.ranks == "one" and traits.gpus_per_rank == 1
    asked, source = launch.gpus_per_node, loaded.source("launch.gpus_per_node")
    if launch.gres is not None and count_gpus(launch.gres):
        asked, source = count_gpus(launch.gres), loaded.source("launch.gres")
    if named(executor).batch:
        if launch.gpu_dialect == "constraint":
            return _gpus_of_a_feature(loaded, asked, source)
        return _slurm_gpus(asked, source, one, _of_type(launch.gpu_type, loaded, partition), nodes)
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
        no_slurm = "" if site.scheduler else ", and there is no SLURM here to find others"
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


def _of_type(kind: str | None, loaded: Loaded, partition: Partition | None) -> Partition | None:
    """The partition with its nodes of that type of GPU only; RefusedError where it has none."""
    types = sorted({name for node in partition.nodes for name in node.gpu_types}) if partition else []
    if partition is None or kind is None or not types:
        return partition
    if kind not in types:
        raise RefusedError(
            f"Partition '{partition.name}' has no GPUs of type '{kind}' ({loaded.source('launch.gpu_type')}).",
            why=f"Its nodes have: {', '.join(types)}.",
            fix=did_you_mean(kind, types, otherwise=f"Use launch.gpu_type={types[0]}, or another --partition."),
            key="launch.gpu_type",
        )
    return replace(partition, nodes=tuple(node for node in partition.nodes if kind in node.gpu_types))


def _gpus_of_a_feature(loaded: Loaded, asked: int | str, source: Source) -> Decision:
    """Where GPUs are a feature of nodes, SLURM does not count them: somebody must say how many a node has."""
    if asked == "auto":
        raise UserError(
            "Nobody knows how many GPUs a node has (launch.gpus_per_node=auto).",
            why=f"This site asks for them by a feature ({loaded.source('launch.gpu_dialect')}), which has no number.",
            fix="Set gpus_per_node in the site's profile, or give --gpus-per-node N.",
            key="launch.gpus_per_node",
        )
    if asked and loaded.config.launch.constraint is None:
        raise UserError(
            "launch.gpu_dialect=constraint needs the constraint.",
            why="Nothing else would ask for GPUs.",
            fix="Set constraint in the site's profile, or give --constraint gpu.",
            key="launch.constraint",
        )
    return Decision("gpus_per_node", asked, source, "by --constraint alone" if asked else "trains on the CPU")


def gpu_directives(loaded: Loaded, gpus: Decision) -> list[Decision]:
    """What asks for the GPUs, and for other generic resources: at most one of --gpus-per-node and --gres.

    Raises UserError where `launch.sbatch` asks for GPUs as well.
    """
    launch = loaded.config.launch
    _require_one_way(loaded, gpus)
    gres = Decision("gres", launch.gres, loaded.source("launch.gres"))
    own = [gres] if launch.gres is not None else []
    if not gpus.value or launch.gpu_dialect == "constraint" or (launch.gres and count_gpus(launch.gres)):
        return own
    count = f"{launch.gpu_type}:{gpus.value}" if launch.gpu_type else gpus.value
    if launch.gpu_dialect == "gpus-per-node":
        return [*own, replace(gpus, value=count)]
    # One list: of two --gres SLURM takes the last.
    listed = ",".join([f"gpu:{count}", *([launch.gres] if launch.gres else [])])
    return [Decision("gres", listed, gpus.source, gpus.reason)]


def _require_one_way(loaded: Loaded, gpus: Decision) -> None:
    launch = loaded.config.launch
    for key, value in launch.sbatch.items():
        replaces_gres = key == "gres" and (count_gpus(value) or launch.gres or launch.gpu_dialect == "gres")
        if key in _OTHER_WAYS or (replaces_gres and (gpus.value or count_gpus(value))):
            raise UserError(
                f"GPUs are asked for in two ways: --gpus-per-node, and --sbatch {key}={value}.",
                why="SLURM takes both without a word, and the job's srun then fails or has other GPUs than planned "
                f"({loaded.source('launch.sbatch')}).",
                fix="Give --gpus-per-node N alone, or --gres gpu:N where the site wants that.",
                key="launch.sbatch",
            )
