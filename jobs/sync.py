"""``python -m jobs.sync RUN...``: upload runs that were recorded offline (W&B), all attempts of each as one run.

If the run of somebody else names a project, name one of yours: monitor.wandb_project=mine.
"""

from collections.abc import Mapping, Sequence

from jobs import cli


def parser() -> cli.Parser:
    return cli.Parser("sync", __doc__ or "").taking("runs", "--allow-code", "--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parsed(argv, env)
    from trainkit.common.errors import UserError
    from trainkit.config.loading import load
    from trainkit.monitor import base
    from trainkit.run.find import runs_named
    from trainkit.run.history import history_of
    from trainkit.run.ownership import SYNCS, require_own_code
    from trainkit.run.run_lease import is_written

    overrides = [word for word in args.runs if word.startswith("monitor.")]
    configs = {}
    for run in runs_named([word for word in args.runs if word not in overrides], env):
        if is_written(run):
            why = "The upload would replace records that the run sends in the meantime."
            raise UserError(f"{run.name} is being trained.", why=why, fix="Wait until it ends.")
        loaded = load(str(run.config), overrides)
        require_own_code(run.path, loaded, allow_code=args.allow_code, use=SYNCS)
        configs[run] = loaded.config
    for run, config in configs.items():
        for sent in base.sync(run, config, history_of(run).started):
            print(f"{run.name}: {sent}", flush=True)


if __name__ == "__main__":
    cli.run(main)
