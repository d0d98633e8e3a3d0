"""``python -m jobs.cancel RUN...``: end the job of a run, or all of a sweep's, on SLURM or on this machine."""

from collections.abc import Mapping, Sequence

from jobs import cli
from trainkit.run.folder import find_runs


def parser() -> cli.Parser:
    about = "End the jobs of runs. What they have saved stays, and `resume` goes on from it."
    return cli.Parser("cancel", about).taking("runs", "--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parsed(argv, env)
    from trainkit.finish import cancel

    cancel([run for reference in args.runs for run in find_runs(reference, env)])


if __name__ == "__main__":
    cli.run(main)
