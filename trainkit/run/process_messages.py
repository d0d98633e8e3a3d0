"""Files by which processes of a run tell one another something: their names, formats, writers and readers.

A message counts while its file is there; what is to be remembered is an event (`trainkit.run.events`). Each is complete
or absent, and one that cannot be read is passed over, for a stranger may have written it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainkit import fileio


@dataclass(frozen=True)
class Message:
    """One kind of message."""

    name: str
    """``{}`` stands for the number of a rank or a node."""
    content: str
    writer: str
    reader: str
    of_attempt: bool = True
    """It lies in the log folder of an attempt; otherwise in the run's folder."""

    def at(self, folder: Path, number: int | None = None) -> Path:
        """Its file in a run's folder, or in the log folder of an attempt."""
        return folder / self.name.format(number)

    def send(
        self, folder: Path, content: str | Mapping[str, Any], number: int | None = None, *, within: Path | None = None
    ) -> None:
        """Write it: a line of text, or a JSON object. ``within``: the run's folder, where ``folder`` is below it."""
        text = f"{content}\n" if isinstance(content, str) else json.dumps(content)
        fileio.write(self.at(folder, number), text, within or folder)

    def read(self, folder: Path, number: int | None = None) -> str:
        """Its text; empty where there is none that can be read."""
        try:
            return fileio.read_text(self.at(folder, number)).strip()
        except OSError:
            return ""


LEASE = Message(
    "lease.json", "JSON: `token`, `job_id`, `attempt`, `host`, `pid`, `process_started`, `process_space`",
    "the process that writes the run, renewed every 10 s", "every process that would write it", of_attempt=False,
)  # fmt: skip
PROFILE = Message(
    "PROFILE", "nothing: make this file to ask for a profile of the next updates", "a user",
    "rank 0, which removes it afterwards", of_attempt=False,
)  # fmt: skip
CLAIM = Message(
    "node-{}", "nothing: node n takes part in this attempt", "the first process of node n", "every process of node n"
)
NODES = Message(
    "nodes", "the nodes of this attempt, as SLURM writes them", "the batch script", "the next start of the batch script"
)
REQUEUE = Message("requeue", "the id of the job to be queued again", "the batch script's Python", "the batch script")
PREFLIGHT = Message(
    "preflight.json", "lines, one of them the JSON report of a check of the nodes", "rank 0 of the check",
    "the batch script",
)  # fmt: skip
HANG = Message(
    "rank-{}.hang", "JSON: `beats`, `where`, `waits`: where a rank stands that makes no progress", "that rank",
    "the first of the ranks that hang",
)  # fmt: skip
MESSAGES = (LEASE, PROFILE, CLAIM, NODES, REQUEUE, PREFLIGHT, HANG)
