"""``python -m jobs.resume RUN``: queue the same run again; it goes on from its newest checkpoint."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

from jobs import cli, elsewhere
from jobs.starting import dry_run, follow, start
from trainkit import terminal
from trainkit.cluster.queue import job_state, require_no_job
from trainkit.cluster.site import discover
from trainkit.config import loading
from trainkit.config.presets import profile_layer
from trainkit.data import check_data
from trainkit.errors import UserError
from trainkit.launch import submission
from trainkit.launch.plan import make_plan
from trainkit.launch.validation import validate
from trainkit.records import reading
from trainkit.records.history import life_of
from trainkit.records.lease import Holder, lease_on
from trainkit.records.ownership import require_own_code
from trainkit.records.rundir import RunDir, find_run


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    parser = cli.Parser("resume", "Queue a run again. Resources may change; settings may not: they are the run's own.")
    parser.add_argument("run", metavar="RUN", help="a run's name or folder")
    cli.add_force_flag(parser)
    cli.add_allow_code_flag(parser)
    cli.add_launch_flags(parser)
    elsewhere.add_host_flag(parser)
    args = parser.parse_args(list(argv))
    if args.host is not None:
        return elsewhere.forward("resume", argv, args.host, env)
    run = find_run(args.run, env)
    _require_unfinished(run)
    require_no_job(run, force=args.force)
    before = life_of(run).submission
    # One at a time: of two that come together, the second finds the job of the first.
    with nullcontext() if args.dry_run else lease_on(run, Holder.me(), is_dead=_ended_jobs(run)):
        if life_of(run).submission != before:
            require_no_job(run, force=args.force)
        # The environment's SBATCH_* were part of the first submission; only what is asked for now may change it.
        flags = {**_moved(run, args.cluster), **cli.launch_flags(args)} if args.cluster else cli.launch_flags(args)
        # It waited for another job once; that is over.
        flags.setdefault("launch.dependency", (None, "a resumed run waits for nothing"))
        loaded = loading.load(str(run.config), flags=flags)
        require_own_code(run.path, loaded, allow_code=args.allow_code, starts_snapshot=True)
        if (
            ":" not in loaded.config.data.name
        ):  # the user's own modules are in the run's snapshot, wherever this is called
            check_data(loaded.config.data)
        site, cwd = discover(env), _first_folder(run)
        plan = make_plan(loaded, site, run.path)
        validate(loaded, plan, site, run.path)
        script = submission.script_text(plan, run.path, cwd) if plan.executor == "slurm" else None
        if args.dry_run:
            return dry_run(plan, loaded, run.path, script)
        submission.require_executor(plan, site)
        submission.write_launch(run.path, plan, script)
        _replace(run.config, loading.to_yaml(loaded.config))
        if plan.executor != "debug":
            start(run.path, [run], plan, cwd, env)
    if plan.executor == "debug":  # this very process becomes the run's writer
        start(run.path, [run], plan, cwd, env)
    return follow([run], plan, args)


def _require_unfinished(run: RunDir) -> None:
    if life_of(run).finished:
        raise UserError(
            f"{run.name} has finished.",
            why="There is nothing left to train.",
            fix=f"`{terminal.command('submit', run.path)} train.epochs=N` starts a new run with its settings.",
        )


def _ended_jobs(run: RunDir) -> Callable[[Holder], bool]:
    """Whether the writer is of a job that the scheduler knows to have ended, however that left its lease."""
    submission = life_of(run).submission
    ended = submission is not None and bool(submission.job_id) and job_state(run).alive == "no"
    return lambda other: ended and submission is not None and other.job_id == submission.job_id


def _moved(run: RunDir, cluster: str) -> dict[str, tuple[Any, str]]:
    """What the profile of another site says, in the place of what the one before it has said.

    The configuration that a run keeps is complete, so that its own site's profile is not asked again.
    """
    launch = loading.load(str(run.config)).config.launch
    before, flag = launch.model_dump(mode="json"), f"--cluster {cluster}"
    there: dict[str, tuple[Any, str]] = {}
    if launch.cluster is not None:
        with suppress(UserError):  # that profile may be gone: then nobody knows what it has said
            for key, (value, _) in profile_layer(launch.cluster).items():
                name = key.removeprefix("launch.")
                if name in before and str(before[name]) == str(value):
                    there[key] = (type(launch).model_fields[name].get_default(call_default_factory=True), flag)
    return there | {key: (value, flag) for key, (value, _) in profile_layer(cluster).items()}


def _first_folder(run: RunDir) -> Path:
    """Where the run was submitted from, so that paths of its own keep their meaning; else here."""
    folder = reading.read_object(run.manifest).get("cwd")
    return Path(folder) if isinstance(folder, str) and os.path.isdir(folder) else Path.cwd()


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(text, encoding="utf-8")
    os.replace(partial, path)


if __name__ == "__main__":
    cli.run(main)
