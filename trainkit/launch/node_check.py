"""Start a check of nodes the way a training would be started there: through srun, or as ranks of this machine."""

from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from trainkit import fileio, programs, terminal
from trainkit.config.loading import load
from trainkit.config.schema import LaunchConfig
from trainkit.errors import RefusedError, SchedulerError
from trainkit.launch.plan import Plan, make_plan
from trainkit.programs import scrubbed
from trainkit.ranks.env import Secret, free_port
from trainkit.schedulers.base import named
from trainkit.site.node_health import FOLDER
from trainkit.site.profile import Site

LIMIT_MINUTES = 3
_END_SECONDS = 5.0
"""After the report the ranks have nothing left to do; one that hangs does not hold the answer."""
_MOST_SAID = 1_000_000
"""Characters of what srun or a rank says beside the report; nobody reads more."""
_MODULE = ("-u", "-m", "trainkit.distributed.health")


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
    processes = _start(plan, _environment(plan, folder, env, interface))
    listeners = [threading.Thread(target=_pass_on, args=(process.stderr,), daemon=True) for process in processes]
    try:
        for listener in listeners:
            listener.start()
        first = processes[0].stdout
        assert first is not None
        heard = 0
        while line := first.readline(programs.MOST):
            heard += len(line)
            if heard > programs.MOST:
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


def _environment(plan: Plan, folder: Path, env: Mapping[str, str], interface: str | None) -> dict[str, str]:
    project = str(Path(__file__).parents[2])
    # In an allocation of one's own (salloc) its nodes are meant, and srun finds them in the environment.
    own = dict(env) if "SLURM_JOB_ID" in env else scrubbed(env)
    own["PYTHONPATH"] = f"{project}:{env['PYTHONPATH']}" if env.get("PYTHONPATH") else project
    own |= {"TRAINKIT_SECRET": Secret.generate().text, FOLDER: str(folder.absolute()), "SLURM_EXPORT_ENV": "ALL"}
    own["TORCH_CPP_LOG_LEVEL"] = "FATAL"  # pages of a library's own calls, where one line says who is missing
    if interface:
        own = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} | own
    if not plan.gpus_per_node:
        own["CUDA_VISIBLE_DEVICES"] = ""
    return own


def _start(plan: Plan, env: Mapping[str, str]) -> list[subprocess.Popen[str]]:
    """The processes to be read and ended; rank 0's output comes from the first."""
    command = [sys.executable, *_MODULE]
    together = named(plan.executor).on_its_nodes(plan, command, LIMIT_MINUTES)
    if together is not None:
        return [_popen(together, env)]
    port = str(free_port())
    ranks = []
    for rank in range(plan.ntasks_per_node):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "NODE_RANK": "0", "MASTER_PORT": port}
        place |= {name: str(plan.ntasks_per_node) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE")}
        ranks.append(_popen(command, {**env, **place, "MASTER_ADDR": "127.0.0.1"}))
    return ranks


def _popen(command: list[str], env: Mapping[str, str]) -> subprocess.Popen[str]:
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, errors="replace")


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
    return RefusedError(
        "The check gave no answer.", why=why, fix="Leave that node out with --exclude, and check again."
    )
