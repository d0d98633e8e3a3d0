"""``python -m jobs.cancel RUN...``: end the job of a run, or all of a sweep's, on SLURM or on this machine."""

from collections.abc import Mapping, Sequence

from jobs import cli, login_node
from trainkit.run.folder import find_runs


def parser() -> cli.Parser:
    parser = cli.Parser("cancel", "End the jobs of runs. What they have saved stays, and `resume` goes on from it.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run's or a sweep's name or folder")
    return parser.taking("--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    args = parser().parse_args(list(argv))
    from trainkit.finish import cancel

    if args.host is not None:
        return login_node.forward("cancel", argv, args.host, env)
    cancel([run for reference in args.runs for run in find_runs(reference, env)])
    return 0


if __name__ == "__main__":
    cli.run(main)
