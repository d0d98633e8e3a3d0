"""Write the folders of runs and sweeps, and start what needs no scheduler's job: a debug run, a check of the nodes."""

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from trainkit.cluster.plan import PART, Plan, whole
from trainkit.cluster.scheduler import Function, named
from trainkit.cluster.site import Site
from trainkit.common import fileio
from trainkit.common.accelerators import mask_variables
from trainkit.common.errors import RefusedError, UserError
from trainkit.common.process import leaked, set_variables
from trainkit.config.loading import Loaded, to_yaml
from trainkit.config.schema import Config
from trainkit.launch import notify
from trainkit.run.code_files import project_of
from trainkit.run.events import Attempt, submitted
from trainkit.run.folder import RunDir, make_private
from trainkit.run.history import history_of
from trainkit.run.ownership import vouch
from trainkit.run.run_lease import ProcessId
from trainkit.run.run_manifest import repeat_manifest, write_manifest
from trainkit.run.snapshot import STORE, share_with, write_code
from trainkit.run.user_lists import mark


def stored_config(loaded: Loaded, cwd: Path) -> Config:
    """Make paths absolute in the configuration for the run folder: the run can be repeated from any folder."""
    data = loaded.config.data
    model = loaded.config.model
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
    """Make a run folder with everything that the job needs. If that fails, the folder is removed.

    Args:
        store: the folder in which runs share equal code; None: `STORE` beside the run.
    """
    run_dir = RunDir.create(path, to_yaml(config))
    with undone_on_error(path):
        # A container mounts the folder of the submission, but not the target of a link in it.
        in_sight = plan.container is None or Path(os.path.realpath(path)).is_relative_to(Path.cwd())
        place = (store or path.parent / STORE) if in_sight else None
        withheld = write_code(run_dir, config.plugin_names(), store=place, project=project_of(config.script))
        write_manifest(run_dir, command, withheld, fingerprint=fingerprint)
        write_launch(run_dir.path, plan, script)
    vouch(run_dir, config)
    if fingerprint:
        mark(run_dir.path, fingerprint)
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
    fix = "Give another --run-dir, or name a folder that you can write to with TRAINKIT_RUNS=FOLDER."
    with fileio.disk_errors_as(f"Cannot make the folder {folder}.", fix=fix):
        make_private(folder)  # fails if another sweep has just taken the name
    with undone_on_error(folder):
        runs: list[RunDir] = []
        points = []
        store = folder.parent / STORE
        firsts: dict[tuple[str, ...], RunDir] = {}  # by the functions of the user's own that their code must have
        repeated: dict[tuple[str, ...], list[Config]] = {}
        for config, fingerprint, overrides in zip(configs, fingerprints, variants, strict=True):
            name = str(len(runs))
            own = tuple(config.plugin_names())
            run = None
            if own in firsts:
                run = _repeat_run(firsts[own], folder / name, config, fingerprint)
            if run is None:
                run = write_run(folder / name, config, plan, script, command, fingerprint, store=store)
                firsts.setdefault(own, run)
            else:
                repeated.setdefault(own, []).append(config)
            runs.append(run)
            points.append({"run": name, "overrides": list(overrides)})
        for own, of_same_code in repeated.items():
            vouch(firsts[own], *of_same_code)
        write_launch(folder, plan, script)
        fileio.write(folder / "sweep.json", json.dumps(points, indent=2) + "\n", folder)
    return runs


def _repeat_run(first: RunDir, path: Path, config: Config, fingerprint: str) -> RunDir | None:
    """Make another run of a sweep as `write_run` has just made ``first``; the caller vouches for it. Collecting and
    checking the code for each would take a third of a second.

    None, and no folder, where ``first`` shares no code.
    """
    run_dir = RunDir.create(path, to_yaml(config))
    with undone_on_error(path):
        if not share_with(first, run_dir):
            shutil.rmtree(path)
            return None
        repeat_manifest(first, run_dir, fingerprint)
        for file in (first.path / "plan.json", first.path / "submit.sbatch"):
            if file.exists():
                fileio.copy(file, path / file.name, path)
    if fingerprint:
        mark(path, fingerprint)
    return run_dir


def write_launch(folder: Path, plan: Plan, script: str | None) -> None:
    """Write plan.json and, for SLURM, submit.sbatch."""
    fileio.write(folder / "plan.json", plan.to_json(), folder)
    if script is not None:
        fileio.write(folder / "submit.sbatch", script, folder)


@contextlib.contextmanager
def undone_on_error(folder: Path, *, unless: bool = False) -> Iterator[None]:
    """Remove a folder that this command made, if the body fails.

    The folder stays if a job may be queued for it (Ctrl-C while sbatch runs): `status` finds that job.

    Args:
        unless: keep it anyway, for a body that is the run itself, whose failure is recorded there.
    """
    try:
        yield
    except BaseException as error:
        files = (*folder.glob("config.yaml"), *folder.glob("*/config.yaml"))
        if unless or any(_may_have_job(RunDir(file.parent)) for file in files):
            raise
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            why = f"{error.strerror}: {error.filename}"
            fix = "Free some space, or choose another folder with TRAINKIT_RUNS=FOLDER or --run-dir."
            raise UserError(f"Cannot write the run folder {folder}.", why=why, fix=fix) from None
        raise


def _may_have_job(run: RunDir) -> bool:
    """Return True if the run was submitted: what failed came later, as a closed terminal does."""
    history = history_of(run)
    return bool(history.cut_short or history.submission)


def require_executor(plan: Plan, site: Site) -> None:
    """Refuse a scheduler that this machine does not have, and a container where nothing can run it."""
    scheduler = named(plan.executor)
    if not scheduler.batch and plan.container is not None:
        what = "A container is for SLURM jobs and for jobs.launch."
        why = f"The run would be {plan.executor}, and launch.container_image is {plan.container.image}."
        fix = "Add --container-image none, or start it with `python -m jobs.launch`."
        raise RefusedError(what, why=why, fix=fix, key="launch.container_image")
    if scheduler.batch and ":" not in plan.executor and site.scheduler != plan.executor:
        what = f"There is no {scheduler.title} on this machine."
        why = f"launch.executor is {plan.executor}, but {site.unknown or 'its programs are not found'}."
        fix = "Use --executor local to run it here, or submit from a login node."
        raise RefusedError(what, why=why, fix=fix, key="launch.executor")


def run_here(run: RunDir, plan: Plan, function: Function, env: Mapping[str, str]) -> None:
    """Run rank 0 of 1 in this process, with its terminal, so that ``breakpoint()`` works."""
    me = ProcessId.of(os.getpid())
    submitted(run, "debug", str(me.pid), me)
    attempt = Attempt.begin(run)
    # This process becomes the rank, which reads its environment.
    set_variables(dict.fromkeys(leaked(env)) | attempt.environment())
    if not plan.gpus_per_node:
        set_variables(mask_variables(env, 0, 0))
    state = "FAILED"
    try:
        function(str(run.path))
        state = "PREEMPTED" if attempt.number in history_of(run).handed_back else "COMPLETED"
    except KeyboardInterrupt:
        state = "CANCELLED"
        raise
    finally:
        attempt.ended(state, job_id=str(me.pid))
        notify.tell(run, env)


# The job arrays of a sweep


def part_folder(sweep: Path) -> Path:
    """Name the folder of a sweep's next further array, which is not made yet.

    The runs of a sweep are its folders 0, 1, 2, ..., and the indices of its first array are these numbers. If the sweep
    is larger than the scheduler's largest array, or failed runs are resumed, there are further arrays. Each has a
    folder in the sweep's `.submitit`, with links to its runs that count from 0 again.
    """
    number = 1
    while (sweep / ".submitit" / f"{PART}{number}").exists():
        number += 1
    return sweep / ".submitit" / f"{PART}{number}"


def link_runs(part: Path, runs: Sequence[RunDir]) -> None:
    """Make the folder of a further array, with links 0, 1, 2, ... to its runs."""
    with fileio.disk_errors_as(f"Cannot make the folder {part}.", fix="Check the permissions."):
        fileio.make_folder(part, whole(part))
        for index, run in enumerate(runs):
            fileio.link(part / str(index), str(run.path), whole(part))
