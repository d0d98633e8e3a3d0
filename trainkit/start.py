"""Load, check, plan, write and start runs: what `submit` does, in notebooks and scripts too.

`prepare` loads and checks a `Request`, `plan_runs` plans its launch, `submit` writes and starts the runs.
"""

import json
import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from trainkit import fileio, plugins, terminal
from trainkit.bench.base import refuse_bench
from trainkit.config.checks import check_strategy, micro_batch_sizes, strategy_traits
from trainkit.config.components import check_optimizer, check_schedule, check_task
from trainkit.config.loading import Loaded, Source, find_preset, load, presets_named
from trainkit.config.schema import LaunchConfig, is_one_line
from trainkit.data import check_data, guessed, patience, train_size
from trainkit.data.base import steps_per_epoch
from trainkit.errors import RefusedError, UserError, require
from trainkit.finish import full_name
from trainkit.launch import notify, submission
from trainkit.launch.plan import Plan, make_plan, sides, validate, waiting_for
from trainkit.models import TIMM_SOURCES, check_model
from trainkit.run.events import history_of
from trainkit.run.folder import PRUNING, SAMPLER, RunDir, find_run, find_runs, folders_named, next_path, runs_root
from trainkit.run.labels import say
from trainkit.run.ownership import require_own_code
from trainkit.run.room import empty_trash
from trainkit.run.secrets import refuse_settings
from trainkit.run.snapshot import code_files, digest_of, fingerprint, same_runs
from trainkit.run.teacher import teacher_of
from trainkit.schedulers.base import JobState, job_states, named
from trainkit.site.profile import Site, discover
from trainkit.sweep import changed_resources, check_prune, check_sampler, sweep_points
from trainkit.worker import run_rank

_MOST_PEERS = 1000
"""Peers of one array: more is a typing error."""
_FEW = 8
"""Images that a rehearsal takes at once."""
_MOST_SAID = 3
"""Failed earlier runs of a sweep to name."""


@dataclass(frozen=True)
class Request:
    """What a user asks for: one run, or the runs of a sweep."""

    preset: str
    overrides: Sequence[str] = ()
    flags: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Launch setting -> (value, flag), see `launch_settings`."""
    sweep: Sequence[str] = ()
    run_dir: Path | None = None
    again: bool = False
    """Make new runs even if equal ones exist."""
    allow_code: bool = False
    join: str | None = None
    array: int | None = None
    command: Sequence[str] = ()
    """The command line, for the manifest."""
    tags: Sequence[str] = ()
    notes: Sequence[str] = ()
    trials: int | None = None
    """Points of the sweep that are drawn; None: all that there are."""
    sampler: str = "random"
    """Who chooses the trials: ``random`` when they are submitted, or ``tpe`` when they begin."""
    prune: int | None = None
    """Of how many runs of the sweep one goes on, at each of some epochs; None: all train to their ends."""


@dataclass(frozen=True)
class Prepared:
    """The configurations of a request, loaded and checked."""

    loadeds: Sequence[Loaded]
    variants: Sequence[Sequence[str]]
    folder: Path
    request: Request
    env: Mapping[str, str]


class Planned(NamedTuple):
    """How the runs will be launched."""

    plan: Plan
    script: str | None
    notes: Sequence[str]
    site: Site
    largest: int
    """Most tasks of one array."""


class Started(NamedTuple):
    """All requested runs, those of them that are running now, and their executor."""

    runs: Sequence[RunDir]
    going_on: Sequence[RunDir]
    executor: str


def launch_settings(given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Configuration key -> (value, flag) of the flags that set something of ``launch``; others are left out.

    Args:
        given: flag name with underscores -> value; None and False mean not given.
    """
    found: dict[str, tuple[Any, str]] = {}
    for name in LaunchConfig.model_fields:
        value, flag = given.get(name), f"--{name.replace('_', '-')}"
        if name in ("sbatch", "srun"):
            pairs = dict(text.partition("=")[::2] for text in value or ())
            if "" in pairs:
                why, fix = f"{flag} takes KEY=VALUE.", f"For example {flag} comment=thesis."
                raise UserError(f"{flag} '={pairs['']}' has no key.", why=why, fix=fix)
            value = {key.lstrip("-"): item for key, item in pairs.items()} or None
        if value is not None and value is not False:
            found[f"launch.{name}"] = (value, flag)
    return found


def prepare(request: Request, env: Mapping[str, str]) -> Prepared:
    """Load and check a request. Raises UserError, or RefusedError for code that another user could have written."""
    # A run that is given a name is always new.
    is_named = "launch.job_name" in request.flags or any(it.startswith("launch.job_name=") for it in request.overrides)
    again = request.again or request.run_dir is not None or is_named
    if request.join is not None or request.array is not None:
        loaded, count, env = _to_join(request, env)
        loadeds, variants = [loaded] * count, [list(request.overrides)] * count
        again = True  # peers with equal settings are different runs
    else:
        check_prune(request.prune, request.sweep)
        variants = [[*request.overrides, *point] for point in sweep_points(request.sweep, request.trials)]
        preset = preset_or_run(request.preset, env)
        place = Path(preset).expanduser()
        refuse_bench(place)
        possible = check_sampler(request.sampler, request.sweep, request.trials)
        points = [*variants, *([*variants[0], word] for word in possible)]
        loadeds = [load(preset, overrides, flags=request.flags, env=env) for overrides in points]
        for loaded in loadeds:
            require_own_code(place, loaded, allow_code=request.allow_code)
            check(loaded)
            if loaded.config.collaborative.initial_peers:
                from trainkit.swarm.admission import entry_of

                entry_of([], env)  # the token that the job is going to need
        loadeds = settled(loadeds[: len(variants)])
    folder = request.run_dir.absolute() if request.run_dir else next_path(runs_root(env), loadeds[0].name)
    return Prepared(loadeds, variants, folder, replace(request, again=again), env)


def plan_runs(prepared: Prepared) -> Planned:
    """Plan the launch of the prepared runs and check it against the site. Writes nothing."""
    loadeds, folder, env, cwd = prepared.loadeds, prepared.folder, prepared.env, Path.cwd()
    site, points = discover(env), len(loadeds)
    largest = named(site.scheduler).largest_array() if points > 1 and site.scheduler else points
    plans = [make_plan(loaded, site, folder, points=min(points, largest)) for loaded in loadeds]
    plan, scheduler = plans[0], named(plans[0].executor)
    if any((other.world_size, other.directives) != (plan.world_size, plan.directives) for other in plans):
        raise changed_resources()
    if prepared.request.array is not None and points > 1 and not scheduler.batch:
        join = terminal.command("join", "TOKEN")
        fix = f"Join with this machine as one peer: {join}, with --nproc for several GPUs."
        raise UserError("--array is for SLURM.", why="Here its peers would run one after the other.", fix=fix)
    plan = by_names(plan, env)
    untold = notify.objection(env, reaches_internet=loadeds[0].config.launch.internet or not scheduler.batch)
    notes = [*validate(loadeds[0], plan, site, folder, cwd), *filter(None, [untold])]
    largest = largest if scheduler.batch else points
    return Planned(plan, scheduler.script(plan, folder, cwd, min(points, largest)), notes, site, largest)


def submit(prepared: Prepared) -> Started:
    """Write and start the runs; report those that exist already."""
    request, env, folder, cwd = prepared.request, prepared.env, prepared.folder, Path.cwd()
    configs = [submission.stored_config(loaded, cwd) for loaded in prepared.loadeds]
    chosen = {} if request.sampler == "random" else {"sampler": request.sampler, "sweep": list(request.sweep)}
    digest = digest_of(code_files()) + (json.dumps(chosen) if chosen else "")
    marks = [fingerprint(config, digest) for config in configs]
    there = {} if request.again or configs[0].launch.executor == "debug" else _there(marks)
    known = [there[mark] for mark in marks if mark in there]
    missing = [index for index, mark in enumerate(marks) if mark not in there]  # of a sweep, only these are started
    if not missing:
        executor = next((item.state.executor for item in known if not item.is_finished), "")
        return Started([item.run for item in known], _say_there(known), executor)
    loadeds, variants = [prepared.loadeds[at] for at in missing], [prepared.variants[at] for at in missing]
    configs, marks_of_new = [configs[at] for at in missing], [marks[at] for at in missing]
    plan, script, notes, site, largest = plan_runs(replace(prepared, loadeds=loadeds))
    submission.require_executor(plan, site)
    empty_trash(folder.parent)
    if plan.executor == "debug" and len(loadeds) > 1:
        why = "debug is one run in this process."
        raise UserError("A sweep does not run with --executor debug.", why=why, fix="Use local.")
    try:
        if len(loadeds) == 1:
            runs = [submission.write_run(folder, configs[0], plan, script, request.command, marks_of_new[0])]
        else:
            runs = submission.write_sweep(folder, configs, plan, script, request.command, variants, marks_of_new)
            if request.prune is not None:
                fileio.write(folder / PRUNING, json.dumps({"eta": request.prune}), folder)
            if chosen:
                chosen["others"] = [str(item.run.path) for item in known]
                fileio.write(folder / SAMPLER, json.dumps(chosen), folder)
    except UserError:
        if request.run_dir is None and folder.exists():  # another submission took this number: take the next
            return submit(replace(prepared, folder=next_path(folder.parent, loadeds[0].name)))
        raise
    with submission.undone_on_error(folder, unless=plan.executor == "debug"):
        for run in runs:
            say(run, tags=request.tags, notes=request.notes)
        arrays = Arrays(folder, loadeds[0], site, cwd, env)
        if (at_once := len(sides(loadeds[0].config.launch, plan, site, len(runs)))) > 1:
            list(arrays.queue(runs, len(runs)))
            print(f"Running locally: {at_once} of {len(runs)} runs side by side, through submitit's local execution.")
            _say_commands(folder, folder / "0")
            job_ids, rest = [], []
        else:
            job_ids, rest = start(folder, runs[:largest], plan, cwd, env), runs[largest:]
    if rest:
        after = job_ids[0].partition("_")[0] if loadeds[0].config.launch.max_parallel else ""
        for array, part in arrays.queue(rest, largest, after=after):
            print(f"  and job     {array}: {len(part)} more, for an array has {largest} tasks at most here")
    print("".join(f"{note}\n" for note in notes), end="", file=sys.stderr)
    new = iter(runs)
    going_on = [*runs, *_say_there(known)]
    return Started([there[mark].run if mark in there else next(new) for mark in marks], going_on, plan.executor)


def new_folder(text: str) -> Path:
    """Check the name of a new folder, which goes into scripts and onto terminals. Raises UserError."""
    if not text.strip():
        why = "A variable of the shell may be unset."
        raise UserError("The name of the folder is empty.", why=why, fix="Give one, such as --run-dir runs/first.")
    if not is_one_line(text):
        why = "It holds a line break or another control character."
        raise UserError(f"{text!r} cannot be the name of a folder.", why=why, fix="Give another name.")
    return Path(text).expanduser()


def named_folder(name: str, env: Mapping[str, str]) -> Path:
    """The folder of a new run with this name. Raises UserError for a name that is none, or taken."""
    if not re.fullmatch(r"[^\W_][\w.+-]{0,99}", name) or name.isdecimal():
        why = "It becomes a folder in runs/, and a word of commands."
        fix = "Use letters, digits, . + - and _, with a letter among them: --name vit-lr3."
        raise UserError(f"{name!r:.120} is no name of a run.", why=why, fix=fix)
    if os.path.lexists(path := runs_root(env) / name):
        fix = f"Give another --name; `{terminal.command('resume', name)}` goes on with that one."
        raise UserError(f"There is a run {name} already.", why=f"It is in {path}.", fix=fix)
    return path


def preset_or_run(name: str, env: Mapping[str, str]) -> str:
    """Return ``name`` if it is a preset or a file, else the folder of the run with that name."""
    try:
        is_run = find_preset(name).parent == Path(name).expanduser()
    except UserError:  # the loader raises it again if there is no run either
        is_run = bool(name.strip()) and not presets_named(name) and bool(folders_named(name, env))
    return str(find_run(name, env).path) if is_run else name


def by_names(plan: Plan, env: Mapping[str, str]) -> Plan:
    """Replace the runs that the plan's dependency names by their job ids."""
    return named(plan.executor).with_job_ids(plan, lambda name: find_runs(name, env))


def start(folder: Path, runs: Sequence[RunDir], plan: Plan, cwd: Path, env: Mapping[str, str]) -> list[str]:
    """Start written runs and print how. Returns their job ids; none for the debug executor."""
    why = {item.name: str(item.reason) for item in plan.decisions}
    if plan.executor == "debug":
        print(f"{runs[0].name}: rank 0 of 1 in this process. {why.get('nodes', '')}".rstrip(), flush=True)
        submission.run_here(runs[0], plan, run_rank, env)
        return []
    scheduler = named(plan.executor)
    job_ids = scheduler.submit(folder, runs, plan, run_rank, cwd=cwd, env=env)
    ranks = f"{terminal.plural(plan.nodes, 'node')} x {terminal.plural(plan.ntasks_per_node, 'rank')}"
    if scheduler.batch:
        what = job_ids[0] if len(job_ids) == 1 else f"{job_ids[0].split('_')[0]} (array of {len(job_ids)})"
        print(f"Submitted job {what}: {ranks}.")
    else:
        how = f"simulating {ranks}" if plan.nodes > 1 else ranks
        asked = why.get("executor") or "as asked"
        print(f"Running locally ({asked}): {how} on this machine through submitit's local execution.")
    _say_commands(folder, folder if len(job_ids) == 1 else folder / "0")
    return job_ids


def _say_commands(folder: Path, run: Path) -> None:
    """Print the folder of a run or sweep, and the commands to watch and cancel it."""
    print(f"  run folder  {folder}")
    print(f"  watch       {terminal.command('logs', run, '-f')}")
    print(f"  state       {terminal.command('status', folder)}")
    print(f"  cancel      {terminal.command('cancel', folder)}", flush=True)


def _to_join(request: Request, env: Mapping[str, str]) -> tuple[Loaded, int, Mapping[str, str]]:
    """Configuration, number and environment of the peers of ``submit --join TOKEN --array N``.

    Raises UserError when the swarm does not answer, or the flags do not go together.
    """
    from trainkit.swarm import view
    from trainkit.swarm.admission import VARIABLE, entry_of
    from trainkit.swarm.messages import require_collaborative

    if request.join is None:
        why = "It adds so many peers to a swarm."
        raise UserError("--array needs --join.", why=why, fix="Add --join TOKEN, or use --sweep.")
    if request.sweep or request.trials or request.prune or request.sampler != "random":
        raise not_with_join("--sweep")
    count = 1 if request.array is None else request.array
    if not 0 < count <= _MOST_PEERS:
        why = f"It is a number of peers, 1 to {_MOST_PEERS}."
        raise UserError(f"--array {count} is not possible.", why=why, fix="Use --array 8.")
    require_collaborative(load(request.preset).config)
    entry = entry_of([request.join] if request.join else [], env)
    loaded = view.as_peer(entry, request.overrides, flags=request.flags, env=env, allow_code=request.allow_code)
    # Jobs get the token from the environment: it must not appear in command lines or files.
    return loaded, count, {**env, VARIABLE: entry.text}


def not_with_join(flag: str) -> UserError:
    """The error for a flag that does not apply to a job that joins a swarm."""
    why = "What joins has the settings of the swarm's creator, which are asked for from here."
    return UserError(f"{flag} and --join do not go together.", why=why, fix=f"Leave {flag} out.")


# Before anything is written


def check(loaded: Loaded) -> None:
    """Refuse names, options and values that would fail only once the run starts; does without torch.

    Raises UserError that names the setting and where it was written.
    """
    config = loaded.config
    strategy, loggers, launch = config.strategy, config.monitor.loggers, config.launch
    # Where the job brings an environment of its own, what is missing here may be there.
    here = not (launch.environment or launch.container_image or launch.modules or launch.setup)
    plugin_names = [
        *(("data", config.data.name), ("strategies", strategy.name), ("tasks", config.task.name)),
        *(("optim", config.optim.name), ("schedule", config.schedule.name)),
        *[("models", config.model.name)] * (not config.model.name.startswith(TIMM_SOURCES)),
        *[("schedulers", launch.executor)] * (":" in launch.executor),
        *(("monitor", logger) for logger in loggers),
    ]
    with loaded.pointing_at_sources():
        for package, name in plugin_names:
            plugins.check_importable(f"trainkit.{package}", name, installed=here)
        check_data(config.data)
        waits, hang = patience(config.data), launch.hang_seconds
        require(waits < hang, "data.patience", waits, f"less than launch.hang_seconds={hang}")
        if (images := train_size(config.data)) is not None:
            steps_per_epoch(images, config.train.global_batch_size)
        check_model(config.model)
        check_task(config)
        teacher_of(config)
        if (file := config.model.checkpoint) is not None and not Path(file).expanduser().is_file():
            why = "Training is to start from the weights in it."
            fix = "Give a .safetensors or .pth file, such as `python -m jobs.export RUN FILE` writes."
            raise UserError(f"There is no file {file}.", why=why, fix=fix, key="model.checkpoint")
        plugins.check_options("trainkit.strategies", strategy.name, strategy.options, where="strategy")
        check_strategy(config)
        check_optimizer(config)
        check_schedule(config.schedule)
        for logger in loggers:
            if here:
                plugins.require_extra("trainkit.monitor", logger)
            plugins.check_options("trainkit.monitor", logger, {}, where="monitor")
    refuse_settings(loaded)  # last: its detectors take longer than all the rest


def settled(loadeds: Sequence[Loaded], run: Path | None = None) -> list[Loaded]:
    """Configurations with what new runs find in their data and then keep; says what that is.

    What has begun keeps what it has: a run that is repeated or goes on guesses nothing.

    Args:
        run: a folder that may hold the run already.
    """
    begun = None
    if run is not None and (run / "config.yaml").is_file():
        begun = {name: value for name, value in load(str(run)).config.data.options.items() if name == "image_size"}
    known: dict[str, dict[str, tuple[Any, str]]] = {}
    done, said = [], set[str]()
    for loaded in loadeds:
        data, key, found = loaded.config.data, loaded.config.data.model_dump_json(), dict[str, tuple[Any, str]]()
        if begun is not None:
            found = {name: (value, str(run)) for name, value in begun.items() if name not in data.options}
        elif not (loaded.is_run and loaded.source("data.name").kind == "file"):
            found = known[key] = known[key] if key in known else guessed(data)
            said |= {f"data.{name}={value}; {why}." for name, (value, why) in found.items()}
        sources = {f"data.{name}": Source("guessed", why) for name, (_, why) in found.items()}
        data = data.model_copy(update={name: value for name, (value, _) in found.items()})
        short = _rehearsal(loaded) if begun is None else {}
        sources |= {f"train.{name}": Source("rehearsal", "data.fake, executor debug") for name in short}
        train = loaded.config.train.model_copy(update=short)
        config = loaded.config.model_copy(update={"data": data, "train": train})
        done.append(replace(loaded, config=config, sources={**loaded.sources, **sources}))
    print("".join(f"Guessed: {words}\n" for words in sorted(said)), end="", file=sys.stderr, flush=True)
    return done


def _rehearsal(loaded: Loaded) -> dict[str, Any]:
    """Settings of ``train`` for one update on made-up images in this process, maybe a laptop's: a few at once."""
    config, train = loaded.config, loaded.config.train
    if not config.data.fake or config.launch.executor != "debug":
        return {}
    sizes = [size for size in micro_batch_sizes(train.global_batch_size, even=config.augment.mixes) if size <= _FEW]
    is_free = train.micro_batch_size is None and strategy_traits(config.strategy.name).loop == "updates"
    few = {"micro_batch_size": max(sizes)} if sizes and is_free else {}
    return {**({"max_steps": 1} if train.max_steps is None else {}), **few}


# Existing runs with the same settings, code and data


class _Known(NamedTuple):
    run: RunDir
    state: JobState
    is_finished: bool


def _there(fingerprints: Sequence[str]) -> dict[str, _Known]:
    """Fingerprint -> the run that trains or has finished already. Names failed ones on stderr."""
    same = same_runs(fingerprints)
    histories = {run: history_of(run) for runs in same.values() for run in runs}
    states = {run: JobState("COMPLETED" if it.finished else it.outcome or "FAILED") for run, it in histories.items()}
    # Only the scheduler knows the state of a job whose end is not recorded.
    asked = [
        run
        for run, past in histories.items()
        if not past.finished and (past.cut_short or (past.submission and past.submission.ended is None))
    ]
    states |= zip(asked, job_states(asked) if asked else (), strict=True)
    found: dict[str, _Known] = {}
    failed: list[_Known] = []
    for mark, runs in same.items():
        known = [_Known(run, states[run], histories[run].finished) for run in runs]
        living = [item for item in known if item.is_finished or item.state.alive == "yes"]
        unknown = [item for item in known if item.state.alive == "unknown"]
        if living:
            found[mark] = living[-1]
        elif unknown:
            run, state, _ = unknown[-1]
            what = f"{full_name(run)} is the same run, and nobody can tell whether it still runs."
            fix = f"`{terminal.command('status', run.path)}` asks again; add --again to train it once more."
            raise RefusedError(what, why=state.reason or "Its scheduler does not answer.", fix=fix)
        else:
            failed += known[-1:]
    _say_failed(failed)
    return found


def _say_failed(runs: Sequence[_Known]) -> None:
    """Say that the same command starts new runs, and what the failed ones are still good for."""
    for run, state, _ in runs[:_MOST_SAID]:
        ended = "was cancelled" if state.state == "CANCELLED" else f"has ended ({state.state})"
        why, resume = (terminal.command(verb, run.path) for verb in ("why", "resume"))
        told = f"it {ended}: `{why}` says why, `{resume}` goes on with it"
        print(f"{full_name(run)} is the same run, and {told}. This one begins anew.", file=sys.stderr)
    if len(runs) > _MOST_SAID:
        print(f"So do {len(runs) - _MOST_SAID} more.", file=sys.stderr)


def _say_there(known: Sequence[_Known]) -> list[RunDir]:
    """Describe runs that need not be started; returns those that are still running."""
    from trainkit.report.facts import summary_lines

    for run, state, is_finished in known:
        if is_finished:
            print(f"{full_name(run)} is up to date: it has finished with this configuration, code and data.")
            results, *places = summary_lines(run)
            print("\n".join([results, *places]) if len(known) == 1 else f"  {results}  {run.path}")
            continue
        print(f"{full_name(run)} is the same run, and it is {state.state} (job {state.job_id}).")
        if len(known) == 1:
            _say_commands(run.path, run.path)
    if len(known) > 1:
        sweeps = dict.fromkeys(item.run.path.parent if item.run.name.isdecimal() else item.run.path for item in known)
        print(f"  results     {terminal.command('report', *sweeps)}")
    if known:
        print("Add --again, or give --run-dir or --job-name, to train it once more.", flush=True)
    return [item.run for item in known if not item.is_finished]


# Sweeps


class Arrays(NamedTuple):
    """Further job arrays of a sweep: for runs beyond the first array, and for resumed ones."""

    sweep: Path
    loaded: Loaded
    site: Site
    cwd: Path
    env: Mapping[str, str]

    def plan(self, runs: Sequence[RunDir], *, after: str = "") -> tuple[Path, Plan, str | None]:
        """Folder, plan and script of another array of these runs, or of a single run. Writes nothing.

        Args:
            after: id of the job that must end first.
        """
        folder = runs[0].path if len(runs) == 1 else submission.part_folder(self.sweep)
        plan = by_names(make_plan(self.loaded, self.site, folder, points=len(runs)), self.env)
        if after:
            plan = waiting_for(plan, after, "--max-parallel is for all arrays together")
        return folder, plan, named(plan.executor).script(plan, folder, self.cwd, len(runs))

    def queue(self, runs: Sequence[RunDir], largest: int, *, after: str = "") -> Iterator[tuple[str, list[RunDir]]]:
        """Queue arrays of at most ``largest`` tasks, or as many as share this machine; yields id and runs of each.
        --max-parallel chains arrays."""
        found = sides(self.loaded.config.launch, self.plan(runs[:largest])[1], self.site, len(runs))
        if len(found) > 1:
            parts = [(list(runs[side.index :: side.count]), side) for side in found]
        else:
            parts = [(list(runs[at : at + largest]), found[0]) for at in range(0, len(runs), largest)]
        for part, side in parts:
            folder, plan, script = self.plan(part, after=after)
            plan = replace(plan, side=side)
            submission.require_executor(plan, self.site)
            if len(part) > 1:
                submission.link_runs(folder, part)
            submission.write_launch(folder, plan, script)
            job_ids = named(plan.executor).submit(folder, part, plan, run_rank, cwd=self.cwd, env=self.env)
            array = job_ids[0].partition("_")[0]
            after = array if self.loaded.config.launch.max_parallel else ""
            yield array, part
