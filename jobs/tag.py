"""``python -m jobs.tag RUN TAG...``: tag a run, or all of a sweep; find it with `status --tag`; `keep` protects it."""

from collections.abc import Mapping, Sequence

from jobs import cli
from trainkit.common import terminal


def parser() -> cli.Parser:
    parser = cli.Parser("tag", __doc__ or "")
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's or a sweep's name or folder")
    add("tags", nargs="*", metavar="TAG", help="tags to add, such as paper; without any, print the existing tags")
    add("--remove", action="store_true", help="remove these tags")
    return parser.taking("--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parsed(argv, env)
    from trainkit.common.errors import UserError
    from trainkit.run.find import find_runs
    from trainkit.run.labels import labels_of, require_said, say, tag_of, take_back

    tags = list(dict.fromkeys(map(tag_of, args.tags)))
    if args.remove and not tags:
        fix = f"For example {terminal.command('tag', args.run, 'paper', '--remove')}."
        raise UserError("--remove needs a tag.", why="It removes the tags that you name.", fix=fix)
    runs = find_runs(args.run, env)
    if args.remove:
        for run in runs:  # before anything is written of a sweep
            require_said(run, tags=tags)
    for run in runs:
        if args.remove:
            take_back(run, tags=tags)
        else:
            say(run, tags=tags)
        print(f"{run.name}: {' '.join(labels_of(run).tags) or 'no tags'}")


if __name__ == "__main__":
    cli.run(main)
