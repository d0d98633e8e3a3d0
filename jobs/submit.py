"""``python -m jobs.submit PRESET``: plan, validate, write the run folder, queue.

PRESET trains on SLURM where sbatch is found, else on this machine. A training
script of your own may take its place, with its arguments after `--`.

  python -m jobs.submit ddp --nodes 2 --gpus-per-node 4 --time 2:00:00 \\
      data.name=cifar10 optim.lr=3e-4
  python -m jobs.submit train.py --nodes 2 --gpus-per-node 4 -- --lr 3e-4
"""

import argparse
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import cli, login_node, output
from jobs.flags import RESOURCES, add_launch_flags, launch_flags, new_folder, parse_script
from trainkit.common import terminal
from trainkit.common.errors import UserError
from trainkit.config.script import split

if TYPE_CHECKING:
    from jobs.shapes import OutlookPart
    from trainkit.config.loading import Loaded
    from trainkit.launch.preparation import Prepared


def parser() -> cli.Parser:
    parser = cli.Parser("submit", __doc__ or "")
    add = parser.add_argument
    preset = "a preset in configs/, a YAML file, a script, or a run to repeat; without it, list the presets"
    add("preset", nargs="?", metavar="PRESET|SCRIPT.py|RUN", help=preset)
    parser.taking("-m")
    add("overrides", nargs="*", metavar="section.key=value", help="training settings")
    sweep = "one run per value; KEY=0..4 is 0,1,2,3,4; repeatable: all combinations"
    add("--sweep", metavar="KEY=A,B,C", action="append", default=[], help=sweep)
    add("--trials", metavar="N", type=int, help="draw N points of the sweep at random, also from KEY=1e-4..1e-1:log")
    add("--sampler", choices=["random", "tpe"], default="random", help="tpe: trials learn from those before them")
    add("--prune", metavar="N", type=int, help="stop runs that are not the best 1 in N after 1, N, N*N validations")
    add("--max-parallel", metavar="N", help="run at most N runs of a sweep at the same time")
    add("--array", metavar="N", type=int, help="with --join: N such peers, each a job of its own")
    add("--again", action="store_true", help="train even if the same run is already there")
    names = parser.add_mutually_exclusive_group()
    names.add_argument("--name", metavar="NAME", help="the run's name: its folder is runs/NAME")
    where = "the run folder to create (default: runs/<preset>-<id>)"
    names.add_argument("--run-dir", type=new_folder, metavar="FOLDER", help=where)
    add("--tag", metavar="TAG", action="append", default=[], help="a tag of the run, for `status --tag`; repeatable")
    add("--note", metavar="TEXT", help="a note on the run; see `note`")
    questions = parser.add_mutually_exclusive_group()
    when = "say when it would start in each partition; queue nothing"
    questions.add_argument("--estimate", action="store_true", help=when)
    fit = "say what to ask for, from earlier runs of the preset or script; queue nothing"
    questions.add_argument("--fit", action="store_true", help=fit)
    add("--by", metavar="WHEN", help="say whether it can be done by 'Friday 9:00', on how many nodes, with which odds")
    add("--budget", metavar="HOURS", type=float, help="say on how many nodes it can be done for so many GPU-hours")
    add("--settings", metavar="SECTION", nargs="?", const="", help="only list what can be set, of a section or all")
    add_launch_flags(parser)
    return parser.taking("--join", "--allow-code", "--json", "--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    args, script = parse_script(parser(), argv)
    if args.settings is not None:
        return _print_settings(args.settings or None)
    if args.preset is None:
        if argv:
            parser().error("the following arguments are required: PRESET|RUN")
        return _print_presets()
    # These imports are too slow for `--help`.
    from jobs.dry_run import print_plan
    from trainkit.config.script import as_values
    from trainkit.config.sweep import sweep_points
    from trainkit.launch import preparation, submission
    from trainkit.launch.lab import is_lab, open_lab
    from trainkit.run.labels import note_of, tag_of

    deadline = None
    is_asked = args.by is not None or args.budget is not None
    if is_asked:
        from trainkit.launch.deadline import deadline_of

        if args.estimate or args.fit:
            other = "--estimate" if args.estimate else "--fit"
            why = "Each is a question of its own."
            raise UserError(f"--by and --budget do not go with {other}.", why=why, fix=f"Leave {other} out.")
        deadline = deadline_of(args.by, args.budget, time.time())
    token = args.join
    if token is not None or args.array is not None:
        for flag in ("--host", "--estimate", "--fit", "--by", "--budget"):
            if vars(args)[flag.removeprefix("--")]:
                raise preparation.not_with_join(flag)
    if args.host is not None:  # most is checked there, where profile, data and scheduler are
        variants = []
        for point in sweep_points(as_values(args.sweep) if script else args.sweep, args.trials):
            variants.append([*args.overrides, *point])
        return _submit_there(argv, args, variants, script, env)
    run_dir = args.run_dir
    if args.name is not None:
        run_dir = submission.named_folder(args.name, env)
    notes = []
    if args.note is not None:
        notes.append(note_of(args.note))
    request = preparation.Request(
        args.preset, args.overrides, launch_flags(args) | script, args.sweep, run_dir, args.again, args.allow_code,
        token, args.array, command=["python", "-m", "jobs.submit", *_without_token(argv, token)],
        tags=list(map(tag_of, args.tag)), notes=notes, trials=args.trials, sampler=args.sampler, prune=args.prune,
    )  # fmt: skip
    prepared = preparation.prepare(request, env)
    if args.estimate:
        return _estimate(prepared)
    if args.fit:
        return _fit(prepared, argv)
    outlook, told = _outlook(prepared, deadline, args.budget, argv) if is_asked else (None, [])
    if args.dry_run:
        planned = submission.plan_runs(prepared)
        print_plan(planned.plan, prepared.loadeds[0], prepared.folder, planned.script, outlook)
        for note in planned.notes:
            terminal.warn(note)
        for line in told:
            terminal.warn(line)
        return 0
    for line in told:
        terminal.say(line)
    started = submission.submit(prepared)
    if is_lab(prepared.loadeds[0].config):
        return open_lab(started.runs[0]) or cli.finish(started, argparse.Namespace(follow=False, wait=False))
    return cli.finish(started, args, outlook)


def _outlook(
    prepared: "Prepared", deadline: float | None, budget: float | None, argv: Sequence[str]
) -> "tuple[OutlookPart, list[str]]":
    """Answer whether it can be done, for programs and in lines."""
    from jobs.shapes import OutlookPart
    from trainkit.launch.deadline import lines, outlook, to_json

    sweep = ["--sweep X", "--trials X", "--sampler X", "--prune X", "--max-parallel X"]
    words = _without_flags(argv, ["--by X", "--budget X", "--run-dir X", "--name X", "--dry-run", "--json", *sweep])
    if prepared.loadeds[0].config.script is None:
        words = [word for word in words if not word.startswith("train.max_steps=")] + ["train.max_steps=200"]
    found = outlook(prepared, deadline, budget, time.time(), terminal.command("submit", *words))
    return OutlookPart.model_validate(to_json(found)), lines(found)


def _without_token(argv: Sequence[str], token: str | None) -> list[str]:
    """The words of the command line for the manifest, which others may read."""
    words = []
    for word in argv:
        if token and token in word:
            word = "TOKEN"
        words.append(word)
    return words


def _print_presets() -> int:
    from trainkit.config.presets import preset_descriptions

    print(f"Give one of these, as in `{terminal.command('submit', 'ddp')}`:\n")
    for is_recipe in (False, True):
        known = {}
        for name, about in preset_descriptions().items():
            if ("/" in name) == is_recipe:
                known[name] = about
        width = max(map(len, known))
        for name, about in known.items():
            print(f"  {name:{width}}  {about}")
        print()
    print(f"`{terminal.command('submit', '--settings')}` lists what can be set beside it.")
    return 0


def _print_settings(section: str | None) -> int:
    from trainkit.config.json_schema import settings

    for item in settings(section):
        name = f"{item.key}={item.default}  ({item.type})"
        text = item.sentence
        if item.of:
            text = f"{item.of}: {text}"
        lines = terminal.wrapped(f"{name}  {text}")
        if len(lines) > 1:
            lines = [*terminal.wrapped(name), *terminal.wrapped(f"    {text}")]
        print(*lines, sep="\n")
    return 0


def _submit_there(
    argv: Sequence[str], args: argparse.Namespace, variants: Sequence[Sequence[str]],
    script: Mapping[str, tuple[Any, str]], env: Mapping[str, str],
) -> int:  # fmt: skip
    from trainkit.config import loading, presets
    from trainkit.launch.scripts import check_script, settled_script

    flags = {**launch_flags(args), **script}
    flags.pop("launch.cluster", None)
    is_run_there = "/" in args.preset and not args.preset.endswith((".yaml", ".yml"))
    try:
        presets.find_preset(args.preset)
    except UserError:
        if not is_run_there:
            raise
        variants = []
    loadeds = [loading.load(args.preset, overrides, flags=flags) for overrides in variants]
    if script:
        loadeds = [settled_script(loaded, Path.cwd()) for loaded in loadeds]
        check_script(loadeds[0], env)
    return login_node.submit(argv, parser(), loadeds, env)


def _estimate(prepared: "Prepared") -> int:
    from jobs.dry_run import estimate
    from trainkit.config import loading

    request = prepared.request
    env = prepared.env

    def load(partition: str) -> "Loaded":
        flags = {**request.flags, "launch.partition": (partition, "--partition")}
        return loading.load(request.preset, prepared.variants[0], flags=flags, env=env)

    return estimate(load, prepared.loadeds[0], prepared.site, prepared.folder, Path.cwd(), env)


def _fit(prepared: "Prepared", argv: Sequence[str]) -> int:
    from trainkit.launch.follow import full_name
    from trainkit.launch.requests import beyond_limit, propose
    from trainkit.report.fit import lines

    fit, runs = propose(prepared)
    words = _without_flags(argv, ["--fit", *fit.flags])
    at = words.index("--") if "--" in words else len(words)
    words[at:at] = " ".join(fit.flags).split()
    if output.is_on():
        from jobs.shapes import FitAnswer, FitPart

        words.remove("--json")
        command = terminal.command("submit", *words)
        output.emit(
            FitAnswer(runs=[str(run.path) for run in runs], fit=FitPart.model_validate(fit.to_json()), command=command)
        )
        return 0
    print(f"By {terminal.plural(len(runs), 'run')} like this, the newest {full_name(runs[-1])}:")
    print(*lines(fit), sep="\n")
    limit = beyond_limit(fit, prepared)
    if limit:
        print(limit)
    print(f"  {terminal.command('submit', *words)}")
    return 0


def _without_flags(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """The words of a command line without flags of ours, given as ``--name`` or ``--name value``, in any spelling."""
    words, arguments = split(argv)
    for flag in flags:
        name, _, value = flag.partition(" ")
        short = RESOURCES.get(name.removeprefix("--"), ("", "", ""))[0]
        kept = []
        before = ""
        for word in words:
            is_value = bool(value) and before in (name, f"-{short}")
            is_joined = word.startswith(f"{name}=") or (bool(short) and re.match(f"-{short}.", word) is not None)
            if not is_value and not is_joined and word not in (name, f"-{short}"):
                kept.append(word)
            before = word
        words = kept
    return words if arguments is None else [*words, "--", *arguments]


if __name__ == "__main__":
    cli.run(main)
