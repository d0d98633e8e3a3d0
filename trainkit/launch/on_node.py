"""Beside the ranks of a running job, on their node: a shell as a rank has it, its stacks, or what runs there.

    python -m trainkit.launch.on_node RUN shell RANK [COMMAND ...]
    python -m trainkit.launch.on_node RUN stack RANK
    python -m trainkit.launch.on_node RUN watch

Ranks are found among this machine's processes, so that a shell gets what the batch script, modules and the launcher
have made of their environment. Nothing here takes the run's lease or writes into its folder.
"""

import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from trainkit.cluster.containers import node_command
from trainkit.cluster.plan import Plan
from trainkit.cluster.ranks import RankEnv
from trainkit.common import fileio, terminal
from trainkit.common.errors import RefusedError, TrainkitError, UserError
from trainkit.common.process import ask, device_masks, run_program, scrubbed
from trainkit.monitor.hardware import MB, open_gpus
from trainkit.run.events import RUN_DIR
from trainkit.run.folder import RunDir

WATCH_SECONDS = 2.0
"""Seconds between two looks at a node's processes."""
_FIRST_SECONDS = 0.5
"""Time over which the first look measures."""
_STACK_SECONDS = 120.0
_NAMED = re.compile(r"rank-(\d+)")
_HELPERS = ("rank-keeper", "rank-council", "rank-nursery")
_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")


def processes_of(run: RunDir) -> list[psutil.Process]:
    """List the processes of this user that belong to a run on this machine, oldest first."""
    folder = os.path.realpath(run.path)
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):  # another user's, or just ended
            given = process.environ().get(RUN_DIR)
            if given and os.path.realpath(given) == folder:
                found.append((process.create_time(), process.pid, process))
    return [process for *_, process in sorted(found)]


def rank_of(process: psutil.Process) -> int | None:
    """Return the rank that a process of a run is, or works for; None for a launcher."""
    name = process.name()
    named = _NAMED.fullmatch(name)
    if named:
        return int(named[1])
    if name in _HELPERS:
        return None
    with suppress(UserError):
        rank = RankEnv.from_mapping(process.environ())
        if rank.launcher != "single":
            return rank.rank
    return None


def ranks_here(run: RunDir) -> dict[int, psutil.Process]:
    """Map the ranks of a run on this machine to their processes."""
    found: dict[int, tuple[tuple[bool, bool], psutil.Process]] = {}
    for process in processes_of(run):
        with suppress(psutil.Error, OSError):
            rank = rank_of(process)
            if rank is None:
                continue
            # What a rank has started came after it. torchrun itself has srun's variables, as a rank has without it.
            order = (_NAMED.fullmatch(process.name()) is None, "TORCHELASTIC_RUN_ID" not in process.environ())
            if rank not in found or order < found[rank][0]:
                found[rank] = (order, process)
    return {rank: process for rank, (_, process) in sorted(found.items())}


def _rank(run: RunDir, rank: int) -> psutil.Process:
    here = ranks_here(run)
    if rank in here:
        return here[rank]
    there = ", ".join(map(str, here)) or "none"
    why = f"Ranks of it that run here: {there}."
    fix = f"`{terminal.command('shell', run.path, '--top')}` shows which ranks run where; one may just be starting."
    raise RefusedError(f"Rank {rank} of {run.name} does not run on {socket.gethostname()}.", why=why, fix=fix)


# What is done here


def enter(run: RunDir, rank: int, command: Sequence[str], env: Mapping[str, str]) -> None:
    """Become a shell, or a command, with the environment and the folder of a rank, or in a container of its image.

    What would make it a rank of the run is taken out: it trains, meets and records nothing of the run's.

    Raises:
        RefusedError: the rank is not here.
        UserError: there is no such command.
    """
    process = _rank(run, rank)
    inside = scrubbed(process.environ())
    folder = Path(process.cwd())
    container = Plan.read(run.plan).container if run.plan.is_file() else None
    words = list(command) or [env.get("SHELL") or "sh"]
    if container is not None:
        inside = scrubbed(env)
        words = list(command) or ["sh"]
        gpus = bool(device_masks())
        words = [*node_command(container, (run.path, folder), folder, run.code, env, gpus=gpus)[:-1], *words]
        if words[:2] == ["docker", "run"] and sys.stdin.isatty():
            words.insert(2, "-it")
    for name in ("TERM", "COLUMNS", "LINES"):
        if name in env:
            inside[name] = env[name]
    if sys.stdin.isatty():
        terminal.warn(f"Rank {rank} of {run.name} on {socket.gethostname()}. What you do here is not the run's.")
    os.chdir(folder)
    try:
        os.execvpe(words[0], words, inside)
    except OSError as error:
        why = f"{error.strerror} on {socket.gethostname()}, with the PATH of the rank."
        raise UserError(f"{words[0]} cannot be started.", why=why, fix="Check its name, or give its path.") from None


def stacks(run: RunDir, rank: int, env: Mapping[str, str]) -> str:
    """Return the Python and native stacks of a rank, and of what in Python it has started, by py-spy.

    Raises:
        RefusedError: there is no py-spy, or it may not look.
    """
    process = _rank(run, rank)
    places = os.pathsep.join([os.path.dirname(sys.executable), env.get("PATH", os.defpath)])
    program = shutil.which("py-spy", path=places)
    log = terminal.command("logs", run.path, "--rank", rank, "--err")
    if program is None:
        why = f"It is neither beside {sys.executable} nor on the PATH."
        raise RefusedError("Stacks need py-spy.", why=why, fix='pip install "trainkit-vision[stack]"')
    found = []
    for each in [process, *process.children(recursive=True)]:
        told = ask([program, "dump", "--native", "--pid", str(each.pid)], seconds=_STACK_SECONDS)
        if not told.code:
            found.append(told.shown().out)
        elif each is process:
            raise _no_stacks(rank, told.words, f"`{log}`")
        # A child may have ended, or be no Python, as that of W&B: this hides no other's.
    return "\n".join(found)


def _no_stacks(rank: int, words: str, log: str) -> RefusedError:
    why = f"py-spy: {words}."
    fix = f"A rank that hangs also prints its Python stack itself: {log}."
    if re.search("permi(ssion|tted)", words, re.IGNORECASE):
        scope = fileio.read_start(_YAMA, 8).strip() if _YAMA.is_file() else "?"
        why = f"A process may not look into another one there (kernel.yama.ptrace_scope={scope}, or a container)."
        fix = f"Ask the site for kernel.yama.ptrace_scope=0, or for CAP_SYS_PTRACE in the container. {fix}"
    return RefusedError(f"No stacks of rank {rank} on {socket.gethostname()}.", why=why, fix=fix)


def looks(run: RunDir) -> Iterator[dict[str, Any]]:
    """Look at this node again and again: its GPUs (`hardware.Gpus.samples`), and the run's processes with their rank,
    percent of one core, and memory in MB."""
    gpus = open_gpus(device_masks())
    known: dict[int, psutil.Process] = {}
    pause = _FIRST_SECONDS
    while True:
        rows = []
        for process in processes_of(run):
            with suppress(psutil.Error, OSError):
                process = known.setdefault(process.pid, process)
                row: dict[str, Any] = {"rank": rank_of(process), "pid": process.pid, "name": process.name()}
                row["cpu_percent"] = process.cpu_percent()  # since the last look
                row["memory_mb"] = round(process.memory_info().rss / MB)
                rows.append(row)
        if pause == WATCH_SECONDS:
            yield {"host": socket.gethostname(), "gpus": gpus.samples(), "processes": rows}
        time.sleep(pause)
        pause = WATCH_SECONDS


def main(arguments: Sequence[str], env: Mapping[str, str]) -> int:
    """Do one of these. Only `launch.shell` calls it, so that a mistake in the arguments is ours."""
    folder, what, *rest = arguments
    run = RunDir(Path(folder))
    try:
        if what == "shell":
            enter(run, int(rest[0]), rest[1:], env)
        elif what == "stack":
            terminal.say(stacks(run, int(rest[0]), env).rstrip())
        else:
            for look in looks(run):
                terminal.say(json.dumps(look))
    except TrainkitError as error:
        terminal.warn(terminal.as_started(str(error)))
        return error.exit_code
    except psutil.Error as error:  # it ended between two looks
        terminal.warn(f"The rank has just ended: {terminal.one_line(error)}")
        return RefusedError.exit_code
    return 0


if __name__ == "__main__":
    run_program(main)
