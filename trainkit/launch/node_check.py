"""The check of nodes before a run starts on them."""

import math
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from trainkit.cluster.node_health import FOLDER
from trainkit.cluster.pickles import PYTHON_FLAGS
from trainkit.cluster.plan import LIMIT_MINUTES, Plan
from trainkit.cluster.ranks import Secret
from trainkit.cluster.scheduler import named
from trainkit.cluster.site import Site
from trainkit.common import fileio, jsonl, terminal
from trainkit.common.accelerators import interface_variables, mask_variables
from trainkit.common.errors import RefusedError, SchedulerError
from trainkit.common.hosts import free_port
from trainkit.common.process import MOST, python_path, scrubbed
from trainkit.config.loading import load
from trainkit.config.schema import LaunchConfig
from trainkit.launch.planning import make_plan

_END_SECONDS = 5.0
"""Time for a rank of a check to end after the report; one that hangs must not hold up the answer."""
_MOST_SAID = 1_000_000
"""Characters that are shown of what srun or a rank of a check prints."""


def check_plan(
    flags: Mapping[str, tuple[Any, str]], site: Site, folder: Path, env: Mapping[str, str]
) -> tuple[Plan, LaunchConfig]:
    """Plan a check: as a training with these flags, but with two ranks on a node without GPUs."""
    given: dict[str, tuple[Any, str]] = {"launch.job_name": ("check", "check")}
    given["launch.time"] = (str(LIMIT_MINUTES), "check")
    given |= flags
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
    """Start the ranks of ``plan``. Returns their report, and the seconds by which our clock is ahead of theirs.

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
        for line in iter(lambda: first.readline(MOST), ""):
            heard += len(line)
            if heard > MOST:
                raise _no_answer(f"Its first rank has said {terminal.size(heard)} and no result.")
            report = fileio.parse_object(line) if line.startswith('{"ranks"') else None
            if report is not None and jsonl.is_time(report.get("time")):
                return report, time.time() - report["time"]
            _show(line)
        code = processes[0].wait()
        if named(plan.executor).batch and code == 1:  # srun's own, before anything was started
            what = "The check has no nodes to run on, or its first node ended it."
            fix = "Give --partition or --account, or other nodes with --nodelist and --exclude."
            raise SchedulerError(what, why="The message of srun is above.", fix=fix)
        raise _no_answer(f"Its first rank ended with exit code {code}; its output is above.")
    finally:
        for process, listener in zip(processes, listeners, strict=True):
            _end(process)
            listener.join(_END_SECONDS)  # its last words come before what is said of its end


def _pass_on(words: IO[str]) -> None:
    """Show what a process writes, up to a limit, and read the rest: a full pipe would block the process."""
    left = _MOST_SAID
    with words:
        for part in iter(lambda: words.readline(_MOST_SAID), ""):
            _show(part[:left])
            left -= len(part[:left])


def _show(words: str) -> None:
    sys.stderr.write(terminal.log_text(words, sys.stderr))


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
    command = [sys.executable, *PYTHON_FLAGS, "-m", "trainkit.distributed.health"]
    together = named(plan.executor).on_its_nodes(plan, command, LIMIT_MINUTES)
    if together is not None:
        return [_process(together, own)]
    own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "NODE_RANK": "0"}
    own |= dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(plan.ntasks_per_node))
    return [_process(command, own | {"RANK": str(i), "LOCAL_RANK": str(i)}) for i in range(plan.ntasks_per_node)]


def _process(command: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, errors="replace")


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
    fix = "Exclude that node with --exclude, and check again."
    return RefusedError("The check gave no answer.", why=why, fix=fix)
