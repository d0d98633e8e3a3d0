"""``python -m jobs.train PRESET|RUN``: one rank. The same under srun, torchrun, mpirun, submitit, or alone."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from jobs import cli
from trainkit.checking import check
from trainkit.config.loading import Loaded, load, to_yaml
from trainkit.config.schema import Config
from trainkit.config.traits import strategy_traits
from trainkit.distributed.stop import StopFlag, stop_on_signal
from trainkit.errors import TrainkitError, UserError
from trainkit.records.events import append_event, last_event
from trainkit.records.ownership import require_own_code
from trainkit.records.rundir import RunDir, next_path, runs_root


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    """Parse, train, say how it ended."""
    parser = cli.Parser("train", __doc__)
    parser.add_argument("run", metavar="PRESET|RUN", help="a preset, a YAML file, or a run folder to go on with")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    parser.add_argument("--run-dir", type=Path, help="run folder to make, or to go on with if it is there")
    cli.add_allow_code_flag(parser)
    args = parser.parse_intermixed_args(argv)
    with stop_on_signal() as stop:
        loaded = load(args.run, args.overrides, env=env)
        given = Path(args.run).expanduser()
        require_own_code(given, loaded, allow_code=args.allow_code)
        check(loaded)
        run_dir = given if (given / "config.yaml").is_file() else args.run_dir
        if run_dir is None and env.get("TRAINKIT_RUN_DIR"):
            run_dir = Path(env["TRAINKIT_RUN_DIR"])
        command = ["python", "-m", "jobs.train", *argv]
        outcome, done = _train(loaded.config, env, stop, lambda: _open(loaded, run_dir, env, command))
    if "TRAINKIT_ATTEMPT" not in env and done is not None:
        if outcome == "preempted":
            print(f"Stopped and saved. Go on with: python -m jobs.train {done.path}", flush=True)
        else:
            from trainkit.monitor.follow import summary_lines

            print("\n".join(summary_lines(done)), flush=True)
    return 0


def run_rank(run: str) -> str:
    """Train one rank of the run in folder ``run``; what submitit calls in every task. How it ended.

    The signal handlers come first: until they are in place, the signal of a time limit would kill the task.
    """
    with stop_on_signal() as stop:
        try:
            run_dir = RunDir.open(Path(run))
            config = load(str(run_dir.config)).config
            outcome, _ = _train(config, os.environ, stop, lambda: run_dir)
        except TrainkitError as error:
            print(error, file=sys.stderr, flush=True)
            raise SystemExit(error.exit_code) from None
    return outcome


def _train(
    config: Config, env: Mapping[str, str], stop: StopFlag, open_run: Callable[[], RunDir]
) -> tuple[str, RunDir | None]:
    from trainkit.ranks.env import RankEnv
    from trainkit.ranks.secret import Secret

    rank_env, secret = RankEnv.from_mapping(env), Secret.from_mapping(env)
    attempt = int(env["TRAINKIT_ATTEMPT"]) if env.get("TRAINKIT_ATTEMPT", "").isdigit() else None
    if strategy_traits(config.strategy.name).loop == "collaborative":  # each rank is a peer with a loop of its own
        from trainkit.collaborative.peer import run_swarm_rank

        kept = open_run() if rank_env.is_main else None
        return run_swarm_rank(config, kept, rank_env, stop, attempt=attempt, secret=secret), kept
    from trainkit import experiment

    outcome, run_dir = experiment.run(config, rank_env, stop, open_run=open_run, attempt=attempt, secret=secret)
    return outcome, run_dir if rank_env.is_main else None


def _open(loaded: Loaded, path: Path | None, env: Mapping[str, str], command: list[str]) -> RunDir:
    """The run folder that was asked for, made if it is not there."""
    if path is None:
        path = next_path(runs_root(env), loaded.name)
    if not (path / "config.yaml").exists() and (not path.exists() or "TRAINKIT_ATTEMPT" in env):
        from trainkit.records.snapshot import write_manifest

        run_dir = RunDir.create(path, to_yaml(loaded.config), after_logs="TRAINKIT_ATTEMPT" in env)
        write_manifest(run_dir, command)
        _record_job(run_dir, env)
        return run_dir
    run_dir = RunDir.open(path)
    if _settings(load(str(run_dir.config)).config) != _settings(loaded.config):
        raise UserError(
            f"{path} was started with other settings.",
            why="Its config.yaml differs from what was asked for now.",
            fix=f"Go on with it as it is (`python -m jobs.train {path}`), or give another --run-dir.",
        )
    _record_job(run_dir, env)
    return run_dir


def _record_job(run_dir: RunDir, env: Mapping[str, str]) -> None:
    """Note the SLURM job of a template, so that `status` and `cancel` find it like one of `jobs.submit`."""
    job_id, attempt = env.get("SLURM_JOB_ID"), env.get("TRAINKIT_ATTEMPT", "")
    if not job_id or not attempt.isdigit():  # a shell inside an allocation is no job of this run
        return
    before = last_event(run_dir, "submitted")
    if before is None or before.get("job_id") != job_id:
        append_event(run_dir, "submitted", executor="slurm", job_id=job_id, attempts_before=int(attempt))


def _settings(config: Config) -> Config:
    """The configuration without where and how it is launched, which may differ from start to start."""
    return config.model_copy(update={"launch": type(config.launch)()})


if __name__ == "__main__":
    cli.run(main)
