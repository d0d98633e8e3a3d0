"""The launch plan: what will run where, and for every value who said so and why. Printed before anything is queued."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainkit.cluster.containers import container_of
from trainkit.cluster.plan import Decision, Plan, Row, Side
from trainkit.cluster.scheduler import named
from trainkit.cluster.site import Site
from trainkit.common import fileio
from trainkit.common.errors import UserError
from trainkit.config.checks import check_split, check_strategy, holds, strategy_traits
from trainkit.config.layers import flatten
from trainkit.config.loading import Loaded
from trainkit.config.schema import LaunchConfig
from trainkit.config.slurm_options import objection, time_minutes
from trainkit.config.source import Source
from trainkit.launch.resources import DERIVED, FIXED, OPTIONS_OF_QUEUE, Resources

_OFFLINE = 'export WANDB_MODE="${WANDB_MODE:-offline}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"'
"""For nodes without internet: jobs would wait for W&B and model hubs until these gave up."""


def make_plan(loaded: Loaded, site: Site, run_path: Path, *, points: int = 1) -> Plan:
    """Decide everything about a launch.

    Args:
        run_path: folder of the run, or of the sweep; it appears in the directives.
        points: runs of a sweep; more than one makes a job array.

    Raises:
        UserError: the batch size does not divide over the ranks, or the strategy is for one.
        RefusedError: this site or machine cannot run it.
    """
    launch = loaded.config.launch
    if loaded.config.script is None:
        check_strategy(loaded.config, {"ranks": launch.nodes * (launch.ntasks_per_node or 1)})
    found = Resources(loaded, site)
    executor = found.executor.value
    batch = found.batch
    nodes = found.nodes.value
    tasks = found.tasks.value
    if launch.preflight and not batch:
        fix = "`python -m jobs.cluster check --executor local` tries this machine."
        why = f"The executor is {executor}."
        raise UserError("--preflight is for jobs of SLURM.", why=why, fix=fix, key="launch.preflight")
    if launch.spare_nodes:
        _require_spares(loaded, executor)
    if loaded.config.script is None:
        check_strategy(loaded.config, {"launch.nodes": nodes, "launch.ntasks_per_node": tasks})
    lead = launch.model_copy(update={"time": found.time.value}).lead_seconds()
    container = container_of(launch, loaded.config.data.root, on_slurm=batch)

    decided = [found.executor, found.nodes, found.gpus, found.tasks, found.cpus, found.time]
    by_rule = "90 s, or a third of a short limit"
    if launch.signal_seconds:
        by_rule = ""
    decided += [found.given("signal_seconds", lead, by_rule)]
    decided += [Decision("world_size", nodes * tasks, DERIVED, f"{nodes} x {tasks} ranks")]
    if loaded.config.script is None:
        decided += _batch_sizes(loaded, nodes * tasks)
    setup = launch.setup
    if launch.spare_nodes:
        why = f"the job has, and costs, {nodes + launch.spare_nodes} nodes: one that is lost is replaced in it"
        decided += [found.given("spare_nodes", launch.spare_nodes, why)]
    cannot = ""
    if launch.requeue == "expedite":
        cannot = named(executor).can_expedite()
        reason = f"not expedited: {cannot}" if cannot else "SLURM starts it before all other jobs after a lost node"
        decided += [found.given("requeue", True if cannot else "expedite", reason)]
    if launch.runs_per_gpu > 1 and executor == "local":
        decided += [found.given("runs_per_gpu", launch.runs_per_gpu, "side by side, each with its share of the CPUs")]
    if launch.environment is not None and batch:
        decided += [found.given("environment", launch.environment)]
    if container is not None:
        decided += [found.given("container_image", container.image, f"run by {container.runtime}")]
    if batch and not launch.internet:
        setup = (_OFFLINE, *setup)
        decided += [found.given("internet", False, "W&B and model hubs stay offline")]
    if found.partition is not None and launch.partition is None:
        where = Source("discovered", "scontrol")
        decided += [Decision("partition", found.partition.name, where, "the site's default")]
    elif batch and site.unknown:
        decided += [found.given("partition", launch.partition, f"not checked: {site.unknown}")]
    directives: tuple[Decision, ...] = ()
    if batch:
        directives = _directives(
            loaded, found, run_path, points, lead, expedite=launch.requeue == "expedite" and not cannot
        )
    return Plan(
        name=launch.job_name or loaded.name, executor=executor, nodes=nodes, ntasks_per_node=tasks,
        gpus_per_node=found.gpus.value, cpus_per_task=found.cpus.value,
        time_limit_seconds=round(time_minutes(found.time.value) * 60), lead_seconds=lead,
        hang_seconds=launch.hang_seconds, requeue=launch.requeue if launch.requeue in (False, "chain") else True,
        preflight=launch.preflight,
        decisions=tuple(decided), directives=directives, srun=tuple(sorted(launch.srun.items())), setup=setup,
        modules=launch.modules, spare_nodes=launch.spare_nodes, environment=launch.environment, container=container,
    )  # fmt: skip


def _require_spares(loaded: Loaded, executor: str) -> None:
    """Refuse spare nodes where no scheduler can give them, and for peers, which are lost one by one anyway."""
    key = "launch.spare_nodes"
    config = loaded.config
    if executor == "debug" or not named(executor).replaces_nodes:
        fix = "Leave it out, or submit to SLURM."
        raise UserError("--spare-nodes is for jobs of SLURM.", why=f"The executor is {executor}.", fix=fix, key=key)
    if config.script is None and strategy_traits(config.strategy.name).loop == "collaborative":
        why = "A swarm goes on without a peer that is lost."
        raise UserError("A swarm has no spare nodes.", why=why, fix="Leave --spare-nodes out.", key=key)


def sides(launch: LaunchConfig, plan: Plan, site: Site, runs: int) -> list[Side]:
    """Share this machine between so many runs of a sweep; one side where they come one after another."""
    if launch.runs_per_gpu == 1 or named(plan.executor).batch:
        return [Side(0, 1)]
    gpus = 1
    if plan.gpus_per_node:
        gpus = max(site.gpus, 1)
    count = min(launch.runs_per_gpu * gpus, runs, launch.max_parallel or runs)
    return [Side(index, count, index % gpus) for index in range(count)]


def _batch_sizes(loaded: Loaded, world_size: int) -> list[Decision]:
    train = loaded.config.train
    given = loaded.source("train.micro_batch_size")
    size = train.global_batch_size
    micro = train.given_micro_batch_size
    traits = strategy_traits(loaded.config.strategy.name)
    if traits.loop == "collaborative":
        world_size = 1  # every peer trains with its own batches
    check_split(loaded.config, world_size, loaded.source("train.global_batch_size"))
    if train.micro_batch_size == "auto":
        if loaded.config.launch.runs_per_gpu > 1:
            key = "train.micro_batch_size"
            why = "The first run would take all free memory."
            raise UserError("Runs that share a GPU need a batch size.", why=why, fix=f"Give {key} a number.", key=key)
        most = f"at most {size // world_size}, as many as fit into memory: found before the first update"
        passes = f"{size} / ({world_size} x micro_batch_size)"
        chosen = Decision("micro_batch_size", "auto", given, most)
        return [chosen, Decision("grad_accum_steps", "auto", DERIVED, passes)]
    per_pass = micro or size // world_size
    accumulate = size // (world_size * per_pass)
    passes = f"{accumulate} passes per update" if accumulate > 1 else "the rank's whole share in one pass"
    # Only torch could tell if the model has BatchNorm, so it is said of every model.
    norm = "all ranks' passes" if holds(traits.global_batchnorm, loaded.config) else "one pass of one rank"
    passes += f"; BatchNorm's statistics are those of {norm}"
    return [
        Decision("micro_batch_size", per_pass, given if micro else DERIVED, passes),
        Decision("grad_accum_steps", accumulate, DERIVED, f"{size} / ({world_size} x {per_pass})"),
    ]


def _directives(
    loaded: Loaded, found: Resources, run_path: Path, points: int, lead: int, *, expedite: bool
) -> tuple[Decision, ...]:
    launch = loaded.config.launch
    nodes = found.nodes
    spare = launch.spare_nodes
    if spare:
        reason = f"{nodes.value} for the ranks, {spare} spare"
        nodes = dataclasses.replace(nodes, value=nodes.value + spare, reason=reason)
    folder = str(run_path).replace("%", "%%")
    if points > 1:
        folder += "/%a"
    job_name = found.given(
        "job_name", loaded.name, "the preset's name" if loaded.config.script is None else "the script's name"
    )
    if launch.job_name:
        job_name = found.given("job_name", launch.job_name)
    listed = [job_name, nodes, found.tasks, *found.gpu_directives()]
    if found.cpus.value:
        listed.append(found.cpus)
    listed.append(found.time)
    if found.memory is not None:
        listed.append(found.memory)
    for key in OPTIONS_OF_QUEUE:
        value = getattr(launch, key)
        if value is not None:
            listed.append(found.given(key, value))
    listed += [
        Decision("signal", f"USR2@{lead}", FIXED, "to every rank (no B:), so that they save before the time limit"),
        _requeue(loaded, expedite=expedite),
        Decision("open-mode", "append", FIXED, "a requeued job must not truncate its log"),
        Decision("output", f"{folder}/logs/batch.out", FIXED, "the batch script's own words"),
    ]
    if spare:
        listed.append(Decision("no-kill", None, FIXED, "a lost node does not end the job"))
    if points > 1:
        array = f"0-{points - 1}"
        if launch.max_parallel:
            array += f"%{launch.max_parallel}"
        listed.append(Decision("array", array, Source("flag", "--sweep")))
    _refuse_options(loaded, "sbatch", launch.sbatch)
    _refuse_options(loaded, "srun", launch.srun)
    options = {}
    for item in listed:
        name = item.name.replace("_", "-")
        options[name] = dataclasses.replace(item, name=name)
    for name, text in launch.sbatch.items():  # which outranks ours
        options.pop(name, None)
        options[name] = Decision(name, text or None, loaded.source(f"launch.sbatch.{name}"))
    return tuple(options.values())


def _requeue(loaded: Loaded, *, expedite: bool) -> Decision:
    name = "requeue"
    if loaded.config.launch.requeue in (False, "chain"):
        name = "no-requeue"
    value = "expedite" if expedite else None
    return Decision(name, value, loaded.source("launch.requeue"))


def _refuse_options(loaded: Loaded, program: str, options: Mapping[str, str]) -> None:
    """Raise UserError for options that would break the launch."""
    for name, text in options.items():
        refused = objection(program, name, text)
        if refused:
            key = f"launch.{program}.{name}"
            what = f"--{program} {f'{name}={text}'.rstrip('=')} is not passed on ({loaded.source(key)})."
            raise UserError(what, why=refused[0], fix=refused[1], key=key)


def plan_rows(plan: Plan) -> list[Row]:
    """Value, source and reason of everything that the plan decided."""
    rows = []
    for item in plan.decisions:
        is_setting = item.name in LaunchConfig.model_fields  # the rest follows from them
        rows.append(_row(f"launch.{item.name}" if is_setting else item.name, item))
    rows += [_row(f"#SBATCH --{item.name}", item) for item in plan.directives]
    return rows


def _row(name: str, item: Decision) -> Row:
    return name, _text(item.value), str(item.source), item.reason


def config_rows(loaded: Loaded) -> list[Row]:
    """Value and source of every setting, but for the resources, which the plan explains."""
    packaged = f"{fileio.folder('configs')}/"  # of our own presets the name says it
    values = loaded.config.model_dump(mode="json", exclude={"launch"})
    if loaded.config.script is not None:  # to which most others mean nothing
        values = {name: values[name] for name in ("script", "monitor")}
    return [(key, _text(value), str(loaded.source(key)).replace(packaged, ""), "") for key, value in flatten(values)]


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
