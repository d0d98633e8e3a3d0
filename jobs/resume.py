"""``python -m jobs.resume RUN``: queue the same run again; it goes on from its newest checkpoint.

Of a sweep, what has failed is queued. With train.epochs=N a run trains longer, also if it has finished. Resources may
change, and a few settings (docs/reference/settings.md).
"""

from collections.abc import Mapping, Sequence

from jobs import cli
from trainkit.run.folder import find_runs, is_url

_SCHEDULES = {
    "restart": "begin a schedule that goes by the run's length anew, for the updates to come",
    "stretch": "go on with it as if it had been planned for the new length",
}


def parser() -> cli.Parser:
    parser = cli.Parser("resume", __doc__ or "").taking("run", "overrides")
    either = parser.add_mutually_exclusive_group()
    for name, text in _SCHEDULES.items():
        either.add_argument(f"--{name}-schedule", dest="schedule", action="store_const", const=name, help=text)
    cli.add_launch_flags(parser.taking("--force", "--allow-code"))
    return parser.taking("--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    args = parser().parsed(argv, env)
    from jobs.dry_run import print_plan
    from jobs.swarm import resume_by_hand
    from trainkit.prolongation import Change, settings_are_of_all
    from trainkit.resumption import fetched, is_by_hand, refuse_finished, resume

    runs = [fetched(args.run, env, allow_code=args.allow_code)] if is_url(args.run) else find_runs(args.run, env)
    change = Change(args.overrides, args.schedule)
    if len(runs) == 1 and is_by_hand(runs[0]):
        refuse_finished(runs[0])
        if change:
            raise settings_are_of_all(runs[0])
        return resume_by_hand(runs[0], args, argv)
    preview = print_plan if args.dry_run else None
    flags, allow = cli.launch_flags(args), args.allow_code
    started = resume(runs, flags, env, force=args.force, allow_code=allow, preview=preview, change=change)
    return cli.follow(started.going_on, started.executor, args)


if __name__ == "__main__":
    cli.run(main)
