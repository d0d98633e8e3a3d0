"""Evidence of why an attempt ended: the rank that failed first, what it said, and who else speaks of it."""

import contextlib
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

from trainkit.cluster.scheduler import JobState, built_in
from trainkit.common import fileio, terminal
from trainkit.diagnosis.rank_log import (
    LONGEST,
    WORDS,
    RankLog,
    Traceback,
    is_lost_connection,
    places_of,
    plain_line,
    rank_log,
)
from trainkit.run.folder import RunDir
from trainkit.run.history import history_of


@dataclass(frozen=True)
class Failure:
    """The rank that failed first in an attempt. ``traceback`` may be empty: a rank that was killed leaves none."""

    attempt: int
    rank: int
    error: str
    traceback: tuple[str, ...]
    host: str = ""

    def log(self, run: RunDir) -> RankLog:
        return rank_log(run, self.attempt, self.rank)

    @property
    def log_name(self) -> str:
        """The path of that log in the run's folder."""
        return f"logs/{self.attempt}/rank-{self.rank}.err"


def failure_of(run: RunDir, attempt: int) -> Failure | None:
    """The first failure of an attempt; None if there is no sign of one.

    When one rank dies the others lose their connections to it, and may say so first. So tasks ended from outside go
    first, then failures that the ranks or their controller recorded, then tasks in the order in which srun saw them
    exit, then tracebacks by their age; and causes before lost connections.
    """
    if not run.attempts():
        return None
    hard, exited, late = _from_srun(run, attempt)
    found = [*hard]
    for item in history_of(run).failures:
        if item.attempt in (attempt, None) and item.rank is not None:
            words = rank_log(run, attempt, item.rank).words
            found.append(Failure(attempt, item.rank, item.error, words, item.host))
    found += exited
    written: list[tuple[float, Failure]] = []
    for rank in ranks_of(run, attempt):  # of a thousand ranks, one log at a time is in memory
        log = rank_log(run, attempt, rank)
        if log.traceback:
            age = log.path.stat().st_mtime
            written.append((age, Failure(attempt, rank, log.traceback.error, log.traceback.lines)))
    written.sort(key=lambda item: item[0])
    found += [failure for _, failure in written]
    causes = [failure for failure in found if not is_lost_connection(failure.error)]
    # A task that SLURM ended with the step is no cause; but where all others only miss one, it is the one to look at.
    return next(iter(causes or late or found), None)


def _from_srun(run: RunDir, attempt: int) -> tuple[list[Failure], list[Failure], list[Failure]]:
    """Tasks that were ended from outside, those that exited, each with its own words, and those ended with the step."""
    text = batch_text(run, attempt)
    whole = len(until_ended(text))
    hard = list[Failure]()
    exited = list[Failure]()
    late = list[Failure]()
    for match in WORDS["srun"].finditer(text):
        host = match[1]
        rank = int(match[2])
        words = match[3].strip()
        error = f"{words} (on {host})"
        own = rank_log(run, attempt, rank)
        if WORDS["hard"].match(words):
            failure = Failure(attempt, rank, error, (), host)
            if match.start() <= whole:
                hard.append(failure)
            else:
                late.append(failure)
        elif match.start() <= whole:
            if WORDS["crashed"].match(words):
                exited.append(Failure(attempt, rank, error, own.crash, host))
            else:
                exited.append(Failure(attempt, rank, own.error or error, own.words, host))
    return hard, exited, late


def ranks_of(run: RunDir, attempt: int, kind: str = "err") -> list[int]:
    """The ranks of which there is a log of that kind, ``err`` or ``out``."""
    found = list[int]()
    for path in run.attempt_logs(attempt).glob(f"rank-*.{kind}"):
        match = re.fullmatch(r"rank-([0-9]+)", path.stem)
        if match and path.is_file():
            found.append(int(match[1]))
    return sorted(found)


def lagging_ranks(run: RunDir, attempt: int) -> tuple[int, ...]:
    """The ranks for which the others waited until a collective timed out, by what the ranks themselves say.

    Ranks that waited say so; the others were waited for. Where all say so, NCCL's count of enqueued work tells.
    """
    waited = list[int]()
    silent = list[int]()
    enqueued: dict[int, int] = {}
    for rank in ranks_of(run, attempt, "out"):
        text = rank_log(run, attempt, rank).text
        if WORDS["waited"].search(text):
            waited.append(rank)
        else:
            silent.append(rank)
        count = WORDS["enqueued"].search(text)
        if count:
            enqueued[rank] = int(count[1])
    if not waited:
        return ()
    counts = set(enqueued.values())
    if silent or len(counts) < 2:
        return tuple(silent)
    return tuple(rank for rank, count in enqueued.items() if count == min(counts))


# The log of the batch script


def until_ended(batch: str) -> str:
    """The batch script's words before SLURM ended the step: what follows are consequences."""
    return WORDS["step-ended"].split(batch, maxsplit=1)[0]


def batch_text(run: RunDir, attempt: int) -> str:
    """Words of the batch script and srun, or of the local controller, on one attempt: between two headings."""
    text = _batch_log(run)
    _, heading, after = text.partition(f"Attempt {attempt} on ")
    if heading:
        return after.partition(f"\nAttempt {attempt + 1} on ")[0]
    attempts = run.attempts()
    if attempts and attempt != attempts[-1]:
        return ""
    return text


def last_words(run: RunDir) -> list[str]:
    """The end of the batch script's or local controller's log: why no rank started, or who killed them."""
    return _batch_log(run).splitlines()[-20:]


def _batch_log(run: RunDir) -> str:
    """``logs/batch.out``; of a template's job, which sbatch writes beside the folder of the runs, that file."""
    paths = [run.logs / "batch.out"]
    submission = history_of(run).submission
    if submission is not None:
        paths.append(run.path.parent.parent / f"slurm-{submission.job_id}.out")
    for path in paths:
        with contextlib.suppress(OSError):
            return fileio.read_end(path, LONGEST)
    return ""


# Texts in which rows are looked for


@dataclass(frozen=True)
class Quote:
    """A line of evidence, and where it stands: ``logs/0/rank-3.err:12``, ``squeue``."""

    where: str
    text: str


def listed(quotes: Sequence[Quote]) -> str:
    """Lines of evidence, one below the other."""
    width = max((len(quote.where) for quote in quotes), default=0)
    return "\n       ".join(f"{quote.where:{width}}  {terminal.one_line(quote.text, 300)}" for quote in quotes)


@dataclass(frozen=True)
class LogSource:
    """A text, where it stands, and the number of its first line; 0 where lines are not counted."""

    place: Literal["job", "batch", "rank", "end", "frames"]
    where: str
    text: str
    first: int = 0
    of_code: bool = False
    """True for an error that the user's own code raised of itself: what its words mention has not happened."""
    raised: bool = False
    """True for the batch script's words where the rank that failed has raised an exception of its own."""
    aside: bool = False
    """Looked at only where no other says a cause: what led to the last error may have been dealt with."""

    def quote(self, at: int) -> Quote:
        """The line at a position in the text."""
        before = self.text.count("\n", 0, at)
        where = f"{self.where}:{self.first + before}" if self.first else self.where
        return Quote(where, self.text.splitlines()[before].strip())


def sources_of(
    run: RunDir, state: JobState, attempt: int, failure: Failure | None, *, newest: bool, waits: bool
) -> list[LogSource]:
    """All that may show a cause: facts of the machine first, then what ended or holds the job, then the rank.

    Args:
        newest: whether the scheduler's word and the folder as it is now are of this attempt.
        waits: whether the job has yet to run, so that its logs are of an earlier attempt.
    """
    found = []
    if newest:
        found += _of_the_job(run, state, attempt)
    if waits:
        return found
    found += of_the_batch(run, attempt, failure)
    found += _of_logs_elsewhere(run, state, failure)
    if failure is not None:
        found += _of_the_rank(run, failure)
    if newest:
        found += _of_the_code(run, attempt, failure)
        if failure is None or not failure.traceback:
            found += _of_the_folder(run)
    return found


def _of_the_job(run: RunDir, state: JobState, attempt: int) -> list[LogSource]:
    """The job's state, and what the controller of its ranks said once they had saved."""
    life = history_of(run)
    found = []
    for item in life.failures:
        if item.attempt == attempt and item.rank is None and attempt in life.handed_back:
            found.append(LogSource("job", "events.jsonl", item.error))
    found.append(LogSource("job", built_in(state.executor).witness, words_of_state(state)))
    return found


def facts_of(run: RunDir, attempt: int) -> str:
    """The events of an attempt that contradict rows, one in a line: ``event started``."""
    life = history_of(run)
    facts = []
    if life.started.get("attempt") == attempt:
        facts.append("event started")
    if attempt in life.handed_back:
        facts.append("event handed_back")
    if attempt in life.requeued:
        facts.append("event requeued")
    return "\n".join(facts)


def words_of_state(state: JobState) -> str:
    return f"{state.state} {state.reason}".strip()


def _of_the_folder(run: RunDir) -> list[LogSource]:
    """A run whose folder has become read-only cannot say so itself."""
    try:
        disk = os.statvfs(run.path)
        status = os.stat(run.path)
    except OSError as error:
        return [LogSource("job", "the run's folder", f"it cannot be looked at: {error.strerror}", aside=True)]
    is_forbidden = status.st_uid == os.getuid() and not os.access(run.path, os.W_OK)
    if disk.f_flag & os.ST_RDONLY or is_forbidden:
        return [LogSource("job", "the run's folder", "it can only be read", aside=True)]
    return []


def _of_the_code(run: RunDir, attempt: int, failure: Failure | None) -> list[LogSource]:
    """The code of the run was removed as it began: ``code`` leads nowhere, and a module of the kit was not found."""
    if not run.code.is_symlink() or run.code.exists():
        return []
    said = WORDS["code-gone"].search(failure.error if failure else batch_text(run, attempt))
    return [LogSource("job", "code", f"leads nowhere; {said[0]}")] if said else []


def of_the_batch(run: RunDir, attempt: int, failure: Failure | None = None) -> list[LogSource]:
    lines = map(plain_line, batch_text(run, attempt).split("\n"))  # a progress bar is one long line
    text = "\n".join(lines)
    if not text:
        return []
    raised = failure is not None and bool(failure.traceback) and not is_lost_connection(failure.error)
    return [LogSource("batch", "logs/batch.out", text, raised=raised)]


def _of_logs_elsewhere(run: RunDir, state: JobState, failure: Failure | None) -> list[LogSource]:
    """A node that does not see the folder of the logs makes one of its own (SLURM since 23.02), and they stay there."""
    if failure is not None and failure.error.startswith("Exited"):
        logs = run.attempt_logs(failure.attempt)
        if not any(logs.glob(f"rank-{failure.rank}.*")):
            words = f"no log of task {failure.rank} on {failure.host} is here"
            return [LogSource("batch", f"logs/{failure.attempt}", words, aside=True)]
    has_run = built_in(state.executor).batch and state.state == "FAILED" and state.nodes
    # One that is there and empty was written by the node: its script has ended without a word.
    if has_run and not run.attempts() and not last_words(run) and not (run.logs / "batch.out").exists():
        return [LogSource("batch", "logs", "no log of the job is here", aside=True)]
    return []


def _is_of_the_users_code(failure: Failure) -> bool:
    """True if the user's own code raised the error itself, as far as the traceback shows.

    Compiled code leaves no frame: an error that no `raise` or `assert` of the user's made has the words of a library.
    """
    places, own = places_of(failure.traceback)
    if not own or own[-1] != places[-1] or not WORDS["of-code"].match(failure.error):
        return False
    lines = failure.traceback
    last_frame = max(index for index, line in enumerate(lines) if WORDS["frame"].match(line))
    line = "".join(lines[last_frame + 1 : last_frame + 2]).strip()
    if not line or line == failure.error.strip():
        return True  # the line of code is not shown
    return failure.error.startswith("AssertionError") or WORDS["raises"].match(line) is not None


def _of_the_rank(run: RunDir, failure: Failure) -> list[LogSource]:
    """Its last error and how it ended; where it has left no cause, the end of its log."""
    log = failure.log(run)
    traceback = log.traceback if failure.traceback else None
    tail = log.tail
    of_code = _is_of_the_users_code(failure)
    found = [_of_its_end(run, failure, of_code)]
    if traceback is not None:
        found += _of_its_traceback(failure, traceback, tail, of_code)
    elif failure.traceback:
        found.append(LogSource("rank", failure.log_name, "\n".join(failure.traceback), of_code=of_code))
    whole = "\n".join(text for _, text in tail)
    if WORDS["of-the-script"].search(whole):
        is_aside = "No module named" not in failure.error  # else what had to load its environment failed before
        script = _of_tail(failure, tail, WORDS["of-the-script"].search, aside=is_aside)
        found.append(replace(script, place="batch", raised=bool(failure.traceback)))
    elif not failure.traceback and WORDS["of-a-shell"].search(whole):
        found.append(replace(_of_tail(failure, tail, WORDS["of-a-shell"].search, aside=True), place="batch"))
    last = _of_tail(failure, tail, _counts_at_the_end(failure, traceback, tail))
    if last.text.strip():
        found.append(last)
    return found


def _of_its_end(run: RunDir, failure: Failure, of_code: bool) -> LogSource:
    """The error by which the rank is known to have failed."""
    where = ""
    for item in history_of(run).failures:
        if item.attempt == failure.attempt and item.error == failure.error:
            where = "events.jsonl"
    if failure.error.endswith(f"(on {failure.host})") or failure.error.startswith("killed by"):
        return LogSource("end", where, failure.error, of_code=of_code)
    return LogSource("rank", where, failure.error, of_code=of_code)


def _of_its_traceback(
    failure: Failure, traceback: Traceback, tail: list[tuple[int, str]], of_code: bool
) -> list[LogSource]:
    """The message of its last traceback, what that was raised from, its frames, and what tools printed before."""
    first = 0
    for number, text in tail:
        if text and traceback.message.startswith(text):
            first = number
            break
    where = failure.log_name
    is_same = failure.error in traceback.message or traceback.error in failure.error
    is_alone = traceback.first == traceback.error
    found = [
        LogSource("rank", where, traceback.message, first, of_code=of_code, aside=not is_same),
        LogSource("rank", where, traceback.causes, of_code=of_code and is_alone, aside=True),
        LogSource("frames", where, "\n".join(traceback.lines)),
    ]
    if WORDS["points-elsewhere"].search(failure.error):
        found.append(_of_tail(failure, tail, WORDS["of-tools"].search, aside=True))
    if WORDS["of-a-process"].search(failure.error):
        found.append(_of_tail(failure, tail, WORDS["loud"].search, aside=True))
    return found


def _of_tail(
    failure: Failure, tail: list[tuple[int, str]], counts: Callable[[str], object], *, aside: bool = False
) -> LogSource:
    """The lines at the end of the log that count; the others are left empty, so that lines keep their numbers."""
    lines = []
    first = 0
    for number, text in tail:
        first = first or number
        is_kept = counts(text) and not WORDS["dealt-with"].search(text)
        lines.append(text if is_kept else "")
    return LogSource("rank", failure.log_name, "\n".join(lines), first, aside=aside)


def _counts_at_the_end(
    failure: Failure, traceback: Traceback | None, tail: list[tuple[int, str]]
) -> Callable[[str], object]:
    """Tells whether a line at the end of the log may be the rank's last word."""
    is_killed = failure.error.startswith(("Killed", "killed by SIGKILL"))
    if is_killed or (traceback is not None and not is_lost_connection(failure.error)):
        return WORDS["stepd"].match  # it had no last word: only its node's can be of it
    if traceback is not None:
        return bool
    announced = set[str]()
    for (_, before), (_, text) in pairwise(tail):
        if before.rstrip().endswith("error:"):
            announced.add(text)
    return lambda text: text in announced or WORDS["loud"].search(text)


@dataclass(frozen=True)
class Case:
    """An attempt that ended, or a job that waits: whatever a cause is looked for in."""

    run: RunDir
    state: JobState
    attempt: int
    failure: Failure | None
    sources: list[LogSource]

    @property
    def error(self) -> str:
        return self.failure.error if self.failure is not None else ""

    @property
    def traceback(self) -> tuple[str, ...]:
        return self.failure.traceback if self.failure is not None else ()
