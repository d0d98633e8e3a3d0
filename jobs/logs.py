"""``python -m jobs.logs RUN``: what the ranks of a run print, across requeues; of a failed run first why it failed."""

from __future__ import annotations

import io
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import cli
from trainkit import terminal
from trainkit.cluster.queue import job_state
from trainkit.diagnosis.evidence import failure_of, last_words
from trainkit.errors import UserError
from trainkit.records import reading
from trainkit.records.rundir import RunDir, find_run

POLL_SECONDS = 0.5
ASK_SECONDS = 5.0  # a scheduler is not asked more often than that


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    parser = cli.Parser("logs", "Print the log of a run's rank; of a failed run, the failing rank's traceback first.")
    parser.add_argument("run", help="a run's name or folder")
    parser.add_argument("-f", "--follow", action="store_true", help="go on until the job ends, across requeues")
    parser.add_argument("--rank", type=int, metavar="N", help="which rank (default: 0)")
    parser.add_argument("--attempt", type=int, metavar="N", help="which attempt, from 0 (default: the last)")
    parser.add_argument("--err", action="store_true", help="stderr instead of stdout")
    args = parser.parse_args(list(argv))
    run = find_run(args.run, env)
    attempts = run.attempts()
    if args.attempt is not None and args.attempt not in attempts:
        raise UserError(
            f"{run.name} has no attempt {args.attempt}.",
            why=_have("attempts", attempts),
            fix="Leave --attempt out for the last one.",
        )
    name = f"rank-{args.rank or 0}." + ("err" if args.err else "out")
    if args.follow:
        return _follow(run, name, args.attempt)
    if not attempts:
        return _nothing_yet(run)
    attempt = attempts[-1] if args.attempt is None else args.attempt
    if args.rank is None and not args.err:
        _show_failure(run, attempt)
    path = run.attempt_logs(attempt) / name
    if not os.path.lexists(path):
        names = [file.stem.removeprefix("rank-") for file in run.attempt_logs(attempt).glob("rank-*.out")]
        ranks = sorted(int(name) for name in names if name.isascii() and name.isdecimal())
        if not ranks or (
            not args.rank and job_state(run).alive != "no"
        ):  # the folder is there just before the ranks start
            return _nothing_yet(run)
        raise UserError(
            f"{run.name} has no rank {args.rank or 0} in attempt {attempt}.",
            why=_have("ranks", ranks),
            fix="Give one of them with --rank, or another --attempt.",
        )
    try:
        opened = reading.open_regular(path)
        with io.TextIOWrapper(opened, encoding="utf-8", errors="replace", newline="\n") as lines:
            for line in lines:
                sys.stdout.write(terminal.log_text(line))
    except OSError as error:
        raise reading.unreadable(path, error) from None
    return 0


def _show_failure(run: RunDir, attempt: int) -> None:
    state = job_state(run)
    if state.alive != "no" or state.state in ("COMPLETED", "CANCELLED", "PREEMPTED"):
        return
    failure = failure_of(run, attempt)
    if failure is None:
        print(f"--- {run.name}: {state.state}" + (f" ({state.reason})" if state.reason else ""))
        print(terminal.lines("\n".join(last_words(run))))
        return
    print(f"--- {run.name}: {state.state}. Rank {failure.rank} failed first: {terminal.one_line(failure.error, 5000)}")
    print(terminal.lines("\n".join(failure.traceback)))
    print(
        "--- log of rank 0"
        if not failure.traceback
        else f"--- the rest of it: --rank {failure.rank} --err. Log of rank 0:"
    )


def _nothing_yet(run: RunDir) -> int:
    state = job_state(run)
    print(f"{run.name}: {state.state}" + (f" ({state.reason})" if state.reason else "") + "; no rank has started.")
    for line in last_words(run):
        print(terminal.lines(line))
    return 0


def _follow(run: RunDir, name: str, attempt: int | None) -> int:
    """Print what is written until the job ends; a new attempt's log follows that of the one before."""
    current = attempt if attempt is not None else (run.attempts() or [0])[-1]
    last_attempt = attempt
    offset, asked, alive, waiting = 0, 0.0, True, ""
    while True:
        if time.monotonic() - asked > ASK_SECONDS:
            state = job_state(run)
            alive, asked = state.alive != "no", time.monotonic()
            if not run.attempts() and (words := f"{state.state} {state.reason}".strip()) != waiting:
                waiting = words
                print(f"--- job {state.job_id}: {words}", flush=True)
        offset = _print_from(run.attempt_logs(current) / name, offset)
        newest = (run.attempts() or [current])[-1]
        if last_attempt is None and newest > current:
            offset = _print_from(run.attempt_logs(current) / name, offset)
            current, offset = current + 1, 0
            print(f"--- attempt {current}", flush=True)
            continue
        if not alive:
            _print_from(run.attempt_logs(current) / name, offset)
            _show_failure(run, current)
            return 0
        time.sleep(POLL_SECONDS)


def _print_from(path: Path, offset: int) -> int:
    try:
        with reading.open_regular(path) as file:
            file.seek(offset)
            new = file.read()
    except OSError:
        return offset
    if new:
        sys.stdout.write(terminal.log_text(new.decode(errors="replace")))
        sys.stdout.flush()
    return offset + len(new)


def _have(what: str, numbers: Sequence[int]) -> str:
    return f"There are {what} {', '.join(map(str, numbers))}." if numbers else f"There are no {what} yet."


if __name__ == "__main__":
    cli.run(main)
