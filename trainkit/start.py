"""From what somebody asks for to started runs: what `submit` does, in notebooks and scripts too.

A `Request` is loaded and checked (`prepare`), planned (`plan_runs`), written and handed over (`submit`).
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainkit import terminal
from trainkit.bench.request import refuse_bench
from trainkit.checking import check
from trainkit.config import yaml
from trainkit.config.loading import Loaded, find_preset, load, presets_named
from trainkit.config.schema import LaunchConfig, is_one_line
from trainkit.errors import RefusedError, UserError
from trainkit.finish import full_name
from trainkit.launch import submission
from trainkit.launch.plan import Plan, make_plan, validate, waiting_for
from trainkit.run.events import RunHistory, history_of
from trainkit.run.folder import RunDir, find_run, find_runs, folders_named, next_path, runs_root
from trainkit.run.ownership import require_own_code
from trainkit.run.snapshot import code_files, digest_of, fingerprint, same_runs
from trainkit.schedulers.base import JobState, named
from trainkit.schedulers.states import job_states
from trainkit.site.profile import Site, discover
from trainkit.worker import run_rank

_MOST_PEERS = 1000
"""Peers of one array: more are a slip of the pen."""
_MOST_SAID = 3
"""Runs that have failed before, of a sweep."""
_MOST_RUNS = 10_000
"""Runs of one sweep: more are a slip of the pen."""
_RANGE = re.compile(r"(-?\d+)\.\.(-?\d+)(?:\.\.(\d+))?")


@dataclass(frozen=True)
class Request:
    """A run, or the runs of a sweep, as somebody asks for them."""

    preset: str
    overrides: Sequence[str] = ()
    flags: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Launch settings by their keys, each with the flag that gave it (`launch_settings`)."""
    sweep: Sequence[str] = ()
    run_dir: Path | None = None
    again: bool = False
    """Make new ones where the same are there already."""
    allow_code: bool = False
    join: str | None = None
    array: int | None = None
    command: Sequence[str] = ()
    """What was typed, for the record."""


@dataclass(frozen=True)
class Prepared:
    """The configurations of a request, loaded and checked."""

    loadeds: Sequence[Loaded]
    variants: Sequence[Sequence[str]]
    folder: Path
    request: Request
    env: Mapping[str, str]


@dataclass(frozen=True)
class Planned:
    """How they are to be launched."""

    plan: Plan
    site: Site
    script: str | None
    largest: int
    """Tasks of one array."""
    first: int
    """Runs of the first array."""
    notes: Sequence[str]

    def say_notes(self) -> None:
        for note in self.notes:
            print(note, file=sys.stderr)


@dataclass(frozen=True)
class Started:
    """All runs that were asked for, those of them that were started or run already, and their executor."""

    runs: Sequence[RunDir]
    going_on: Sequence[RunDir]
    executor: str


def launch_settings(given: Mapping[str, Any]) -> dict[str, tuple[Any, str]]:
    """Configuration key -> (value, flag) of those flags that set something of ``launch``; the others are left out.

    Args:
        given: values by the flags' names, with underscores; what is None or False was not given.
    """
    found: dict[str, tuple[Any, str]] = {}
    for name in LaunchConfig.model_fields:
        value, flag = given.get(name), f"--{name.replace('_', '-')}"
        if name in ("sbatch", "srun"):
            value = dict(_pair(text, flag) for text in value or ()) or None
        elif name in ("nodes", "gpus_per_node", "ntasks_per_node", "cpus_per_task", "max_parallel"):
            value = yaml.parse_value(value) if isinstance(value, str) else value
        if value is not None and value is not False:
            found[f"launch.{name}"] = (value, flag)
    return found


def _pair(text: str, flag: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not key:
        raise UserError(
            f"{flag} {text!r} has no key.", why=f"{flag} takes KEY=VALUE.", fix=f"For example {flag} comment=thesis."
        )
    return key.lstrip("-"), value if equals else ""


def prepare(request: Request, env: Mapping[str, str]) -> Prepared:
    """Load and check what is asked for. Raises UserError, or RefusedError for code that is somebody else's."""
    again = request.again or request.run_dir is not None or _is_named(request)
    if request.join is not None or request.array is not None:
        loaded, count, env = _to_join(request, env)
        loadeds, variants = [loaded] * count, [list(request.overrides)] * count
        again = True  # such a run may be there as often as you like
    else:
        variants = [[*request.overrides, *point] for point in sweep_points(request.sweep)]
        preset = preset_or_run(request.preset, env)
        refuse_bench(Path(preset).expanduser())
        loadeds = [load(preset, overrides, flags=request.flags, env=env) for overrides in variants]
        for loaded in loadeds:
            require_own_code(Path(preset).expanduser(), loaded, allow_code=request.allow_code)
            check(loaded)
    folder = request.run_dir.absolute() if request.run_dir else next_path(runs_root(env), loadeds[0].name)
    return Prepared(loadeds, variants, folder, replace(request, again=again), env)


def _is_named(request: Request) -> bool:
    """Who gives a run a name of its own wants one more."""
    return "launch.job_name" in request.flags or any(it.startswith("launch.job_name=") for it in request.overrides)


def plan_runs(loadeds: Sequence[Loaded], prepared: Prepared) -> Planned:
    """How these of the prepared runs are launched, checked against the site. Writes nothing."""
    folder, env, points, cwd = prepared.folder, prepared.env, len(loadeds), Path.cwd()
    site = discover(env)
    largest = named(site.scheduler).largest_array() if points > 1 and site.scheduler else points
    plans = [make_plan(loaded, site, folder, points=min(points, largest)) for loaded in loadeds]
    plan = plans[0]
    if any((other.world_size, other.directives) != (plan.world_size, plan.directives) for other in plans):
        raise UserError(
            "A sweep cannot change resources.", why="All its runs are one job array.", fix="Submit them one by one."
        )
    if prepared.request.array is not None and points > 1 and not named(plan.executor).batch:
        join = terminal.command("join", "TOKEN")
        raise UserError(
            "--array is for SLURM.",
            why="Here its peers would run one after the other.",
            fix=f"Join with this machine as one peer: {join}, with --nproc for several GPUs.",
        )
    plan = by_names(plan, env)
    notes = validate(loadeds[0], plan, site, folder, cwd)
    scheduler = named(plan.executor)
    first = min(points, largest) if scheduler.batch else points
    return Planned(plan, site, scheduler.script(plan, folder, cwd, first), largest, first, notes)


def submit(prepared: Prepared) -> Started:
    """Write the runs and hand them over; of those that are there already, say so."""
    loadeds, variants, request, env = prepared.loadeds, prepared.variants, prepared.request, prepared.env
    folder, cwd = prepared.folder, Path.cwd()
    configs = [submission.stored_config(loaded, cwd) for loaded in loadeds]
    digest = digest_of(code_files())
    marks = [fingerprint(config, digest) for config in configs]
    there = {} if request.again or configs[0].launch.executor == "debug" else _there(marks)
    known = [there.get(mark) for mark in marks]
    if all(known):
        going_on = [item.run for item in _say_there([item for item in known if item])]
        executor = next((item.state.executor for item in known if item and not item.is_finished), "")
        return Started([item.run for item in known if item], going_on, executor)
    missing = [index for index, found in enumerate(known) if not found]  # of a sweep: what is missing is trained
    loadeds, variants = [loadeds[index] for index in missing], [variants[index] for index in missing]
    configs, marks = [configs[index] for index in missing], [marks[index] for index in missing]
    planned = plan_runs(loadeds, prepared)
    plan, script = planned.plan, planned.script
    submission.require_executor(plan, planned.site)
    if plan.executor == "debug" and len(loadeds) > 1:
        raise UserError(
            "A sweep does not run with --executor debug.", why="debug is one run in this process.", fix="Use local."
        )
    try:
        if len(loadeds) == 1:
            runs = [submission.write_run(folder, configs[0], plan, script, request.command, marks[0])]
        else:
            runs = submission.write_sweep(folder, configs, plan, script, request.command, variants, marks)
    except UserError:
        if request.run_dir is None and folder.exists():  # another submission was given the same number: take the next
            return submit(replace(prepared, folder=next_path(folder.parent, loadeds[0].name)))
        raise
    first = planned.first
    with submission.undone_on_error(folder, unless=plan.executor == "debug"):
        job_ids = start(folder, runs[:first], plan, cwd, env)
    after = job_ids[0].partition("_")[0] if loadeds[0].config.launch.max_parallel and runs[first:] else ""
    further = Further(folder, loadeds[0], planned.site, cwd, env)
    for array, part in further.start_all(runs[first:], planned.largest, after=after):
        tasks = planned.largest
        print(f"  and job     {array}: {len(part)} more, for an array has {tasks} tasks at most here")
    planned.say_notes()
    going_on = [item.run for item in _say_there([item for item in known if item])]
    new = iter(runs)
    return Started([item.run if item else next(new) for item in known], [*runs, *going_on], plan.executor)


def new_folder(text: str) -> Path:
    """The path of a folder to make. Its name goes into scripts and onto terminals, so not every name is one."""
    if not text.strip():
        why = "A variable of the shell may be unset."
        raise UserError("The name of the folder is empty.", why=why, fix="Give one, such as --run-dir runs/first.")
    if not is_one_line(text):
        raise UserError(
            f"{text!r} cannot be the name of a folder.",
            why="It holds a line break or another control character.",
            fix="Give another name.",
        )
    return Path(text).expanduser()


def preset_or_run(name: str, env: Mapping[str, str]) -> str:
    """``name`` of a preset or a file as it is; where there is none, but a run of that name, the run's folder."""
    try:
        is_run = find_preset(name).parent == Path(name).expanduser()
    except UserError:  # the loader says it, where there is no run either
        is_run = bool(name.strip()) and not presets_named(name) and bool(folders_named(name, env))
    return str(find_run(name, env).path) if is_run else name


def by_names(plan: Plan, env: Mapping[str, str]) -> Plan:
    """The plan with job ids for the runs that its dependency names."""
    if not any(item.name == "dependency" for item in plan.directives):
        return plan
    return named(plan.executor).with_job_ids(plan, lambda name: find_runs(name, env))


def start(folder: Path, runs: Sequence[RunDir], plan: Plan, cwd: Path, env: Mapping[str, str]) -> list[str]:
    """Hand written runs over to whoever runs them, and say so. The job id of each; none for the debug executor."""
    if plan.executor == "debug":
        print(f"{runs[0].name}: rank 0 of 1 in this process. {_reason(plan, 'nodes')}".rstrip(), flush=True)
        submission.run_here(runs[0], plan, run_rank, env)
        return []
    job_ids = named(plan.executor).submit(folder, runs, plan, run_rank, cwd=cwd, env=env)
    _announce(folder, plan, job_ids)
    return job_ids


def _announce(folder: Path, plan: Plan, job_ids: Sequence[str]) -> None:
    ranks = f"{plan.nodes} node{'s' * (plan.nodes > 1)} x {plan.ntasks_per_node} rank{'s' * (plan.ntasks_per_node > 1)}"
    if named(plan.executor).batch:
        what = job_ids[0] if len(job_ids) == 1 else f"{job_ids[0].split('_')[0]} (array of {len(job_ids)})"
        print(f"Submitted job {what}: {ranks}.")
    else:
        why = _reason(plan, "executor")
        how = f"simulating {ranks}" if plan.nodes > 1 else ranks
        print(f"Running locally ({why or 'as asked'}): {how} on this machine through submitit's local execution.")
    say_commands(folder, folder if len(job_ids) == 1 else folder / "0")


def say_commands(folder: Path, run: Path) -> None:
    """Where a run, or a sweep, and one run of it, is, and what to type to look after it."""
    print(f"  run folder  {folder}")
    print(f"  watch       {terminal.command('logs', run, '-f')}")
    print(f"  state       {terminal.command('status', folder)}")
    print(f"  cancel      {terminal.command('cancel', folder)}", flush=True)


def _reason(plan: Plan, name: str) -> str:
    return next((str(item.reason) for item in plan.decisions if item.name == name), "")


def _to_join(request: Request, env: Mapping[str, str]) -> tuple[Loaded, int, Mapping[str, str]]:
    """What each peer of ``submit --join TOKEN --array N`` is configured as, how many there are, and their environment.

    Raises UserError when the swarm does not answer, or the flags do not go together.
    """
    from trainkit.swarm import reader
    from trainkit.swarm.admission import VARIABLE, entry_of, warned
    from trainkit.swarm.spec import require_collaborative

    if request.join is None:
        raise UserError(
            "--array needs --join.", why="It adds so many peers to a swarm.", fix="Add --join TOKEN, or use --sweep."
        )
    if request.sweep:
        raise not_with_join("--sweep")
    count = 1 if request.array is None else request.array
    if not 0 < count <= _MOST_PEERS:
        raise UserError(
            f"--array {count} is not possible.",
            why=f"It is a number of peers, 1 to {_MOST_PEERS}.",
            fix="Use --array 8.",
        )
    require_collaborative(load(request.preset).config)
    entry = warned(entry_of([request.join] if request.join else [], env, name="submit"))
    loaded = reader.as_peer(entry, request.overrides, flags=request.flags, env=env, allow_code=request.allow_code)
    # Jobs have the token from their environment, so that it is in no command line and in no folder.
    return loaded, count, {**env, VARIABLE: entry.text} if entry.invited else env


def not_with_join(flag: str) -> UserError:
    """The error for a flag that means nothing to a job that joins a swarm."""
    return UserError(
        f"{flag} and --join do not go together.",
        why="What joins has the settings of the swarm's creator, which are asked for from here.",
        fix=f"Leave {flag} out.",
    )


@dataclass(frozen=True)
class _Known:
    """A run that is there already, of the same settings, code and data."""

    run: RunDir
    state: JobState
    is_finished: bool


def _there(fingerprints: Sequence[str]) -> dict[str, _Known]:
    """What trains, or has trained, already, by fingerprint; what was tried before and has failed is only said."""

    found: dict[str, _Known] = {}
    same = same_runs(fingerprints)
    lives = {run.path: history_of(run) for runs in same.values() for run in runs}
    # Whether what has no end lives only its scheduler knows.
    open_ends = [run for runs in same.values() for run in runs if _may_live(lives[run.path])]
    states = dict(zip((run.path for run in open_ends), job_states(open_ends) if open_ends else (), strict=True))
    failed: list[_Known] = []
    for mark, runs in same.items():
        known = [_known(run, lives[run.path], states.get(run.path)) for run in runs]
        living = [item for item in known if item.is_finished or item.state.alive == "yes"]
        unknown = [item for item in known if item.state.alive == "unknown"]
        if living:
            found[mark] = living[-1]
        elif unknown:
            run, reason = unknown[-1].run, unknown[-1].state.reason
            raise RefusedError(
                f"{full_name(run)} is the same run, and nobody can tell whether it still runs.",
                why=reason or "Its scheduler does not answer.",
                fix=f"`{terminal.command('status', run.path)}` asks again; add --again to train it once more.",
            )
        elif known:
            failed.append(known[-1])
    _say_failed(failed)
    return found


def _known(run: RunDir, life: RunHistory, state: JobState | None) -> _Known:
    return _Known(run, state or JobState("COMPLETED" if life.finished else life.outcome or "FAILED"), life.finished)


def _say_failed(runs: Sequence[_Known]) -> None:
    """The same command after a failure begins anew, with the new flags perhaps; what was saved is not lost."""
    from trainkit.checkpoint import format
    from trainkit.diagnosis.causes import cause_of

    for item in runs[:_MOST_SAID]:
        step = format.pointed(item.run.checkpoints, "latest")
        resume, why = terminal.command("resume", item.run.path), terminal.command("why", item.run.path)
        # What going on does not mend would end it again: a loss that is nan, too little memory, an error in code.
        cause = cause_of(item.run, item.state) if step is not None else None
        helps = step is not None and (cause is None or "-m jobs.resume " in cause.command)
        told = f"`{resume}` goes on with it from step {step}" if helps else f"`{why}` says why"
        ended = "was cancelled" if item.state.state == "CANCELLED" else f"has ended ({item.state.state})"
        print(f"{full_name(item.run)} is the same run, and it {ended}: {told}. This one begins anew.", file=sys.stderr)
    if len(runs) > _MOST_SAID:
        print(f"So do {len(runs) - _MOST_SAID} more.", file=sys.stderr)


def _say_there(known: Sequence[_Known]) -> list[_Known]:
    """Say what there is of runs that need not be started, and where; those that go on are returned."""
    from trainkit.monitor.follow import summary_lines

    going_on = [item for item in known if not item.is_finished]
    for item in known:
        name, path = full_name(item.run), item.run.path
        if not item.is_finished:
            print(f"{name} is the same run, and it is {item.state.state} (job {item.state.job_id}).")
            if len(known) == 1:
                say_commands(path, path)
            continue
        print(f"{name} is up to date: it has finished with this configuration, code and data.")
        results, *places = summary_lines(item.run)
        print("\n".join([results, *places]) if len(known) == 1 else f"  {results}  {path}")
    if len(known) > 1:
        sweeps = dict.fromkeys(item.run.path.parent if item.run.name.isdecimal() else item.run.path for item in known)
        print(f"  results     {terminal.command('report', *sweeps)}")
    if known:
        print("Add --again, or give --run-dir or --job-name, to train it once more.", flush=True)
    return going_on


def _may_live(life: RunHistory) -> bool:
    if life.finished:
        return False
    return life.cut_short is not None or (life.submission is not None and life.submission.ended is None)


def sweep_points(sweeps: Sequence[str]) -> list[list[str]]:
    """Overrides of every run: the product of all sweeps; one empty list without any."""
    axes = []
    for text in sweeps:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise UserError(
                f"--sweep {text!r} has no values.",
                why="It takes KEY=A,B,C, or KEY=0..4 for whole numbers from 0 to 4.",
                fix="For example --sweep optim.lr=1e-3,3e-3 --sweep seed=0..4.",
            )
        if key.startswith("launch."):
            raise UserError(
                "A sweep cannot change resources.", why="All its runs are one job array.", fix="Submit them one by one."
            )
        axes.append([f"{key}={value}" for value in _values(text, values)])
    count = 1
    for axis in axes:
        count *= len(axis)
    if count > _MOST_RUNS:
        raise UserError(
            f"The sweep has {count} runs.",
            why=f"A sweep has {_MOST_RUNS} at most.",
            fix="Give fewer values, or fewer keys.",
        )
    return [list(point) for point in itertools.product(*axes)]


def _values(sweep: str, text: str) -> list[str]:
    """``0..4`` is 0,1,2,3,4, both ends included; ``0..8..4`` is 0,4,8."""
    found = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        if match is None:
            if re.fullmatch(r"[\d.eE+-]+\.\.[\d.eE+-]+", item):
                raise UserError(
                    f"--sweep {sweep!r} has a range of other than whole numbers.",
                    why="Between such numbers there are too many.",
                    fix="Name them: --sweep optim.lr=1e-4,3e-4,1e-3.",
                )
            found.append(item)
            continue
        first, last, step = int(match[1]), int(match[2]), int(match[3] or 1)
        if first > last or step == 0 or (last - first) // step >= _MOST_RUNS:
            raise UserError(
                f"--sweep {sweep!r} has no such range.",
                why=f"A range goes up, in steps of 1 or more, and has {_MOST_RUNS} values at most.",
                fix="For example seed=0..4, or 0..8..2 for every second.",
            )
        found += [str(number) for number in range(first, last + 1, step)]
    return found


@dataclass(frozen=True)
class Further:
    """What further arrays of a sweep share."""

    sweep: Path
    loaded: Loaded
    site: Site
    cwd: Path
    env: Mapping[str, str]

    def plan(self, runs: Sequence[RunDir], *, after: str = "") -> tuple[Path, Plan, str | None]:
        """Folder, plan and script of one more array of these runs, or of the only one's job. Writes nothing.

        Args:
            after: a job that must have ended before.
        """

        folder = runs[0].path if len(runs) == 1 else submission.part_folder(self.sweep)
        plan = by_names(make_plan(self.loaded, self.site, folder, points=len(runs)), self.env)
        if after:
            plan = waiting_for(plan, after, "--max-parallel is for all arrays together")
        return folder, plan, named(plan.executor).script(plan, folder, self.cwd, len(runs))

    def start(self, runs: Sequence[RunDir], *, after: str = "") -> list[str]:
        """Queue them; the job ids."""

        folder, plan, script = self.plan(runs, after=after)
        submission.require_executor(plan, self.site)
        if len(runs) > 1:
            submission.link_runs(folder, runs)
        submission.write_launch(folder, plan, script)
        return named(plan.executor).submit(folder, runs, plan, run_rank, cwd=self.cwd, env=self.env)

    def start_all(self, runs: Sequence[RunDir], largest: int, *, after: str = "") -> Iterator[tuple[str, list[RunDir]]]:
        """Queue them as arrays of at most ``largest`` tasks; id and runs of each. With --max-parallel one by one."""

        for part in submission.split(runs, largest):
            array = self.start(part, after=after)[0].partition("_")[0]
            after = array if self.loaded.config.launch.max_parallel else ""
            yield array, part
