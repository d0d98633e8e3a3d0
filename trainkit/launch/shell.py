"""Beside the ranks of a running job: a shell, stacks, and what runs on its nodes, from where commands are typed."""

import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from trainkit.cluster import containers
from trainkit.cluster.job_states import job_state, not_known_as_its_own
from trainkit.cluster.pickles import PYTHON_FLAGS
from trainkit.cluster.plan import Plan
from trainkit.cluster.scheduler import JobState, named
from trainkit.common import fileio, terminal
from trainkit.common.errors import RefusedError, SchedulerError, UserError
from trainkit.common.hosts import expand
from trainkit.common.process import python_path, scrubbed
from trainkit.launch.follow import require_own
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of

_PROGRAM = "trainkit.launch.on_node"
_KEY_SECONDS = 0.25
"""Longest wait for a key between two pictures."""


@dataclass(frozen=True)
class Place:
    """The nodes of a running job, and the plan by which its ranks are on them; None for a template's."""

    run: RunDir
    job: JobState
    nodes: tuple[str, ...]
    plan: Plan | None

    @property
    def _world_size(self) -> int:
        if self.plan is not None:
            return self.plan.world_size
        started = history_of(self.run).started.get("world_size")
        return started if isinstance(started, int) else len(self.nodes)

    def node_of(self, rank: int) -> str:
        """Return the node of a rank. Raises UserError where there is no such rank."""
        if 0 <= rank < self._world_size:
            return self.nodes[rank * len(self.nodes) // self._world_size]
        why = f"It has {terminal.plural(self._world_size, 'rank')}, numbered from 0."
        raise UserError(f"{self.run.name} has no rank {rank}.", why=why, fix="Give another --rank.")

    def first_rank(self, node: str) -> int:
        """Return the first rank of a node, by its name or its number. Raises UserError where there is no such node."""
        simulated = self.plan.nodes if self.plan is not None else 1
        count = max(len(self.nodes), simulated)
        number = self.nodes.index(node) if node in self.nodes else -1
        if node.isdecimal():
            number = int(node)
        if 0 <= number < count:
            return -(-number * self._world_size // count)
        why = f"It runs on {', '.join(self.nodes)}; a number counts from 0 to {count - 1}."
        raise UserError(f"{self.run.name} has no node {node}.", why=why, fix="Give one of them.")

    def beside(self, nodes: Sequence[str], *words: str, container: Sequence[tuple[str, str]] = ()) -> list[str]:
        """Return the command that does something of `on_node` on some of its nodes."""
        prefix = self._step(nodes, container)
        return [*prefix, sys.executable, *PYTHON_FLAGS, "-m", _PROGRAM, str(self.run.path), *words]

    def _step(self, nodes: Sequence[str], container: Sequence[tuple[str, str]] = ()) -> list[str]:
        cpus = self.plan.cpus_per_task if self.plan is not None else None
        on_terminal = len(nodes) == 1 and sys.stdin.isatty() and sys.stdout.isatty()
        return named(self.job.executor).beside(self.job.job_id, nodes, cpus, container, on_terminal=on_terminal)

    def shell(self, rank: int, command: Sequence[str]) -> list[str]:
        """Return the command that becomes a shell, or ``command``, as a rank has it."""
        node = self.node_of(rank)
        container = self.plan.container if self.plan is not None else None
        if container is None or container.runtime != "pyxis":
            return self.beside([node], "shell", str(rank), *command)
        # srun itself makes pyxis' container, in which there need be nothing of ours.
        cwd = Path.cwd()
        options = containers.srun_options(container, (self.run.path, cwd), cwd)
        inside = [*containers.inside(), f"PYTHONPATH={self.run.code}", *(command or ["sh"])]
        return [*self._step([node], options), *inside]


def place_of(run: RunDir) -> Place:
    """Find the nodes of a run's job.

    Raises:
        UserError: it does not run.
        RefusedError: it is somebody else's, or only its record says that the job is its own.
        SchedulerError: nobody can tell.
    """
    require_own(run, "Ask them; their ranks are theirs to enter.")
    state = job_state(run)
    if state.alive == "unknown":
        fix = "Repeat the command where and when its scheduler answers."
        raise SchedulerError(f"It is unknown whether {run.name} runs.", why=f"{state.reason}.", fix=fix)
    if state.state != "RUNNING" or not state.nodes:
        fix = f"`{terminal.command('resume', run.path)}` starts it again; "
        fix += f"`{terminal.command('submit', 'lab')}` gives you a node of your own."
        if state.alive == "yes":
            fix = f"`{terminal.command('logs', run.path, '-f')}` waits for its start."
        raise UserError(f"{run.name} has no node: it is {state.state}.", why=state.reason or "No rank runs.", fix=fix)
    if not_known_as_its_own([(run, state)]):
        why = "Only the record in the run's folder names it, and whoever wrote that could name any job of yours."
        fix = f"If it is yours: `srun --overlap --jobid={state.job_id} --pty $SHELL`."
        raise RefusedError(f"Job {state.job_id} may not be {run.name}'s.", why=why, fix=fix)
    plan = Plan.read(run.plan) if run.plan.is_file() else None
    return Place(run, state, tuple(expand(state.nodes)), plan)


def _environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment for `on_node`: that of no other job, and this code."""
    code = Path(__file__).parents[2]
    return scrubbed(env) | {"PYTHONPATH": python_path(code, env)}


def become(command: Sequence[str], env: Mapping[str, str]) -> NoReturn:
    """Become a command of `Place`: its terminal, signals and exit code are this command's."""
    sys.stdout.flush()
    try:
        os.execvpe(command[0], list(command), _environment(env))
    except OSError as error:
        why = f"{error.strerror}."
        raise SchedulerError(f"{command[0]} cannot be started here.", why=why, fix="Do it on a login node.") from None


def watch(place: Place, env: Mapping[str, str]) -> int:
    """Show GPUs and processes of all nodes until q or Ctrl-C; without a terminal once. Returns the exit code."""
    command = place.beside(place.nodes, "watch")
    latest: dict[str, dict[str, Any]] = {}
    pipe = subprocess.PIPE
    with subprocess.Popen(command, env=_environment(env), stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe) as looks:

        def hear() -> None:
            for line in looks.stdout or ():
                look = fileio.parse_object(line.decode(errors="replace"))
                if look is not None:
                    latest[str(look.get("host"))] = look

        threading.Thread(target=hear, daemon=True).start()
        try:
            _show(latest, looks, len(place.nodes))
        except KeyboardInterrupt:
            pass
        finally:
            code = looks.poll()
            looks.terminate()
        if code:  # by itself; srun also complains of having been ended
            terminal.warn(terminal.lines(looks.communicate()[1].decode(errors="replace")).rstrip())
    return code or 0


def _show(latest: Mapping[str, Mapping[str, Any]], looks: "subprocess.Popen[bytes]", nodes: int) -> None:
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        while looks.poll() is None and len(latest) < nodes:
            threading.Event().wait(_KEY_SECONDS)
        terminal.say("\n".join(_picture(latest)))
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console()
    with _keys() as pressed, Live(console=console, auto_refresh=False, screen=True) as live:
        while looks.poll() is None and pressed() not in ("q", "Q"):
            live.update(Text(terminal.fitting("\n".join(_picture(latest)), console.height - 1)), refresh=True)


def _picture(latest: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Lines of one table: the GPUs of each node, and below them its processes."""
    header = ("node", "rank", "process", "CPU %", "MB", "name")
    rows = []
    for host, look in sorted(latest.items()):
        for gpu in look["gpus"]:
            memory = f"{gpu.get('memory_used_mb', '?')}/{gpu.get('memory_total_mb', '?')}"
            rows.append((host, "", f"GPU {gpu['index']}", f"{gpu.get('util_percent', '?')}", memory, "(GPU)"))
        for row in look["processes"]:
            rank = "" if row["rank"] is None else str(row["rank"])
            rows.append((host, rank, str(row["pid"]), f"{row['cpu_percent']:.0f}", str(row["memory_mb"]), row["name"]))
    return terminal.table(header, [tuple(map(terminal.one_line, row)) for row in rows])


@contextmanager
def _keys() -> Iterator[Any]:
    """Read single keys of this terminal; yields what waits a moment for one, and returns "" where none came."""
    import termios
    import tty

    before = termios.tcgetattr(0)
    tty.setcbreak(0)

    def pressed() -> str:
        if select.select([0], [], [], _KEY_SECONDS)[0]:
            return os.read(0, 1).decode(errors="replace")
        return ""

    try:
        yield pressed
    finally:
        termios.tcsetattr(0, termios.TCSADRAIN, before)
