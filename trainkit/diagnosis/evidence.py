"""Which rank failed first, and what it said."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from trainkit.records import reading
from trainkit.records.history import life_of
from trainkit.records.rundir import RunDir

# srun's own words in the batch script's log: "srun: error: n2: task 3: Exited with exit code 1", "tasks 0-1: Killed".
_SRUN = re.compile(r"srun: error: (\S+): tasks? (\d+)[^:]*: (?!Terminated)(.+)")
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?")  # torch.distributed puts it before every line of a traceback
# What a rank says when another has gone: of gloo, NCCL, TCPStore and the kernel.
_LOST_CONNECTION = re.compile(
    r"connection (closed|reset|refused|was likely closed)|broken pipe|remote process exited|NCCL.*(timeout|aborted)"
    r"|socket (timeout|closed)|failed to (recv|send)|recvValue failed|sendBytes failed|DistNetworkError"
    r"|DistBackendError|went away while rank|timed out waiting \d+ms for (recv|send)",
    re.IGNORECASE,
)


def is_lost_connection(error: str) -> bool:
    """Whether a rank failed for want of another: a consequence, and no cause while there is another."""
    return _LOST_CONNECTION.search(error) is not None


@dataclass(frozen=True)
class Failure:
    """What is known of a failed attempt. ``traceback`` may be empty: a rank that was killed leaves none."""

    attempt: int
    rank: int
    error: str
    traceback: tuple[str, ...]


def failure_of(run: RunDir, attempt: int | None = None) -> Failure | None:
    """The first failure of an attempt (the newest one if None); None if nothing speaks of one.

    When one rank dies the others soon fail too, for want of it, and may say so first. So causes go before lost
    connections, and only among equals the order of time decides.
    """
    attempts = run.attempts()
    if not attempts:
        return None
    attempt = attempts[-1] if attempt is None else attempt
    logs = run.attempt_logs(attempt)
    found: list[Failure] = []
    for item in life_of(run).failures:
        if item.attempt in (attempt, None) and item.rank is not None:
            found.append(Failure(attempt, item.rank, item.error, _traceback(logs / f"rank-{item.rank}.err")))
    found += _from_srun(run, attempt, attempts)
    ranks = {path: path.stem.removeprefix("rank-") for path in logs.glob("rank-*.err") if path.is_file()}
    ranks = {path: name for path, name in ranks.items() if name.isascii() and name.isdecimal()}
    for _, path in sorted((path.stat().st_mtime, path) for path in ranks):
        if lines := _traceback(path):
            found.append(Failure(attempt, int(ranks[path]), lines[-1], lines))
    causes = [failure for failure in found if not is_lost_connection(failure.error)]
    return next(iter(causes or found), None)


def _from_srun(run: RunDir, attempt: int, attempts: list[int]) -> list[Failure]:
    """Tasks that srun saw end badly, killed ones first; its words about one attempt stand between two headings."""
    try:
        text = reading.read_text(run.logs / "batch.out")
    except OSError:
        return []
    _, heading, after = text.partition(f"Attempt {attempt} on ")
    if heading:
        text = after.partition(f"\nAttempt {attempt + 1} on ")[0]
    elif attempt != attempts[-1]:
        return []
    seen = [match.groups() for match in _SRUN.finditer(text)]
    seen.sort(key=lambda groups: "Exited" in groups[2])  # one that exits may have missed one that was killed
    return [Failure(attempt, int(rank), f"{words.strip()} (on {host})", ()) for host, rank, words in seen]


def last_words(run: RunDir) -> list[str]:
    """The end of what the batch script or the local controller said: why no rank started, or who killed them."""
    try:
        return reading.read_text(run.logs / "batch.out").splitlines()[-20:]
    except OSError:
        return []


def last_error(stderr: Path) -> str:
    """What a rank said last: its traceback's own line, or the first of our three lines; empty if neither is there."""
    if lines := _traceback(stderr):
        return lines[-1]
    lines = _lines(stderr)
    whys = [index for index, line in enumerate(lines) if line.startswith("  why: ")]
    return lines[whys[-1] - 1] if whys and whys[-1] > 0 else ""


def _lines(path: Path) -> tuple[str, ...]:
    try:
        text = reading.read_text(path)
    except OSError:
        return ()
    return tuple(_RANK_PREFIX.sub("", line) for line in text.splitlines())


def _traceback(path: Path) -> tuple[str, ...]:
    """The last traceback in a rank's stderr; empty if there is none."""
    lines = _lines(path)
    starts = [index for index, line in enumerate(lines) if line.startswith("Traceback (most recent call last)")]
    if not starts:
        return ()
    found = []
    for line in lines[starts[-1] :]:
        found.append(line)
        if len(found) > 1 and line and not line[0].isspace():  # the exception's own line ends it
            break
    return tuple(found)
