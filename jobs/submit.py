"""``python -m jobs.submit PRESET``: plan, validate, write the run folder, queue."""

from __future__ import annotations

import argparse
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from jobs import cli, elsewhere
from jobs.following import full_name
from jobs.sweeps import Further, sweep_points
from trainkit import terminal
from trainkit.bench.request import refuse_bench
from trainkit.config import yaml
from trainkit.errors import RefusedError, UserError
from trainkit.run.folder import next_path, runs_root

if TYPE_CHECKING:
    from collections.abc import Callable

    from trainkit.config.loading import Loaded
    from trainkit.run.events import Life
    from trainkit.run.folder import RunDir
    from trainkit.schedulers.base import JobState

    Then = Callable[[Sequence[RunDir], Sequence[RunDir], str, argparse.Namespace], int]

_MOST_SAID = 3
"""Runs that have failed before, of a sweep."""

DESCRIPTION = """Train PRESET: on SLURM where sbatch is found, else on this machine.

  python -m jobs.submit ddp --nodes 2 --gpus-per-node 4 --time 2:00:00 \\
      data.name=cifar10 optim.lr=3e-4"""


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    return submit(argv, env, _followed)


def parser() -> cli.Parser:
    parser = cli.Parser("submit", DESCRIPTION)
    parser.add_argument(
        "preset", nargs="?", metavar="PRESET|RUN",
        help="a preset in configs/, a YAML file, or a run to repeat; without any word the presets are listed",
    )  # fmt: skip
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="training settings")
    parser.add_argument(
        "--sweep",
        metavar="KEY=A,B,C",
        action="append",
        default=[],
        help="one run per value; KEY=0..4 is 0,1,2,3,4; repeatable: all combinations",
    )
    parser.add_argument("--max-parallel", metavar="N", help="so many runs of a sweep at the same time")
    parser.add_argument(
        "--join", metavar="TOKEN", nargs="?", const="",
        help="join that swarm, as a peer with all GPUs of the job (default: that in TRAINKIT_TOKEN, or a file with it)",
    )  # fmt: skip
    parser.add_argument("--array", metavar="N", type=int, help="with --join: N such peers, each a job of its own")
    parser.add_argument("--again", action="store_true", help="train it once more where the same run is there already")
    parser.add_argument(
        "--run-dir", type=cli.new_folder, metavar="FOLDER", help="the run folder to make (default: runs/<preset>-<id>)"
    )
    parser.add_argument(
        "--estimate", action="store_true", help="say when it would start in each partition; queue nothing"
    )
    parser.add_argument(
        "--settings", metavar="SECTION", nargs="?", const="", help="list what can be set, of a section or all; then end"
    )
    cli.add_allow_code_flag(parser)
    cli.add_launch_flags(parser)
    elsewhere.add_host_flag(parser)
    return parser


def submit(argv: Sequence[str], env: Mapping[str, str], then: Then) -> int:
    """What the command does, in this process; its exit code.

    ``then`` gets all runs that were asked for, those of them that were started or run already, and their executor.
    """
    args = parser().parse_intermixed_args(list(argv))
    if args.settings is not None:
        return _print_settings(args.settings or None)
    if args.preset is None:
        if argv:
            parser().error("the following arguments are required: PRESET|RUN")
        return _print_presets()
    # From here on it costs more than `--help` may.
    from trainkit.checking import check
    from trainkit.config import loading
    from trainkit.run.ownership import require_own_code

    flags = cli.launch_flags(args)
    if args.max_parallel is not None:
        flags["launch.max_parallel"] = (yaml.parse_value(args.max_parallel), "--max-parallel")
    if args.join is not None or args.array is not None:
        return _join(argv, args, flags, env, then)
    variants = [[*args.overrides, *point] for point in sweep_points(args.sweep)]
    if args.host is not None:  # the site's profile, the data and the scheduler are there, so most is checked there
        return _submit_there(argv, args, parser(), variants, env)
    args.preset = cli.preset_or_run(args.preset, env)
    refuse_bench(Path(args.preset).expanduser())
    loadeds = [loading.load(args.preset, overrides, flags=flags, env=env) for overrides in variants]
    for loaded in loadeds:
        require_own_code(Path(args.preset).expanduser(), loaded, allow_code=args.allow_code)
        check(loaded)
    if args.estimate:
        return _estimate(args, variants[0], loadeds[0], env)
    folder = args.run_dir.absolute() if args.run_dir else next_path(runs_root(env), loadeds[0].name)
    command = ["python", "-m", "jobs.submit", *argv]
    return _submit(loadeds, variants, folder, args, command, env, then)


def _print_presets() -> int:
    from trainkit.config.loading import described

    print(f"Give one of these, as in `{terminal.command('submit', 'ddp')}`:\n")
    known = described()
    for names in ([name for name in known if "/" not in name], [name for name in known if "/" in name]):
        width = max(map(len, names))
        print("\n".join(f"  {name:{width}}  {known[name]}" for name in names), end="\n\n")
    print(f"`{terminal.command('submit', '--settings')}` lists what can be set beside it.")
    return 0


def _print_settings(section: str | None) -> int:
    from trainkit.config.settings import settings

    rows = [
        (f"{item.key}={item.default}", f"({item.type})", f"{f'{item.of}: ' if item.of else ''}{item.sentence}")
        for item in settings(section)
    ]
    room = shutil.get_terminal_size().columns if sys.stdout.isatty() else sys.maxsize
    for name, kind, text in rows:
        line = f"{name}  {kind}  {text}"
        if len(line) <= room:
            print(line)
        else:
            print(textwrap.fill(f"{name}  {kind}", room, subsequent_indent="    "))
            print(textwrap.fill(text, room, initial_indent="    ", subsequent_indent="    "))
    return 0


def _followed(runs: Sequence[RunDir], going_on: Sequence[RunDir], executor: str, args: argparse.Namespace) -> int:
    from jobs.starting import follow

    return follow(going_on, executor, args)


def _join(
    argv: Sequence[str], args: argparse.Namespace, flags: dict[str, tuple[object, str]], env: Mapping[str, str],
    then: Then,
) -> int:  # fmt: skip
    from jobs.join import loaded_to_join, without_token

    loaded, count, env = loaded_to_join(args, flags, env)
    folder = args.run_dir.absolute() if args.run_dir else next_path(runs_root(env), loaded.name)
    args.again = True  # such a run may be there as often as you like
    command = ["python", "-m", "jobs.submit", *without_token(argv, args.join)]
    return _submit([loaded] * count, [list(args.overrides)] * count, folder, args, command, env, then)


def _submit_there(
    argv: Sequence[str], args: argparse.Namespace, parser: argparse.ArgumentParser, variants: Sequence[Sequence[str]],
    env: Mapping[str, str],
) -> int:  # fmt: skip
    from jobs import sending
    from trainkit.config import loading

    flags = {key: value for key, value in cli.launch_flags(args).items() if key != "launch.cluster"}
    try:
        loading.find_preset(args.preset)
    except UserError:
        if "/" not in args.preset or args.preset.endswith((".yaml", ".yml")):
            raise
        loadeds = []  # a run folder there
    else:
        loadeds = [loading.load(args.preset, overrides, flags=flags) for overrides in variants]
    return sending.submit(argv, parser, loadeds, env)


def _estimate(args: argparse.Namespace, overrides: Sequence[str], loaded: Loaded, env: Mapping[str, str]) -> int:
    from jobs.estimating import estimate
    from trainkit.config import loading
    from trainkit.site.profile import discover

    def load(partition: str) -> Loaded:
        flags = cli.launch_flags(args) | {"launch.partition": (partition, "--partition")}
        return loading.load(args.preset, overrides, flags=flags, env=env)

    folder = args.run_dir.absolute() if args.run_dir else next_path(runs_root(env), loaded.name)
    return estimate(load, loaded, discover(env), folder, Path.cwd(), env)


def _submit(
    loadeds: Sequence[Loaded], variants: Sequence[Sequence[str]], folder: Path, args: argparse.Namespace,
    command: Sequence[str], env: Mapping[str, str], then: Then,
) -> int:  # fmt: skip
    from jobs.starting import by_names, dry_run, start
    from trainkit.launch import submission
    from trainkit.launch.plan import make_plan, validate
    from trainkit.run.snapshot import code_files, digest_of, fingerprint
    from trainkit.schedulers.base import named
    from trainkit.site.profile import discover

    asked = loadeds, variants
    cwd, points = Path.cwd(), len(loadeds)
    configs = [submission.stored_config(loaded, cwd) for loaded in loadeds]
    digest = digest_of(code_files())
    marks = [fingerprint(config, digest) for config in configs]
    wants_new = args.again or args.dry_run or args.run_dir is not None or configs[0].launch.executor == "debug"
    there = {} if wants_new or _is_named(args) else _there(marks)
    known = [there.get(mark) for mark in marks]
    if all(known):
        runs = [item.run for item in known if item]
        going_on = _say_there([item for item in known if item])
        return then(runs, [item.run for item in going_on], going_on[0].state.executor if going_on else "", args)
    if any(known):  # of a sweep: what is missing is trained
        missing = [index for index, found in enumerate(known) if not found]
        loadeds, variants = [loadeds[index] for index in missing], [variants[index] for index in missing]
        configs, marks = [configs[index] for index in missing], [marks[index] for index in missing]
        points = len(loadeds)
    site = discover(env)
    largest = named(site.scheduler).largest_array() if points > 1 and site.scheduler else points
    plans = [make_plan(loaded, site, folder, points=min(points, largest)) for loaded in loadeds]
    plan = plans[0]
    if any((other.world_size, other.directives) != (plan.world_size, plan.directives) for other in plans):
        raise UserError(
            "A sweep cannot change resources.", why="All its runs are one job array.", fix="Submit them one by one."
        )
    if args.array is not None and points > 1 and not named(plan.executor).batch:
        raise UserError(
            "--array is for SLURM.",
            why="Here its peers would run one after the other.",
            fix="Join with this machine as one peer: python -m jobs.join TOKEN, with --nproc for several GPUs.",
        )
    plan = by_names(plan, env)
    notes = validate(loadeds[0], plan, site, folder, cwd)
    scheduler = named(plan.executor)
    first = min(points, largest) if scheduler.batch else points
    script = scheduler.script(plan, folder, cwd, first)
    if args.dry_run:
        code = dry_run(plan, loadeds[0], folder, script)
        _say(notes)
        return code
    submission.require_executor(plan, site)
    if plan.executor == "debug" and points > 1:
        raise UserError(
            "A sweep does not run with --executor debug.", why="debug is one run in this process.", fix="Use local."
        )
    try:
        if points == 1:
            runs = [submission.write_run(folder, configs[0], plan, script, command, marks[0])]
        else:
            runs = submission.write_sweep(folder, configs, plan, script, command, variants, marks)
    except UserError:
        if args.run_dir is None and folder.exists():  # another submission was given the same number: take the next
            return _submit(*asked, next_path(folder.parent, loadeds[0].name), args, command, env, then)
        raise
    with submission.undone_on_error(folder, unless=plan.executor == "debug"):
        job_ids = start(folder, runs[:first], plan, cwd, env)
    after = job_ids[0].partition("_")[0] if loadeds[0].config.launch.max_parallel and runs[first:] else ""
    for array, part in Further(folder, loadeds[0], site, cwd, env).start_all(runs[first:], largest, after=after):
        print(f"  and job     {array}: {len(part)} more, for an array has {largest} tasks at most here")
    _say(notes)
    going_on = _say_there([item for item in known if item])
    new = iter(runs)
    return then(
        [item.run if item else next(new) for item in known], [*runs, *(item.run for item in going_on)], plan.executor,
        args,
    )  # fmt: skip


def _say(notes: Sequence[str]) -> None:
    for note in notes:
        print(note, file=sys.stderr)


@dataclass(frozen=True)
class _Known:
    """A run that is there already, of the same settings, code and data."""

    run: RunDir
    state: JobState
    is_finished: bool


def _is_named(args: argparse.Namespace) -> bool:
    """Who gives a run a name of its own wants one more."""
    return args.job_name is not None or any(word.startswith("launch.job_name=") for word in args.overrides)


def _there(fingerprints: Sequence[str]) -> dict[str, _Known]:
    """What trains, or has trained, already, by fingerprint; what was tried before and has failed is only said."""
    from trainkit.run.events import life_of
    from trainkit.run.snapshot import same_runs
    from trainkit.schedulers.states import job_states

    found: dict[str, _Known] = {}
    same = same_runs(fingerprints)
    lives = {run.path: life_of(run) for runs in same.values() for run in runs}
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


def _known(run: RunDir, life: Life, state: JobState | None) -> _Known:
    from trainkit.schedulers.base import JobState

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
    from jobs.starting import say_commands
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


def _may_live(life: Life) -> bool:
    if life.finished:
        return False
    return life.cut_short is not None or (life.submission is not None and life.submission.ended is None)


if __name__ == "__main__":
    cli.run(main)
