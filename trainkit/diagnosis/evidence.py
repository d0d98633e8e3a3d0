"""Which rank failed first, and what it said."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from trainkit import reading
from trainkit.diagnosis.stderr import crash_of, last_error, tail_of, text_of, traceback_of, words_of
from trainkit.records.history import life_of
from trainkit.records.rundir import RunDir

# srun's own words in the batch script's log: "srun: error: n2: task 3: Exited with exit code 1", "tasks 0-1: Killed".
_SRUN = re.compile(r"^srun: error: (\S+): tasks? (\d+)[^:\n]*: (?!Terminated)(.+)", re.MULTILINE)
STEPD = r"(?:slurmstepd\S*|\[[^]\n]*\]) error: "
"""How slurmstepd's lines begin in a job's output: ``slurmstepd-n1: error:``; in 25.11 it says when, and no name."""
# From here on SLURM ends the ranks that were left, and srun reports that in the same words.
_STEP_ENDED = re.compile(
    rf"^(?:{STEPD}\*\*\* (?:STEP|JOB) .* CANCELLED AT|srun: .*Terminating (?:StepId|job step))", re.M
)
# What ended a task from outside. The others have words of their own in their logs.
_HARD = re.compile(r"Killed|Out Of Memory")
# What compiled code did to a task: a traceback that its log holds is of something that it survived.
_CRASHED = re.compile(r"Segmentation fault|Bus error|Illegal instruction|Floating point exception")
# What a rank says when another has gone: of gloo, NCCL, TCPStore and the kernel.
_LOST_CONNECTION = re.compile(
    r"connection (closed|reset|refused|lost|was likely closed)|ConnectionResetError"
    r"|broken pipe|remote process exited|NCCL.*(timeout|aborted)"
    r"|socket (timeout|closed)|failed to (recv|send)|recvValue failed|sendBytes failed|DistNetworkError"
    r"|DistBackendError|RendezvousClosedError|went away while rank|timed out waiting \d+ms for (recv|send)",
    re.IGNORECASE,
)
# Errors of the same classes that no other rank's end explains.
_OWN_FAULT = re.compile(r"EADDRINUSE|already in use|Duplicate GPU|version mismatch|socket interface", re.IGNORECASE)


def is_lost_connection(error: str) -> bool:
    """Whether a rank failed for want of another: a consequence, and no cause while there is another."""
    return _LOST_CONNECTION.search(error) is not None and _OWN_FAULT.search(error) is None


_LONGEST = 1 << 20
"""Bytes at the end of a batch script's log that are looked at."""


@dataclass(frozen=True)
class Failure:
    """What is known of a failed attempt. ``traceback`` may be empty: a rank that was killed leaves none."""

    attempt: int
    rank: int
    error: str
    traceback: tuple[str, ...]
    host: str = ""


def failure_of(run: RunDir, attempt: int | None = None) -> Failure | None:
    """The first failure of an attempt (the newest one if None); None if nothing speaks of one.

    When one rank dies the others soon fail too, for want of it, and may say so first. So what ended a task from outside
    goes first, then what ranks and whoever looks after them have written down, then tasks in the order in which srun
    saw them exit, then tracebacks by their age; and causes before lost connections.
    """
    attempts = run.attempts()
    if not attempts:
        return None
    attempt = attempts[-1] if attempt is None else attempt
    logs = run.attempt_logs(attempt)
    hard, exited, late = _from_srun(run, attempt)
    said = [
        Failure(attempt, item.rank, item.error, words_of(logs / f"rank-{item.rank}.err"), item.host)
        for item in life_of(run).failures
        if item.attempt in (attempt, None) and item.rank is not None
    ]
    written = []
    ranks = {path: path.stem.removeprefix("rank-") for path in logs.glob("rank-*.err") if path.is_file()}
    ranks = {path: name for path, name in ranks.items() if name.isascii() and name.isdecimal()}
    for _, path in sorted((path.stat().st_mtime, path) for path in ranks):
        if traceback := traceback_of(path):
            written.append(Failure(attempt, int(ranks[path]), traceback.error, traceback.lines))
    found = [*hard, *said, *exited, *written]
    causes = [failure for failure in found if not is_lost_connection(failure.error)]
    # A task that SLURM ended with the step is no cause; but where all others only miss one, it is the one to look at.
    return next(iter(causes or late or found), None)


def _from_srun(run: RunDir, attempt: int) -> tuple[list[Failure], list[Failure], list[Failure]]:
    """Tasks that were ended from outside, those that exited, each with its own words, and those ended with the step."""
    text = batch_text(run, attempt)
    ended = _STEP_ENDED.search(text)
    hard: list[Failure] = []
    exited: list[Failure] = []
    late: list[Failure] = []
    for match in _SRUN.finditer(text):
        host, rank, words = match[1], int(match[2]), match[3].strip()
        own = run.attempt_logs(attempt) / f"rank-{rank}.err"
        error = f"{words} (on {host})"
        if _HARD.match(words):
            with_the_step = ended is not None and match.start() > ended.start()
            (late if with_the_step else hard).append(Failure(attempt, rank, error, (), host))
        elif ended is not None and match.start() > ended.start():
            continue
        elif _CRASHED.match(words):
            exited.append(Failure(attempt, rank, error, crash_of(own), host))
        else:
            exited.append(Failure(attempt, rank, last_error(own) or error, words_of(own), host))
    return hard, exited, late


def until_ended(batch: str) -> str:
    """What a batch script said before SLURM ended the step: what follows are consequences."""
    ended = _STEP_ENDED.search(batch)
    return batch if ended is None else batch[: ended.start()]


def batch_text(run: RunDir, attempt: int) -> str:
    """What the batch script and srun, or the local controller, said of one attempt: it stands between two headings."""
    text = _batch_log(run)
    _, heading, after = text.partition(f"Attempt {attempt} on ")
    if heading:
        return after.partition(f"\nAttempt {attempt + 1} on ")[0]
    return text if attempt in run.attempts()[-1:] or not run.attempts() else ""


def _batch_log(run: RunDir) -> str:
    """``logs/batch.out``; of a template's job, which sbatch writes beside the folder of the runs, that file."""
    submission = life_of(run).submission
    beside = run.path.parent.parent / f"slurm-{submission.job_id}.out" if submission is not None else None
    for path in (batch_log(run), beside):
        if path is not None:
            with contextlib.suppress(OSError):
                return reading.read_end(path, _LONGEST)
    return ""


def batch_log(run: RunDir) -> Path:
    """Where the batch script of a submitted run writes."""
    return run.logs / "batch.out"


def last_words(run: RunDir) -> list[str]:
    """The end of what the batch script or the local controller said: why no rank started, or who killed them."""
    return _batch_log(run).splitlines()[-20:]


def last_lines(run: RunDir, failure: Failure) -> tuple[str, ...]:
    """The end of the stderr of a rank that left no traceback: of one that was killed, what it did last."""
    return tuple(text for _, text in tail_of(run.attempt_logs(failure.attempt) / f"rank-{failure.rank}.err"))


_ENQUEUED = re.compile(r"last enqueued (?:NCCL )?work: (-?\d+)")
_WAITED = re.compile(
    r"collective operation timeout|Timed out waiting \d+ms|wait timeout after|NCCL operations have failed"
)


def lagging_ranks(run: RunDir, attempt: int) -> tuple[int, ...]:
    """After a collective timed out, the ranks that the others waited for, by what the ranks themselves say.

    Ranks that waited say so; who does not was waited for. Where all say so, NCCL's count of enqueued work tells.
    """
    waited, enqueued = set(), {}
    ranks = sorted(
        int(name) for path in run.attempt_logs(attempt).glob("rank-*.out") if (name := path.stem[5:]).isdecimal()
    )
    for rank in ranks:
        text = text_of(run.attempt_logs(attempt) / f"rank-{rank}.err")
        if _WAITED.search(text):
            waited.add(rank)
        if counts := _ENQUEUED.findall(text):
            enqueued[rank] = int(counts[0])
    if not waited:
        return ()
    silent = tuple(rank for rank in ranks if rank not in waited)
    if silent or len(set(enqueued.values())) < 2:
        return silent
    return tuple(rank for rank, count in enqueued.items() if count == min(enqueued.values()))
