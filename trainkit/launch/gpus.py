"""GPUs of a launch: how many on each node, and how the site wants them asked for. Never in two ways at once.

SLURM 22.05 takes --gres=gpu:1 with --gpus-per-node=2 without a word, gives the one, and then refuses the srun in it.
"""

from __future__ import annotations

from dataclasses import replace

from trainkit.config.checks import strategy_traits
from trainkit.config.loading import Loaded, Source
from trainkit.errors import RefusedError, UserError, did_you_mean
from trainkit.launch.resources import DERIVED, Decision
from trainkit.site.profile import Partition, Site, count_gpus

_OTHER_WAYS = ("gpus", "G", "gpus-per-node", "gpus-per-task", "gpus-per-socket")


def decide_gpus(loaded: Loaded, site: Site, executor: str, partition: Partition | None, nodes: int) -> Decision:
    """GPUs per node: what was asked for, if it is there, else what is there."""
    launch, traits = loaded.config.launch, strategy_traits(loaded.config.strategy.name)
    one = traits.ranks == "one" and traits.gpus_per_rank == 1
    asked, source = launch.gpus_per_node, loaded.source("launch.gpus_per_node")
    if launch.gres is not None and count_gpus(launch.gres):
        asked, source = count_gpus(launch.gres), loaded.source("launch.gres")
    if executor == "slurm":
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
