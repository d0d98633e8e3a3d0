"""``python -m jobs.submit PRESET``: plan, validate, write the run folder, queue."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jobs import cli, elsewhere
from trainkit.errors import UserError
from trainkit.records.rundir import next_path, runs_root

if TYPE_CHECKING:
    from trainkit.config.loading import Loaded

DESCRIPTION = """Train PRESET: on SLURM where sbatch is found, else on this machine.

  python -m jobs.submit ddp --nodes 2 --gpus-per-node 4 --time 2:00:00 data.name=cifar10 optim.lr=3e-4"""


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    parser = cli.Parser("submit", DESCRIPTION)
    parser.add_argument("preset", help="a preset in configs/, a YAML file, or a run folder to repeat")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value", help="training settings")
    parser.add_argument(
        "--sweep", metavar="KEY=A,B,C", action="append", default=[], help="one run per value; repeatable"
    )
    parser.add_argument(
        "--run-dir", type=cli.new_folder, metavar="FOLDER", help="the run folder to make (default: runs/<preset>-<id>)"
    )
    parser.add_argument(
        "--estimate", action="store_true", help="say when it would start in each partition; queue nothing"
    )
    cli.add_allow_code_flag(parser)
    cli.add_launch_flags(parser)
    elsewhere.add_host_flag(parser)
    args = parser.parse_intermixed_args(list(argv))
    # From here on it costs more than `--help` may.
    from trainkit.checking import check
    from trainkit.config import loading
    from trainkit.records.ownership import require_own_code

    flags = cli.launch_flags(args)
    variants = [[*args.overrides, *point] for point in sweep_points(args.sweep)]
    if args.host is not None:  # the site's profile, the data and the scheduler are there, so most is checked there
        here = {key: value for key, value in flags.items() if key != "launch.cluster"}
        config = loading.load(args.preset, variants[0], flags=here).config
        own = (config.model.name, config.data.name, config.strategy.name)
        return elsewhere.submit(argv, args, own, config.data.root, env)
    loadeds = [loading.load(args.preset, overrides, flags=flags, env=env) for overrides in variants]
    for loaded in loadeds:
        require_own_code(Path(args.preset).expanduser(), loaded, allow_code=args.allow_code)
        check(loaded)
    if args.estimate:
        return _estimate(args, variants[0], loadeds[0], env)
    folder = args.run_dir.absolute() if args.run_dir else next_path(runs_root(env), loadeds[0].name)
    command = ["python", "-m", "jobs.submit", *argv]
    return _submit(loadeds, variants, folder, args, command, env)


def _estimate(args: argparse.Namespace, overrides: Sequence[str], loaded: Loaded, env: Mapping[str, str]) -> int:
    from jobs.estimating import estimate
    from trainkit.cluster.site import discover
    from trainkit.config import loading

    def load(partition: str) -> Loaded:
        flags = cli.launch_flags(args) | {"launch.partition": (partition, "--partition")}
        return loading.load(args.preset, overrides, flags=flags, env=env)

    folder = args.run_dir.absolute() if args.run_dir else next_path(runs_root(env), loaded.name)
    return estimate(load, loaded, discover(env), folder, Path.cwd(), env)


def _submit(
    loadeds: Sequence[Loaded], variants: Sequence[Sequence[str]], folder: Path, args: argparse.Namespace,
    command: Sequence[str], env: Mapping[str, str],
) -> int:  # fmt: skip
    from jobs.starting import dry_run, follow, start
    from trainkit.cluster.site import discover
    from trainkit.launch import submission
    from trainkit.launch.plan import make_plan
    from trainkit.launch.validation import validate

    site, cwd, points = discover(env), Path.cwd(), len(loadeds)
    plans = [make_plan(loaded, site, folder, points=points) for loaded in loadeds]
    plan = plans[0]
    if any((other.world_size, other.directives) != (plan.world_size, plan.directives) for other in plans):
        raise UserError(
            "A sweep cannot change resources.", why="All its runs are one job array.", fix="Submit them one by one."
        )
    notes = validate(loadeds[0], plan, site, folder)
    script = submission.script_text(plan, folder, cwd, points) if plan.executor == "slurm" else None
    if args.dry_run:
        code = dry_run(plan, loadeds[0], folder, script)
        _say(notes)
        return code
    submission.require_executor(plan, site)
    if plan.executor == "debug" and points > 1:
        raise UserError(
            "A sweep does not run with --executor debug.", why="debug is one run in this process.", fix="Use local."
        )
    configs = [submission.stored_config(loaded, cwd) for loaded in loadeds]
    try:
        if points == 1:
            runs = [submission.write_run(folder, configs[0], plan, script, command)]
        else:
            runs = submission.write_sweep(folder, configs, plan, script, command, variants)
    except UserError:
        if args.run_dir is None and folder.exists():  # another submission was given the same number: take the next
            return _submit(loadeds, variants, next_path(folder.parent, loadeds[0].name), args, command, env)
        raise
    with submission.undone_on_error(folder, unless=plan.executor == "debug"):
        start(folder, runs, plan, cwd, env)
    _say(notes)
    return follow(runs, plan, args)


def _say(notes: Sequence[str]) -> None:
    for note in notes:
        print(note, file=sys.stderr)


def sweep_points(sweeps: Sequence[str]) -> list[list[str]]:
    """Overrides of every run: the product of all sweeps; one empty list without any."""
    axes = []
    for text in sweeps:
        key, equals, values = text.partition("=")
        if not equals or not values:
            raise UserError(
                f"--sweep {text!r} has no values.",
                why="It takes KEY=A,B,C.",
                fix="For example --sweep optim.lr=1e-3,3e-3.",
            )
        if key.startswith("launch."):
            raise UserError(
                "A sweep cannot change resources.", why="All its runs are one job array.", fix="Submit them one by one."
            )
        axes.append([f"{key}={value}" for value in values.split(",")])
    return [list(point) for point in itertools.product(*axes)]


if __name__ == "__main__":
    cli.run(main)
