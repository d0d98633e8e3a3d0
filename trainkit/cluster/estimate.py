"""When a job would start, as ``sbatch --test-only`` guesses: one call for each partition, and nothing is queued."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from trainkit import programs, terminal


@dataclass(frozen=True)
class Start:
    """The scheduler's guess; ``when`` is None, and ``refusal`` says why, where it would not take the job."""

    when: datetime | None = None
    nodes: str = ""
    refusal: str = ""


def earliest_start(script: str, partition: str, env: Mapping[str, str]) -> Start:
    """Ask sbatch when the script would start in a partition. ``env`` has no variables of a job around this process."""
    command = ["sbatch", "--test-only", f"--partition={partition}"]
    try:
        answer = programs.ask(command, text=script, env=env)
    except programs.NoAnswer as error:
        return Start(refusal=error.words)
    return read_start(answer.err + answer.out)


def read_start(text: str) -> Start:
    """From what ``sbatch --test-only`` prints, on stderr, whether it takes the job or not."""
    # 25.05 and 25.11 say "to start at TIME a using"; where there are several clusters, "TIME on cluster NAME a using".
    match = re.search(r"to start at (\S+)(?: on cluster \S+)?(?: a)? using \d+ processors on (?:nodes )?(\S+)", text)
    if match is None:
        lines = [re.sub(r"^(sbatch|allocation failure): (error: )?", "", line) for line in text.splitlines()]
        return Start(refusal=terminal.one_line(lines[-1]) if lines else "sbatch said nothing")
    try:
        return Start(datetime.fromisoformat(match[1]), match[2])
    except ValueError:  # "Unknown"
        return Start(refusal=f"no time known: {match[1]}")
