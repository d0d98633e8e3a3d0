"""What a run has left that tells why an attempt ended, or what a running one does.

Of an attempt that ended: which rank failed first, what it said, and who else speaks of it. Of a running one: its own
records, without a question to the scheduler.

Ranks write what they like to stderr, for hours: progress bars, colours, bytes that are no text. Only the end is read.
"""

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import yaml

from trainkit import fileio, terminal
from trainkit.ranks.signals import STARTING_SECONDS
from trainkit.run.events import RunHistory, history_of, read_events
from trainkit.run.folder import RunDir
from trainkit.run.metrics import progress_of
from trainkit.schedulers.base import JobState, built_in

_LONGEST = 1 << 20
"""Bytes at the end of a log that are read. No more than that follows a traceback."""
_CHAIN = 1 << 16
"""Bytes before a traceback in which those may stand that led to it."""
_LONG = 4000
"""Characters of a line, at its end."""
_TAIL = 40
"""Lines at the end that may say why a rank was ended."""
_CAUSE = "The above exception was the direct cause of the following exception:"
_HANDLED = "During handling of the above exception, another exception occurred:"
QUIET_SECONDS = 60.0
"""A shorter silence of the records is not reported."""
SILENT_SECONDS = 180.0
"""A node samples its hardware every few seconds; clocks differ, and shared folders show new lines late."""
IDLE_PERCENT, IDLE_SAMPLES = 5.0, 6
"""Of a GPU that does nothing: less use than that, in as many samples one after the other."""

_TOLD: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("words.yaml").read_text("utf-8"))
WORDS = {name: re.compile(one if isinstance(one, str) else "|".join(one)) for name, one in _TOLD["patterns"].items()}
"""The patterns of ``words.yaml``, which says what each is for."""
CACHES: list[tuple[str, str, str]] = [tuple(row) for row in _TOLD["caches"]]


@dataclass(frozen=True)
class Traceback:
    """A traceback, and those before it that led to it."""

    lines: tuple[str, ...]
    """All of them, from the first one's heading to the last one's error."""
    error: str
    """The exception's own line, with what it says below it if the line itself says nothing."""
    message: str
    """The exception's own lines: some say their reason below."""
    first: str
    """The error before all others of the chain; ``error`` itself where there is only one."""
    causes: str
    """The text from the first error on that this one was raised ``from``; what was only being handled is none."""


class RankLog:
    """The end of what a rank wrote to its stderr; empty if it cannot be read."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, ""
        with contextlib.suppress(OSError):
            self.text = fileio.read_end(path, _LONGEST)

    @cached_property
    def traceback(self) -> Traceback | None:
        """The last complete traceback, with its chain."""
        text, until = self.text, len(self.text)
        while (last := text.rfind("Traceback (most recent call last)", 0, until)) >= 0:
            begin = text.rfind("\n", 0, max(last - _CHAIN, 0)) + 1
            lines = [_plain(line) for line in text[begin : last + _CHAIN].split("\n")]
            at = text.count("\n", begin, last)
            if "| Traceback" in lines[at] or "Exception Group Traceback" in lines[at]:  # its errors may have none
                lines = [WORDS["group"].sub("", line) for line in lines]
            if WORDS["traceback"].match(lines[at]):
                return _read(lines, at)  # None where it was cut off: an older one is not what ended the rank
            until = last  # it is a word in another line
        return None

    @property
    def three_lines(self) -> tuple[str, ...]:
        """Those of our own last error."""
        at = self.text.rfind("\n  why: ")
        begin = self.text.rfind("\n", 0, at) + 1
        return tuple(_plain(line) for line in self.text[begin:].split("\n", 3)[:3]) if at >= 0 else ()

    @property
    def crash(self) -> tuple[str, ...]:
        """What faulthandler or C++ said of a crash in compiled code, the reason first."""
        lines = [_plain(line) for line in self.text.rsplit("\n", 200)[-200:]]
        for index, line in enumerate(lines):
            if match := WORDS["crash"].match(line):
                return (match[1].strip(), *lines[index:])[:60]
        return ()

    @property
    def words(self) -> tuple[str, ...]:
        """The last traceback, the three lines of our last error, or those of a crash."""
        return self.traceback.lines if self.traceback is not None else self.three_lines or self.crash

    @property
    def error(self) -> str:
        """What it said last: its exception's own line, the first of our three lines, or how it crashed."""
        return self.traceback.error if self.traceback is not None else (*self.words, "")[0]

    @property
    def tail(self) -> list[tuple[int, str]]:
        """The last lines with their numbers from 1; 0 where a log is too long to count."""
        if not self.text.strip():
            return []
        last = self.text.rstrip().rsplit("\n", _TAIL)[-_TAIL:]
        first = self.text.rstrip().count("\n") - len(last) + 2 if os.path.getsize(self.path) <= _LONGEST else 0
        return [(first + index if first else 0, _plain(line)) for index, line in enumerate(last)]


def _plain(line: str) -> str:
    """A line as a terminal shows it, without a rank's prefix."""
    line = line.rstrip("\r").rpartition("\r")[2][-_LONG:].replace("\0", "")  # torch's workers end a message so
    if not (line.isascii() and line.isprintable()):
        line = terminal.lines(line)
    return WORDS["glued"].sub("", WORDS["rank-prefix"].sub("", line))


def _read(lines: list[str], at: int) -> Traceback | None:
    """The traceback whose heading is line ``at``."""
    end = _end_of(lines, at)
    if end is None:
        return None
    starts = [at]
    while (before := _before(lines, starts[0])) is not None:
        starts.insert(0, before)
    error, message = _said(lines, end)
    causing = at
    for before, after in zip(reversed(starts[:-1]), reversed(starts[1:]), strict=True):
        if any(line.strip() == _HANDLED for line in lines[max(after - 3, 0) : after]):
            break
        causing = before
    first_end = _end_of(lines, starts[0])
    first = _said(lines, first_end)[0] if first_end is not None else error
    return Traceback((*lines[starts[0] : end], error), error, message, first, "\n".join([*lines[causing:end], error]))


def _end_of(lines: list[str], at: int) -> int | None:
    """The line that names the exception: the first that is not set in."""
    for index in range(at + 1, len(lines)):
        if lines[index] and not lines[index][0].isspace():
            return index if index < len(lines) - 1 or ":" in lines[index] else None
    return None


def _before(lines: list[str], at: int) -> int | None:
    """The heading of the traceback that led to this one."""
    index = at - 1
    while index >= 0 and not lines[index].strip():
        index -= 1
    if index < 0:
        return None
    if not lines[at].startswith("Original") and lines[index].strip() not in (_CAUSE, _HANDLED):
        return None  # torch's DataLoader quotes a worker's traceback in its own error
    return next((above for above in range(index - 1, -1, -1) if WORDS["traceback"].match(lines[above])), None)


def _said(lines: list[str], end: int) -> tuple[str, str]:
    """The exception's own line, and all that it says."""
    below = lines[end + 1 : end + 20]
    own = [lines[end]]
    for line in below:
        if (not line.strip() and own[-1].strip()[-1:] != ":") or WORDS["others"].match(line):
            break
        own.append(line)
    rest = next((line.strip() for line in below if line.strip()), "")
    error = lines[end].rstrip()
    if error.endswith(":") and rest:
        error = f"{error} {rest}"
    return error, "\n".join(own if error == own[0].rstrip() else [error, *own])


def places_of(lines: Sequence[str]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """File and line of each frame of a traceback, outermost first; and those of them in code of the user's own."""
    places = [(match["file"], match["line"]) for text in lines if (match := WORDS["frame"].match(text))]
    if any("most recent call first" in text for text in lines):  # as faulthandler has it
        places.reverse()
    return places, [place for place in places if not WORDS["not-mendable"].search(place[0])]


def is_lost_connection(error: str) -> bool:
    """Whether a rank failed because another went away: a consequence, not a cause."""
    return WORDS["lost-connection"].search(error) is not None and WORDS["own-fault"].search(error) is None


def rank_log(run: RunDir, attempt: int, rank: int) -> RankLog:
    return RankLog(run.attempt_logs(attempt) / f"rank-{rank}.err")


def ranks_of(run: RunDir, attempt: int, kind: str = "err") -> list[int]:
    """The ranks of which there is a log of that kind, ``err`` or ``out``."""
    logs = [path.stem for path in run.attempt_logs(attempt).glob(f"rank-*.{kind}") if path.is_file()]
    return sorted(int(match[1]) for name in logs if (match := re.fullmatch("rank-([0-9]+)", name)))


@dataclass(frozen=True)
class Failure:
    """The rank that failed first in an attempt. ``traceback`` may be empty: a rank that was killed leaves none."""

    attempt: int
    rank: int
    error: str
    traceback: tuple[str, ...]
    host: str = ""

    def log(self, run: RunDir) -> RankLog:
        """What the rank wrote."""
        return rank_log(run, self.attempt, self.rank)


def failure_of(run: RunDir, attempt: int) -> Failure | None:
    """The first failure of an attempt; None if there is no sign of one.

    When one rank dies the others lose their connections to it, and may say so first. So tasks ended from outside go
    first, then failures that the ranks or their controller recorded, then tasks in the order in which srun saw them
    exit, then tracebacks by their age; and causes before lost connections.
    """
    if not run.attempts():
        return None
    hard, exited, late = _from_srun(run, attempt)
    said = [
        Failure(attempt, item.rank, item.error, rank_log(run, attempt, item.rank).words, item.host)
        for item in history_of(run).failures
        if item.attempt in (attempt, None) and item.rank is not None
    ]
    written: list[tuple[float, Failure]] = []
    for rank in ranks_of(run, attempt):  # of a thousand ranks, one log at a time is in memory
        log = rank_log(run, attempt, rank)
        if log.traceback:
            age = log.path.stat().st_mtime
            written.append((age, Failure(attempt, rank, log.traceback.error, log.traceback.lines)))
    found = [*hard, *said, *exited, *(failure for _, failure in sorted(written, key=lambda item: item[0]))]
    causes = [failure for failure in found if not is_lost_connection(failure.error)]
    # A task that SLURM ended with the step is no cause; but where all others only miss one, it is the one to look at.
    return next(iter(causes or late or found), None)


def _from_srun(run: RunDir, attempt: int) -> tuple[list[Failure], list[Failure], list[Failure]]:
    """Tasks that were ended from outside, those that exited, each with its own words, and those ended with the step."""
    text = batch_text(run, attempt)
    whole = len(until_ended(text))
    found: tuple[list[Failure], list[Failure], list[Failure]] = ([], [], [])
    for match in WORDS["srun"].finditer(text):
        host, rank, words = match[1], int(match[2]), match[3].strip()
        error, with_the_step = f"{words} (on {host})", match.start() > whole
        if WORDS["hard"].match(words):
            found[2 if with_the_step else 0].append(Failure(attempt, rank, error, (), host))
        elif not with_the_step:
            own, crashed = rank_log(run, attempt, rank), WORDS["crashed"].match(words)
            said = (error, own.crash) if crashed else (own.error or error, own.words)
            found[1].append(Failure(attempt, rank, *said, host))
    return found


def until_ended(batch: str) -> str:
    """What a batch script said before SLURM ended the step: what follows are consequences."""
    return WORDS["step-ended"].split(batch, maxsplit=1)[0]


def batch_text(run: RunDir, attempt: int) -> str:
    """What the batch script and srun, or the local controller, said of one attempt: it stands between two headings."""
    text = _batch_log(run)
    _, heading, after = text.partition(f"Attempt {attempt} on ")
    if heading:
        return after.partition(f"\nAttempt {attempt + 1} on ")[0]
    return text if attempt in run.attempts()[-1:] or not run.attempts() else ""


def _batch_log(run: RunDir) -> str:
    """``logs/batch.out``; of a template's job, which sbatch writes beside the folder of the runs, that file."""
    submission = history_of(run).submission
    beside = run.path.parent.parent / f"slurm-{submission.job_id}.out" if submission is not None else None
    for path in (run.logs / "batch.out", beside):
        if path is not None:
            with contextlib.suppress(OSError):
                return fileio.read_end(path, _LONGEST)
    return ""


def last_words(run: RunDir) -> list[str]:
    """The end of what the batch script or the local controller said: why no rank started, or who killed them."""
    return _batch_log(run).splitlines()[-20:]


def lagging_ranks(run: RunDir, attempt: int) -> tuple[int, ...]:
    """The ranks for which the others waited until a collective timed out, by what the ranks themselves say.

    Ranks that waited say so; the others were waited for. Where all say so, NCCL's count of enqueued work tells.
    """
    ranks = ranks_of(run, attempt, "out")
    waited, enqueued = set[int](), dict[int, int]()
    for rank in ranks:
        text = rank_log(run, attempt, rank).text
        if WORDS["waited"].search(text):
            waited.add(rank)
        if match := WORDS["enqueued"].search(text):
            enqueued[rank] = int(match[1])
    if not waited:
        return ()
    silent = tuple(rank for rank in ranks if rank not in waited)
    if silent or len(set(enqueued.values())) < 2:
        return silent
    return tuple(rank for rank, count in enqueued.items() if count == min(enqueued.values()))


@dataclass(frozen=True)
class Quote:
    """A line of evidence, and where it stands: ``logs/0/rank-3.err:12``, ``squeue``."""

    where: str
    text: str


@dataclass(frozen=True)
class Source:
    """A text, where it stands, and the number of its first line; 0 where lines are not counted."""

    place: Literal["job", "batch", "rank", "end"]
    where: str
    text: str
    first: int = 0
    of_code: bool = False
    """Whether it is an error that the user's own code raised of itself: what its words mention has not happened."""
    raised: bool = False
    """Whether the rank that failed has said so by an exception of its own; of the batch script's words."""
    aside: bool = False
    """Looked at only where no other says a cause: what led to the last error may have been dealt with."""

    def quote(self, at: int) -> Quote:
        """The line at a position in the text."""
        before = self.text.count("\n", 0, at)
        where = f"{self.where}:{self.first + before}" if self.first else self.where
        return Quote(where, self.text.splitlines()[before].strip())


def sources_of(
    run: RunDir, state: JobState, attempt: int, failure: Failure | None, *, newest: bool, waits: bool
) -> list[Source]:
    """All that may show a cause: facts of the machine first, then what ended or holds the job, then the rank.

    Args:
        newest: whether the scheduler's word and the folder as it is now are of this attempt.
        waits: whether the job has yet to run, so that its logs are of an earlier attempt.
    """
    found = _of_the_job(run, state, attempt) if newest else []
    if waits:
        return found
    found += of_the_batch(run, attempt, failure) + _of_logs_elsewhere(run, state, failure) + _of_the_rank(run, failure)
    if newest:
        found += _of_the_code(run, attempt, failure)
        found += _of_the_folder(run) if failure is None or not failure.traceback else []
    return found


def _of_the_job(run: RunDir, state: JobState, attempt: int) -> list[Source]:
    """The job's state, and what the controller of its ranks said once they had saved."""
    life = history_of(run)
    said = [
        Source("job", "events.jsonl", item.error)
        for item in life.failures
        if item.attempt == attempt and item.rank is None and attempt in life.handed_back
    ]
    return [*said, Source("job", built_in(state.executor).witness, words_of_state(state))]


def facts_of(run: RunDir, attempt: int) -> str:
    """The events of an attempt that contradict rows, one in a line: ``event started``."""
    life = history_of(run)
    facts = {
        "started": life.started.get("attempt") == attempt,
        "handed_back": attempt in life.handed_back,
        "requeued": attempt in life.requeued,
    }
    return "\n".join(f"event {name}" for name, true in facts.items() if true)


def words_of_state(state: JobState) -> str:
    return f"{state.state} {state.reason}".strip()


def _of_the_folder(run: RunDir) -> list[Source]:
    """A run whose folder has become read-only cannot say so itself."""
    try:
        room, status = os.statvfs(run.path), os.stat(run.path)
    except OSError as error:
        return [Source("job", "the run's folder", f"it cannot be looked at: {error.strerror}", aside=True)]
    if room.f_flag & os.ST_RDONLY or (status.st_uid == os.getuid() and not os.access(run.path, os.W_OK)):
        return [Source("job", "the run's folder", "it can only be read", aside=True)]
    return []


def _of_the_code(run: RunDir, attempt: int, failure: Failure | None) -> list[Source]:
    """The code of the run was removed as it began: ``code`` leads nowhere, and a module of the kit was not found."""
    leads_nowhere = run.code.is_symlink() and not run.code.exists()
    said = WORDS["code-gone"].search(failure.error if failure else batch_text(run, attempt)) if leads_nowhere else None
    return [Source("job", "code", f"leads nowhere; {said[0]}")] if said else []


def of_the_batch(run: RunDir, attempt: int, failure: Failure | None = None) -> list[Source]:
    text = batch_text(run, attempt)
    raised = failure is not None and bool(failure.traceback) and not is_lost_connection(failure.error)
    return [Source("batch", "logs/batch.out", text, raised=raised)] if text else []


def _of_logs_elsewhere(run: RunDir, state: JobState, failure: Failure | None) -> list[Source]:
    """A node that does not see the folder of the logs makes one of its own (SLURM since 23.02), and they stay there."""
    if failure is not None and failure.error.startswith("Exited"):
        logs = run.attempt_logs(failure.attempt)
        if not any(logs.glob(f"rank-{failure.rank}.*")):
            words = f"no log of task {failure.rank} on {failure.host} is here"
            return [Source("batch", f"logs/{failure.attempt}", words, aside=True)]
    has_run = built_in(state.executor).batch and state.state == "FAILED" and state.nodes
    if has_run and not run.attempts() and not last_words(run):
        return [Source("batch", "logs", "no log of the job is here", aside=True)]
    return []


def _of_the_rank(run: RunDir, failure: Failure | None) -> list[Source]:
    """How the rank ended and its last error; where it has left no cause, the end of its log."""
    if failure is None:
        return []
    log, where = failure.log(run), f"logs/{failure.attempt}/rank-{failure.rank}.err"
    tail, traceback = log.tail, log.traceback if failure.traceback else None
    ended = failure.error.endswith(f"(on {failure.host})") or failure.error.startswith("killed by")
    told = failure.error in (item.error for item in history_of(run).failures if item.attempt == failure.attempt)
    places, own = places_of(failure.traceback)
    of_code = bool(own) and own[-1] == places[-1] and bool(WORDS["of-code"].match(failure.error))
    found = [Source("end" if ended else "rank", "events.jsonl" if told else "", failure.error, of_code=of_code)]

    def of_tail(is_told: Callable[[str], object], *, aside: bool = False) -> Source:
        """The lines at the end of the log that count; the others are left empty, so that lines keep their numbers."""
        return Source(
            "rank", where, "\n".join(text if is_told(text) else "" for _, text in tail), tail[0][0], aside=aside
        )

    if traceback is not None:
        first = next((number for number, text in tail if text and traceback.message.startswith(text)), 0)
        same = failure.error in traceback.message or traceback.error in failure.error
        found.append(Source("rank", where, traceback.message, first, of_code=of_code, aside=not same))
        alone = traceback.first == traceback.error
        found.append(Source("rank", where, traceback.causes, of_code=of_code and alone, aside=True))
        if WORDS["points-elsewhere"].search(failure.error):
            found.append(of_tail(WORDS["of-tools"].search, aside=True))
    elif failure.traceback:
        found.append(Source("rank", where, "\n".join(failure.traceback), of_code=of_code))
    killed = failure.error.startswith(("Killed", "killed by SIGKILL"))
    if tail and (killed or (traceback is not None and not is_lost_connection(failure.error))):
        found.append(of_tail(WORDS["stepd"].match))  # it had no last word: only its node's can be of it
    elif tail and traceback is not None:
        found.append(of_tail(bool))
    elif tail:
        after = {text for (_, before), (_, text) in pairwise(tail) if before.rstrip().endswith("error:")}
        found.append(of_tail(lambda text: text in after or WORDS["loud"].search(text)))
    return found if found[-1].text.strip() else found[:-1]


@dataclass(frozen=True)
class Course:
    """What a running job does, in a sentence, and what looks wrong."""

    does: str
    smells: tuple[Quote, ...]
    command: str
    """Shows more of it."""

    def __str__(self) -> str:
        if not self.smells:
            return self.does
        width = max(len(quote.where) for quote in self.smells)
        shown = "\n       ".join(f"{quote.where:{width}}  {quote.text}" for quote in self.smells)
        return f"{self.does}\n  why: {shown}\n  fix: See what its ranks do: `{self.command}`"


def course_of(run: RunDir, now: float | None = None, *, ends: str = "") -> Course:
    """What the newest attempt does at a time in seconds since 1970 (now if None).

    Args:
        ends: a sentence on when it will have ended.
    """
    now = time.time() if now is None else now
    life, attempts = history_of(run), run.attempts()
    attempt, since = life.started.get("attempt", 0), life.started.get("time")
    command = terminal.command("logs", run.path, "--rank", "all")
    if not fileio.is_time(since) or attempt != (attempts or [0])[-1]:
        return Course("Its ranks start, and have not met yet.", (), command)
    standing = progress_of(run, pace_since=float(since))
    last = standing.last.get("time", 0.0)
    if last < since:
        does = f"Attempt {attempt} began {terminal.age(now - since)} ago; no step of it is recorded yet."
        quiet = f"no step in the {terminal.age(now - since)} since the attempt began"
        is_quiet = now - since > STARTING_SECONDS
    else:
        total, pace, pause = life.started.get("total_steps"), standing.seconds_per_step, standing.longest_pause
        of = f" of {total}" if fileio.is_whole(total) else ""
        epoch = f" (epoch {standing.last['epoch']:.1f})" if "epoch" in standing.last else ""
        does = f"It trains: step {'?' if standing.step is None else standing.step}{of}{epoch}, attempt {attempt}"
        does += f", {pace:.3g} s a step" if pace is not None else ""
        does += f", the last record {terminal.age(now - last)} ago."
        before = "" if pause is None else f"; of late {pause:.3g} s passed between two records at most"
        quiet = f"nothing for {terminal.age(now - last)}{before}"
        is_quiet = now - last > (STARTING_SECONDS if pause is None else max(5 * pause, QUIET_SECONDS))
    smells = [Quote("metrics.jsonl", quiet)] * is_quiet
    return Course(
        f"{does} {ends}".strip(), (*smells, *_hardware(run, life, since, now), *_stragglers(run, attempt)), command
    )


def _stragglers(run: RunDir, attempt: int) -> Iterator[Quote]:
    """Ranks for which all others wait, as the ranks of this attempt have recorded."""
    events = [event for event in read_events(run, "straggler") if event.get("attempt", 0) == attempt]
    for rank, event in {event.get("rank"): event for event in events if fileio.is_number(event.get("times"))}.items():
        where = f"rank {rank} on {event.get('host', '?')}"
        yield Quote("events.jsonl", f"{where} needs {event['times']:.1f} times as long as the others, who wait for it")


def _hardware(run: RunDir, life: RunHistory, since: float, now: float) -> Iterator[Quote]:
    """Nodes that have stopped to sample their hardware, and idle GPUs of the others."""
    for host in life.started.get("hosts") or ():
        file = run.hardware(terminal.one_line(host).replace("/", "_"))
        records = fileio.last_records(file)
        samples = [item for item in records if fileio.is_time(item.get("time")) and item["time"] >= since]
        if not samples:
            continue  # it is not sampled, or has just begun
        age = now - samples[-1]["time"]
        if age > SILENT_SECONDS:
            yield Quote(file.name, f"nothing from {host} for {terminal.age(age)}: the node or its file system hangs")
            continue
        seen: dict[int, list[Any]] = {}
        for gpu in (gpu for sample in samples[-IDLE_SAMPLES:] for gpu in sample.get("gpus") or ()):
            if isinstance(gpu, dict) and fileio.is_whole(gpu.get("index")):
                seen.setdefault(gpu["index"], []).append(gpu.get("util_percent", 100.0))
        idle = [
            str(index)
            for index, used in sorted(seen.items())
            if len(used) == IDLE_SAMPLES and all(fileio.is_number(item) and item < IDLE_PERCENT for item in used)
        ]
        if idle:
            seconds = samples[-1]["time"] - samples[-IDLE_SAMPLES]["time"]
            which = f"GPU{'s' * (len(idle) > 1)} {', '.join(idle)} of {host}"
            yield Quote(file.name, f"{which} idle for {terminal.age(seconds)}: the ranks wait, for data or for others")
