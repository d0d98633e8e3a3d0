"""``python -m jobs.logs RUN``: what the ranks of a run print, across requeues; of a failed run first why it failed."""

from __future__ import annotations

import re
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from jobs import cli
from trainkit import fileio, terminal
from trainkit.errors import UserError
from trainkit.finish import LOOK_SECONDS, Watch, full_name
from trainkit.run.folder import RunDir, find_run
from trainkit.schedulers.base import JobState, job_state

if TYPE_CHECKING:
    from trainkit.monitor.follow import LogTail


def parser() -> cli.Parser:
    parser = cli.Parser("logs", "Print the log of a run's rank; of a failed run, the failing rank's traceback first.")
    add = parser.add_argument
    add("run", metavar="RUN", help="a run's name or folder")
    add("-f", "--follow", action="store_true", help="go on until the job ends, across requeues")
    add("--rank", metavar="N", help="which ranks (default: 0): 0,4-7, or all; each line says whose it is")
    add("--grep", metavar="PATTERN", help="only lines in which this regular expression is found")
    add("--err", action="store_true", help="stderr instead of stdout")
    return parser.taking("--attempt", "--host")


def main(argv: Sequence[str], env: Mapping[str, str]) -> None:
    args = parser().parsed(argv, env)
    from trainkit.diagnosis.evidence import last_words, ranks_of
    from trainkit.monitor.follow import logs_of

    run = find_run(args.run, env)
    attempts = run.attempts()
    cli.require_attempt(run, args.attempt)
    asked, pattern, ending = _ranks(args.rank), _pattern(args.grep), "err" if args.err else "out"

    def wanted(attempt: int) -> list[LogTail]:
        ranks = ranks_of(run, attempt, "out") if asked is None else asked
        return logs_of(run.attempt_logs(attempt), ranks, ending=ending, pattern=pattern)

    if args.follow:
        _follow(run, wanted, args.attempt)
        return
    attempt = args.attempt if args.attempt is not None else attempts[-1] if attempts else 0
    state, logs, ranks = job_state(run), wanted(attempt), ranks_of(run, attempt, "out")
    if attempts and args.rank is None and args.grep is None and not args.err:
        _show_failure(run, attempt, state)
    missing = [str(rank) for rank in asked or () if rank not in ranks]
    if missing or not logs:
        # The folder exists a moment before the ranks start.
        if ranks and not (asked in (None, (0,)) and state.alive != "no"):
            what = f"{run.name} has no rank {', '.join(missing[:8])} in attempt {attempt}."
            why = f"There are ranks {', '.join(map(str, ranks))}."
            raise UserError(what, why=why, fix="Give others with --rank, or another --attempt.")
        print(f"{run.name}: {_words(state)}; no rank has started.")
        print("".join(f"{terminal.lines(line)}\n" for line in last_words(run)), end="")
        return
    for log in logs:
        _print(log, to_the_end=True)


def _ranks(text: str | None) -> tuple[int, ...] | None:
    """Parse ``0,4-7``; None means all."""
    if text == "all":
        return None
    found: list[int] = []
    for part in (text or "0").split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part, re.ASCII)
        ranks = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
        if not ranks:
            why = "It takes numbers from 0, ranges of them, or all."
            fix = "For example --rank 3, --rank 0,4-7 or --rank all."
            raise UserError(f"--rank {text} names no ranks.", why=why, fix=fix)
        found += ranks
    return tuple(dict.fromkeys(found))


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text is not None else None
    except re.error as error:
        fix = f"Write it as Python does; to look for the text itself: --grep {shlex.quote(re.escape(text or ''))}."
        raise UserError(f"--grep {text} is no regular expression.", why=f"{error}.", fix=fix) from None


def _words(state: JobState) -> str:
    return state.state + (f" ({state.reason})" if state.reason else "")


def _show_failure(run: RunDir, attempt: int, state: JobState) -> None:
    from trainkit.diagnosis.causes import cause_of
    from trainkit.diagnosis.evidence import last_words

    if state.alive != "no" or state.state in ("COMPLETED", "CANCELLED", "PREEMPTED"):
        return
    if disk := fileio.full(run.path):
        print(f"--- {terminal.long_line(disk)}: what came after that is not written down.")
    cause = cause_of(run, state, attempt)
    failure = cause.failure if cause is not None else None
    words = last_words(run) if failure is None else failure.traceback or [text for _, text in failure.log(run).tail]
    if cause is None:
        print(f"--- {full_name(run)}: {_words(state)}")
        print(terminal.lines("\n".join(words)))
        return
    print(f"--- {full_name(run)}: {state.state}. {terminal.long_line(cause.what)}")
    if cause.why:
        print(f"--- why: {cause.shown}")
    elif words:
        print(terminal.lines("\n".join(words)))
    print(f"--- fix: {terminal.long_line(cause.advice)}")
    rest = f"the rest of it: --rank {failure.rank} --err. Log" if failure is not None and words else "log"
    print(f"--- {rest} of rank 0:")


def _follow(run: RunDir, wanted: Callable[[int], list[LogTail]], attempt: int | None) -> None:
    """Print new lines until the job ends, attempt after attempt."""
    current = attempt if attempt is not None else (run.attempts() or [0])[-1]
    shown: dict[Path, LogTail] = {}
    watched = Watch(run)
    watched.wait_for_start()
    while True:
        alive = watched.is_alive()  # asked before reading, so that the last lines are shown too
        goes_on = attempt is None and (run.attempts() or [current])[-1] > current
        for found in wanted(current):
            log = shown.setdefault(found.path, found)
            log.label = found.label  # wider, if there are more ranks by now
            if log.path.exists():
                _print(log, to_the_end=goes_on or not alive)
        if goes_on:
            current += 1
            print(f"--- attempt {current}", flush=True)
        elif alive:
            time.sleep(LOOK_SECONDS)
        else:
            if attempt is None:
                _show_failure(run, current, watched.poller.state())
            return


def _print(log: LogTail, *, to_the_end: bool) -> None:
    try:
        for text in log.new(to_the_end=to_the_end):
            sys.stdout.write(terminal.log_text(text))
        sys.stdout.flush()
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # the reader's doing, not the file's
            raise
        if to_the_end:
            raise fileio.unreadable(log.path, error) from None


if __name__ == "__main__":
    cli.run(main)
