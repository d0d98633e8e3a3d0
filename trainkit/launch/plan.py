"""The launch plan: what will run where, and for every value who said so and why. Pure; printed before anything is queued."""

from __future__ import annotations

import dataclasses
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit.config.loading import Loaded, Source
from trainkit.config.schema import time_minutes
from trainkit.errors import RefusedError, UserError, did_you_mean
from trainkit.launch.site import Node, Partition, Site, count_gpus

DERIVED = Source("derived")
FIXED = Source("trainkit")
ONE_PROCESS = ("single", "dp")


@dataclass(frozen=True)
class Setting:
    """A decided value, where it came from, and why."""

    name: str
    value: Any
    source: Source
    reason: str = ""


@dataclass(frozen=True)
class Plan:
    """What will run: ``settings`` explains the numbers, ``directives`` are sbatch's options in their order."""

    name: str
    executor: str
    """slurm, local or debug."""
    nodes: int
    ntasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int | None
    time_limit_seconds: int
    lead_seconds: int
    """How long before the time limit the ranks are told to save."""
    requeue: bool
    settings: tuple[Setting, ...]
    directives: tuple[Setting, ...]
    srun: tuple[tuple[str, str], ...] = ()
    setup: tuple[str, ...] = ()

    @property
    def world_size(self) -> int:
        return self.nodes * self.ntasks_per_node

    def to_json(self) -> str:
        """Text of plan.json."""
        plain = dataclasses.asdict(self) | {"world_size": self.world_size}
        for key in ("settings", "directives"):
            plain[key] = [item | {"source": str(Source(**item["source"]))} for item in plain[key]]
        return json.dumps(plain, indent=2) + "\n"


def make_plan(loaded: Loaded, site: Site, run_path: Path, *, points: int = 1) -> Plan:
    """Decide everything about a launch.

    Args:
        run_path: folder of the run, or of the sweep; it appears in the directives.
        points: runs of a sweep; more than one makes a job array.

    Raises:
        UserError: the batch size does not divide over the ranks.
        RefusedError: this site or machine cannot run it.
    """
    launch = loaded.config.launch
    executor = _executor(loaded, site)
    partition = _partition(loaded, site) if executor.value == "slurm" else None
    nodes = _nodes(loaded, site, executor.value, partition)
    gpus = _gpus(loaded, site, executor.value, partition, nodes.value)
    tasks = _tasks(loaded, executor.value, gpus.value)
    cpus = _cpus(loaded, executor.value, partition, gpus.value, tasks.value)
    time = _time(loaded, executor.value, partition)
    time_limit = round(time_minutes(time.value) * 60)
    lead = launch.model_copy(update={"time": time.value}).lead_seconds()
    by_default = "" if launch.signal_seconds else "90 s, or a third of a short limit"
    decided = [executor, nodes, gpus, tasks, cpus, time]
    decided += [Setting("signal_seconds", lead, loaded.source("launch.signal_seconds"), by_default)]
    decided += [Setting("world_size", nodes.value * tasks.value, DERIVED, f"{nodes.value} x {tasks.value} ranks")]
    decided += _batch(loaded, nodes.value * tasks.value)
    if partition is not None and launch.partition is None:
        decided += [Setting("partition", partition.name, Source("discovered", "scontrol"), "the site's default")]
    elif executor.value == "slurm" and site.unknown:
        decided += [Setting("partition", launch.partition, loaded.source("launch.partition"), f"not checked: {site.unknown}")]
    return Plan(
        name=launch.job_name or loaded.name,
        executor=executor.value,
        nodes=nodes.value,
        ntasks_per_node=tasks.value,
        gpus_per_node=gpus.value,
        cpus_per_task=cpus.value,
        time_limit_seconds=time_limit,
        lead_seconds=lead,
        requeue=launch.requeue,
        settings=tuple(decided),
        directives=_directives(loaded, run_path, points, nodes, gpus, tasks, cpus, time, lead)
        if executor.value == "slurm"
        else (),
        srun=tuple(sorted(launch.srun.items())),
        setup=launch.setup,
    )


def _executor(loaded: Loaded, site: Site) -> Setting:
    asked, source = loaded.config.launch.executor, loaded.source("launch.executor")
    if asked != "auto":
        return Setting("executor", asked, source)
    if site.slurm:
        return Setting("executor", "slurm", Source("discovered", "sbatch"), "SLURM is here")
    return Setting("executor", "local", Source("discovered", "no sbatch"), site.unknown or "there is no SLURM on this machine")


def _partition(loaded: Loaded, site: Site) -> Partition | None:
    asked = loaded.config.launch.partition
    found = site.partition(asked)
    if found is None and asked is not None and "," not in asked and site.partitions:
        names = [partition.name for partition in site.partitions]
        raise RefusedError(
            f"Unknown partition '{asked}' ({loaded.source('launch.partition')}).",
            why=f"This site has: {', '.join(names)}.",
            fix=did_you_mean(asked, names, otherwise=f"Use --partition {names[0]}."),
        )
    if found is not None and not found.up:
        raise RefusedError(f"Partition '{found.name}' takes no jobs now.", why="Its state is not UP.", fix="Use another --partition.")
    return found


def _nodes(loaded: Loaded, site: Site, executor: str, partition: Partition | None) -> Setting:
    nodes, source = loaded.config.launch.nodes, loaded.source("launch.nodes")
    if executor == "debug":
        reason = "debug runs rank 0 of 1 in this process" + (f", not {nodes} nodes" if nodes > 1 else "")
        return Setting("nodes", 1, FIXED, reason)
    if executor == "local":
        reason = f"{nodes} nodes are simulated on this machine" if nodes > 1 else ""
        return Setting("nodes", nodes, source, reason)
    if partition is not None:
        total = len(partition.nodes)
        limit = min(partition.max_nodes or total, total) if total else partition.max_nodes
        if limit is not None and nodes > limit:
            why = f"It has {total} nodes" + (f" and allows {partition.max_nodes} per job." if partition.max_nodes else ".")
            raise RefusedError(
                f"{nodes} nodes are more than partition '{partition.name}' gives ({source}).",
                why=why,
                fix=f"Use --nodes {limit}" + (" or another --partition." if len(site.partitions) > 1 else "."),
            )
    return Setting("nodes", nodes, source)


def _gpus(loaded: Loaded, site: Site, executor: str, partition: Partition | None, nodes: int) -> Setting:
    launch, strategy = loaded.config.launch, loaded.config.strategy.name
    asked, source = launch.gpus_per_node, loaded.source("launch.gpus_per_node")
    if launch.gres is not None and count_gpus(launch.gres):
        asked, source = count_gpus(launch.gres), loaded.source("launch.gres")
    if executor == "slurm":
        return _slurm_gpus(asked, source, strategy, partition, nodes)
    simulated = f" over {nodes} simulated nodes" if nodes > 1 else ""
    if executor == "debug":
        return Setting("gpus_per_node", min(site.gpus, 1 if asked == "auto" else asked), DERIVED, "one process uses one GPU")
    if asked == "auto":
        share = site.gpus // nodes
        share = min(share, 1) if strategy == "single" else share
        where = Source("discovered", "nvidia driver")
        why = f"{site.gpus} GPUs here{simulated}" if site.gpus else "no GPU here, so it trains on the CPU"
        return Setting("gpus_per_node", share, where, why)
    if asked * nodes > site.gpus:
        here = f"{site.gpus} of its GPUs are visible" if site.gpus else "no GPU is visible"
        no_slurm = "" if site.slurm else ", and there is no SLURM here to find others"
        raise RefusedError(
            f"{asked * nodes} GPUs are asked for, and this machine does not have them ({source}).",
            why=f"The run would be local, and {here}{no_slurm}.",
            fix="Use --gpus-per-node 0 or the preset ddp_sim to train on the CPU, or submit from a cluster's login node.",
        )
    return Setting("gpus_per_node", asked, source, "trains on the CPU" if asked == 0 else "")


def _slurm_gpus(
    asked: int | str, source: Source, strategy: str, partition: Partition | None, nodes: int
) -> Setting:
    # The GPU counts of the partition's nodes, largest first: entry nodes-1 is what that many nodes all have.
    counts = sorted((node.gpus for node in partition.nodes if node.up), reverse=True) if partition else []
    if asked == "auto":
        if not counts:
            return Setting("gpus_per_node", 0, Source("default"), "the partition's nodes are not known; set --gpus-per-node")
        most = counts[min(nodes, len(counts)) - 1]
        assert partition is not None
        count = min(most, 1) if strategy == "single" else most
        why = "one process uses one GPU" if count < most else "what its nodes have"
        return Setting("gpus_per_node", count, Source("discovered", f"partition {partition.name}"), why)
    assert isinstance(asked, int)
    known = sorted((node.gpus for node in partition.nodes), reverse=True) if partition else []
    if known and asked > known[min(nodes, len(known)) - 1]:
        assert partition is not None
        most = known[min(nodes, len(known)) - 1]
        has = f"{most} GPUs each at most" if most else "no GPUs"
        raise RefusedError(
            f"{asked} GPUs per node are asked for on {nodes} node{'s' * (nodes > 1)} ({source}).",
            why=f"So many nodes of partition '{partition.name}' have {has}.",
            fix=f"Use --gpus-per-node {most}" + (" to train on the CPU" if not most else "") + ", or another --partition.",
        )
    return Setting("gpus_per_node", asked, source, "trains on the CPU" if asked == 0 else "")


def _tasks(loaded: Loaded, executor: str, gpus: int) -> Setting:
    asked, source = loaded.config.launch.ntasks_per_node, loaded.source("launch.ntasks_per_node")
    strategy = loaded.config.strategy.name
    if executor == "debug":
        return Setting("ntasks_per_node", 1, FIXED, "one process")
    if strategy in ONE_PROCESS:
        return Setting("ntasks_per_node", 1, Source("default"), f"{strategy} is one process")
    if asked is None:
        why = "one rank per GPU" if gpus else "one rank per node on the CPU"
        return Setting("ntasks_per_node", gpus or 1, Source("default"), why)
    if gpus and asked > gpus:
        raise RefusedError(
            f"{asked} ranks per node cannot share {gpus} GPU{'s' * (gpus > 1)} ({source}).",
            why="Every rank needs a GPU of its own.",
            fix=f"Use --ntasks-per-node {gpus}, or --gpus-per-node 0 to train on the CPU.",
        )
    idle = gpus - asked
    return Setting("ntasks_per_node", asked, source, f"{idle} of {gpus} GPUs stay idle" if idle > 0 else "")


def _cpus(loaded: Loaded, executor: str, partition: Partition | None, gpus: int, tasks: int) -> Setting:
    asked, source = loaded.config.launch.cpus_per_task, loaded.source("launch.cpus_per_task")
    if asked is not None or executor != "slurm":
        return Setting("cpus_per_task", asked, source, "" if asked else "what this machine has is shared")
    owners: list[Node] = [node for node in partition.nodes if node.gpus >= gpus] if partition and gpus else []
    if not owners:
        return Setting("cpus_per_task", None, Source("default"), "left to the site" + ("" if gpus else ": no GPUs to go by"))
    # A node's CPUs in proportion to the GPUs taken: the rest is for whoever takes the other GPUs.
    share = min(node.cpus * gpus // (node.gpus * tasks) for node in owners)
    where = Source("discovered", f"partition {partition.name}" if partition else "")
    return Setting("cpus_per_task", max(share, 1), where, f"{min(node.cpus for node in owners)} CPUs a node, by its GPUs")


def _time(loaded: Loaded, executor: str, partition: Partition | None) -> Setting:
    time, source = loaded.config.launch.time, loaded.source("launch.time")
    limit = partition.max_time_min if partition else None
    if executor == "slurm" and partition and limit is not None and time_minutes(time) > limit:
        longest = slurm_time(limit)
        if source.kind == "default":
            return Setting("time", longest, Source("discovered", f"partition {partition.name}"), "its MaxTime")
        raise RefusedError(
            f"--time {time} is over the limit of partition '{partition.name}' ({source}).",
            why=f"Its MaxTime is {longest}; SLURM would leave the job pending for ever.",
            fix=f"Use --time {longest}; the job is requeued at the limit and goes on where it was.",
        )
    return Setting("time", time, source)


def _batch(loaded: Loaded, world_size: int) -> list[Setting]:
    train = loaded.config.train
    size, micro = train.global_batch_size, train.micro_batch_size
    if loaded.config.strategy.name == "hivemind":
        world_size = 1  # every peer trains with its own batches
    unit = world_size * (micro or 1)
    if size % unit:
        ranks = f"{world_size} rank{'s' * (world_size > 1)}" + (f" of micro_batch_size={micro}" if micro else "")
        near = sorted({max(size // unit, 1) * unit, math.ceil(size / unit) * unit})
        raise UserError(
            f"global_batch_size={size} cannot be split evenly over {ranks}.",
            why=f"One pass over all ranks takes a multiple of {unit} samples ({loaded.source('train.global_batch_size')}).",
            fix=f"Use train.global_batch_size={' or '.join(map(str, near))}, or another number of ranks.",
        )
    per_pass = micro or size // world_size
    accumulate = size // (world_size * per_pass)
    passes = f"{accumulate} passes per update" if accumulate > 1 else "the rank's whole share in one pass"
    return [
        Setting("micro_batch_size", per_pass, loaded.source("train.micro_batch_size") if micro else DERIVED, passes),
        Setting("grad_accum_steps", accumulate, DERIVED, f"{size} / ({world_size} x {per_pass})"),
    ]


def _directives(
    loaded: Loaded, run_path: Path, points: int, nodes: Setting, gpus: Setting, tasks: Setting, cpus: Setting,
    time: Setting, lead: int,
) -> tuple[Setting, ...]:  # fmt: skip
    launch = loaded.config.launch
    logs = f"{run_path}/%a/logs".replace("%a", "\0") if points > 1 else f"{run_path}/logs"
    output = logs.replace("%", "%%").replace("\0", "%a") + "/batch.out"
    found = [Setting("job-name", launch.job_name or loaded.name, loaded.source("launch.job_name"), "the preset's name" * (not launch.job_name))]
    found += [nodes, tasks]
    if launch.gres is not None:
        found.append(Setting("gres", launch.gres, loaded.source("launch.gres")))
    if gpus.value and not (launch.gres and count_gpus(launch.gres)):
        found.append(gpus)
    found += [cpus] if cpus.value else []
    found.append(time)
    for key in ("mem", "partition", "account", "qos", "constraint", "nodelist", "exclude", "reservation", "dependency",
                "mail_user", "mail_type"):  # fmt: skip
        if (value := getattr(launch, key)) is not None:
            found.append(Setting(key, value, loaded.source(f"launch.{key}")))
    found += [
        Setting("signal", f"USR2@{lead}", FIXED, "to every rank (no B:), so that they save before the time limit"),
        Setting("requeue" if launch.requeue else "no-requeue", None, loaded.source("launch.requeue")),
        Setting("open-mode", "append", FIXED, "a requeued job must not truncate its log"),
        Setting("output", output, FIXED, "the batch script's own words"),
    ]
    found += [Setting("array", f"0-{points - 1}", Source("flag", "--sweep"))] if points > 1 else []
    extra = [Setting(key, value or None, loaded.source("launch.sbatch")) for key, value in launch.sbatch.items()]
    replaced = {_flag(item.name) for item in extra}
    kept = [item for item in found if _flag(item.name) not in replaced]
    return tuple(dataclasses.replace(item, name=_flag(item.name)) for item in [*kept, *extra])


def _flag(name: str) -> str:
    return name.replace("_", "-")


def slurm_time(minutes: float) -> str:
    """A time as sbatch writes it: ``30:00``, ``2:00:00``, ``1-12:00:00``."""
    seconds = round(minutes * 60)
    days, rest = divmod(seconds, 86400)
    hours, rest = divmod(rest, 3600)
    text = f"{hours}:{rest // 60:02}:{rest % 60:02}"
    return f"{days}-{text}" if days else re.sub(r"^0:", "", text)
