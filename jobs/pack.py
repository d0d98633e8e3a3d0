"""``python -m jobs.pack RUN FILE``: write a run into one file without secrets; `unpack` restores it."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import cli
from trainkit.common import terminal


def parser() -> cli.Parser:
    parser = cli.Parser("pack", __doc__ or "")
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's name or folder")
    add("file", metavar="FILE", type=Path, help="the archive to write, such as RUN.tar")
    which = "checkpoints to include, repeatable (default: best)"
    add("--checkpoint", metavar="best|latest|STEP|all|none", action="append", default=[], help=which)
    add("--optimizer", action="store_true", help="include the optimizer's state, to continue training elsewhere")
    add("--logs", action="store_true", help="include the logs of the ranks; what looks like a secret is left out")
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
    print(f"Packed {run.name} with {checkpoints}: {terminal.size(file.stat().st_size)}. Only you can read it.")
    if hidden:
        print(f"Possible secrets were replaced by *** in {', '.join(hidden)}.")
    print(f"  elsewhere   {terminal.command('unpack', file.name)}")


if __name__ == "__main__":
    cli.run(main)
