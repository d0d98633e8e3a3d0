"""The launch plan: what will run where, and for every value who said so and why. Printed before anything is queued."""

import dataclasses
import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, TypeAdapter, ValidationError

from trainkit import fileio, terminal
from trainkit.config.checks import check_split, check_strategy, holds, strategy_traits
from trainkit.config.loading import Loaded, Source, flatten
from trainkit.config.schema import LaunchConfig
from trainkit.config.slurm_options import objection, time_minutes
from trainkit.errors import RefusedError, UserError
from trainkit.launch.containers import Container, container_of, is_file
from trainkit.launch.resources import DERIVED, FIXED, Decision, Resources
from trainkit.schedulers.base import Scheduler, named
from trainkit.site.profile import Site, SiteFacts, doubtful, read_facts, require_access, require_room, require_shared

Row = tuple[str, str, str, str]
"""Setting, value, source, reason."""
_OFFLINE = 'export WANDB_MODE="${WANDB_MODE:-offline}" HF_HUB_OFFLINE="${HF_HUB_OFFLINE:-1}"'
"""For nodes without internet: jobs would wait for W&B and model hubs until these gave up."""


@dataclass(frozen=True)
class Side:
    """What a run has of this machine, where ``count`` of a sweep train side by side: a share of the CPUs, and that
    GPU."""

    index: NonNegativeInt = 0
    count: PositiveInt = 1
    gpu: NonNegativeInt = 0


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
    """Seconds without progress after which ranks hang, and are ended."""
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
    side: Side = Side()

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
    def read(cls, file: Path) -> "Plan":
        """The plan in a run folder's plan.json. Raises UserError where it cannot be read, or is another text."""
        what = f"{file} is not a launch plan, or is damaged."
        try:
            plain = fileio.parse(fileio.read_text(file))
            for item in [*plain["decisions"], *plain["directives"]]:
                item["source"] = Source.parse(item["source"])
            return TypeAdapter(cls).validate_python(plain)
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        except OSError as error:
            what, why = f"Cannot read {file}.", str(error)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = str(error).splitlines()[0]
        raise UserError(what, why=f"{why}.", fix=f"Submit the run anew: {terminal.command('submit', file.parent)}")


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
    check_strategy(loaded.config, {"ranks": launch.nodes * (launch.ntasks_per_node or 1)})
    found = Resources(loaded, site)
    executor, batch, nodes, tasks = found.executor.value, found.batch, found.nodes.value, found.tasks.value
    if launch.preflight and not batch:
        why = f"This one is run by the executor {executor}, on this machine."
        fix = "`python -m jobs.cluster check --executor local` tries this machine."
        raise UserError("--preflight is for jobs of SLURM.", why=why, fix=fix, key="launch.preflight")
    check_strategy(loaded.config, {"launch.nodes": nodes, "launch.ntasks_per_node": tasks})
    lead = launch.model_copy(update={"time": found.time.value}).lead_seconds()
    container = container_of(launch, loaded.config.data.root, on_slurm=batch)

    decided = [found.executor, found.nodes, found.gpus, found.tasks, found.cpus, found.time]
    by_rule = "" if launch.signal_seconds else "90 s, or a third of a short limit"
    decided += [found.given("signal_seconds", lead, by_rule)]
    decided += [Decision("world_size", nodes * tasks, DERIVED, f"{nodes} x {tasks} ranks")]
    decided += _batch_sizes(loaded, nodes * tasks)
    if launch.runs_per_gpu > 1 and executor == "local":
        decided += [found.given("runs_per_gpu", launch.runs_per_gpu, "side by side, each with its share of the CPUs")]
    if launch.environment is not None and batch:
        decided += [found.given("environment", launch.environment)]
    if container is not None:
        decided += [found.given("container_image", container.image, f"run by {container.runtime}")]
    if batch and not launch.internet:
        decided += [found.given("internet", False, "W&B and model hubs stay offline")]
    if found.partition is not None and launch.partition is None:
        where = Source("discovered", "scontrol")
        decided += [Decision("partition", found.partition.name, where, "the site's default")]
    elif batch and site.unknown:
        decided += [found.given("partition", launch.partition, f"not checked: {site.unknown}")]
    return Plan(
        name=launch.job_name or loaded.name,
        executor=executor,
        nodes=nodes,
        ntasks_per_node=tasks,
        gpus_per_node=found.gpus.value,
        cpus_per_task=found.cpus.value,
        time_limit_seconds=round(time_minutes(found.time.value) * 60),
        lead_seconds=lead,
        hang_seconds=launch.hang_seconds,
        requeue=launch.requeue,
        preflight=launch.preflight,
        decisions=tuple(decided),
        directives=_directives(loaded, found, run_path, points, lead) if batch else (),
        srun=tuple(sorted(launch.srun.items())),
        setup=((_OFFLINE,) if batch and not launch.internet else ()) + launch.setup,
        modules=launch.modules,
        environment=launch.environment,
        container=container,
    )


def sides(launch: LaunchConfig, plan: Plan, site: Site, runs: int) -> list[Side]:
    """How so many runs of a sweep share this machine; one side where they do not, but come one after another."""
    gpus = max(site.gpus, 1) if plan.gpus_per_node else 1
    is_shared = launch.runs_per_gpu > 1 and not named(plan.executor).batch
    count = min(launch.runs_per_gpu * gpus, runs, launch.max_parallel or runs) if is_shared else 1
    return [Side(index, count, index % gpus) for index in range(count)]


def _batch_sizes(loaded: Loaded, world_size: int) -> list[Decision]:
    train, given = loaded.config.train, loaded.source("train.micro_batch_size")
    size, micro = train.global_batch_size, train.given_micro_batch_size
    traits = strategy_traits(loaded.config.strategy.name)
    if traits.loop == "collaborative":
        world_size = 1  # every peer trains with its own batches
    check_split(loaded.config, world_size, loaded.source("train.global_batch_size"))
    if train.micro_batch_size == "auto":
        if loaded.config.launch.runs_per_gpu > 1:
            what, fix = "Runs that share a GPU need a batch size.", "Give train.micro_batch_size a number."
            why = "The first run would take all the memory that it finds, and leave none to those beside it."
            raise UserError(what, why=why, fix=fix, key="train.micro_batch_size")
        most = f"at most {size // world_size}, as many as fit into memory: found before the first update"
        passes = f"{size} / ({world_size} x micro_batch_size)"
        return [
            Decision("micro_batch_size", "auto", given, most),
            Decision("grad_accum_steps", "auto", DERIVED, passes),
        ]
    per_pass = micro or size // world_size
    accumulate = size // (world_size * per_pass)
    passes = f"{accumulate} passes per update" if accumulate > 1 else "the rank's whole share in one pass"
    # Whether the model has BatchNorm only torch could tell, so it is said of every model.
    norm = "all ranks' passes" if holds(traits.global_batchnorm, loaded.config) else "one pass of one rank"
    passes += f"; BatchNorm's statistics are those of {norm}"
    return [
        Decision("micro_batch_size", per_pass, given if micro else DERIVED, passes),
        Decision("grad_accum_steps", accumulate, DERIVED, f"{size} / ({world_size} x {per_pass})"),
    ]


def _directives(loaded: Loaded, found: Resources, run_path: Path, points: int, lead: int) -> tuple[Decision, ...]:
    launch = loaded.config.launch
    task = "/%a" if points > 1 else ""
    output = f"{str(run_path).replace('%', '%%')}{task}/logs/batch.out"
    listed = [found.given("job_name", launch.job_name or loaded.name, "the preset's name" * (not launch.job_name))]
    listed += [found.nodes, found.tasks, *found.gpu_directives()]
    listed += [*([found.cpus] if found.cpus.value else []), found.time, *([found.memory] if found.memory else [])]
    for key in ("partition", "account", "qos", "constraint", "nodelist", "exclude", "reservation", "dependency",
                "mail_user", "mail_type"):  # fmt: skip
        if (value := getattr(launch, key)) is not None:
            listed.append(found.given(key, value))
    listed += [
        Decision("signal", f"USR2@{lead}", FIXED, "to every rank (no B:), so that they save before the time limit"),
        Decision("requeue" if launch.requeue is True else "no-requeue", None, loaded.source("launch.requeue")),
        Decision("open-mode", "append", FIXED, "a requeued job must not truncate its log"),
        Decision("output", output, FIXED, "the batch script's own words"),
    ]
    if points > 1:
        at_once = f"%{launch.max_parallel}" if launch.max_parallel else ""
        listed.append(Decision("array", f"0-{points - 1}{at_once}", Source("flag", "--sweep")))
    for program, options in (("sbatch", launch.sbatch), ("srun", launch.srun)):
        for name, text in options.items():
            if refused := objection(program, name, text):
                key = f"launch.{program}.{name}"
                what = f"--{program} {name}{f'={text}' if text else ''} is not passed on ({loaded.source(key)})."
                raise UserError(what, why=refused[0], fix=refused[1], key=key)
    extra = [Decision(key, text or None, loaded.source(f"launch.sbatch.{key}")) for key, text in launch.sbatch.items()]
    listed = [dataclasses.replace(item, name=item.name.replace("_", "-")) for item in listed]
    return (*(item for item in listed if item.name not in launch.sbatch), *extra)


def waiting_for(plan: Plan, job_id: str, reason: str) -> Plan:
    """The plan, to start after another job has ended as well, however that ends."""
    before = [str(item.value) for item in plan.directives if item.name == "dependency"]
    wait = Decision("dependency", ",".join([*before, f"afterany:{job_id}"]), FIXED, reason)
    others = (item for item in plan.directives if item.name != "dependency")
    return dataclasses.replace(plan, directives=(*others, wait))


def validate(loaded: Loaded, plan: Plan, site: Site, folder: Path, cwd: Path) -> list[str]:
    """Refuse what would fail or wait for ever, as far as that is known before a job is queued; lines on what is only
    doubtful. `sbatch --test-only` is no help: it takes 99 hours on a partition of one.

    Args:
        folder: of the run, or of the sweep.
        cwd: the folder of the submission, where the job runs.

    Raises RefusedError: account or QOS, folders that nodes do not see, no room for a run, an environment or a
    container's image that is not there.
    """
    require_room(folder)
    if plan.executor != site.scheduler:
        return []
    launch, partition = loaded.config.launch, site.partition(loaded.config.launch.partition)
    facts = SiteFacts()
    try:
        facts = (read_facts(launch.cluster) if launch.cluster is not None else None) or facts
    except UserError:
        if loaded.source("launch.cluster").kind != "file":  # a run's own configuration outlives its site's profile
            raise
    minutes, gpus = plan.time_limit_seconds / 60, plan.nodes * plan.gpus_per_node
    require_access(loaded, partition, facts, minutes=minutes, gpus=gpus)
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
    others = [item.name for item in site.partitions if item.up and any(node.gpus for node in item.nodes)]
    if launch.gpus_per_node == "auto" and not plan.gpus_per_node and partition is not None and others:
        where = f"--partition {others[0]}" + (f" (or {', '.join(others[1:])})" if others[1:] else "")
        notes.append(f"Note: partition '{partition.name}' has no GPUs, so this trains on the CPU; {where} has some.")
    return [*notes, *loaded.notes]


def require_environment(loaded: Loaded, cwd: Path) -> None:
    """Raise RefusedError where the folder of ``launch.environment`` holds no such environment.

    conda's environments have names, and a job sees which of them are there only once its modules are loaded.
    """
    kind, _, name = (loaded.config.launch.environment or "").partition(":")
    folder = cwd / Path(name).expanduser()
    if kind == "venv" and not os.path.lexists(folder / "bin" / "python"):  # its Python may be the nodes' only
        missing, command = "bin/python", "python3 -m venv"
    elif kind == "uv" and not (folder / "pyproject.toml").is_file():
        missing, command = "pyproject.toml", "uv init"
    else:
        return
    what = f"{folder} is no environment of {kind} ({loaded.source('launch.environment')})."
    why = f"There is no {missing} in it, and the job would end before its ranks start."
    fix = f"Give the right folder, or: `{command} {folder}` makes one; it needs trainkit's packages too."
    raise RefusedError(what, why=why, fix=fix, key="launch.environment")


def require_container(loaded: Loaded, container: Container, facts: SiteFacts, scheduler: Scheduler) -> None:
    """Raise RefusedError where the image is a file that is not there, or srun does not know pyxis."""
    source = loaded.source("launch.container_image")
    if is_file(container.image) and not Path(container.image).exists():
        what = f"There is no image {container.image} ({source})."
        fix = "Give the image's path, the name that it has in a registry, or --container-image none."
        raise RefusedError(what, why="The job would end before its ranks start.", fix=fix, key="launch.container_image")
    if container.runtime == "pyxis" and "pyxis" not in facts.containers and scheduler.has_pyxis() is False:
        what = f"srun has no option --container-image here, so it does not run {container.image} ({source})."
        fix = "Use an image for apptainer (.sif, docker://...), or write `containers: [pyxis]` below site: in the "
        fix += "cluster's profile if its nodes have it."
        why = "The option is pyxis's, and this machine's SLURM does not load it."
        raise RefusedError(what, why=why, fix=fix, key="launch.container_image")


def plan_rows(plan: Plan) -> list[Row]:
    """Value, source and reason of everything that the plan decided."""
    settings = LaunchConfig.model_fields  # the rest follows from them
    named_items = [(f"launch.{item.name}" if item.name in settings else item.name, item) for item in plan.decisions]
    named_items += [(f"#SBATCH --{item.name}", item) for item in plan.directives]
    return [(name, _text(item.value), str(item.source), item.reason) for name, item in named_items]


def config_rows(loaded: Loaded) -> list[Row]:
    """Value and source of every setting, but for the resources, which the plan explains."""
    packaged = f"{fileio.folder('configs')}/"  # of our own presets the name says it
    values = loaded.config.model_dump(mode="json", exclude={"launch"})
    return [(key, _text(value), str(loaded.source(key)).replace(packaged, ""), "") for key, value in flatten(values)]


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
