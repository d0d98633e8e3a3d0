"""From a plan to a job: the run folder written, the job handed over, and who did it recorded; or a check of nodes."""

from __future__ import annotations

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
from trainkit.config.loading import Loaded, load, to_yaml
from trainkit.config.schema import Config, LaunchConfig
from trainkit.errors import RefusedError, SchedulerError, UserError
from trainkit.launch.plan import Plan, make_plan
from trainkit.process import MOST, leaked, python_path, scrubbed, set_variables
from trainkit.ranks import Secret, free_port
from trainkit.run import folder as run_folder
from trainkit.run.events import Attempt, ProcessId, history_of, submitted
from trainkit.run.folder import RunDir, make_private
from trainkit.run.ownership import vouch
from trainkit.schedulers.base import Function, named
from trainkit.site.node_health import FOLDER
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


# A check of nodes is started the way a training would be: by the scheduler, or as ranks of this machine.

LIMIT_MINUTES = 3
_END_SECONDS = 5.0
"""After the report the ranks have nothing left to do; one that hangs does not hold the answer."""
_MOST_SAID = 1_000_000
"""Characters of what srun or a rank says beside the report; nobody reads more."""


def check_plan(
    flags: Mapping[str, tuple[Any, str]], site: Site, folder: Path, env: Mapping[str, str]
) -> tuple[Plan, LaunchConfig]:
    """Where a check runs: as a training with these flags would, with two ranks on a node without GPUs."""
    given: dict[str, tuple[Any, str]] = {
        "launch.job_name": ("check", "check"), "launch.time": (str(LIMIT_MINUTES), "check"), **flags
    }  # fmt: skip
    nodes = load("ddp", flags=given, env=env).config.launch.nodes
    # Nothing is trained: a number that divides over the ranks, however many a node has.
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
    """What the ranks of ``plan`` found, and by how much this machine's clock is ahead of theirs, in seconds.

    Args:
        folder: where a job would write.
        interface: the site's own network interface, if it has named one.

    Raises:
        SchedulerError: the scheduler gave no such nodes.
        RefusedError: the ranks started and gave no answer.
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
            raise SchedulerError(
                "The check has no nodes to run on, or its first node ended it.",
                why="srun has said above what is wrong.",
                fix="Give --partition or --account, or other nodes with --nodelist and --exclude.",
            )
        raise _no_answer(f"Its first rank ended with exit code {code}; what it said is above.")
    finally:
        for process, listener in zip(processes, listeners, strict=True):
            _end(process)
            listener.join(_END_SECONDS)  # its last words come before what is said of its end


def _pass_on(words: IO[str]) -> None:
    """Show what is said as it comes, up to where nobody reads it; it is heard to its end, so that nobody waits."""
    left = _MOST_SAID
    with words:
        while part := words.readline(_MOST_SAID):
            print(terminal.log_text(part[:left], sys.stderr), end="", file=sys.stderr)
            left -= len(part[:left])


def _start(plan: Plan, folder: Path, env: Mapping[str, str], interface: str | None) -> list[subprocess.Popen[str]]:
    """The processes to be read and ended; rank 0's output comes from the first."""
    # In an allocation of one's own (salloc) its nodes are meant, and srun finds them in the environment.
    own = dict(env) if "SLURM_JOB_ID" in env else scrubbed(env)
    own["PYTHONPATH"] = python_path(Path(__file__).parents[2], env)
    own |= {"TRAINKIT_SECRET": Secret.generate().text, FOLDER: str(folder.absolute()), "SLURM_EXPORT_ENV": "ALL"}
    own["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # pages of a library's own calls, where one line says who is missing
    if interface:
        own = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} | own
    if not plan.gpus_per_node:
        own["CUDA_VISIBLE_DEVICES"] = ""
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
    """End a process that may hang. srun that is told to end ends its ranks and gives the nodes back."""
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
