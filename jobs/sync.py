"""``python -m jobs.sync RUN...``: upload runs that were recorded offline (W&B), all attempts of each as one run."""

from collections.abc import Mapping, Sequence

from jobs import cli


def parser() -> cli.Parser:
    return cli.Parser("sync", __doc__ or "").taking("runs", "--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parsed(argv, env)
    from trainkit import monitor
    from trainkit.config.loading import load
    from trainkit.errors import UserError
    from trainkit.run.events import history_of, is_written
    from trainkit.run.folder import find_runs

    for run in [run for reference in args.runs for run in find_runs(reference, env)]:
        if is_written(run):
            why, fix = "What it sends meanwhile would be replaced by what it had recorded.", "Wait for its end."
            raise UserError(f"{run.name} is being trained.", why=why, fix=fix)
        config = load(str(run.config)).config
        for sent in monitor.sync(run, config, history_of(run).started):
            print(f"{run.name}: {sent}", flush=True)


if __name__ == "__main__":
    cli.run(main)
