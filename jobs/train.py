"""``python -m jobs.train PRESET|RUN``: one rank. The same under srun, torchrun, mpirun, submitit, or alone."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jobs import cli
from trainkit import terminal
from trainkit.errors import UserError
from trainkit.run.events import Attempt, job_of, writing
from trainkit.run.folder import RunDir, as_open_as, next_path, runs_root
from trainkit.schedulers.base import require_no_job

if TYPE_CHECKING:
    from trainkit.config.loading import Loaded
    from trainkit.config.schema import Config


def parser() -> cli.Parser:
    parser = cli.Parser("train", __doc__)
    add = parser.add_argument
    add("run", metavar="PRESET|RUN", help="a preset, a YAML file, or a run to go on with")
    add("--run-dir", type=cli.new_folder, metavar="FOLDER", help="to make, or to go on with if it is there")
    add("--show-lr", action="store_true", help="print the learning rate epoch by epoch; train nothing")
    return parser.taking("overrides", "--join", "--force", "--allow-code")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Parse, train, say how it ended."""
    args = parser().parse_intermixed_args(argv)
    from trainkit.bench.base import refuse_bench
    from trainkit.config.loading import load
    from trainkit.ranks.signals import stop_on_signal
    from trainkit.run.ownership import require_own_code
    from trainkit.start import check, preset_or_run, settled
    from trainkit.worker import own_attempt, train

    args.run = preset_or_run(args.run, env)
    with stop_on_signal() as stop, ExitStack() as held:
        if args.join is None:
            loaded = load(args.run, args.overrides, env=env)
        else:
            from jobs.join import loaded_rank

            loaded, token = loaded_rank(
                args.run, args.join, args.overrides, args.run_dir, env=env, allow_code=args.allow_code
            )
            env = {**env, "TRAINKIT_TOKEN": token} if token else env
        given = Path(args.run).expanduser()
        for folder in (given, args.run_dir or given):
            refuse_bench(folder)
        require_own_code(given, loaded, allow_code=args.allow_code)
        check(loaded)
        if args.show_lr:
            print("\n".join(_rates(loaded.config)))
            return
        attempt = Attempt.named_in(env)
        path = given if (given / "config.yaml").is_file() else args.run_dir
        if path is None:
            path = attempt.run.path if attempt is not None else next_path(runs_root(env), loaded.name)
        if args.join is None:
            (loaded,) = settled([loaded], path)

        def open_run() -> Attempt:
            words = ["TOKEN" if args.join and word == args.join else word for word in argv]
            run = _open(loaded, path, attempt, ["python", "-m", "jobs.train", *words])
            if attempt is None:  # no launcher has checked this before
                require_no_job(run, force=args.force)
            return held.enter_context(writing(own_attempt(attempt, run, env), job_id=job_of(env)))

        held.enter_context(as_open_as(path))
        outcome, done = train(loaded.config, env, stop, attempt, open_run)
    if attempt is None and done is not None:
        from trainkit.report.facts import summary_lines

        stopped = f"Stopped and saved. Go on with: {terminal.command('train', done.path)}"
        print("\n".join([stopped] if outcome == "preempted" else summary_lines(done)), flush=True)


def _rates(config: "Config") -> list[str]:
    """Table of learning rates: at the start of each epoch, at the peak, and at the last update."""
    from trainkit.config.checks import strategy_traits
    from trainkit.data import build_data
    from trainkit.data.base import steps_per_epoch
    from trainkit.training.schedule import lr_at

    if strategy_traits(config.strategy.name).loop == "collaborative":
        why = "Time decides how many a round has, and its rate goes by rounds."
        fix = "Look at the rate of single, ddp or fsdp."
        raise UserError("A collaborative run has no fixed number of updates.", why=why, fix=fix)
    per_epoch = steps_per_epoch(len(build_data(config.data).train), config.train.global_batch_size)
    total = config.train.max_steps or config.train.epochs * per_epoch
    at = partial(lr_at, optim=config.optim, schedule=config.schedule, steps_per_epoch=per_epoch, total_steps=total)
    rates = list(map(at, range(total)))
    highest = rates.index(max(rates))
    rows = [
        (f"{step / per_epoch:.2f}", str(step), f"{rates[step]:.3e}", "#" * round(40 * rates[step] / rates[highest]))
        for step in sorted({*range(0, total, per_epoch), highest, total - 1})
    ]
    return terminal.table(("epoch", "update", "lr", ""), rows)


def _open(loaded: "Loaded", path: Path, attempt: Attempt | None, command: list[str]) -> RunDir:
    """Open the run folder, or make it."""
    from trainkit.config.loading import load, to_yaml
    from trainkit.run.snapshot import write_manifest

    if not (path / "config.yaml").exists() and (not path.exists() or attempt is not None):
        # A template makes the log folder of its attempt before Python makes the run's.
        run_dir = RunDir.create(path, to_yaml(loaded.config), after_logs=attempt is not None)
        write_manifest(run_dir, command)
        return run_dir
    run_dir = RunDir.open(path)
    stored = load(str(run_dir.config)).config
    # Only launch settings may differ from start to start.
    if stored.model_copy(update={"launch": loaded.config.launch}) != loaded.config:
        why = "Its config.yaml differs from what was asked for now."
        fix = f"Go on with it as it is (`{terminal.command('train', path)}`), or give another --run-dir."
        raise UserError(f"{path} was started with other settings.", why=why, fix=fix)
    return run_dir


if __name__ == "__main__":
    cli.run(main)
