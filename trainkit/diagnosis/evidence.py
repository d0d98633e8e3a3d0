"""Which rank failed first, and what it said."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainkit.records.events import read_events
from trainkit.records.rundir import RunDir

# srun's own words in the batch script's log: "srun: error: n2: task 3: Exited with exit code 1", "tasks 0-1: Killed".
_SRUN = re.compile(r"srun: error: (\S+): tasks? (\d+)[^:]*: (?!Terminated)(.+)")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch.distributed puts it before every line of a traceback


@dataclass(frozen=True)
class Failure:
    """What is known of a failed attempt. ``traceback`` may be empty: a rank that was killed leaves none."""

    attempt: int
    rank: int
    error: str
    traceback: tuple[str, ...]


def failure_of(run: RunDir, attempt: int | None = None) -> Failure | None:
    """The first failure of an attempt (the newest one if None); None if nothing speaks of one.

    When one rank dies the others soon fail too, for want of it. So the order of time decides.
    """
    attempts = run.attempts()
    if not attempts:
        return None
    attempt = attempts[-1] if attempt is None else attempt
    logs = run.attempt_logs(attempt)
    for event in read_events(run, "failed"):
        if event.get("attempt", attempt) == attempt and isinstance(event.get("rank"), int):
            rank = event["rank"]
            return Failure(attempt, rank, str(event.get("error", "")), _traceback(logs / f"rank-{rank}.err"))
    raised = [(path.stat().st_mtime, path) for path in logs.glob("rank-*.err") if _traceback(path)]
    if raised:
        path = min(raised)[1]
        lines = _traceback(path)
        return Failure(attempt, int(path.stem.removeprefix("rank-")), lines[-1], lines)
    if attempt == attempts[-1] and (run.logs / "batch.out").is_file():
        text = (run.logs / "batch.out").read_text(encoding="utf-8", errors="replace")
        if found := list(_SRUN.finditer(text)):
            host, rank_text, words = found[-1].groups()
            return Failure(attempt, int(rank_text), f"{words.strip()} (on {host})", ())
    return None


def last_words(run: RunDir) -> list[str]:
    """The end of what the batch script or the local controller said: why no rank started, or who killed them."""
    try:
        return (run.logs / "batch.out").read_text(encoding="utf-8", errors="replace").splitlines()[-20:]
    except OSError:
        return []


def _traceback(path: Path) -> tuple[str, ...]:
    """The last traceback in a rank's stderr; empty if there is none."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    lines = [_RANK_PREFIX.sub("", line) for line in lines]
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not starts:
        return ()
    found = []
    for line in lines[starts[-1] :]:
        found.append(line)
        if len(found) > 1 and line and not line[0].isspace():  # the exception's own line ends it
            break
    return tuple(found)
