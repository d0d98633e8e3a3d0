"""From a plan to a job: the run folder written, the job handed over, and who did it recorded."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainkit import fileio
from trainkit.config.loading import Loaded, to_yaml
from trainkit.config.schema import Config
from trainkit.errors import RefusedError, UserError
from trainkit.launch.plan import Plan
from trainkit.process import leaked, set_variables
from trainkit.run import folder as run_folder
from trainkit.run.events import Attempt, ProcessId, history_of, submitted
from trainkit.run.folder import RunDir, make_private
from trainkit.run.ownership import vouch
from trainkit.schedulers.base import Function, named
from trainkit.site.profile import Site

STORE = ".code"
"""In a folder of runs: the code that they share."""
PART = "array-"


def stored_config(loaded: Loaded, cwd: Path) -> Config:
    """The configuration as the run keeps it: paths are absolute, so that it can be repeated anywhere."""
    data, model = loaded.config.data, loaded.config.model
    data = data.model_copy(update={"root": _absolute(data.root, cwd)})
    if model.checkpoint is not None:
        model = model.model_copy(update={"checkpoint": _absolute(model.checkpoint, cwd)})
    return loaded.config.model_copy(update={"data": data, "model": model})


def _absolute(path: str, cwd: Path) -> str:
    return str((cwd / Path(path).expanduser()).absolute())


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

        # A container has the folder of the submission, and not what a link in it leads to.
        in_sight = plan.container is None or Path(os.path.realpath(path)).is_relative_to(Path.cwd())
        place = (store or path.parent / STORE) if in_sight else None
        withheld = write_code(run_dir, config.plugin_names(), store=place)
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
        runs = [RunDir(path.parent) for pattern in ("config.yaml", "*/config.yaml") for path in folder.glob(pattern)]
        # Queued for sure, where what failed came after that: a closed terminal.
        if unless or any(life.cut_short or life.submission for life in map(history_of, runs)):
            raise
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            raise UserError(
                f"Cannot write the run folder {folder}.",
                why=f"{error.strerror}: {error.filename}",
                fix="Free some space, or choose another folder with TRAINKIT_RUNS=FOLDER or --run-dir.",
            ) from None
        raise


def require_executor(plan: Plan, site: Site) -> None:
    """Refuse to submit to a scheduler that is not here, and what only SLURM or `jobs.launch` can run."""
    scheduler = named(plan.executor)
    if not scheduler.batch and plan.container is not None:
        raise RefusedError(
            "A container is for SLURM jobs and for jobs.launch.",
            why=f"The run would be {plan.executor}, and launch.container_image is {plan.container.image}.",
            fix="Add --container-image none, or start it with `python -m jobs.launch`.",
            key="launch.container_image",
        )
    if refusal := scheduler.refusal(site):
        raise refusal


def run_here(run: RunDir, plan: Plan, function: Function, env: Mapping[str, str]) -> None:
    """Run rank 0 of 1 in this very process, with its terminal, so that ``breakpoint()`` works."""
    me = ProcessId.of(os.getpid())
    submitted(run, "debug", str(me.pid), me)
    attempt = Attempt.begin(run)
    # This process becomes the rank, so its own environment is what the rank will read.
    set_variables(dict.fromkeys(leaked(env)) | attempt.environment())
    if not plan.gpus_per_node:
        set_variables({"CUDA_VISIBLE_DEVICES": ""})
    state = "FAILED"
    try:
        function(str(run.path))
        state = "PREEMPTED" if attempt.number in history_of(run).handed_back else "COMPLETED"
    except KeyboardInterrupt:
        state = "CANCELLED"
        raise
    finally:
        attempt.ended(state, job_id=str(me.pid))


# The job arrays of a sweep: one, or as many as the scheduler's largest array asks for; and another for what has failed.
# The runs of a sweep are its folders 0, 1, 2, ... The first array's indices are these numbers. Every further one has a
# folder of its own in the sweep's `.submitit`, with links to its runs that count from 0 again.


def part_folder(sweep: Path) -> Path:
    """The folder of the next further array of a sweep; it is not made yet."""
    number = 1
    while (folder := sweep / ".submitit" / f"{PART}{number}").exists():
        number += 1
    return folder


def link_runs(part: Path, runs: Sequence[RunDir]) -> None:
    """Make a part's folder, in which the runs are called 0, 1, 2, ..."""
    try:
        fileio.make_folder(part, whole(part))
        for index, run in enumerate(runs):
            fileio.link(part / str(index), str(run.path), whole(part))
    except OSError as error:
        raise UserError(
            f"Cannot make the folder {part}.", why=f"{error.strerror}.", fix="Check who may write there."
        ) from None


def whole(folder: Path) -> Path:
    """The sweep that a part's folder belongs to; any other folder itself."""
    return folder.parents[1] if is_part(folder) else folder


def is_part(folder: Path) -> bool:
    """Whether it is that of a further array."""
    return folder.name.startswith(PART) and folder.parent.name == ".submitit"


def split(runs: Sequence[RunDir], largest: int) -> list[list[RunDir]]:
    """The runs of each array."""
    return [list(runs[first : first + largest]) for first in range(0, len(runs), largest)]
