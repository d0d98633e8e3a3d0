"""The launch plan: what will run where, and for every value who said so and why. Printed before anything is queued."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from trainkit import fileio, terminal
from trainkit.config.checks import check_strategy, holds, strategy_traits
from trainkit.config.loading import Loaded, Source
from trainkit.config.slurm_options import objection, time_minutes
from trainkit.errors import RefusedError, UserError
from trainkit.launch.containers import Container, container_of, is_file
from trainkit.launch.resources import (
    DERIVED,
    FIXED,
    Decision,
    chosen_partition,
    decide_cpus,
    decide_executor,
    decide_gpus,
    decide_memory,
    decide_nodes,
    decide_tasks,
    decide_time,
    gpu_directives,
    require_ranks,
)
from trainkit.schedulers.base import Scheduler, named
from trainkit.site.limits import Request, doubtful, require_access, require_room, require_shared
from trainkit.site.profile import Site, SiteFacts, read_facts

Row = tuple[str, str, str, str]
"""Setting, value, source, reason."""


@dataclass(frozen=True)
class Plan:
    """What will run: ``decisions`` explains the numbers, ``directives`` are sbatch's options in their order."""

    name: str
    executor: Annotated[str, Field(pattern=r"^(\w+|[\w.]+:\w+)$")]
    """Name of a scheduler, or debug: in the calling process."""
    nodes: PositiveInt
    ntasks_per_node: PositiveInt
    gpus_per_node: NonNegativeInt
    cpus_per_task: PositiveInt | None
    time_limit_seconds: PositiveInt
    lead_seconds: PositiveInt
    """How long before the time limit the ranks are told to save."""
    hang_seconds: PositiveInt
    """Ranks that make no progress for so long hang, and are ended."""
    requeue: bool | Literal["chain"]
    decisions: tuple[Decision, ...]
    directives: tuple[Decision, ...]
    srun: tuple[tuple[str, str], ...] = ()
    setup: tuple[str, ...] = ()
    preflight: bool = False
    """The job checks its nodes before its ranks start."""
    modules: tuple[str, ...] = ()
    environment: str | None = None
    container: Container | None = None

    @property
    def world_size(self) -> int:
        return self.nodes * self.ntasks_per_node

    def to_json(self) -> str:
        """Text of plan.json."""
        plain = dataclasses.asdict(self) | {"world_size": self.world_size}
        for key in ("decisions", "directives"):
            plain[key] = [item | {"source": str(Source(**item["source"]))} for item in plain[key]]
        return json.dumps(plain, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str, *, where: str = "plan.json") -> Plan:
        """The plan that `to_json` wrote. Raises UserError, which names ``where``, for any other text."""
        try:
            plain = fileio.parse(text)
            for item in [*plain["decisions"], *plain["directives"]]:
                item["source"] = Source.parse(item["source"])
            return TypeAdapter(cls).validate_python(plain)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = str(error)
            if isinstance(error, ValidationError):
                first = error.errors(include_url=False, include_input=False)[0]
                why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
            raise UserError(
                f"{where} is not a launch plan, or is damaged.",
                why=f"{why.splitlines()[0]}.",
                fix=f"Submit the run anew: {terminal.command('submit', Path(where).parent)}",
            ) from None

    @classmethod
    def read(cls, file: Path) -> Plan:
        """The plan in a run folder's plan.json. Raises UserError as `from_json` does."""
        try:
            text = fileio.read_text(file)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"Cannot read {file}.",
                why=f"{error}.",
                fix=f"Submit the run anew: {terminal.command('submit', file.parent)}",
            ) from None
        return cls.from_json(text, where=str(file))


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
    require_ranks(loaded)
    executor = decide_executor(loaded, site)
    batch = named(executor.value).batch
    partition = chosen_partition(loaded, site) if site.scheduler == executor.value else None
    if launch.preflight and not batch:
        raise UserError(
            "--preflight is for jobs of SLURM.",
            why=f"This one is run by the executor {executor.value}, on this machine.",
            fix="`python -m jobs.cluster check --executor local` tries this machine.",
            key="launch.preflight",
        )
    nodes = decide_nodes(loaded, site, executor.value, partition)
    gpus = decide_gpus(loaded, site, executor.value, partition, nodes.value)
    tasks = decide_tasks(loaded, executor.value, gpus.value)
    check_strategy(loaded.config, {"launch.nodes": nodes.value, "launch.ntasks_per_node": tasks.value})
    cpus = decide_cpus(loaded, executor.value, partition, nodes.value, gpus.value, tasks.value)
    memory = decide_memory(loaded, executor.value, partition, nodes.value, gpus.value)
    time = decide_time(loaded, executor.value, partition)
    time_limit = round(time_minutes(time.value) * 60)
    lead = launch.model_copy(update={"time": time.value}).lead_seconds()
    container = container_of(launch, loaded.config.data.root, on_slurm=batch)
    by_default = "" if launch.signal_seconds else "90 s, or a third of a short limit"
    decided = [executor, nodes, gpus, tasks, cpus, time]
    decided += [Decision("signal_seconds", lead, loaded.source("launch.signal_seconds"), by_default)]
    decided += [Decision("world_size", nodes.value * tasks.value, DERIVED, f"{nodes.value} x {tasks.value} ranks")]
    decided += _batch(loaded, nodes.value * tasks.value)
    if launch.environment is not None and batch:
        decided += [Decision("environment", launch.environment, loaded.source("launch.environment"))]
    if container is not None:
        source, by = loaded.source("launch.container_image"), f"run by {container.runtime}"
        decided += [Decision("container_image", container.image, source, by)]
    if batch and not launch.internet:
        decided += [Decision("internet", False, loaded.source("launch.internet"), "W&B and model hubs stay offline")]
    if partition is not None and launch.partition is None:
        decided += [Decision("partition", partition.name, Source("discovered", "scontrol"), "the site's default")]
    elif batch and site.unknown:
        decided += [
            Decision("partition", launch.partition, loaded.source("launch.partition"), f"not checked: {site.unknown}")
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
        hang_seconds=launch.hang_seconds,
        requeue=launch.requeue,
        preflight=launch.preflight,
        decisions=tuple(decided),
        directives=_directives(loaded, run_path, points, nodes, gpus, tasks, cpus, memory, time, lead) if batch else (),
        srun=tuple(sorted(launch.srun.items())),
        setup=(_offline(loaded) if batch else ()) + launch.setup,
        modules=launch.modules,
        environment=launch.environment,
        container=container,
    )


def _batch(loaded: Loaded, world_size: int) -> list[Decision]:
    train = loaded.config.train
    size, micro = train.global_batch_size, train.given_micro_batch_size
    traits = strategy_traits(loaded.config.strategy.name)
    if traits.loop == "collaborative":
        world_size = 1  # every peer trains with its own batches
    unit = world_size * (micro or 1)
    if size % unit:
        ranks = f"{world_size} rank{'s' * (world_size > 1)}" + (f" of micro_batch_size={micro}" if micro else "")
        near = sorted({max(size // unit, 1) * unit, math.ceil(size / unit) * unit})
        raise UserError(
            f"global_batch_size={size} cannot be split evenly over {ranks}.",
            why=f"A pass over all ranks takes {unit} samples ({loaded.source('train.global_batch_size')}).",
            fix=f"Use train.global_batch_size={' or '.join(map(str, near))}, or another number of ranks.",
            key="train.global_batch_size",
        )
    check_strategy(loaded.config, {"grad_accum_steps": size // unit if micro else 1})
    if train.micro_batch_size == "auto":
        most = f"at most {size // world_size}, as many as fit into memory: found before the first update"
        return [
            Decision("micro_batch_size", "auto", loaded.source("train.micro_batch_size"), most),
            Decision("grad_accum_steps", "auto", DERIVED, f"{size} / ({world_size} x micro_batch_size)"),
        ]
    per_pass = micro or size // world_size
    accumulate = size // (world_size * per_pass)
    passes = f"{accumulate} passes per update" if accumulate > 1 else "the rank's whole share in one pass"
    # Whether the model has BatchNorm only torch could tell, so it is said of every model.
    norm = "all ranks' passes" if holds(traits.global_batchnorm, loaded.config) else "one pass of one rank"
    passes += f"; BatchNorm's statistics are those of {norm}"
    return [
        Decision("micro_batch_size", per_pass, loaded.source("train.micro_batch_size") if micro else DERIVED, passes),
        Decision("grad_accum_steps", accumulate, DERIVED, f"{size} / ({world_size} x {per_pass})"),
    ]


def _directives(
    loaded: Loaded, run_path: Path, points: int, nodes: Decision, gpus: Decision, tasks: Decision, cpus: Decision,
    memory: Decision | None, time: Decision, lead: int,
) -> tuple[Decision, ...]:  # fmt: skip
    launch = loaded.config.launch
    logs = f"{run_path}/%a/logs".replace("%a", "\0") if points > 1 else f"{run_path}/logs"
    output = logs.replace("%", "%%").replace("\0", "%a") + "/batch.out"
    found = [
        Decision(
            "job-name",
            launch.job_name or loaded.name,
            loaded.source("launch.job_name"),
            "the preset's name" * (not launch.job_name),
        )
    ]
    found += [nodes, tasks]
    found += gpu_directives(loaded, gpus)
    found += [cpus] if cpus.value else []
    found.append(time)
    found += [memory] if memory is not None else []
    for key in ("partition", "account", "qos", "constraint", "nodelist", "exclude", "reservation", "dependency",
                "mail_user", "mail_type"):  # fmt: skip
        if (value := getattr(launch, key)) is not None:
            found.append(Decision(key, value, loaded.source(f"launch.{key}")))
    found += [
        Decision("signal", f"USR2@{lead}", FIXED, "to every rank (no B:), so that they save before the time limit"),
        Decision("requeue" if launch.requeue is True else "no-requeue", None, loaded.source("launch.requeue")),
        Decision("open-mode", "append", FIXED, "a requeued job must not truncate its log"),
        Decision("output", output, FIXED, "the batch script's own words"),
    ]
    if points > 1:
        at_once = f"%{launch.max_parallel}" if launch.max_parallel else ""
        found.append(Decision("array", f"0-{points - 1}{at_once}", Source("flag", "--sweep")))
    for program, options in (("sbatch", launch.sbatch), ("srun", launch.srun)):
        for name, text in options.items():
            _require_passable(program, name, text, loaded)
    extra = [
        Decision(key, value or None, loaded.source(f"launch.sbatch.{key}")) for key, value in launch.sbatch.items()
    ]
    replaced = {_flag(item.name) for item in extra}
    kept = [item for item in found if _flag(item.name) not in replaced]
    return tuple(dataclasses.replace(item, name=_flag(item.name)) for item in [*kept, *extra])


def _require_passable(program: str, name: str, value: str, loaded: Loaded) -> None:
    """Raise UserError for an option that contradicts the plan, or breaks what a run relies on."""
    if refused := objection(program, name, value):
        key = f"launch.{program}.{name}"
        raise UserError(
            f"--{program} {name}{f'={value}' if value else ''} is not passed on ({loaded.source(key)}).",
            why=refused[0],
            fix=refused[1],
            key=key,
        )


def _offline(loaded: Loaded) -> tuple[str, ...]:
    """Shell lines of a job whose nodes have no way out: they would wait for W&B and model hubs until they gave up."""
    if loaded.config.launch.internet:
        return ()
    return ('export WANDB_MODE="${WANDB_MODE:-offline}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"',)


def _flag(name: str) -> str:
    return name.replace("_", "-")


def waiting_for(plan: Plan, job_id: str, reason: str) -> Plan:
    """The plan, to start after another job has ended as well, however that ends."""
    before = [str(item.value) for item in plan.directives if item.name == "dependency"]
    wait = Decision("dependency", ",".join([*before, f"afterany:{job_id}"]), FIXED, reason)
    return dataclasses.replace(
        plan, directives=(*(item for item in plan.directives if item.name != "dependency"), wait)
    )


# What can be known before a job is queued, beyond the plan. `sbatch --test-only` is no help: it takes 99 hours on a
# partition of one.


def validate(loaded: Loaded, plan: Plan, site: Site, folder: Path, cwd: Path) -> list[str]:
    """Refuse what would fail, or wait for ever; what is only doubtful comes back as lines for the user.

    Args:
        folder: of the run, or of the sweep.
        cwd: the folder of the submission, where the job runs.

    Raises RefusedError: account or QOS, folders that nodes do not see, no room for a run, an environment or a
    container's image that is not there.
    """
    require_room(folder)
    if plan.executor != site.scheduler:
        return []
    launch, facts = loaded.config.launch, _facts(loaded)
    request = Request(plan.nodes, plan.gpus_per_node, plan.time_limit_seconds / 60)
    require_access(loaded, request, site.partition(launch.partition), facts)
    require_environment(loaded, cwd)
    if plan.container is not None:
        require_container(loaded, plan.container, facts, named(plan.executor))
    places = {"The run folder": folder, "The folder of the submission": cwd}
    data = (cwd / Path(loaded.config.data.root).expanduser()).absolute()
    if data.is_dir():
        places["The data's folder"] = data
    own_environment = sys.prefix != sys.base_prefix and not (launch.environment or launch.container_image)
    if own_environment:  # Python's own folders are every machine's
        places["The virtual environment"] = Path(sys.prefix)
    for what, place in places.items():
        require_shared(place, what, site, facts.shared_folders)
    notes = [note for place in dict.fromkeys(places.values()) if (note := doubtful(place, site, facts.shared_folders))]
    if not launch.sbatch.get("export", "ALL").startswith("ALL") or "export-file" in launch.sbatch:
        notes.append("Note: with such an --export the job does not get the variables of this shell, keys among them.")
    return [*notes, *_idle_gpus(loaded, plan, site), *loaded.notes]


def _idle_gpus(loaded: Loaded, plan: Plan, site: Site) -> list[str]:
    """A word to who has not asked for the CPU, and would train on it while other partitions have GPUs."""
    here = site.partition(loaded.config.launch.partition)
    if plan.gpus_per_node or loaded.config.launch.gpus_per_node != "auto" or here is None:
        return []
    others = [item.name for item in site.partitions if item.up and any(node.gpus for node in item.nodes)]
    if not others:
        return []
    where = f"--partition {others[0]}" + (f" (or {', '.join(others[1:])})" if others[1:] else "")
    return [f"Note: partition '{here.name}' has no GPUs, so this trains on the CPU; {where} has some."]


def _facts(loaded: Loaded) -> SiteFacts:
    cluster = loaded.config.launch.cluster
    if cluster is None:
        return SiteFacts()
    try:
        return read_facts(cluster) or SiteFacts()
    except UserError:
        if loaded.source("launch.cluster").kind == "file":  # a run's own configuration outlives its site's profile
            return SiteFacts()
        raise


def require_environment(loaded: Loaded, cwd: Path) -> None:
    """Raise RefusedError where the folder of ``launch.environment`` is not what it is said to be.

    conda's environments have names, and which of them are there a job sees only once its modules are loaded.
    """
    kind, _, name = (loaded.config.launch.environment or "").partition(":")
    folder = cwd / Path(name).expanduser()
    if kind == "venv" and not os.path.lexists(folder / "bin" / "python"):  # its Python may be the nodes' only
        missing, fix = "bin/python", f"python3 -m venv {folder}` makes one; it needs trainkit's packages too."
    elif kind == "uv" and not (folder / "pyproject.toml").is_file():
        missing, fix = "pyproject.toml", f"uv init {folder}` makes one; it needs trainkit's packages too."
    else:
        return
    raise RefusedError(
        f"{folder} is no environment of {kind} ({loaded.source('launch.environment')}).",
        why=f"There is no {missing} in it, and the job would end before its ranks start.",
        fix=f"Give the right folder, or: `{fix}",
        key="launch.environment",
    )


def require_container(loaded: Loaded, container: Container, facts: SiteFacts, scheduler: Scheduler) -> None:
    """Raise RefusedError where the image is a file that is not there, or srun does not know pyxis."""
    source = loaded.source("launch.container_image")
    if is_file(container.image) and not Path(container.image).exists():
        raise RefusedError(
            f"There is no image {container.image} ({source}).",
            why="The job would end before its ranks start.",
            fix="Give the image's path, the name that it has in a registry, or --container-image none.",
            key="launch.container_image",
        )
    if container.runtime == "pyxis" and "pyxis" not in facts.containers and scheduler.has_pyxis() is False:
        raise RefusedError(
            f"srun has no option --container-image here, so it does not run {container.image} ({source}).",
            why="The option is pyxis's, and this machine's SLURM does not load it.",
            fix="Use an image for apptainer (.sif, docker://...), or write `containers: [pyxis]` below site: in the "
            "cluster's profile if its nodes have it.",
            key="launch.container_image",
        )


# In words


def plan_rows(plan: Plan) -> list[Row]:
    """Value, source and reason of everything that the plan decided."""
    rows = [("launch." + item.name, _text(item.value), str(item.source), item.reason) for item in plan.decisions]
    return rows + [
        ("#SBATCH --" + item.name, _text(item.value), str(item.source), item.reason) for item in plan.directives
    ]


def config_rows(loaded: Loaded) -> list[Row]:
    """Value and source of every setting, but for the resources, which the plan explains."""
    rows: list[Row] = []
    for section, values in loaded.config.model_dump(mode="json").items():
        if section == "launch":
            continue
        pairs: Mapping[str, Any] = values if isinstance(values, dict) else {"": values}
        for key, value in pairs.items():
            name = f"{section}.{key}" if key else section
            # Of our own presets the name says it.
            source = str(loaded.source(name)).replace(f"{fileio.folder('configs')}/", "")
            rows.append((name, _text(value), source, ""))
    return rows


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
