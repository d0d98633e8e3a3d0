"""``python -m jobs.cancel RUN...``: end the job of a run, or all of a sweep's, on SLURM or on this machine."""

from collections.abc import Mapping, Sequence

from jobs import cli
from trainkit.run.find import runs_named


def parser() -> cli.Parser:
    about = "End the jobs of runs. Their checkpoints stay, and `resume` continues from them."
    return cli.Parser("cancel", about).taking("runs", "--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parsed(argv, env)
    from trainkit.launch.follow import cancel

    cancel(runs_named(args.runs, env))


if __name__ == "__main__":
    cli.run(main)
