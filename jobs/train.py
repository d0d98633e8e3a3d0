"""``python -m jobs.train PRESET|RUN``: one rank. The same under srun, torchrun, mpirun, submitit, or alone."""

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from jobs import cli, flags
from trainkit.cluster.job_states import require_no_job
from trainkit.common import terminal
from trainkit.common.errors import UserError
from trainkit.run.events import Attempt, job_of, writing
from trainkit.run.find import next_path, runs_root
from trainkit.run.folder import RunDir, as_open_as
from trainkit.run.history import history_of

if TYPE_CHECKING:
    from trainkit.config.loading import Loaded
    from trainkit.config.schema import Config


def parser() -> cli.Parser:
    parser = cli.Parser("train", __doc__)
    add = parser.add_argument
    run = "a preset, a YAML file, a script, or a run to continue"
    add("run", nargs="?", metavar="PRESET|SCRIPT.py|RUN", help=run)
    add("--run-dir", type=flags.new_folder, metavar="FOLDER", help="the run folder to create or to continue")
    make = "make the run's folder, or see that it is this run, and train nothing: for a script that starts the ranks"
    add("--make", action="store_true", help=make)
    add("--show-lr", action="store_true", help="print the learning rate epoch by epoch; train nothing")
    return parser.taking("overrides", "--join", "--force", "--allow-code", "-m")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Parse, train, say how it ended."""
    args, script = flags.parse_script(parser(), argv)
    if args.run is None:
        parser().error("the following arguments are required: PRESET|SCRIPT.py|RUN")
    from trainkit.cluster.signals import stop_on_signal
    from trainkit.config.loading import load
    from trainkit.launch.preparation import as_begun, check, preset_or_run, settled
    from trainkit.launch.scripts import check_script, refuse_script, settled_script
    from trainkit.run.folder import refuse_bench
    from trainkit.run.ownership import require_own_code
    from trainkit.worker import keep_rank, own_attempt, record_job, train

    args.run = preset_or_run(args.run, env)
    with stop_on_signal() as stop, ExitStack() as held:
        if args.join is None:
            loaded = load(args.run, args.overrides, flags=script, env=env)
            if script:  # a run knows where it is
                loaded = settled_script(loaded, Path.cwd())
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
        if script:
            check_script(loaded, env)
        elif loaded.config.script is None:
            check(loaded)
        if args.show_lr:
            refuse_script(loaded.config, "--show-lr")
            print("\n".join(_rates(loaded.config)))
            return
        if not args.make and args.join is None:
            env = keep_rank(loaded.config, env, stop)
        attempt = Attempt.named_in(env)
        path = given if (given / "config.yaml").is_file() else args.run_dir
        for other in filter(None, (args.run_dir, attempt and attempt.run.path)):
            if path == given and os.path.realpath(other) != os.path.realpath(given):
                raise _two_runs(given, other)
        if path is None:
            path = attempt.run.path if attempt is not None else next_path(runs_root(env), loaded.name)
        if loaded.config.script is not None:
            pass
        elif (path / "config.yaml").is_file() and args.join is None:
            loaded = as_begun(loaded, path)
        elif args.join is None:
            (loaded,) = settled([loaded], counted=False)
        words = ["python", "-m", "jobs.train", *argv]
        if args.join:
            words = ["TOKEN" if word == args.join else word for word in words]
        # A template makes the log folder of its attempt before Python makes the run's.
        after_logs = args.make or attempt is not None
        if args.make:
            run = _open(loaded, path, words, after_logs=after_logs)
            if all(item.job_id != job_of(env) for item in history_of(run).submissions):
                require_no_job(run, force=True)  # where nobody can tell, the ranks see who writes
            record_job(run, env, attempts_before=len(run.attempts()))
            return

        def open_run() -> Attempt:
            run = _open(loaded, path, words, after_logs=after_logs)
            if attempt is None:  # no launcher has checked this before
                require_no_job(run, force=args.force)
            return held.enter_context(writing(own_attempt(attempt, run, env), job_id=job_of(env)))

        held.enter_context(as_open_as(path))
        outcome, done = train(loaded.config, env, stop, attempt, open_run)
    if attempt is None and done is not None:
        from trainkit.report.end_lines import summary_lines

        lines = summary_lines(done)
        if outcome == "preempted":
            lines = [f"Stopped and saved. Go on with: {terminal.command('train', done.path)}"]
        print("\n".join(lines), flush=True)


def _rates(config: "Config") -> list[str]:
    """Table of learning rates: at the start of each epoch, at the peak, and at the last update."""
    from trainkit.config.checks import strategy_traits
    from trainkit.data.order import steps_per_epoch
    from trainkit.data.registry import build_data
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


def _two_runs(given: Path, other: Path) -> UserError:
    why = f"{other} was named too, by --run-dir or by the script that has started this."
    fix = f"Go on with it by TRAINKIT_CONTINUE={given} and its preset, or by `{terminal.command('resume', given)}`."
    return UserError(f"{given} is a run, and trains in its own folder.", why=why, fix=fix)


def _open(loaded: "Loaded", path: Path, command: list[str], *, after_logs: bool) -> RunDir:
    """Open the run folder, or make it; ``after_logs``: also where a job has written logs already."""
    from trainkit.config.loading import load, to_yaml
    from trainkit.launch.preparation import record_data
    from trainkit.run.run_manifest import write_manifest

    if not (path / "config.yaml").exists() and (not path.exists() or after_logs):
        run_dir = RunDir.create(path, to_yaml(loaded.config), after_logs=after_logs)
        write_manifest(run_dir, command)
        for line in record_data([run_dir], [loaded.config]) if loaded.config.script is None else ():
            terminal.warn(line)
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
