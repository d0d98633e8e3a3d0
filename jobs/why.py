"""``python -m jobs.why RUN``: why a run failed or does not start: one cause, its evidence, one command to fix it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from jobs import cli, elsewhere
from trainkit import terminal
from trainkit.cluster.queue import JobState, job_state
from trainkit.diagnosis.causes import cause_of
from trainkit.errors import UserError
from trainkit.records.history import life_of
from trainkit.records.rundir import RunDir, find_run


def main(argv: Sequence[str], env: Mapping[str, str]) -> int:
    parser = cli.Parser("why", "Say why a run failed, or why it does not start.")
    parser.add_argument("run", help="a run's name or folder")
    parser.add_argument("--attempt", type=int, metavar="N", help="which attempt, from 0 (default: the last)")
    elsewhere.add_host_flag(parser)
    args = parser.parse_args(list(argv))
    if args.host is not None:
        return elsewhere.forward("why", argv, args.host, env)
    run = find_run(args.run, env)
    if args.attempt is not None and args.attempt not in run.attempts():
        raise UserError(
            f"{run.name} has no attempt {args.attempt}.",
            why=f"There are: {', '.join(map(str, run.attempts())) or 'none'}.",
            fix="Leave --attempt out for the last one.",
        )
    state = job_state(run)
    cause = cause_of(run, state, args.attempt)
    heading = f"{run.name}: {state.state}" + (f" (job {state.job_id})" if state.job_id else "")
    if cause is None:
        print(f"{heading}. {_nothing(run, state)}")
        return 0
    print(terminal.lines(f"{heading}. {cause}"))
    return 0


def _nothing(run: RunDir, state: JobState) -> str:
    if state.state == "COMPLETED":
        return "It came to its end; nothing failed."
    if state.state == "RUNNING":
        earlier = len(life_of(run).requeued)
        return "It runs; nothing has failed" + (f", and it was queued again {earlier} times." if earlier else ".")
    if state.state == "UNKNOWN":
        return f"Nobody can tell what became of it: {state.reason}."
    return "Nothing that it has left speaks of a failure." + (f" {state.reason}." if state.reason else "")


if __name__ == "__main__":
    cli.run(main)
