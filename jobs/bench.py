"""``python -m jobs.bench NAME [PRESET]``: does it help here? amp, batch-size, loader, scaling, strategy, network ..."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import cli, login_node, output
from jobs.flags import add_launch_flags, launch_flags, new_folder
from trainkit.bench.base import FEWEST_ROUNDS, Bench, BenchRequest
from trainkit.bench.catalogue import BENCHES, bench_of, check_asked
from trainkit.common import fileio, terminal
from trainkit.common.errors import TrainkitError, UserError
from trainkit.run.find import find_run, next_path, runs_root
from trainkit.run.folder import BenchDir

if TYPE_CHECKING:
    from trainkit.cluster.plan import Plan
    from trainkit.launch.preparation import Prepared

DESCRIPTION = "Train briefly in several ways, in turns, and say which one is best here.\n\n" + "\n".join(
    f"  {bench.name:14}{bench.question}" for bench in BENCHES.values()
)
PRESET = "ddp"


def parser() -> cli.Parser:
    parser = _Parser("bench", DESCRIPTION)
    add = parser.add_argument
    add("name", nargs="?", metavar="NAME", help=f"one of: {', '.join(BENCHES)}")
    trained = f"the preset to train (default: {PRESET}), and settings"
    add("words", nargs="*", metavar="PRESET section.key=value", help=trained)
    add("--arms", metavar="A,B,C", help="the arms to compare; the first is the reference and is measured twice")
    add("--rounds", metavar="N", type=int, default=7, help="number of turns of each arm (default: 7)")
    add("--seconds", metavar="S", type=float, default=1.0, help="length of a turn (default: 1)")
    add("--updates", metavar="N", type=int, help="updates in a turn, instead of --seconds")
    add("--show", metavar="FOLDER", help="print the results of a bench, also of one that is still running")
    folder = "the folder to create (default: runs/bench-NAME-<id>)"
    add("--run-dir", type=new_folder, metavar="FOLDER", help=folder)
    add_launch_flags(parser)
    return parser.taking("--allow-code", "--json", "--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Parse, submit one job for all arms, show what it comes to."""
    args = parser().parse_intermixed_args(list(argv))
    if args.show is not None:
        if args.name is not None:
            why = f"You also gave '{args.name}'."
            raise UserError("--show takes no other words.", why=why, fix="Leave it out.")
        if args.host is not None:
            return login_node.forward("bench", argv, args.host, env)
        return _show(BenchDir(find_run(args.show, env).path), args)
    if args.name is None:
        raise UserError("NAME missing.", why="It says which bench to run.", fix=f"Use one of: {', '.join(BENCHES)}.")
    bench = bench_of(args.name)
    from trainkit.config import loading
    from trainkit.launch import preparation
    from trainkit.launch.scripts import refuse_script

    if args.host is None:
        args.preset = preparation.preset_or_run(args.preset, env)
    request = _request(bench, args)
    flags = launch_flags(args)
    if args.host is not None:  # the rest is checked on the login node
        flags.pop("launch.cluster", None)
        loaded = loading.load(args.preset, args.overrides, flags=flags)
        return login_node.submit(argv, parser(), [loaded], env, verb="bench")
    _fit(bench, args, flags, env)
    asked = preparation.Request(
        args.preset, args.overrides, flags, run_dir=args.run_dir or next_path(runs_root(env), f"bench-{bench.name}"),
        allow_code=args.allow_code, command=["python", "-m", "jobs.bench", *argv],
    )  # fmt: skip
    prepared = preparation.prepare(asked, env)
    refuse_script(prepared.loadeds[0].config, "bench")
    return _submit(bench, request, prepared, args)


class _Parser(cli.Parser):
    """Knows which of its words is the preset."""

    def parse_intermixed_args(self, *given: Any, **more: Any) -> argparse.Namespace:  # type: ignore[override]
        args: argparse.Namespace = super().parse_intermixed_args(*given, **more)
        args.preset = PRESET
        args.overrides = args.words
        if args.words and "=" not in args.words[0]:
            args.preset, *args.overrides = args.words
        return args


def _request(bench: Bench, args: argparse.Namespace) -> BenchRequest:
    """Check what is asked for."""
    why = "With fewer turns a difference may be chance."
    for name, least in (("rounds", FEWEST_ROUNDS), ("updates", 1), ("seconds", 0.001)):
        value = getattr(args, name)
        if value is not None and not least <= value < 1e6:
            raise UserError(f"--{name} {value:g} is not possible.", why=why, fix=f"Give {least} or more.")
    asked = tuple(filter(None, map(str.strip, (args.arms or "").split(","))))
    if args.arms is not None and not asked:
        raise UserError("--arms is empty.", why="It takes names separated by commas.", fix="Leave it out.")
    check_asked(bench, asked)
    return BenchRequest(bench.name, args.preset, asked, args.rounds, args.seconds, args.updates)


def _fit(bench: Bench, args: argparse.Namespace, flags: dict[str, tuple[Any, str]], env: Mapping[str, str]) -> None:
    """Add what the bench itself sets. It starts again from nothing, so its job is not queued again."""
    from trainkit.config import loading
    from trainkit.config.checks import strategy_traits

    flags["launch.requeue"] = (False, f"bench {bench.name}")
    name = loading.load(args.preset, args.overrides, flags=flags, env=env).config.strategy.name
    traits = strategy_traits(name)
    if traits.loop == "collaborative":
        why = "Its peers train by the clock, independently of each other."
        fix = "Use the preset single, ddp or fsdp."
        raise UserError(f"Bench {bench.name} cannot measure strategy.name={name}.", why=why, fix=fix)
    if bench.strategy and (bench.fewest_ranks == 1 or traits.ranks == "one"):
        flags["strategy.name"] = (bench.strategy, f"bench {bench.name}")


def _submit(bench: Bench, request: BenchRequest, prepared: "Prepared", args: argparse.Namespace) -> int:
    from jobs.dry_run import print_plan
    from trainkit.launch import run_folders
    from trainkit.launch.submission import plan_runs, start

    cwd = Path.cwd()
    folder = prepared.folder
    (loaded,) = prepared.loadeds
    plan, script, notes, site, _ = plan_runs(prepared)
    fewest = bench.fewest_ranks
    if plan.world_size < fewest:
        what = f"Bench {bench.name} needs {fewest} ranks or more; this job has {plan.world_size}."
        fix = f"Add --ntasks-per-node {fewest}, --gpus-per-node {fewest} or --nodes 2."
        raise UserError(what, why="It compares different numbers of ranks.", fix=fix)
    if args.dry_run:
        print_plan(plan, loaded, folder, script)
    else:
        run_folders.require_executor(plan, site)
        stored = run_folders.stored_config(loaded, cwd)
        run = BenchDir(run_folders.write_run(folder, stored, plan, script, prepared.request.command).path)
        with run_folders.undone_on_error(folder, unless=plan.executor == "debug"):
            fileio.write(run.request, request.to_json(), run.path)
            try:
                start(folder, [run], plan, cwd, prepared.env)
            except SystemExit:  # of a rank in this very process, which has said why
                if run.samples.exists():
                    _show(run, args)
                raise
    for note in notes:
        print(note, file=sys.stderr)
    return 0 if args.dry_run else _end(run, plan, args)


def _end(run: BenchDir, plan: "Plan", args: argparse.Namespace) -> int:
    """Follow the job if asked, or if it is here; then what it has come to, also where it has failed half way."""
    if not args.wait and not cli.is_followed(plan.executor, args):
        print(f"  results     {terminal.command('bench', '--show', run.path)}")
        return 0
    from trainkit.bench.results import progress
    from trainkit.launch.follow import ended, show_to_end

    try:
        show = (lambda: None) if args.wait else progress(run)
        if plan.executor != "debug" and not show_to_end(run, show):
            return 130
        ended(run)
    except TrainkitError as error:
        if run.samples.exists():
            _show(run, args)
        if "jobs.resume" in error.fix:
            error.fix = "Fix that, or change the settings, and start the bench again."
        raise
    return _show(run, args) if run.samples.exists() else 0


def _show(run: BenchDir, args: argparse.Namespace) -> int:
    from trainkit.bench.results import page

    print("\n".join(page(run)))  # which writes the results anew
    if output.is_on():
        from jobs.measured_shapes import Benched

        output.emit(Benched.of(run))
    return int(any(arm["outcome"] == "failed" for arm in fileio.read_object(run.results)["arms"]))


if __name__ == "__main__":
    cli.run(main)
