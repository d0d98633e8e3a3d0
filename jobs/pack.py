"""``python -m jobs.pack RUN FILE``: one file of a run to hand on, without secrets; `unpack` makes a run of it again."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import cli
from trainkit.common import terminal


def parser() -> cli.Parser:
    parser = cli.Parser("pack", __doc__ or "")
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's name or folder")
    add("file", metavar="FILE", type=Path, help="the archive to write, such as RUN.tar")
    which = "which checkpoints go along, repeatable (default: best)"
    add("--checkpoint", metavar="best|latest|STEP|all|none", action="append", default=[], help=which)
    add("--optimizer", action="store_true", help="with the optimizer's state: training can go on elsewhere")
    add("--logs", action="store_true", help="with what the ranks printed; what looks like a secret is left out")
    return parser


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parse_intermixed_args(list(argv))
    from trainkit.checkpoint import archive, format
    from trainkit.run.find import find_run

    run = find_run(args.run, env)
    file = args.file.expanduser().absolute()
    known = format.steps(run.checkpoints)
    if known and not args.checkpoint:
        args.checkpoint = ["best"]
    steps: dict[int, None] = {}
    for which in args.checkpoint:
        if which == "all":
            steps |= dict.fromkeys(known)
        elif which != "none":
            steps[format.resolve(run.checkpoints, which)] = None
    hidden = archive.pack(run, file, list(steps), optimizer=args.optimizer, logs=args.logs)
    checkpoints = f"step {', '.join(map(str, steps))}" if steps else "no checkpoint"
    print(f"Packed {run.name} with {checkpoints}: {terminal.size(file.stat().st_size)}. Only you may read it yet.")
    if hidden:
        print(f"What looked like a secret is *** in {', '.join(hidden)}.")
    print(f"  elsewhere   {terminal.command('unpack', file.name)}")


if __name__ == "__main__":
    cli.run(main)
