"""What speaks of an attempt's end, each text with the place where it stands: the scheduler, the batch log, a rank."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from trainkit.cluster.slurm_jobs import JobState
from trainkit.diagnosis.case import Case, Place
from trainkit.diagnosis.evidence import STEPD, Failure, batch_text, is_lost_connection, last_words
from trainkit.diagnosis.stderr import raised_in_own_code, tail_of, traceback_of
from trainkit.records.history import life_of
from trainkit.records.rundir import RunDir

_LOUD = re.compile(
    r"error|exception|fail|fatal|warn|assert|abort|detected|cannot|could not|unable|not found|denied|exceeded"
    r"|timeout|exhausted|no such|unavailable|invalid|\[[EW][ \d]|Xid|what\(\)|^slurmstepd|^  (why|fix): |oom|\bnan\b",
    re.IGNORECASE,
)
"""Lines that speak of something bad; what a healthy run prints may hold the names of causes as well."""
# Errors that only say that something else has gone wrong.
_POINTS_ELSEWHERE = re.compile(
    r"^KeyboardInterrupt|^SystemExit|CalledProcessError|BackendCompilerFailed|InductorError|returned non-zero exit"
    r"|(unhandled|unknown|internal|invalid) (system |cuda )?(error|usage)|CUDA error|NCCL error"
)
# Errors by which Python, or who wrote the code, tells of the code.
_OF_CODE = re.compile(r"(Key|Name|UnboundLocal|Assertion|Type|Attribute|Index|Value|NotImplemented)Error\b")
# What other programs print into the same log, each by its own form: compilers, the kernel, NCCL, OpenBLAS, UCX.
_OF_TOOLS = re.compile(
    r"\.(c|h|cc|cpp|cu)\w*:\d+:\d+: |NVRM: Xid|NCCL WARN |pthread_create|RLIMIT|UCX +(ERROR|WARN)|cannot find -l"
)


@dataclass(frozen=True)
class Quote:
    """A line of evidence, and where it stands: ``logs/0/rank-3.err:12``, ``squeue``."""

    where: str
    text: str


@dataclass(frozen=True)
class Source:
    """A text, where it stands, and the number of its first line; 0 where lines are not counted."""

    place: Place
    where: str
    text: str
    first: int = 0
    of_code: bool = False
    """Whether it is an error that the user's own code raised of itself: what its words mention has not happened."""
    raised: bool = False
    """Whether the rank that failed has said so by an exception of its own; of the batch script's words."""
    aside: bool = False
    """Looked at only where no other says a cause: what led to the last error may have been dealt with."""

    def match(self, row: Case) -> re.Match[str] | None:
        """Where the text shows the cause of a row."""
        if self.place == "batch" and self.raised and "rank" in row.seen and "job" not in row.seen:
            return None  # a script grumbles of much that ends no rank; the one that ended has said why
        if self.of_code and not row.of_code:
            return None
        places = {"end", "rank"} if self.place == "end" else {self.place}
        return row.find(self.text) if places & row.seen else None

    def quote(self, at: int) -> Quote:
        """The line at a position in the text."""
        before = self.text.count("\n", 0, at)
        where = f"{self.where}:{self.first + before}" if self.first else self.where
        return Quote(where, self.text.splitlines()[before].strip())


def of_the_job(run: RunDir, state: JobState, attempt: int) -> list[Source]:
    """Its state, and what whoever looked after the ranks has said of it; of no rank where they have saved."""
    life = life_of(run)
    said = [
        Source("job", "events.jsonl", item.error)
        for item in life.failures
        if item.attempt == attempt and item.rank is None and attempt in life.handed_back
    ]
    return [*said, Source("job", "squeue, sacct" if state.executor == "slurm" else "status", words_of_state(state))]


def facts_of(run: RunDir, attempt: int) -> str:
    """What the run's events say of an attempt, for the rows that it contradicts: ``event started``, one in a line."""
    life = life_of(run)
    facts = {
        "started": life.started.get("attempt") == attempt,
        "handed_back": attempt in life.handed_back,
        "requeued": attempt in life.requeued,
    }
    return "\n".join(f"event {name}" for name, true in facts.items() if true)


def words_of_state(state: JobState) -> str:
    return f"{state.state} {state.reason}".strip()


def of_the_folder(run: RunDir) -> list[Source]:
    """A run whose folder cannot be written any more cannot say so."""
    try:
        room, status = os.statvfs(run.path), os.stat(run.path)
    except OSError as error:
        return [Source("job", "the run's folder", f"it cannot be looked at: {error.strerror}", aside=True)]
    if room.f_flag & os.ST_RDONLY or (status.st_uid == os.getuid() and not os.access(run.path, os.W_OK)):
        return [Source("job", "the run's folder", "it can only be read", aside=True)]
    return []


_GONE = re.compile(
    r"^(ModuleNotFoundError: No module named '(trainkit|jobs)\b.*|FileNotFoundError: \[Errno 2\] No such file or \w+$)",
    re.MULTILINE,
)


def of_the_code(run: RunDir, attempt: int, failure: Failure | None) -> list[Source]:
    """A run whose code was removed as it began: ``code`` leads nowhere, and what is the kit's own was not found."""
    leads_nowhere = run.code.is_symlink() and not run.code.exists()
    said = _GONE.search(failure.error if failure else batch_text(run, attempt)) if leads_nowhere else None
    return [Source("job", "code", f"leads nowhere; {said[0]}")] if said else []


def of_the_batch(run: RunDir, attempt: int, failure: Failure | None = None) -> list[Source]:
    text = batch_text(run, attempt)
    raised = failure is not None and bool(failure.traceback) and not is_lost_connection(failure.error)
    return [Source("batch", "logs/batch.out", text, raised=raised)] if text else []


def of_logs_elsewhere(run: RunDir, state: JobState, failure: Failure | None) -> list[Source]:
    """A node that does not see the logs' folder makes one of its own (SLURM since 23.02); what is said stays there."""
    if failure is not None and failure.error.startswith("Exited"):
        logs = run.attempt_logs(failure.attempt)
        if not any(logs.glob(f"rank-{failure.rank}.*")):
            words = f"no log of task {failure.rank} on {failure.host} is here"
            return [Source("batch", f"logs/{failure.attempt}", words, aside=True)]
    has_run = state.executor == "slurm" and state.state == "FAILED" and state.nodes
    if has_run and not run.attempts() and not last_words(run):
        return [Source("batch", "logs", "no log of the job is here", aside=True)]
    return []


def of_the_rank(run: RunDir, failure: Failure | None) -> list[Source]:
    """How it ended and its own last error; where it has left none that is a cause, the end of its log."""
    if failure is None:
        return []
    where = f"logs/{failure.attempt}/rank-{failure.rank}.err"
    stderr = run.attempt_logs(failure.attempt) / f"rank-{failure.rank}.err"
    tail = tail_of(stderr)
    ended = failure.error.endswith(f"(on {failure.host})") or failure.error.startswith("killed by")
    told = failure.error in (item.error for item in life_of(run).failures if item.attempt == failure.attempt)
    of_code = bool(_OF_CODE.match(failure.error)) and raised_in_own_code(failure.traceback)
    found = [Source("end" if ended else "rank", "events.jsonl" if told else "", failure.error, of_code=of_code)]
    if failure.error.startswith(("Killed", "killed by SIGKILL")):  # it had no last word: only its node's can be of it
        tail = [(number, text if re.match(STEPD, text) else "") for number, text in tail]
    traceback = traceback_of(stderr) if failure.traceback else None
    if traceback is not None:
        first = next((number for number, text in tail if text and traceback.message.startswith(text)), 0)
        same = failure.error in traceback.message or traceback.error in failure.error
        found.append(Source("rank", where, traceback.message, first, of_code=of_code, aside=not same))
        alone = traceback.first == traceback.error
        found.append(Source("rank", where, traceback.causes, of_code=of_code and alone, aside=True))
    elif failure.traceback:
        found.append(Source("rank", where, "\n".join(failure.traceback), of_code=of_code))
    if traceback is not None and _POINTS_ELSEWHERE.search(failure.error):
        tools = [(number, text if _OF_TOOLS.search(text) else "") for number, text in tail]
        found.append(Source("rank", where, "\n".join(text for _, text in tools), tail[0][0], aside=True))
    if traceback is not None and not is_lost_connection(failure.error):
        tail = [(number, text if re.match(STEPD, text) else "") for number, text in tail]
    elif traceback is None:
        tail = [
            (number, text if _LOUD.search(text) or before.rstrip().endswith("error:") else "")
            for (number, text), (_, before) in zip(tail, [(0, ""), *tail], strict=False)
        ]
    if any(text for _, text in tail):
        found.append(Source("rank", where, "\n".join(text for _, text in tail), tail[0][0]))
    return found
