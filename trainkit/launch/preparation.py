"""Preparation of runs: load a request, check its settings and its data, before anything is written.

`prepare` loads and checks a `Request`; `trainkit.launch.submission` plans its launch, writes and starts the runs.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from trainkit.cluster.plan import Plan
from trainkit.cluster.scheduler import named
from trainkit.cluster.site import Site
from trainkit.cluster.survey import discover
from trainkit.common import terminal
from trainkit.common.errors import UserError, require
from trainkit.config import own_code, plugins
from trainkit.config.checks import check_schedule, check_strategy, micro_batch_sizes, strategy_traits
from trainkit.config.libraries import check_optimizer
from trainkit.config.loading import Loaded, load
from trainkit.config.own_code import check_call
from trainkit.config.presets import find_preset, presets_named
from trainkit.config.schema import Config, LaunchConfig
from trainkit.config.script import as_values
from trainkit.config.source import Source
from trainkit.config.sweep import check_prune, check_sampler, sweep_points
from trainkit.config.task_metrics import check_task
from trainkit.data import registry
from trainkit.data.losses import Counts, in_lines
from trainkit.data.order import steps_per_epoch
from trainkit.launch.scripts import check_script, settled_script
from trainkit.models.library import TIMM_SOURCES, check_model
from trainkit.run.find import find_run, find_runs, folders_named, next_path, runs_root
from trainkit.run.folder import RunDir, refuse_bench
from trainkit.run.ownership import require_own_code
from trainkit.run.run_manifest import add_data
from trainkit.run.secrets import refuse_settings
from trainkit.run.teacher import teacher_of

_MOST_PEERS = 1000
"""Maximum peers of one array; a larger number is probably a typo."""
_FEW = 8
"""Images that a rehearsal takes at once."""


@dataclass(frozen=True)
class Request:
    """A user's request: for one run, or for the runs of a sweep."""

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
    """Number of points to draw from the sweep; None runs every combination."""
    sampler: str = "random"
    """``random`` draws the trials when they are submitted, ``tpe`` chooses each when it begins."""
    prune: int | None = None
    """Keep the best 1/N of the runs at epochs 1, N, N²; None trains all of them to the end."""


@dataclass(frozen=True)
class Prepared:
    """The configurations of a request, loaded and checked."""

    loadeds: list[Loaded]
    variants: list[list[str]]
    folder: Path
    request: Request
    env: Mapping[str, str]

    @cached_property
    def site(self) -> Site:
        """The site as it is found here and as its scheduler describes it; asked once."""
        return discover(self.env)


def launch_settings(given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Configuration key -> (value, flag) of the flags that set something of ``launch``; others are left out.

    Args:
        given: flag name with underscores -> value; None means not given.
    """
    found: dict[str, tuple[Any, str]] = {}
    for name in LaunchConfig.model_fields:
        value = given.get(name)
        flag = f"--{name.replace('_', '-')}"
        if name in ("sbatch", "srun"):
            value = _options(value or (), flag) or None
        if value is not None:
            found[f"launch.{name}"] = (value, flag)
    return found


def _options(texts: Sequence[str] | Mapping[str, str], flag: str) -> dict[str, str]:
    """Read texts like ``comment=thesis``, options of sbatch or srun. Raises UserError."""
    if isinstance(texts, Mapping):  # from Python
        return dict(texts)
    found = {}
    for text in texts:
        key, _, value = text.partition("=")
        if not key:
            fix = f"For example {flag} comment=thesis."
            raise UserError(f"{flag} '{text}' has no key.", why=f"{flag} takes KEY=VALUE.", fix=fix)
        found[key.lstrip("-")] = value
    return found


def prepare(request: Request, env: Mapping[str, str]) -> Prepared:
    """Load and check a request. Raises UserError, or RefusedError for code that another user could have written."""
    if request.join is not None or request.array is not None:
        loadeds, env = _peers(request, env)
        variants = [list(request.overrides)] * len(loadeds)
        again = True  # peers with equal settings are different runs
    else:
        if "script.arguments" in request.flags:
            request = replace(request, sweep=as_values(request.sweep))
        check_prune(request.prune, request.sweep)
        variants = [[*request.overrides, *point] for point in sweep_points(request.sweep, request.trials)]
        loadeds = _checked(request, variants, env)
        # A run that is given a name is always new.
        is_named = "launch.job_name" in request.flags
        is_named |= any(text.startswith("launch.job_name=") for text in request.overrides)
        again = request.again or request.run_dir is not None or is_named
    folder = request.run_dir.absolute() if request.run_dir else next_path(runs_root(env), loadeds[0].name)
    return Prepared(loadeds, variants, folder, replace(request, again=again), env)


def _checked(request: Request, variants: Sequence[Sequence[str]], env: Mapping[str, str]) -> list[Loaded]:
    """Load and check the configuration of each variant."""
    preset = preset_or_run(request.preset, env)
    place = Path(preset).expanduser()
    refuse_bench(place)
    # A sampler may choose these values later, so they are checked as well.
    possible = [[*variants[0], text] for text in check_sampler(request.sampler, request.sweep, request.trials)]
    loadeds = []
    for overrides in [*variants, *possible]:
        loaded = load(preset, overrides, flags=request.flags, env=env)
        loadeds.append(settled_script(loaded, Path.cwd()))
    for loaded in loadeds:
        require_own_code(place, loaded, allow_code=request.allow_code)
        if loaded.config.script is not None:
            check_script(loaded, env)
            continue
        check(loaded)
        if loaded.config.collaborative.initial_peers:
            from trainkit.swarm.identity.invitations import entry_of

            entry_of([], env)  # the token that the job is going to need
    if loadeds[0].config.script is not None:
        return loadeds[: len(variants)]
    check_all_data(loadeds)
    return settled(loadeds[: len(variants)])


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


def _peers(request: Request, env: Mapping[str, str]) -> tuple[list[Loaded], Mapping[str, str]]:
    """Load the peers of ``submit --join TOKEN --array N``; with them comes the environment of their jobs.

    Raises UserError when the swarm does not answer, or the flags do not go together.
    """
    from trainkit.swarm.identity.invitations import TOKEN_VARIABLE, entry_of
    from trainkit.swarm.peer import status
    from trainkit.swarm.peer.same_run import require_collaborative

    if request.join is None:
        raise UserError("--array needs --join.", why="It adds peers to a swarm.", fix="Add --join TOKEN.")
    if request.sweep or request.trials or request.prune or request.sampler != "random":
        raise not_with_join("--sweep")
    count = 1
    if request.array is not None:
        count = request.array
    if not 0 < count <= _MOST_PEERS:
        raise UserError(f"--array {count} is not possible.", why=f"It is 1 to {_MOST_PEERS}.", fix="Use --array 8.")
    if "script.arguments" in request.flags:
        raise not_with_join("A script")
    require_collaborative(load(request.preset).config)
    entry = entry_of(list(filter(None, [request.join])), env)
    loaded = status.as_peer(entry, request.overrides, flags=request.flags, env=env, allow_code=request.allow_code)
    # Jobs get the token from the environment: it must not appear in command lines or files.
    return [loaded] * count, {**env, TOKEN_VARIABLE: entry.text}


def not_with_join(flag: str) -> UserError:
    """The error for a flag that does not apply to a job that joins a swarm."""
    why = "A peer uses the settings of the swarm's creator, which this command requests."
    return UserError(f"{flag} and --join do not go together.", why=why, fix=f"Leave {flag} out.")


# Settings


def check(loaded: Loaded) -> None:
    """Refuse names, options and values that would fail only once the run starts; does without torch.

    Raises UserError that names the setting and where it was written.
    """
    config = loaded.config
    launch = config.launch
    here = not launch.has_own_environment
    with loaded.pointing_at_sources():
        for package, name in _plugins(config):
            own_code.check_importable(f"trainkit.{package}", name, installed=here)
            check_call(package, name, config)
        registry.check_data(config.data)
        waits = registry.patience(config.data)
        hang = launch.hang_seconds
        require(waits < hang, "data.patience", waits, f"less than launch.hang_seconds={hang}")
        images = registry.train_size(config.data)
        if images is not None:
            steps_per_epoch(images, config.train.global_batch_size)
        check_model(config.model)
        check_task(config)
        teacher_of(config)
        file = config.model.checkpoint
        if file is not None and not Path(file).expanduser().is_file():
            fix = "Give a .safetensors or .pth file, such as `python -m jobs.export RUN FILE` writes."
            raise UserError(
                f"There is no file {file}.", why="It should hold the initial weights.", fix=fix, key="model.checkpoint"
            )
        strategy = config.strategy
        plugins.check_options("trainkit.distributed.strategies", strategy.name, strategy.options, where="strategy")
        check_strategy(config)
        check_optimizer(config)
        check_schedule(config.schedule)
        for logger in config.monitor.loggers:
            if here:
                plugins.require_extra("trainkit.monitor", logger)
            plugins.check_options("trainkit.monitor", logger, {}, where="monitor")
    refuse_settings(loaded)  # last: its detectors take longer than all the rest


def _plugins(config: Config) -> list[tuple[str, str]]:
    """List what a configuration names that is imported: package and name."""
    found = [("data", config.data.name), ("strategies", config.strategy.name), ("tasks", config.task.name)]
    found += [("optim", config.optim.name), ("schedule", config.schedule.name)]
    if not config.model.name.startswith(TIMM_SOURCES):
        found.append(("models", config.model.name))
    if ":" in config.launch.executor:
        found.append(("schedulers", config.launch.executor))
    found += [("monitor", logger) for logger in config.monitor.loggers]
    return found


# Data


def check_all_data(loadeds: Sequence[Loaded]) -> None:
    """Refuse data that names or some files show to be wrong; warn of what is left out of it. Does without torch.

    Raises UserError.
    """
    sentences: list[str] = []
    for loaded in _by_data(loadeds).values():
        with loaded.pointing_at_sources():
            sentences += registry.look_at_data(loaded.config.data)
    for sentence in dict.fromkeys(sentences):
        terminal.warn(f"Note: {sentence}")


def _by_data(loadeds: Sequence[Loaded]) -> dict[str, Loaded]:
    """Map each data, as JSON, to the first configuration that has it."""
    found: dict[str, Loaded] = {}
    for loaded in loadeds:
        found.setdefault(loaded.config.data.model_dump_json(), loaded)
    return found


def settled(loadeds: Sequence[Loaded], *, counted: bool = True) -> list[Loaded]:
    """Add to configurations what new runs find in their data and then keep; warn of what that is.

    Args:
        counted: also say how many images are read, and what is left out.
    """
    by_data = _by_data(loadeds)
    guesses = {key: _guesses(loaded) for key, loaded in by_data.items()}
    done = []
    for loaded in loadeds:
        data = loaded.config.data
        found = dict(guesses[data.model_dump_json()])
        if not _is_stored(loaded) and registry.lists_files(data) and loaded.source("data.all_kinds").kind == "default":
            found["all_kinds"] = (True, "a new run uses them")
        done.append(_rehearsed(_with_found(loaded, found)))
    lines = set[str]()
    for guess in guesses.values():
        for name, (value, why) in guess.items():
            lines.add(f"Guessed: data.{name}={value}; {why}.")
    told = sorted(lines)
    if counted:
        _known_counts.clear()  # of a submission that came to no run
        told += _told([_counts_of(loaded.config) for loaded in done])
    for line in told:
        terminal.warn(line)
    return done


def _guesses(loaded: Loaded) -> dict[str, tuple[Any, str]]:
    """Guess the options of data that a new run does not set."""
    return {} if _is_stored(loaded) else registry.guessed(loaded.config.data)


def _is_stored(loaded: Loaded) -> bool:
    """Return True for the data of a run that is repeated, which keeps what that run has found."""
    return loaded.is_run and loaded.source("data.name").kind == "file"


def as_begun(loaded: Loaded, run: Path) -> Loaded:
    """Add what a run has found in its data: one that has begun is never guessed again."""
    stored = load(str(run)).config.data
    found = {}
    if loaded.source("data.all_kinds").kind == "default":
        found["all_kinds"] = (stored.all_kinds, str(run))
    if "image_size" in stored.options and "image_size" not in loaded.config.data.options:
        found["image_size"] = (stored.options["image_size"], str(run))
    return _with_found(loaded, found)


def _with_found(loaded: Loaded, found: Mapping[str, tuple[Any, str]]) -> Loaded:
    """Add settings of ``data`` that were found in it: name -> value and why."""
    values = {}
    sources = dict(loaded.sources)
    for name, (value, why) in found.items():
        values[name] = value
        sources[f"data.{name}"] = Source("guessed", why)
    data = loaded.config.data.model_copy(update=values)
    return replace(loaded, config=loaded.config.model_copy(update={"data": data}), sources=sources)


def _rehearsed(loaded: Loaded) -> Loaded:
    """Shorten a training on made-up images in this process, maybe a laptop's: one update, a few images at once."""
    config = loaded.config
    train = config.train
    if not config.data.fake or config.launch.executor != "debug":
        return loaded
    short: dict[str, Any] = {}
    if train.max_steps is None:
        short["max_steps"] = 1
    sizes = [size for size in micro_batch_sizes(train.global_batch_size, even=config.augment.mixes) if size <= _FEW]
    if sizes and train.micro_batch_size is None and strategy_traits(config.strategy.name).loop == "updates":
        short["micro_batch_size"] = max(sizes)
    sources = dict(loaded.sources)
    for name in short:
        sources[f"train.{name}"] = Source("rehearsal", "data.fake, executor debug")
    return replace(loaded, config=config.model_copy(update={"train": train.model_copy(update=short)}), sources=sources)


def record_data(runs: Sequence[RunDir], configs: Sequence[Config]) -> list[str]:
    """Write into the manifests of new runs what is read of their data, and what is not; return lines that say it."""
    found = list(map(_counts_of, configs))
    for run, counts in zip(runs, found, strict=True):
        if counts:
            add_data(run, {split: of.to_json() for split, of in counts.items()})
    _known_counts.clear()  # a later run of this process may find other data
    return _told(found)


_known_counts: dict[str, Counts] = {}
"""Counts of data, by its settings: said when they are settled, and recorded once the run has a folder."""


def _counts_of(config: Config) -> Counts:
    key = config.data.model_dump_json()
    if key not in _known_counts:
        _known_counts[key] = registry.counts_of(config.data)
    return _known_counts[key]


def _told(counts: Iterable[Counts]) -> list[str]:
    """Say what is read of data, and what is not, a line for each split."""
    lines = dict.fromkeys(chain.from_iterable(map(in_lines, counts)))
    return [f"Data: {line}" for line in lines]
