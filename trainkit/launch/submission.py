"""Write the folders of runs and sweeps, and start what needs no scheduler's job: a debug run, a check of the nodes."""

import contextlib
import json
import math
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from trainkit import fileio, terminal
from trainkit.accelerators import interface_variables, mask_variables
from trainkit.config.loading import Loaded, load, to_yaml
from trainkit.config.schema import Config, LaunchConfig
from trainkit.errors import RefusedError, SchedulerError, UserError
from trainkit.launch import notify
from trainkit.launch.plan import Plan, make_plan
from trainkit.process import MOST, leaked, python_path, scrubbed, set_variables
from trainkit.ranks import Secret, free_port
from trainkit.run.events import Attempt, ProcessId, history_of, submitted
from trainkit.run.folder import RunDir, make_private, mark
from trainkit.run.ownership import vouch
from trainkit.run.snapshot import STORE, write_code, write_manifest
from trainkit.schedulers.base import Function, named
from trainkit.site.node_health import FOLDER
from trainkit.site.profile import Site

PART = "array-"
LIMIT_MINUTES = 3
"""Time limit of a check of the nodes."""
_END_SECONDS = 5.0
"""How long a rank of a check may take to end after the report; one that hangs must not hold up the answer."""
_MOST_SAID = 1_000_000
"""Characters that are shown of what srun or a rank of a check prints."""


def stored_config(loaded: Loaded, cwd: Path) -> Config:
    """The configuration for the run folder, with absolute paths: the run can be repeated from any folder."""
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
    """Make a run folder with everything that the job needs. If that fails, the folder is removed.

    Args:
        store: the folder in which runs share equal code; None: `STORE` beside the run.
    """
    run_dir = RunDir.create(path, to_yaml(config))
    with undone_on_error(path):
        # A container mounts the folder of the submission, but not the target of a link in it.
        in_sight = plan.container is None or Path(os.path.realpath(path)).is_relative_to(Path.cwd())
        place = (store or path.parent / STORE) if in_sight else None
        withheld = write_code(run_dir, config.plugin_names(), store=place)
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
    fix = "Give another --run-dir, or a folder that you may write to with TRAINKIT_RUNS=FOLDER."
    with fileio.disk_errors_as(f"Cannot make the folder {folder}.", fix=fix):
        make_private(folder)  # fails if another sweep has just taken the name
    with undone_on_error(folder):
        runs, store = [], folder.parent / STORE
        for number, (config, fingerprint) in enumerate(zip(configs, fingerprints, strict=True)):
            runs += [write_run(folder / str(number), config, plan, script, command, fingerprint, store=store)]
        write_launch(folder, plan, script)
        listed = zip(runs, variants, strict=True)
        points = [{"run": run.name, "overrides": list(overrides)} for run, overrides in listed]
        fileio.write(folder / "sweep.json", json.dumps(points, indent=2) + "\n", folder)
    return runs


def write_launch(folder: Path, plan: Plan, script: str | None) -> None:
    """Write plan.json and, for SLURM, submit.sbatch."""
    fileio.write(folder / "plan.json", plan.to_json(), folder)
    if script is not None:
        fileio.write(folder / "submit.sbatch", script, folder)


@contextlib.contextmanager
def undone_on_error(folder: Path, *, unless: bool = False) -> Iterator[None]:
    """Remove a folder that this command made, if the body fails.

    The folder stays if a job may be queued for it (Ctrl-C while sbatch runs): `status` finds that job.

    ``unless``: keep it anyway, for a body that is the run itself, whose failure is recorded there.
    """
    try:
        yield
    except BaseException as error:
        runs = [RunDir(path.parent) for pattern in ("config.yaml", "*/config.yaml") for path in folder.glob(pattern)]
        # A submission: the job is queued, and what failed came later, as a closed terminal does.
        if unless or any(life.cut_short or life.submission for life in map(history_of, runs)):
            raise
        shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, OSError):
            what = f"Cannot write the run folder {folder}."
            fix = "Free some space, or choose another folder with TRAINKIT_RUNS=FOLDER or --run-dir."
            raise UserError(what, why=f"{error.strerror}: {error.filename}", fix=fix) from None
        raise


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
    """The folder of a sweep's next further array, which is not made yet.

    The runs of a sweep are its folders 0, 1, 2, ..., and the indices of its first array are these numbers. If the sweep
    is larger than the scheduler's largest array, or failed runs are resumed, there are further arrays. Each has a
    folder in the sweep's `.submitit`, with links to its runs that count from 0 again.
    """
    number = 1
    while (folder := sweep / ".submitit" / f"{PART}{number}").exists():
        number += 1
    return folder


def link_runs(part: Path, runs: Sequence[RunDir]) -> None:
    """Make the folder of a further array, with links 0, 1, 2, ... to its runs."""
    with fileio.disk_errors_as(f"Cannot make the folder {part}.", fix="Check who may write there."):
        fileio.make_folder(part, whole(part))
        for index, run in enumerate(runs):
            fileio.link(part / str(index), str(run.path), whole(part))


def whole(folder: Path) -> Path:
    """The sweep of a further array's folder; any other folder itself."""
    return folder.parents[1] if is_part(folder) else folder


def is_part(folder: Path) -> bool:
    """Whether it is the folder of a further array."""
    return folder.name.startswith(PART) and folder.parent.name == ".submitit"


# A check of the nodes


def check_plan(
    flags: Mapping[str, tuple[Any, str]], site: Site, folder: Path, env: Mapping[str, str]
) -> tuple[Plan, LaunchConfig]:
    """The plan of a check: that of a training with these flags, but with two ranks on a node without GPUs."""
    given: dict[str, tuple[Any, str]] = {
        "launch.job_name": ("check", "check"), "launch.time": (str(LIMIT_MINUTES), "check"), **flags
    }  # fmt: skip
    nodes = load("ddp", flags=given, env=env).config.launch.nodes
    # Nothing is trained; this number divides by any number of ranks that a node may have.
    given["train.global_batch_size"] = (nodes * math.lcm(*range(1, 17)), "check")
    loaded = load("ddp", flags=given, env=env)
    plan = make_plan(loaded, site, folder)
    if not plan.gpus_per_node and loaded.config.launch.ntasks_per_node is None:
        loaded = load("ddp", flags={**given, "launch.ntasks_per_node": (2, "check")}, env=env)
        plan = make_plan(loaded, site, folder)
    return plan, loaded.config.launch


def check_nodes(
    plan: Plan, folder: Path, env: Mapping[str, str], *, interface: str | None = None
) -> tuple[dict[str, Any], float]:
    """Start the ranks of ``plan``; their report, and by how many seconds this machine's clock is ahead of theirs.

    Args:
        folder: where a job would write.
        interface: the network interface that the site's profile names, if it does.

    Raises:
        SchedulerError: the scheduler did not give the nodes.
        RefusedError: the ranks started, but made no report.
    """
    processes = _start(plan, folder, env, interface)
    listeners = [threading.Thread(target=_pass_on, args=(process.stderr,), daemon=True) for process in processes]
    try:
        for listener in listeners:
            listener.start()
        first = processes[0].stdout
        assert first is not None
        heard = 0
        while line := first.readline(MOST):
            heard += len(line)
            if heard > MOST:
                raise _no_answer(f"Its first rank has said {terminal.size(heard)} and no result.")
            report = fileio.parse_object(line) if line.startswith('{"ranks"') else None
            if report is not None and fileio.is_time(report.get("time")):
                return report, time.time() - report["time"]
            print(terminal.log_text(line, sys.stderr), end="", file=sys.stderr)
        code = processes[0].wait()
        if named(plan.executor).batch and code == 1:  # srun's own, before anything was started
            what = "The check has no nodes to run on, or its first node ended it."
            fix = "Give --partition or --account, or other nodes with --nodelist and --exclude."
            raise SchedulerError(what, why="srun has said above what is wrong.", fix=fix)
        raise _no_answer(f"Its first rank ended with exit code {code}; what it said is above.")
    finally:
        for process, listener in zip(processes, listeners, strict=True):
            _end(process)
            listener.join(_END_SECONDS)  # its last words come before what is said of its end


def _pass_on(words: IO[str]) -> None:
    """Print what a process writes, up to a limit, and read the rest: a full pipe would block the process."""
    left = _MOST_SAID
    with words:
        while part := words.readline(_MOST_SAID):
            print(terminal.log_text(part[:left], sys.stderr), end="", file=sys.stderr)
            left -= len(part[:left])


def _start(plan: Plan, folder: Path, env: Mapping[str, str], interface: str | None) -> list[subprocess.Popen[str]]:
    """Start the processes of a check; rank 0 writes to the first one's output."""
    # Inside the user's own allocation (salloc) srun takes its nodes, by these variables.
    own = dict(env) if "SLURM_JOB_ID" in env else scrubbed(env)
    own["PYTHONPATH"] = python_path(Path(__file__).parents[2], env)
    own |= {"TRAINKIT_SECRET": Secret.generate().text, FOLDER: str(folder.absolute()), "SLURM_EXPORT_ENV": "ALL"}
    own["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # else a missing rank prints pages of stack traces
    if interface:
        own = interface_variables(interface) | own
    if not plan.gpus_per_node:
        own |= mask_variables(env, 0, 0)
    command = [sys.executable, "-u", "-m", "trainkit.distributed.health"]
    together = named(plan.executor).on_its_nodes(plan, command, LIMIT_MINUTES)
    starts: list[tuple[list[str], dict[str, str]]] = [(together or command, own)]
    if together is None:
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
        own |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(plan.ntasks_per_node))
        ranks = map(str, range(plan.ntasks_per_node))
        starts = [(command, {**own, "RANK": rank, "LOCAL_RANK": rank}) for rank in ranks]
    pipe = subprocess.PIPE
    return [
        subprocess.Popen(words, env=variables, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, errors="replace")
        for words, variables in starts
    ]


def _end(process: subprocess.Popen[str]) -> None:
    """End a process that may hang. srun, on SIGTERM, ends its ranks and releases the nodes."""
    for stop in (process.terminate, process.kill):
        try:
            process.wait(timeout=_END_SECONDS)
            break
        except subprocess.TimeoutExpired:
            stop()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def _no_answer(why: str) -> RefusedError:
    fix = "Leave that node out with --exclude, and check again."
    return RefusedError("The check gave no answer.", why=why, fix=fix)
