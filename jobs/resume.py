"""``python -m jobs.resume RUN``: queue a run again; it continues from its newest checkpoint.

Of a sweep, it queues the runs that failed. With train.epochs=N a run trains longer, also if it has finished. Resources
and a few settings (docs/reference/settings.md) may change.
"""

from collections.abc import Mapping, Sequence

from jobs import cli
from jobs.flags import add_launch_flags, launch_flags
from trainkit.run.find import find_runs, is_url

_SCHEDULES = {
    "restart": "start a schedule that depends on the run's length again, over the remaining updates",
    "stretch": "continue it as if it had been planned for the new length",
}


def parser() -> cli.Parser:
    parser = cli.Parser("resume", __doc__ or "").taking("run", "overrides")
    either = parser.add_mutually_exclusive_group()
    for name, text in _SCHEDULES.items():
        either.add_argument(f"--{name}-schedule", dest="schedule", action="store_const", const=name, help=text)
    add_launch_flags(parser.taking("--force", "--allow-code"))
    return parser.taking("--json", "--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    args = parser().parsed(argv, env)
    from jobs.dry_run import print_plan
    from jobs.swarm import resume_by_hand
    from trainkit.launch.prolong import Change, settings_are_of_all
    from trainkit.launch.resume import fetched, is_by_hand, refuse_finished, resume

    change = Change(args.overrides, args.schedule)
    flags = launch_flags(args)
    allow = args.allow_code
    preview = print_plan if args.dry_run else None
    if is_url(args.run):
        run = fetched(args.run, flags, env, allow_code=allow, change=change, preview=preview)
        if run is None:
            return 0
        runs = [run]
    else:
        runs = find_runs(args.run, env)
    if len(runs) == 1 and is_by_hand(runs[0]):
        refuse_finished(runs[0])
        if change:
            raise settings_are_of_all(runs[0])
        return resume_by_hand(runs[0], args, argv)
    started = resume(runs, flags, env, force=args.force, allow_code=allow, preview=preview, change=change)
    return cli.finish(started, args)


if __name__ == "__main__":
    cli.run(main)
