"""``python -m jobs.logs RUN``: what the ranks of a run print, across requeues; of a failed run first why it failed."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jobs import cli, output
from trainkit.cluster.job_states import job_state
from trainkit.cluster.scheduler import JobState
from trainkit.common import fileio, terminal
from trainkit.common.errors import UserError
from trainkit.common.jsonl import is_whole
from trainkit.launch.follow import LOOK_SECONDS, RunWatch, full_name
from trainkit.run.find import find_run
from trainkit.run.folder import RunDir

if TYPE_CHECKING:
    from trainkit.monitor.log_tail import LogTail, RecordTail


def parser() -> cli.Parser:
    parser = cli.Parser("logs", "Print the log of a rank; of a failed run, first the traceback of the failed rank.")
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's name or folder")
    add("-f", "--follow", action="store_true", help="follow the log until the job ends, across requeues")
    add("--rank", metavar="N", help="ranks to show (default: 0): 0,4-7, or all; each line names its rank")
    add("--grep", metavar="PATTERN", help="only lines that match this regular expression")
    add("--err", action="store_true", help="show stderr instead of stdout")
    return parser.taking("--attempt", "--json", "--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parsed(argv, env)
    from trainkit.diagnosis.evidence import last_words, ranks_of
    from trainkit.monitor.log_tail import logs_of

    run = find_run(args.run, env)
    attempts = run.attempts()
    cli.require_attempt(run, args.attempt)
    asked = _ranks(args.rank)
    pattern = _pattern(args.grep)
    ending = "err" if args.err else "out"

    def wanted(attempt: int) -> list[LogTail]:
        ranks = ranks_of(run, attempt, "out") if asked is None else asked
        return logs_of(run.attempt_logs(attempt), ranks, ending=ending, pattern=pattern)

    if args.follow:
        _follow(run, wanted, args.attempt)
        return
    attempt = _attempt(run, args.attempt)
    state = job_state(run)
    logs = wanted(attempt)
    ranks = ranks_of(run, attempt, "out")
    if attempts and args.rank is None and args.grep is None and not args.err:
        _show_failure(run, attempt, state)
    missing = [str(rank) for rank in asked or () if rank not in ranks]
    if missing or not logs:
        # The folder exists a moment before the ranks start.
        if ranks and not (asked in (None, (0,)) and state.alive != "no"):
            what = f"{run.name} has no rank {', '.join(missing[:8])} in attempt {attempt}."
            why = f"There are ranks {', '.join(map(str, ranks))}."
            raise UserError(what, why=why, fix="Give other ranks, or another --attempt.")
        print(f"{run.name}: {_words(state)}; no rank has started.")
        print("".join(f"{terminal.lines(line)}\n" for line in last_words(run)), end="")
        return
    for log in logs:
        _print(log, to_the_end=True)
    _answer_end(state)


def _attempt(run: RunDir, asked: int | None) -> int:
    """The attempt that was asked for, or the newest; 0 before the first."""
    if asked is not None:
        return asked
    return (run.attempts() or [0])[-1]


def _ranks(text: str | None) -> tuple[int, ...] | None:
    """Parse ``0,4-7``; None means all."""
    if text == "all":
        return None
    found: dict[int, None] = {}
    for part in (text or "0").split(","):
        first, _, last = part.partition("-")
        ranks = range(0)
        if re.fullmatch(r"\d{1,6}(-\d{1,6})?", part, re.ASCII):
            ranks = range(int(first), int(last or first) + 1)
        if not ranks:
            why = "It takes numbers from 0, ranges, or all."
            fix = "For example --rank 3, --rank 0,4-7 or --rank all."
            raise UserError(f"--rank {text} names no ranks.", why=why, fix=fix)
        found |= dict.fromkeys(ranks)
    return tuple(found)


def _pattern(text: str | None) -> re.Pattern[str] | None:
    if text is None:
        return None
    try:
        return re.compile(text)
    except re.error as error:
        fix = f"Use Python's syntax; to search for the text itself: --grep {shlex.quote(re.escape(text))}."
        raise UserError(f"--grep {text} is not a regular expression.", why=f"{error}.", fix=fix) from None


def _words(state: JobState) -> str:
    return f"{state.state} ({state.reason})" if state.reason else state.state


def _show_failure(run: RunDir, attempt: int, state: JobState) -> None:
    from trainkit.diagnosis.causes import cause_of
    from trainkit.diagnosis.evidence import last_words

    if state.alive != "no" or state.state in ("COMPLETED", "CANCELLED", "PREEMPTED"):
        return
    disk = fileio.full(run.path)
    if disk:
        print(f"--- {terminal.long_line(disk)}: later output is missing.")
    cause = cause_of(run, state, attempt)
    words: Sequence[str] = last_words(run)
    if cause is None:
        print(f"--- {full_name(run)}: {_words(state)}")
        print(terminal.lines("\n".join(words)))
        return
    rest = "log"
    if cause.failure is not None:
        words = cause.failure.traceback or [text for _, text in cause.failure.log(run).tail]
        rest = f"the rest: --rank {cause.failure.rank} --err. Log"
    print(f"--- {full_name(run)}: {state.state}. {terminal.long_line(cause.what)}")
    if cause.why:
        print(f"--- why: {cause.shown}")
    elif words:
        print(terminal.lines("\n".join(words)))
    print(f"--- fix: {terminal.long_line(cause.advice)}")
    print(f"--- {rest} of rank 0:")


def _follow(run: RunDir, wanted: Callable[[int], list[LogTail]], attempt: int | None) -> None:
    """Print new lines until the job ends, attempt after attempt."""
    current = _attempt(run, attempt)
    shown: dict[Path, LogTail] = {}
    watched = RunWatch(run)
    watched.wait_for_start()
    from trainkit.monitor.log_tail import RecordTail

    tails = [("event", RecordTail(run.events)), ("record", RecordTail(run.metrics))]
    while True:
        alive = watched.is_alive()  # asked before reading, so that the last lines are shown too
        goes_on = _attempt(run, attempt) > current
        for found in wanted(current):
            log = shown.setdefault(found.path, found)
            log.label = found.label  # wider, if there are more ranks by now
            if log.path.exists():
                _print(log, to_the_end=goes_on or not alive)
        for kind, tail in tails if output.is_on() else ():
            _answer_records(kind, tail)
        if goes_on:
            current += 1
            print(f"--- attempt {current}", flush=True)
        elif alive:
            time.sleep(LOOK_SECONDS)
        else:
            _answer_end(watched.poller.state())
            if attempt is None:
                _show_failure(run, current, watched.poller.state())
            return


def _print(log: LogTail, *, to_the_end: bool) -> None:
    if output.is_on():
        log.label = ""
    try:
        for text in log.new(to_the_end=to_the_end):
            if output.is_on():
                _answer_lines(log.path, text)
                continue
            sys.stdout.write(terminal.log_text(text))
        sys.stdout.flush()
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader's doing, not the file's
            raise
        if to_the_end:
            raise fileio.unreadable(log.path, error) from None


def _answer(kind: str, **values: Any) -> None:
    from jobs.shapes import LogLine

    output.emit(LogLine.model_validate({"kind": kind, **values}), a_line=True)


def _answer_lines(log: Path, text: str) -> None:
    rank, _, stream = log.name.removeprefix("rank-").partition(".")
    for line in text.splitlines():
        _answer("line", attempt=int(log.parent.name), rank=int(rank), stream=stream, text=line)


def _answer_records(kind: str, tail: RecordTail) -> None:
    for values in tail.read():
        attempt = values.get("attempt")
        _answer(kind, values=values, attempt=attempt if is_whole(attempt) else None)


def _answer_end(state: JobState) -> None:
    if output.is_on():
        _answer("end", state=state.state)


if __name__ == "__main__":
    cli.run(main)
