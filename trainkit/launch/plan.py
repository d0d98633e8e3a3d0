"""The launch plan: what will run where, and for every value who said so and why.

Pure; printed before anything is queued.
"""

from __future__ import annotations

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

from trainkit.cluster.site import Site, count_gpus
from trainkit.config.loading import Loaded, Source
from trainkit.config.schema import time_minutes
from trainkit.errors import UserError
from trainkit.launch.resources import (
    DERIVED,
    FIXED,
    Setting,
    chosen_partition,
    cpus_setting,
    executor_setting,
    gpus_setting,
    nodes_setting,
    tasks_setting,
    time_setting,
)


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
    executor = executor_setting(loaded, site)
    partition = chosen_partition(loaded, site) if executor.value == "slurm" else None
    nodes = nodes_setting(loaded, site, executor.value, partition)
    gpus = gpus_setting(loaded, site, executor.value, partition, nodes.value)
    tasks = tasks_setting(loaded, executor.value, gpus.value)
    cpus = cpus_setting(loaded, executor.value, partition, gpus.value, tasks.value)
    time = time_setting(loaded, executor.value, partition)
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
        decided += [
            Setting("partition", launch.partition, loaded.source("launch.partition"), f"not checked: {site.unknown}")
        ]
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
            why=f"A pass over all ranks takes {unit} samples ({loaded.source('train.global_batch_size')}).",
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
    found = [
        Setting(
            "job-name",
            launch.job_name or loaded.name,
            loaded.source("launch.job_name"),
            "the preset's name" * (not launch.job_name),
        )
    ]
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
