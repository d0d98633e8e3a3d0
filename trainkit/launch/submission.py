"""From a plan to a job: the run folder written, the job handed over, and who did it recorded."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainkit import fileio, terminal
from trainkit.cluster.adoption import adopt, write_down
from trainkit.config.loading import Loaded, to_yaml
from trainkit.config.schema import Config
from trainkit.errors import RefusedError, SchedulerError, UserError
from trainkit.launch.batch_script import batch_script
from trainkit.launch.explain import way_out
from trainkit.launch.plan import Plan
from trainkit.launch.scheduler import unclaimed
from trainkit.run import folder as run_folder
from trainkit.run.events import Attempt, life_of, refused, submitted, submitting, unanswered
from trainkit.run.folder import RunDir, make_private
from trainkit.run.lease import ProcessId
from trainkit.run.ownership import vouch
from trainkit.site.profile import Site

if TYPE_CHECKING:
    from trainkit.launch.executors import SbatchError

Function = Callable[[str], str]

STORE = ".code"
"""In a folder of runs: the code that they share."""
PAUSES = (0.0, 2.0, 4.0)
"""Before each look for a job that sbatch has not spoken of, in seconds."""


def stored_config(loaded: Loaded, cwd: Path) -> Config:
    """The configuration as the run keeps it: paths are absolute, so that it can be repeated anywhere."""
    data, model = loaded.config.data, loaded.config.model
    data = data.model_copy(update={"root": _absolute(data.root, cwd)})
    if model.checkpoint is not None:
        model = model.model_copy(update={"checkpoint": _absolute(model.checkpoint, cwd)})
    return loaded.config.model_copy(update={"data": data, "model": model})


def _absolute(path: str, cwd: Path) -> str:
    return str((cwd / Path(path).expanduser()).absolute())


def script_text(plan: Plan, folder: Path, cwd: Path, points: int = 1) -> str:
    """The batch script of a run, or of a sweep of ``points`` runs."""
    return batch_script(plan, folder, cwd=cwd, python=sys.executable, points=points)


def write_run(
    path: Path,
    config: Config,
    plan: Plan,
    script: str | None,
    command: Sequence[str],
    fingerprint: str = "",
    *,
    store: Path | None = None,
) -> RunDir:
    """Make a new run folder with everything that the job needs. What could not be made whole is taken away again.

    Args:
        store: where it shares its code with runs of equal code; None: beside it.
    """
    run_dir = RunDir.create(path, to_yaml(config))
    with undone_on_error(path):
        from trainkit.run.snapshot import write_code, write_manifest

        own = (config.model.name, config.data.name, config.strategy.name)
        # A container has the folder of the submission, and not what a link in it leads to.
        in_sight = plan.container is None or Path(os.path.realpath(path)).is_relative_to(Path.cwd())
        withheld = write_code(run_dir, own, store=(store or path.parent / STORE) if in_sight else None)
        write_manifest(run_dir, command, withheld, fingerprint=fingerprint)
        write_launch(run_dir.path, plan, script)
    vouch(run_dir, config)
    if fingerprint:
        run_folder.mark(run_dir.path, fingerprint)
    return run_dir


def write_sweep(
    folder: Path,
    configs: Sequence[Config],
    plan: Plan,
    script: str | None,
    command: Sequence[str],
    variants: Sequence[Sequence[str]],
    fingerprints: Sequence[str],
) -> list[RunDir]:
    """Make a sweep's folder: complete runs 0, 1, 2, ..., and sweep.json with the overrides of each."""
    try:
        make_private(folder)  # which claims the name: of two sweeps at once only one gets it
    except OSError as error:
        fix = "Give another --run-dir, or a folder that you may write to with TRAINKIT_RUNS=FOLDER."
        raise UserError(f"Cannot make the folder {folder}.", why=f"{error.strerror}.", fix=fix) from None
    with undone_on_error(folder):
        numbered = enumerate(zip(configs, fingerprints, strict=True))
        runs = [
            write_run(folder / str(i), config, plan, script, command, mark, store=folder.parent / STORE)
            for i, (config, mark) in numbered
        ]
        write_launch(folder, plan, script)
        points = [
            {"run": run.name, "overrides": list(overrides)} for run, overrides in zip(runs, variants, strict=True)
        ]
        fileio.write(folder / "sweep.json", json.dumps(points, indent=2) + "\n", folder)
    return runs


def write_launch(folder: Path, plan: Plan, script: str | None) -> None:
    """Write plan.json and, for SLURM, submit.sbatch."""
    fileio.write(folder / "plan.json", plan.to_json(), folder)
    if script is not None:
        fileio.write(folder / "submit.sbatch", script, folder)


@contextlib.contextmanager
def undone_on_error(folder: Path, *, unless: bool = False) -> Iterator[None]:
    """Remove a folder that this very command made, if what follows fails: nothing half-written stays behind.

    A folder stays if a job may have been queued for it (Ctrl-C while sbatch is at work): `status` finds that job.

    ``unless``: what follows is the run itself, whose failure leaves a record.
    """
    try:
        yield
    except BaseException as error:
        if unless or _may_be_queued(folder):
            raise
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(
                f"Cannot write the run folder {folder}.",
                why=f"{error.strerror}: {error.filename}",
                fix="Free some space, or choose another folder with TRAINKIT_RUNS=FOLDER or --run-dir.",
            ) from None
        raise


def _may_be_queued(folder: Path) -> bool:
    runs = [RunDir(path.parent) for pattern in ("config.yaml", "*/config.yaml") for path in folder.glob(pattern)]
    lives = [life_of(run) for run in runs]  # queued for sure, where what failed came after that: a closed terminal
    return any(life.cut_short is not None or life.submission is not None for life in lives)


def require_executor(plan: Plan, site: Site) -> None:
    """Refuse to submit to a SLURM that is not here, and what only SLURM or `jobs.launch` can run."""
    if plan.executor != "slurm" and plan.container is not None:
        raise RefusedError(
            "A container is for SLURM jobs and for jobs.launch.",
            why=f"The run would be {plan.executor}, and launch.container_image is {plan.container.image}.",
            fix="Add --container-image none, or start it with `python -m jobs.launch`.",
            key="launch.container_image",
        )
    if plan.executor == "slurm" and not site.slurm:
        raise RefusedError(
            "There is no SLURM on this machine.",
            why="launch.executor is slurm, but sbatch is not found.",
            fix="Use --executor local to run it here, or submit from a login node.",
        )


def hand_over(
    folder: Path, runs: Sequence[RunDir], plan: Plan, function: Function, *, cwd: Path, env: Mapping[str, str]
) -> list[str]:
    """Queue the runs in ``folder`` with SLURM, or start them here, and write a ``submitted`` event into each.

    Returns the job id of each run.
    """
    # submitit is imported here: a dry run and `--help` do without.
    from trainkit.launch import executors

    if plan.executor == "slurm":
        return _queue(folder, runs, plan, function, env)
    before = [len(run.attempts()) for run in runs]  # the job may begin one before it is written down
    job_ids, controller = executors.submit_locally(folder, runs, function, tasks=plan.world_size, cwd=cwd, env=env)
    for run, job_id, attempts in zip(runs, job_ids, before, strict=True):
        submitted(run, plan.executor, job_id, controller, attempts_before=attempts)
    return job_ids


def _queue(folder: Path, runs: Sequence[RunDir], plan: Plan, function: Function, env: Mapping[str, str]) -> list[str]:
    from trainkit.launch import executors

    token = secrets.token_hex(4)
    script = folder / ".submitit" / f"{token}.sbatch"
    fileio.make_folder(script.parent, folder)
    fileio.link(script, "../submit.sbatch", folder)
    for run in runs:
        submitting(run, token)
    try:
        job_ids = executors.submit_to_slurm(
            folder, runs, function, script, nodes=plan.nodes, ntasks_per_node=plan.ntasks_per_node, env=env
        )
    except executors.SbatchError as error:
        return _despite(error, folder, runs, plan)
    for run, job_id in zip(runs, job_ids, strict=True):
        cut = life_of(run).cut_short
        if cut is not None:  # else it was found in the queue before this
            write_down(run, cut, [job_id])
    return job_ids


def _despite(error: SbatchError, folder: Path, runs: Sequence[RunDir], plan: Plan) -> list[str]:
    """The ids of the jobs that are there although sbatch has failed: a busy scheduler may take one and not answer.

    Raises:
        SchedulerError: there are none; where nobody can tell, the runs' records say so.
    """
    for pause in PAUSES[: 1 if error.is_answer else None]:
        time.sleep(pause)
        search = adopt([(run, life_of(run)) for run in runs if life_of(run).cut_short])
        lives = [life_of(run) for run in runs]
        if not any(life.cut_short for life in lives):
            job_ids = [life.submission.job_id for life in lives if life.submission is not None]
            print(f"sbatch has failed ({error.why}), and has queued the job: {job_ids[0]}.", file=sys.stderr)
            return job_ids
        if search.complaint:
            break
    if error.is_answer and (not search.complaint or "Batch job submission failed" in error.why):
        for index, run in enumerate(runs):
            refused(run, error.why)
            (folder / ".submitit" / unclaimed(index)).unlink(missing_ok=True)
        raise SchedulerError(error.what, why=error.why, fix=way_out(error.why, plan))
    for run in runs:
        unanswered(run, error.why)
    raise SchedulerError(
        f"Nobody can tell whether SLURM has taken the job of {folder}.",
        why=f"sbatch said: {error.why}. "
        + (f"SLURM cannot be asked: {search.complaint}." if search.complaint else "SLURM has no job of it yet."),
        fix=f"Do not submit it anew: `{terminal.command('status', folder)}` looks for the job, "
        f"`{terminal.command('cancel', folder)}` ends it if it comes.",
    )


def run_here(run: RunDir, plan: Plan, function: Function, env: Mapping[str, str]) -> None:
    """Run rank 0 of 1 in this very process, with its terminal, so that ``breakpoint()`` works."""
    from trainkit.launch.environment import leaked

    me = ProcessId.of(os.getpid())
    submitted(run, "debug", str(me.pid), me)
    attempt = Attempt.begin(run)
    # This process becomes the rank, so its own environment is what the rank will read.
    for name in leaked(env):
        os.environ.pop(name, None)
    os.environ.update(attempt.environment())
    if not plan.gpus_per_node:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    state = "FAILED"
    try:
        function(str(run.path))
        state = "PREEMPTED" if attempt.number in life_of(run).handed_back else "COMPLETED"
    except KeyboardInterrupt:
        state = "CANCELLED"
        raise
    finally:
        attempt.ended(state, job_id=str(me.pid))
