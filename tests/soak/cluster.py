"""The cluster that is mistreated: its commands, its nodes, and what runs on them, seen from outside."""

import os
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).parents[2]
DEVCLUSTER = str(PROJECT / "slurm" / "devcluster")
_OF_A_NODE = ("slurmd", "sleep infinity")
"""What runs on a node that has nothing to do, beside its first process."""


@dataclass(frozen=True)
class Process:
    """A process on a node, by its number outside."""

    pid: int
    node: str
    command: str
    env: Mapping[str, str]
    parent: str
    """Name of the one that has started it."""
    name: str

    def is_keeper(self, job: str) -> bool:
        """Whether srun has started it."""
        return self.parent == "slurmstepd" and self._is_of(job) and "SLURM_STEP_ID" in self.env

    def is_rank(self, job: str) -> bool:
        """Whether it trains; not its data loaders."""
        return self.parent == "rank-keeper" and self._is_of(job) and self.name != "rank-council"

    def is_srun(self, job: str) -> bool:
        """Whether it is the batch script's srun."""
        return self._is_of(job) and Path(self.command.partition(" ")[0]).name == "srun"

    def is_script(self, job: str) -> bool:
        """Whether it is the batch script."""
        return self.parent == "slurmstepd" and self._is_of(job) and "SLURM_STEP_ID" not in self.env

    def _is_of(self, job: str) -> bool:
        return self.env.get("SLURM_JOB_ID") == job


@dataclass(frozen=True)
class Cluster:
    """``env``: of a login node; ``up``: the words that have started it; ``home``: where commands are called."""

    home: Path
    env: Mapping[str, str]
    up: Sequence[str]
    nodes: Sequence[str]

    def call(self, *command: str, check: bool = False) -> str:
        """What a command of a user prints."""
        done = subprocess.run(
            command, cwd=self.home, env=self.env, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
        )
        if check and done.returncode:
            raise SystemExit(f"{' '.join(command)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout

    def ask(self, *command: str) -> str:
        """What the scheduler answers; it is asked until it does."""
        for _ in range(60):
            done = subprocess.run(command, cwd=self.home, env=self.env, capture_output=True, text=True, check=False)
            if done.returncode == 0:
                return done.stdout.strip()
            time.sleep(1)
        raise SystemExit(f"{' '.join(command)}: {done.stderr}")

    def devcluster(self, *words: str) -> str:
        """A command to the cluster itself."""
        return self.call(DEVCLUSTER, *words)

    def pid(self, name: str) -> int:
        """Of a daemon or a node's first process, by the name of its pid file; 0 if there is none."""
        try:
            return int(Path(self.env["DEVCLUSTER_DIR"], "run", f"{name}.pid").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            return 0

    def processes(self) -> Iterator[Process]:
        """All that run on the nodes for somebody: neither SLURM's own nor the nodes' first ones."""
        firsts = {self.pid(f"node-{node}"): node for node in self.nodes}
        spaces = {_space(pid): node for pid, node in firsts.items() if pid}
        for entry in os.scandir("/proc"):
            if entry.name.isdecimal() and int(entry.name) not in firsts:
                node = spaces.get(_space(int(entry.name)) or "-")
                found = None if node is None else _process(int(entry.name), node)
                if found is not None and not found.command.startswith(_OF_A_NODE):
                    yield found


def _space(pid: int) -> str:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:
        return ""


def _process(pid: int, node: str) -> Process | None:
    """None for one that has just ended, or is only waited for."""
    try:
        folder = Path("/proc", str(pid))
        command = folder.joinpath("cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        pairs = folder.joinpath("environ").read_bytes().decode(errors="replace").split("\0")
        parent = folder.joinpath("stat").read_text(errors="replace").rpartition(")")[2].split()[1]
        above = Path("/proc", parent, "comm").read_text().strip()
        name = folder.joinpath("comm").read_text().strip()
    except OSError:
        return None
    env = dict(pair.split("=", 1) for pair in pairs if "=" in pair)
    return Process(pid, node, command, env, above, name) if command else None
