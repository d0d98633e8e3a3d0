"""The plan of a run: what is asked of a scheduler, and where each value comes from."""

from __future__ import annotations

import dataclasses
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainkit.cluster.containers import Container
from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError
from trainkit.config.source import Source

CONTINUE = "TRAINKIT_CONTINUE"
"""Environment variable of the templates: the run folder that a job goes on with, instead of making its own."""


@dataclass(frozen=True)
class Decision:
    """A decided value, where it came from, and why."""

    name: str
    value: Any
    source: Source
    reason: str = ""


Row = tuple[str, str, str, str]
"""Setting, value, source, reason."""


@dataclass(frozen=True)
class Side:
    """Share of this machine for one of ``count`` runs that train side by side: its CPUs, and that GPU."""

    index: int = 0
    count: int = 1
    gpu: int = 0


@dataclass(frozen=True)
class Plan:
    """A launch in numbers: ``decisions`` explains the numbers, ``directives`` are sbatch's options in their order."""

    name: str
    executor: str
    """Name of a scheduler, or debug: in the calling process."""
    nodes: int
    ntasks_per_node: int
    gpus_per_node: int
    cpus_per_task: int | None
    time_limit_seconds: int
    lead_seconds: int
    """Seconds before the time limit at which the ranks are told to save."""
    hang_seconds: int
    """Seconds without progress after which ranks hang, and are ended."""
    requeue: bool | Literal["chain"]
    decisions: tuple[Decision, ...]
    directives: tuple[Decision, ...]
    srun: tuple[tuple[str, str], ...] = ()
    setup: tuple[str, ...] = ()
    preflight: bool = False
    """The job checks its nodes before its ranks start."""
    modules: tuple[str, ...] = ()
    spare_nodes: int = 0
    """Nodes that the job has beyond those of its ranks."""
    environment: str | None = None
    container: Container | None = None
    side: Side = Side()

    @property
    def world_size(self) -> int:
        return self.nodes * self.ntasks_per_node

    def to_json(self) -> str:
        """Text of plan.json."""
        plain = dataclasses.asdict(self) | {"world_size": self.world_size}
        for key in ("decisions", "directives"):
            plain[key] = [item | {"source": str(Source(**item["source"]))} for item in plain[key]]
        return json.dumps(plain, indent=2) + "\n"

    @classmethod
    def read(cls, file: Path) -> Plan:
        """Read a run folder's plan.json. Raises UserError where it cannot be read, or is another text."""
        from pydantic import TypeAdapter  # the script of a job, which reads no plan, does without

        try:
            plain = fileio.parse(fileio.read_text(file))
            for item in [*plain["decisions"], *plain["directives"]]:
                item["source"] = Source.parse(item["source"])
            plan = TypeAdapter(cls).validate_python(plain)
            plan._check()
            return plan
        except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            why = f"{terminal.one_line(error)}."
        fix = f"Submit the run again: {terminal.command('submit', file.parent)}"
        raise UserError(f"{file} is not a launch plan, or is damaged.", why=why, fix=fix)

    def _check(self) -> None:
        """Raise ValueError for values that no plan has."""
        if not re.fullmatch(r"\w+|[\w.]+:\w+", self.executor):
            raise ValueError("executor is not the name of a scheduler")
        least = dict.fromkeys(("nodes", "ntasks_per_node", "time_limit_seconds", "lead_seconds", "hang_seconds"), 1)
        least |= {"gpus_per_node": 0, "spare_nodes": 0}
        if self.cpus_per_task is not None:
            least["cpus_per_task"] = 1
        for name, number in least.items():
            if getattr(self, name) < number:
                raise ValueError(f"{name} is below {number}")
        if min(self.side.index, self.side.gpu) < 0 or self.side.count < 1:
            raise ValueError("side is no share of a machine")


PART = "array-"
LIMIT_MINUTES = 3
"""Time limit of a check of the nodes."""


def whole(folder: Path) -> Path:
    """Return the sweep of a further array's folder; any other folder itself."""
    if is_part(folder):
        return folder.parents[1]
    return folder


def is_part(folder: Path) -> bool:
    """Return True for the folder of a further array."""
    return folder.name.startswith(PART) and folder.parent.name == ".submitit"
