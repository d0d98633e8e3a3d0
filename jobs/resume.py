"""``python -m jobs.resume RUN``: queue the same run again; it goes on from its newest checkpoint."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import cli
from jobs.starting import add_launch_flags, dry_run, launch_settings, start
from trainkit.config import loading
from trainkit.errors import UserError
from trainkit.records.events import read_events
from trainkit.records.ownership import require_own_code
from trainkit.records.rundir import RunDir, find_run

ENDING_SECONDS = 60.0
"""How long to wait for a job that is being ended; SLURM gives its tasks 30 s by default."""


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    parser = cli.Parser("resume", "Queue a run again. Resources may change; settings may not: they are the run's own.")
    parser.add_argument("run", help="a run's name or folder")
    cli.add_allow_code_flag(parser)
    add_launch_flags(parser)
    args = parser.parse_args(list(argv))
    run = find_run(args.run, env)
    _require_resumable(run)
    # The environment's SBATCH_* were part of the first submission; only what is asked for now may change it.
    settings = launch_settings(args)
    # It waited for another job once; that is over.
    settings.setdefault("launch.dependency", (None, "a resumed run waits for nothing"))
    loaded = loading.load(str(run.config), flags=settings)
    require_own_code(run.path, loaded, allow_code=args.allow_code, starts_snapshot=True)
    from trainkit.cluster.site import discover
    from trainkit.data import check_data
    from trainkit.launch import submission
    from trainkit.launch.plan import make_plan

    if ":" not in loaded.config.data.name:  # the user's own modules are in the run's snapshot, wherever this is called
        check_data(loaded.config.data)
    site, cwd = discover(env), _first_folder(run)
    plan = make_plan(loaded, site, run.path)
    script = submission.script_text(plan, run.path, cwd) if plan.executor == "slurm" else None
    if args.dry_run:
        return dry_run(plan, loaded, run.path, script)
    submission.require_executor(plan, site)
    submission.write_launch(run.path, plan, script)
    _replace(run.config, loading.to_yaml(loaded.config))
    return start(run.path, [run], plan, args, cwd, env, new=False)


def _require_resumable(run: RunDir) -> None:
    from trainkit.cluster.queue import job_state

    state = job_state(run)
    deadline = time.monotonic() + ENDING_SECONDS
    while state.state == "COMPLETING" and time.monotonic() < deadline:  # cancelled a moment ago
        time.sleep(1)
        state = job_state(run)
    if state.alive:
        raise UserError(
            f"{run.name} is {state.state} (job {state.job_id}).",
            why="Two jobs on one run would write over each other.",
            fix=f"Wait for it, or `python -m jobs.cancel {run.path}` first.",
        )
    if read_events(run, "finished"):
        raise UserError(
            f"{run.name} has finished.",
            why="There is nothing left to train.",
            fix=f"`python -m jobs.submit {run.path} train.epochs=N` starts a new run with its settings.",
        )


def _first_folder(run: RunDir) -> Path:
    """Where the run was submitted from, so that paths of its own keep their meaning; else here."""
    try:
        folder = Path(json.loads(run.manifest.read_text(encoding="utf-8"))["cwd"])
    except (OSError, ValueError, KeyError):
        return Path.cwd()
    return folder if folder.is_dir() else Path.cwd()


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    cli.run(main)
