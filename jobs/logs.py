"""``python -m jobs.logs RUN``: what the ranks of a run print, across requeues; of a failed run first why it failed."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs import cli, elsewhere
from trainkit import fileio, terminal
from trainkit.diagnosis.causes import cause_of
from trainkit.diagnosis.evidence import last_lines, last_words
from trainkit.errors import UserError
from trainkit.finish import alive_poller, full_name, process_of
from trainkit.monitor.follow import RankLog, logs_of, ranks_of
from trainkit.run.folder import RunDir, find_run
from trainkit.schedulers.base import JobState
from trainkit.schedulers.states import Poller, job_state
from trainkit.watcher import FileWatcher

POLL_SECONDS = 0.5


@dataclass(frozen=True)
class Wanted:
    """Which logs to print."""

    ranks: tuple[int, ...] | None
    """None: all."""
    ending: str
    pattern: re.Pattern[str] | None

    def of(self, logs: Path) -> list[RankLog]:
        """Those in an attempt's folder; of all ranks, as far as they are there."""
        ranks = ranks_of(logs) if self.ranks is None else self.ranks
        return logs_of(logs, ranks, ending=self.ending, pattern=self.pattern)


def parser() -> cli.Parser:
    parser = cli.Parser("logs", "Print the log of a run's rank; of a failed run, the failing rank's traceback first.")
    parser.add_argument("run", metavar="RUN", help="a run's name or folder")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job ends, across requeues")
    parser.add_argument(
        "--rank", metavar="N", help="which ranks (default: 0): 0,4-7, or all; each line says whose it is"
    )
    parser.add_argument("--attempt", type=int, metavar="N", help="which attempt, from 0 (default: the last)")
    parser.add_argument("--grep", metavar="PATTERN", help="only lines in which this regular expression is found")
    parser.add_argument("--err", action="store_true", help="stderr instead of stdout")
    elsewhere.add_host_flag(parser)
    return parser


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    args = parser().parse_args(list(argv))
    if args.host is not None:
        return elsewhere.forward("logs", argv, args.host, env)
    run = find_run(args.run, env)
    attempts = run.attempts()
    if args.attempt is not None and args.attempt not in attempts:
        raise UserError(
            f"{run.name} has no attempt {args.attempt}.",
            why=_have("attempts", attempts),
            fix="Leave --attempt out for the last one.",
        )
    wanted = Wanted(_ranks(args.rank), "err" if args.err else "out", _pattern(args.grep))
    if args.follow:
        return _follow(run, wanted, args.attempt)
    if not attempts:
        return _nothing_yet(run, job_state(run))
    attempt = attempts[-1] if args.attempt is None else args.attempt
    if args.rank is None and args.grep is None and not args.err:
        _show_failure(run, attempt, job_state(run))
    logs = wanted.of(run.attempt_logs(attempt))
    ranks = ranks_of(run.attempt_logs(attempt))
    missing = [str(rank) for rank in wanted.ranks or () if rank not in ranks]
    if missing or not logs:
        state = job_state(run)
        is_first = wanted.ranks in (None, (0,))
        if not ranks or (is_first and state.alive != "no"):  # the folder is there just before the ranks start
            return _nothing_yet(run, state)
        raise UserError(
            f"{run.name} has no rank {', '.join(missing[:8])} in attempt {attempt}.",
            why=_have("ranks", ranks),
            fix="Give others with --rank, or another --attempt.",
        )
    for log in logs:
        _print_all(log)
    return 0


def _ranks(text: str | None) -> tuple[int, ...] | None:
    """Of ``0,4-7``; None for all."""
    if text == "all":
        return None
    found: list[int] = []
    for part in (text or "0").split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", part, re.ASCII)
        last = int(match[2] or match[1]) if match else -1
        if match is None or int(match[1]) > last:
            raise UserError(
                f"--rank {text} names no ranks.",
                why="It takes numbers from 0, ranges of them, or all.",
                fix="For example --rank 3, --rank 0,4-7 or --rank all.",
            )
        found += range(int(match[1]), last + 1)
    return tuple(dict.fromkeys(found))


def _pattern(text: str | None) -> re.Pattern[str] | None:
    try:
        return re.compile(text) if text is not None else None
    except re.error as error:
        fix = f"Write it as Python does; to look for the text itself: --grep {shlex.quote(re.escape(text or ''))}."
        raise UserError(f"--grep {text} is no regular expression.", why=f"{error}.", fix=fix) from None


def _print_all(log: RankLog) -> None:
    try:
        for text in log.new(to_the_end=True):
            sys.stdout.write(terminal.log_text(text))
    except BrokenPipeError:  # which is no fault of the file
        raise
    except OSError as error:
        raise fileio.unreadable(log.path, error) from None


def _show_failure(run: RunDir, attempt: int, state: JobState) -> None:
    if state.alive != "no" or state.state in ("COMPLETED", "CANCELLED", "PREEMPTED"):
        return
    cause, disk = cause_of(run, state, attempt), fileio.full(run.path)
    if disk:
        print(f"--- {terminal.one_line(disk, 5000)}: what came after that is not written down.")
    if cause is None:
        print(f"--- {full_name(run)}: {state.state}" + (f" ({state.reason})" if state.reason else ""))
        print(terminal.lines("\n".join(last_words(run))))
        return
    print(f"--- {full_name(run)}: {state.state}. {terminal.one_line(cause.what, 5000)}")
    failure = cause.failure
    words = failure.traceback or last_lines(run, failure) if failure is not None else last_words(run)
    if cause.why:
        print(f"--- why: {cause.shown}")
    elif words:
        print(terminal.lines("\n".join(words)))
    print(f"--- fix: {terminal.one_line(cause.advice, 5000)}")
    rest = f"the rest of it: --rank {failure.rank} --err. Log" if failure is not None and words else "log"
    print(f"--- {rest} of rank 0:")


def _nothing_yet(run: RunDir, state: JobState) -> int:
    print(f"{run.name}: {state.state}" + (f" ({state.reason})" if state.reason else "") + "; no rank has started.")
    for line in last_words(run):
        print(terminal.lines(line))
    return 0


def _follow(run: RunDir, wanted: Wanted, attempt: int | None) -> int:
    poller = Poller(run)
    with FileWatcher([run.events], process_of(poller.state())) as notice:
        return _show_until_its_end(run, wanted, attempt, poller, notice)


def _show_until_its_end(run: RunDir, wanted: Wanted, attempt: int | None, poller: Poller, notice: FileWatcher) -> int:
    """Print what is written until the job ends; a new attempt's log follows that of the one before."""
    is_alive = alive_poller(run, poller)
    current = attempt if attempt is not None else (run.attempts() or [0])[-1]
    shown: dict[Path, RankLog] = {}
    alive, waiting = True, ""
    while True:
        alive = is_alive()  # before the look at the logs: what was written before the end must still be shown
        state = poller.state()
        if not run.attempts() and (words := f"{state.state} {state.reason}".strip()) != waiting:
            waiting = words
            print(f"--- job {state.job_id}: {words}", flush=True)
        newest = (run.attempts() or [current])[-1]
        goes_on = attempt is None and newest > current
        logs = wanted.of(run.attempt_logs(current))
        notice.watch([log.path for log in logs] or [run.attempt_logs(current) / f"rank-0.{wanted.ending}"])
        _print_new(logs, shown, to_the_end=goes_on or not alive)
        if goes_on:
            current += 1
            print(f"--- attempt {current}", flush=True)
            continue
        if not alive:
            if attempt is None:
                _show_failure(run, current, state)
            return 0
        notice.wait(POLL_SECONDS)


def _print_new(logs: Sequence[RankLog], shown: dict[Path, RankLog], *, to_the_end: bool) -> None:
    """What has been written since the last look, of ranks that have come since then too."""
    for found in logs:
        log = shown.setdefault(found.path, found)
        log.label = found.label  # wider, if there are more ranks by now
        try:
            for text in log.new(to_the_end=to_the_end):
                sys.stdout.write(terminal.log_text(text))
        except BrokenPipeError:
            raise
        except OSError as error:  # not there yet
            if to_the_end and not isinstance(error, FileNotFoundError):
                raise fileio.unreadable(log.path, error) from None
    sys.stdout.flush()


def _have(what: str, numbers: Sequence[int]) -> str:
    return f"There are {what} {', '.join(map(str, numbers))}." if numbers else f"There are no {what} yet."


if __name__ == "__main__":
    cli.run(main)
